// What a trainer with sharding and communication of its own writes: two ranks,
// here threads, each with half the rows of every parameter. It gives onepass
// its rows' gradients, averaged, and merges the norms; onepass updates the fp32
// weights on the CPU and writes the bf16 ones on the device.

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dispatch/host_device.h"
#include "dispatch/norm_sum.h"
#include "dispatch/thread_pool.h"
#include "kernels/default.h"
#include "offload/shard_optimizer.h"

#define RETURN_IF_ERROR(expression)    \
  do {                                 \
    absl::Status error = (expression); \
    if (!error.ok()) return error;     \
  } while (false)

#define ASSIGN_OR_RETURN(variable, expression)            \
  auto variable##_or = (expression);                      \
  if (!variable##_or.ok()) return variable##_or.status(); \
  auto variable = *std::move(variable##_or)

constexpr int kRanks = 2;
constexpr int kSteps = 600;
constexpr int kSamples = 128;  // of each rank

// The model: y[i] = sum over j of a[i][j] * x[j] + b[i][j] * (x[j]^2 - 1/3).
constexpr int kParameters = 2;
const char* const kNames[kParameters] = {"a", "b"};
constexpr int kRows = 8;
constexpr int kColumns = 12;
constexpr int kRowsOfRank = kRows / kRanks;
constexpr int64_t kNumelOfRank = kRowsOfRank * kColumns;  // of a parameter

using Matrix = std::vector<float>;  // kRows x kColumns, in C order

// What it is to find.
float Truth(int parameter, int row, int column) {
  return static_cast<float>((row * 3 + column * (2 + parameter)) % 5 - 2) / 4;
}

float Feature(int parameter, float x) {
  return parameter == 0 ? x : x * x - 1.0f / 3;
}

// Between -1 and 1.
float Input(int rank, int sample, int column) {
  uint32_t bits = (rank * kSamples + sample) * kColumns + column + 1;
  for (int i = 0; i < 3; ++i) bits = (bits ^ (bits >> 15)) * 0x2c1b3c6du;
  return static_cast<float>(bits >> 8) / (1 << 23) - 1;
}

// Of half the mean square of the error over this rank's samples.
void ComputeGradients(int rank, const Matrix (&weights)[kParameters],
                      Matrix (&gradients)[kParameters]) {
  for (Matrix& gradient : gradients) gradient.assign(kRows * kColumns, 0);
  for (int sample = 0; sample < kSamples; ++sample) {
    for (int row = 0; row < kRows; ++row) {
      float error = 0;
      for (int p = 0; p < kParameters; ++p) {
        for (int column = 0; column < kColumns; ++column) {
          error +=
              (weights[p][row * kColumns + column] - Truth(p, row, column)) *
              Feature(p, Input(rank, sample, column));
        }
      }
      for (int p = 0; p < kParameters; ++p) {
        for (int column = 0; column < kColumns; ++column) {
          gradients[p][row * kColumns + column] +=
              error * Feature(p, Input(rank, sample, column)) / kSamples;
        }
      }
    }
  }
}

float WidenBFloat16(uint16_t element) {
  const uint32_t bits = uint32_t{element} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// What a trainer's communication does, here memory that the ranks share: each
// writes its own part, waits for the others, and reads theirs.
class Shared {
 public:
  // Returns when all ranks wait. Aborted: one has left.
  absl::Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++waiting_ == kRanks) {
      waiting_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round || left_; });
    if (round_ != round) return absl::OkStatus();
    return absl::AbortedError("the other rank has left");
  }
  // Of a rank that has failed: the others must not wait for it.
  void Leave() {
    std::lock_guard<std::mutex> lock(mutex_);
    left_ = true;
    changed_.notify_all();
  }

  Matrix weights[kParameters];
  Matrix gradients[kRanks][kParameters];
  onepass::NormSum norms[kRanks];
  float factors[kRanks];

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  int round_ = 0;
  bool left_ = false;
};

absl::Status Train(int rank, const onepass::Kernel& kernel, Shared& shared) {
  ASSIGN_OR_RETURN(pool, onepass::ThreadPool::Create({/*threads=*/1}));
  ASSIGN_OR_RETURN(device, onepass::HostDevice::Create(kernel));

  // On the device, of this rank's rows: weights in bf16, gradients in fp32.
  const int first_row = rank * kRowsOfRank;
  onepass::DeviceBuffer weights[kParameters];
  onepass::DeviceBuffer gradients[kParameters];
  float means[kParameters][kNumelOfRank];
  // What a stream copies outlives it, also where an error ends the function.
  ASSIGN_OR_RETURN(stream, device->CreateStream());
  std::vector<onepass::Shard> shards(kParameters);
  for (int p = 0; p < kParameters; ++p) {
    ASSIGN_OR_RETURN(of_weights,
                     device->Allocate(kNumelOfRank * sizeof(uint16_t)));
    ASSIGN_OR_RETURN(of_gradients,
                     device->Allocate(kNumelOfRank * sizeof(float)));
    weights[p] = std::move(of_weights);
    gradients[p] = std::move(of_gradients);
    shards[p].name = kNames[p];
    shards[p].shape = {kRows, kColumns};
    shards[p].box.offset = {first_row, 0};
    shards[p].box.extent = {kRowsOfRank, kColumns};
    shards[p].values = [](int64_t, absl::Span<float> values) {
      std::fill(values.begin(), values.end(), 0.0f);
      return absl::OkStatus();
    };
    shards[p].weights = weights[p].data();
  }
  onepass::ShardOptimizerOptions options;
  options.groups[0].lr = 0.02;
  options.grad_type = onepass::DType::kFloat32;
  options.max_norm = 1;
  ASSIGN_OR_RETURN(optimizer, onepass::ShardOptimizer::Create(
                                  {kernel, *device, *pool}, options, shards));
  bool clipped = false;

  for (int step = 1; step <= kSteps; ++step) {
    // All rows of all weights, and the gradient of each rank's samples.
    for (int p = 0; p < kParameters; ++p) {
      uint16_t rows[kNumelOfRank];
      RETURN_IF_ERROR(
          stream->CopyToHost(rows, weights[p].data(), sizeof(rows)));
      RETURN_IF_ERROR(stream->Synchronize());
      for (int64_t i = 0; i < kNumelOfRank; ++i) {
        shared.weights[p][first_row * kColumns + i] = WidenBFloat16(rows[i]);
      }
    }
    RETURN_IF_ERROR(shared.Wait());
    ComputeGradients(rank, shared.weights, shared.gradients[rank]);
    RETURN_IF_ERROR(shared.Wait());

    // The mean, of this rank's rows.
    for (int p = 0; p < kParameters; ++p) {
      for (int64_t i = 0; i < kNumelOfRank; ++i) {
        float sum = 0;
        for (int other = 0; other < kRanks; ++other) {
          sum += shared.gradients[other][p][first_row * kColumns + i];
        }
        means[p][i] = sum / kRanks;
      }
      RETURN_IF_ERROR(stream->CopyToDevice(gradients[p].data(), means[p],
                                           kNumelOfRank * sizeof(float)));
      RETURN_IF_ERROR(
          optimizer->AddGradient(p, gradients[p].data(), *stream).status());
    }

    // The norm over all ranks, of which each clips by the same.
    ASSIGN_OR_RETURN(norm, optimizer->LocalNorm());
    shared.norms[rank] = norm;
    RETURN_IF_ERROR(shared.Wait());
    onepass::StepInput input;
    for (const onepass::NormSum& of_rank : shared.norms) {
      input.norm.Merge(of_rank);
    }
    ASSIGN_OR_RETURN(report, optimizer->Step(input));
    if (report.skipped) return absl::InternalError("a step was skipped");
    shared.factors[rank] = report.factor;
    clipped |= report.factor < 1;

    if (step == kSteps / 2) {
      options.groups[0].lr /= 10;
      RETURN_IF_ERROR(optimizer->SetGroupOptions(0, options.groups[0]));
    }
  }

  if (!clipped) return absl::InternalError("no gradient was clipped");

  // Where this rank's fp32 weights are.
  for (int p = 0; p < kParameters; ++p) {
    std::vector<float> masters(kNumelOfRank);
    RETURN_IF_ERROR(optimizer->GetState(kNames[p], onepass::StateKind::kMaster,
                                        absl::MakeSpan(masters)));
    for (int64_t i = 0; i < kNumelOfRank; ++i) {
      const float expected = Truth(p, first_row + i / kColumns, i % kColumns);
      if (std::fabs(masters[i] - expected) > 0.01f) {
        return absl::InternalError(std::string("weight ") + kNames[p] + "[" +
                                   std::to_string(first_row * kColumns + i) +
                                   "] is " + std::to_string(masters[i]) +
                                   ", expected " + std::to_string(expected));
      }
    }
  }
  return absl::OkStatus();
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

int main() {
  auto dispatcher = onepass::CreateDefaultDispatcher();
  if (!dispatcher.ok()) return Fail(dispatcher.status());
  auto kernel = dispatcher->Select();
  if (!kernel.ok()) return Fail(kernel.status());

  Shared shared;
  for (Matrix& weights : shared.weights) weights.resize(kRows * kColumns);
  absl::Status results[kRanks];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = Train(rank, **kernel, shared);
      if (!results[rank].ok()) shared.Leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) {
    if (!result.ok()) return Fail(result);
  }
  if (shared.factors[0] != shared.factors[1]) {
    return Fail(absl::InternalError("ranks clipped by different factors"));
  }
  std::printf("%d steps on %d ranks on kernel %s\n", kSteps, kRanks,
              (*kernel)->name);
  return 0;
}
