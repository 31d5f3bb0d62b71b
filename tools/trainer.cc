#include "tools/trainer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "dispatch/dtype.h"
#include "dispatch/norm_sum.h"
#include "dispatch/operations.h"
#include "offload/adam_options.h"
#include "offload/gradient_clip.h"
#include "xxhash.h"

namespace onepass {
namespace {

// weights, widened, gradient, master, exp_avg, exp_avg_sq of Trainer::Unit.
constexpr int64_t kUnitBytes = 2 + 4 + 4 + 4 + 4 + 4;

// What a layer takes beside its numbers, at most: names, vectors and matrices,
// twice while a vector of them grows, and what the heap adds. Measured: up to
// 640.
constexpr int64_t kLayerBytes = 1024;

// The seed of positions is not that of the weights.
constexpr uint64_t kPositionsSeed = 0x706f736974696f6e;

int64_t HeldOutBegin(int64_t text_bytes) {
  return text_bytes - text_bytes / 10;
}

absl::Status CheckAtLeast(absl::string_view flag, int64_t value,
                          int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, " is ", value, ", expected a whole number of at least ", least));
}

absl::Status CheckNotNegative(absl::string_view flag, double value) {
  if (value >= 0 && std::isfinite(static_cast<float>(value))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      flag, " is ", value, ", expected a number of at least 0 that fits fp32"));
}

absl::Status Validate(const TrainOptions& options, int64_t text_bytes) {
  const LanguageModelOptions& model = options.model;
  for (const absl::Status& status :
       {CheckAtLeast("--steps", options.steps, 1),
        CheckAtLeast("--batch", options.batch, 1),
        CheckAtLeast("--context", model.context, 1),
        CheckAtLeast("--embedding", model.embedding, 1),
        CheckAtLeast("--hidden", model.hidden, 1),
        CheckAtLeast("--layers", model.layers, 1),
        CheckAtLeast("--seed", options.seed, 0),
        CheckAtLeast("--piece_numel", options.piece_numel, 1),
        CheckNotNegative("--lr", options.lr),
        CheckNotNegative("--clip", options.clip)}) {
    if (!status.ok()) return status;
  }
  if (text_bytes < 10) {
    return absl::InvalidArgumentError(
        absl::StrCat("--text has ", text_bytes,
                     " bytes, expected at least 10: the last tenth is held "
                     "out"));
  }
  if (model.context >= HeldOutBegin(text_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--context is ", model.context, ", expected less than the ",
        HeldOutBegin(text_bytes), " bytes of --text that are trained on"));
  }
  return absl::OkStatus();
}

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

absl::StatusOr<int64_t> TrainingBytes(const TrainOptions& options,
                                      int64_t text_bytes) {
  if (absl::Status status = Validate(options, text_bytes); !status.ok()) {
    return status;
  }
  const absl::StatusOr<int64_t> parameters =
      LanguageModel::ParameterCount(options.model);
  if (!parameters.ok()) return parameters;
  const absl::StatusOr<int64_t> activations =
      LanguageModel::ActivationBytes(options.model, options.batch);
  if (!activations.ok()) return activations;
  // Two staging buffers of a piece, or one of a layer: at most all weights
  // twice, so this cannot overflow where the state does not.
  const auto staging = [&] {
    return options.separate ? *parameters
                            : 2 * std::min(options.piece_numel, *parameters);
  };
  int64_t bytes;
  int64_t layers;
  int64_t positions;
  if (__builtin_mul_overflow(*parameters, kUnitBytes, &bytes) ||
      __builtin_add_overflow(
          bytes, staging() * static_cast<int64_t>(sizeof(uint16_t)), &bytes) ||
      __builtin_add_overflow(options.model.layers, 2, &layers) ||
      __builtin_mul_overflow(layers, kLayerBytes, &layers) ||
      __builtin_add_overflow(bytes, layers, &bytes) ||
      __builtin_mul_overflow(options.batch, int64_t{sizeof(int64_t)},
                             &positions) ||
      __builtin_add_overflow(bytes, positions, &bytes) ||
      __builtin_add_overflow(bytes, *activations, &bytes) ||
      __builtin_add_overflow(bytes, text_bytes, &bytes)) {
    return absl::OutOfRangeError(absl::StrCat(
        "the bytes of a model of ", *parameters,
        " parameters and a --batch of ", options.batch, " do not fit 64 bits"));
  }
  return bytes;
}

Trainer::Unit::Unit(int64_t numel)
    : weights(numel),
      widened(numel),
      gradient(numel),
      master(numel),
      exp_avg(numel),
      exp_avg_sq(numel) {}

AdamSpan Trainer::Unit::Span() {
  AdamSpan span;
  span.numel = numel();
  span.param = master.data();
  span.grad = gradient.data();
  span.exp_avg = exp_avg.data();
  span.exp_avg_sq = exp_avg_sq.data();
  span.copy_type = DType::kBFloat16;
  return span;
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(
    const Kernel& kernel, ThreadPool& pool, const TrainOptions& options,
    std::string text) {
  const absl::StatusOr<int64_t> bytes =
      TrainingBytes(options, static_cast<int64_t>(text.size()));
  if (!bytes.ok()) return bytes.status();
  AdamOptions adam_options;
  adam_options.lr = options.lr;
  absl::StatusOr<CpuAdam> adam = CpuAdam::Create(kernel, pool, {adam_options});
  if (!adam.ok()) return adam.status();
  auto trainer = absl::WrapUnique(
      new Trainer(kernel, pool, options, std::move(text), *std::move(adam)));
  if (absl::Status status = trainer->CastToDevice(); !status.ok()) {
    return status;
  }
  return trainer;
}

Trainer::Trainer(const Kernel& kernel, ThreadPool& pool,
                 const TrainOptions& options, std::string text, CpuAdam adam)
    : kernel_(kernel),
      pool_(pool),
      options_(options),
      text_(std::move(text)),
      held_out_begin_(HeldOutBegin(static_cast<int64_t>(text_.size()))),
      fused_(!options.separate && adam.copy_supported(DType::kBFloat16)),
      adam_(std::move(adam)),
      model_(options.model, options.batch, pool),
      random_(static_cast<uint64_t>(options.seed) ^ kPositionsSeed) {
  int64_t longest = 0;
  for (const Layer& layer : model_.layers()) {
    units_.emplace_back(layer.numel());
    longest = std::max(longest, layer.numel());
  }
  std::vector<absl::Span<float>> masters;
  for (Unit& unit : units_) {
    masters.push_back(absl::MakeSpan(unit.master));
    gradients_.push_back(absl::MakeSpan(unit.gradient));
    widened_.push_back(unit.widened);
  }
  model_.Initialize(static_cast<uint64_t>(options.seed), masters);
  const int64_t piece =
      std::max(options.piece_numel, fused_ ? adam_.block_numel() : longest);
  // No buffer needs to be longer than the longest layer.
  staging_[0].resize(std::min(piece, longest));
  if (fused_) staging_[1].resize(staging_[0].size());
}

absl::string_view Trainer::TrainingPart() const {
  return absl::string_view(text_).substr(0, held_out_begin_);
}

absl::StatusOr<TrainStep> Trainer::Step() {
  const int64_t context = options_.model.context;
  positions_.resize(options_.batch);
  for (int64_t& position : positions_) {
    position = context + random_.Below(held_out_begin_ - context);
  }
  if (absl::Status status = Widen(); !status.ok()) return status;
  TrainStep step;
  step.loss =
      model_.ForwardBackward(TrainingPart(), positions_, widened_, gradients_);

  const auto begin = std::chrono::steady_clock::now();
  NormSum sum;
  for (const Unit& unit : units_) {
    const absl::Status status =
        SquaredNorm(kernel_, pool_, unit.numel(), unit.gradient.data(),
                    DType::kFloat32, sum);
    if (!status.ok()) return status;
  }
  step.norm = GradientNorm(sum);
  step.skipped = !std::isfinite(step.norm);
  step.clip_factor = 0;
  if (!step.skipped) {
    const absl::StatusOr<float> factor = ClipFactor(step.norm, options_.clip);
    if (!factor.ok()) return factor.status();
    step.clip_factor = *factor;
    ++updates_;
    const absl::Status status =
        fused_ ? UpdateInPieces(*factor)
               : UpdateInPasses(*factor, /*scale=*/options_.separate);
    if (!status.ok()) return status;
  }
  step.optimizer_s = Seconds(std::chrono::steady_clock::now() - begin);
  return step;
}

absl::Status Trainer::Widen() {
  for (Unit& unit : units_) {
    const absl::Status status =
        Cast(kernel_, pool_,
             {unit.numel(), unit.weights.data(), unit.widened.data(),
              DType::kBFloat16, DType::kFloat32});
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Trainer::UpdateInPieces(float factor) {
  int turn = 0;
  for (Unit& unit : units_) {
    const absl::Status status = adam_.StepPieces(
        unit.Span(), updates_, factor, options_.piece_numel,
        [&](const AdamPiece&) -> absl::StatusOr<void*> {
          turn = 1 - turn;
          return staging_[turn].data();
        },
        [&](const AdamPiece& piece, void* copy) {
          std::memcpy(unit.weights.data() + piece.offset, copy,
                      piece.numel * sizeof(uint16_t));
          return absl::OkStatus();
        });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Trainer::UpdateInPasses(float factor, bool scale) {
  if (scale) {
    for (Unit& unit : units_) {
      float* gradient = unit.gradient.data();
      const absl::Status status =
          Scale(kernel_, pool_, {unit.numel(), gradient, gradient, factor});
      if (!status.ok()) return status;
    }
  }
  for (Unit& unit : units_) {
    const absl::Status status =
        adam_.Step(unit.Span(), updates_, scale ? 1.0f : factor);
    if (!status.ok()) return status;
  }
  return CastToDevice();
}

absl::Status Trainer::CastToDevice() {
  std::vector<uint16_t>& host = staging_[0];
  const int64_t most = static_cast<int64_t>(host.size());
  for (Unit& unit : units_) {
    for (int64_t offset = 0; offset < unit.numel(); offset += most) {
      const int64_t numel = std::min(most, unit.numel() - offset);
      const absl::Status status =
          Cast(kernel_, pool_,
               {numel, unit.master.data() + offset, host.data(),
                DType::kFloat32, DType::kBFloat16});
      if (!status.ok()) return status;
      std::memcpy(unit.weights.data() + offset, host.data(),
                  numel * sizeof(uint16_t));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Trainer::HeldOutBits() {
  if (absl::Status status = Widen(); !status.ok()) return status;
  const int64_t end = static_cast<int64_t>(text_.size());
  double nats = 0;
  for (int64_t begin = held_out_begin_; begin < end; begin += options_.batch) {
    positions_.clear();
    for (int64_t i = begin; i < end && i - begin < options_.batch; ++i) {
      positions_.push_back(i);
    }
    nats += model_.Forward(text_, positions_, widened_) *
            static_cast<double>(positions_.size());
  }
  return nats / static_cast<double>(end - held_out_begin_) / std::log(2.0);
}

double Trainer::FrequencyBits() const {
  std::array<int64_t, LanguageModel::kSymbols> counts;
  counts.fill(1);
  for (const char c : TrainingPart()) ++counts[static_cast<uint8_t>(c)];
  const double total =
      static_cast<double>(held_out_begin_ + LanguageModel::kSymbols);
  const absl::string_view held_out =
      absl::string_view(text_).substr(held_out_begin_);
  double bits = 0;
  for (const char c : held_out) {
    bits -=
        std::log2(static_cast<double>(counts[static_cast<uint8_t>(c)]) / total);
  }
  return bits / static_cast<double>(held_out.size());
}

std::string Trainer::Digest() const {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(
      XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  for (const Unit& unit : units_) {
    XXH3_64bits_update(state.get(), unit.master.data(),
                       unit.master.size() * sizeof(float));
  }
  return absl::StrCat(
      absl::Hex(XXH3_64bits_digest(state.get()), absl::kZeroPad16));
}

int64_t Trainer::parameters() const {
  int64_t count = 0;
  for (const Unit& unit : units_) count += unit.numel();
  return count;
}

}  // namespace onepass
