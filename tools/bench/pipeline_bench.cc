#include "tools/bench/pipeline_bench.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "dispatch/communicator.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/host_buffer.h"
#include "dispatch/operations.h"
#include "dispatch/return_if_error.h"
#include "dispatch/runtime.h"
#include "dispatch/thread_communicator.h"
#include "dispatch/thread_pool.h"
#include "offload/adam_options.h"
#include "offload/shard_optimizer.h"
#include "offload/zero_optimizer.h"
#include "tools/bench/random_at.h"

namespace onepass {
namespace {

// Of a weight on the device, of its copy, and of a gradient.
constexpr int64_t kBFloat16Bytes = 2;

// A row of points, and the least that its medians are to be. Those of one link
// follow one another.
struct Row {
  double link_over_cpu;
  int buffers;
  double bound_over_measured;
  double serial_over_pipelined;
};

constexpr Row kRows[] = {
    {0.25, 2, 0.95, 0}, {0.5, 2, 0.95, 0}, {1, 2, 0.92, 1.80},
    {1, 1, 0, 0},       {2, 2, 0.95, 0},   {10, 2, 0.95, 0},
};
// What the targets are of.
constexpr int64_t kTargetPieces = 32;

// Of the pass that comes before the first link's.
constexpr int64_t kCalibrationRounds = 4;
constexpr Row kCalibrationRow = {1, 2, 0, 0};

constexpr int kRanks[] = {1, 2, 4};
constexpr int64_t kPartsOfNumel[] = {64, 16, 4};

// What arrays of an optimizer may take beyond their elements: a part of a page
// each, and staging buffers of pieces of the usual size.
constexpr int64_t kOptimizerSlackBytes = 8 * HostBuffer::kHugePageBytes;

// Of an optimizer: masters, moments, gradients that arrived, and weights on the
// device.
constexpr int64_t kOptimizerElementBytes =
    4 + 4 + 4 + kBFloat16Bytes + kBFloat16Bytes;
// Of a rank's part, beside that: sums of gradients.
constexpr int64_t kRankElementBytes = kOptimizerElementBytes + 4;
// Of all elements, on each rank: its gradient, flat, and what it received.
constexpr int64_t kReductionElementBytes = 3 * kBFloat16Bytes;

int Threads(const PipelineBenchOptions& options) {
  return options.threads == 0 ? ThreadPool::AllowedProcessors()
                              : options.threads;
}

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

Spread Milliseconds(std::vector<double> seconds) {
  for (double& value : seconds) value *= 1e3;
  return SpreadOf(std::move(seconds));
}

absl::Status FillRandom(int64_t offset, absl::Span<float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = RandomAt(offset + static_cast<int64_t>(i));
  }
  return absl::OkStatus();
}

// A device, and a gradient of `numel` elements of bf16 on it.
class Side {
 public:
  static absl::StatusOr<std::unique_ptr<Side>> Create(const Kernel& kernel,
                                                      ThreadPool& pool,
                                                      HostDeviceOptions options,
                                                      int64_t numel) {
    auto side = std::make_unique<Side>();
    ONEPASS_ASSIGN_OR_RETURN(side->device_,
                             HostDevice::Create(kernel, std::move(options)));
    ONEPASS_ASSIGN_OR_RETURN(side->stream_,
                             side->device_->CreateStream("trainer"));
    ONEPASS_ASSIGN_OR_RETURN(side->gradient_,
                             side->device_->Allocate(numel * kBFloat16Bytes));
    std::vector<float> values(std::min<int64_t>(numel, kLeafNumel));
    for (int64_t i = 0; i < numel; i += kLeafNumel) {
      CastArgs cast;
      cast.numel = std::min(kLeafNumel, numel - i);
      // Other numbers than those of the weights.
      ONEPASS_RETURN_IF_ERROR(FillRandom(numel + i, absl::MakeSpan(values)));
      cast.in = values.data();
      cast.out = side->gradient_.as<uint16_t>() + i;
      cast.out_type = DType::kBFloat16;
      ONEPASS_RETURN_IF_ERROR(Cast(kernel, pool, cast));
    }
    return side;
  }

  HostDevice& device() { return *device_; }
  Stream& stream() { return *stream_; }
  const void* gradient() const { return gradient_.data(); }

 private:
  std::unique_ptr<HostDevice> device_;
  DeviceBuffer gradient_;
  std::unique_ptr<Stream> stream_;
};

AdamOptions StepOptions() {
  AdamOptions options;
  options.lr = 1e-4;
  options.weight_decay = 0.01;
  return options;
}

// --- One rank over a link. ---

// An optimizer of one shard, whose weights are on the device of a Side.
class Stepper {
 public:
  static absl::StatusOr<std::unique_ptr<Stepper>> Create(
      const Kernel& kernel, ThreadPool& pool, Side& side, int64_t numel,
      int64_t piece_numel, int buffers) {
    auto stepper = std::make_unique<Stepper>(side);
    ONEPASS_ASSIGN_OR_RETURN(stepper->weights_,
                             side.device().Allocate(numel * kBFloat16Bytes));
    ShardOptimizerOptions options;
    options.groups = {StepOptions()};
    options.piece_numel = piece_numel;
    options.staging_buffers = buffers;
    options.sub_group_numel = numel;
    Shard shard;
    shard.name = "all";
    shard.shape = {numel};
    shard.box = {{0}, {numel}};
    shard.values = &FillRandom;
    shard.weights = stepper->weights_.data();
    ONEPASS_ASSIGN_OR_RETURN(
        stepper->optimizer_,
        ShardOptimizer::Create({kernel, side.device(), pool}, options,
                               {std::move(shard)}));
    return stepper;
  }

  explicit Stepper(Side& side) : side_(side) {}

  // What it reports of a step whose gradient is on the host when it begins.
  absl::StatusOr<StepReport> Step() {
    ONEPASS_RETURN_IF_ERROR(
        optimizer_->AddGradient(0, side_.gradient(), side_.stream()).status());
    StepInput input;
    ONEPASS_ASSIGN_OR_RETURN(input.norm, optimizer_->LocalNorm());
    return optimizer_->Step(input);
  }

 private:
  Side& side_;
  DeviceBuffer weights_;
  std::unique_ptr<ShardOptimizer> optimizer_;
};

class PipelineBench {
 public:
  PipelineBench(const Kernel& kernel, ThreadPool& pool,
                const PipelineBenchOptions& options)
      : kernel_(kernel),
        pool_(pool),
        options_(options),
        real_copies_(
            !options.timestamps &&
            CopiesAreReal(pool.threads(), ThreadPool::AllowedProcessors())),
        piece_numel_(DivideUp(options.numel, options.pieces * kLeafNumel) *
                     kLeafNumel) {}

  absl::Status Run(PipelineReport& report) {
    report.threads = pool_.threads();
    report.real_copies = real_copies_;
    ONEPASS_ASSIGN_OR_RETURN(unlinked_side_,
                             MakeSide(/*link_bytes_per_s=*/0, /*move=*/false));
    ONEPASS_ASSIGN_OR_RETURN(
        unlinked_, MakeStepper(*unlinked_side_, piece_numel_, /*buffers=*/2));
    ONEPASS_RETURN_IF_ERROR(Calibrate());
    std::vector<double> productions;
    for (const Row* row = std::begin(kRows); row != std::end(kRows);) {
      const Row* const end =
          std::find_if(row, std::end(kRows), [row](const Row& other) {
            return other.link_over_cpu != row->link_over_cpu;
          });
      ONEPASS_RETURN_IF_ERROR(MeasureLink({row, static_cast<size_t>(end - row)},
                                          options_.rounds, report.points));
      productions.push_back(production_);
      row = end;
    }
    report.cpu_gb_per_s = SpreadOf(std::move(productions)).median / 1e9;
    return absl::OkStatus();
  }

 private:
  // What a way to do a step has told of its latest one.
  struct Way {
    std::unique_ptr<Stepper> stepper;
    StepReport report;
  };

  absl::StatusOr<std::unique_ptr<Side>> MakeSide(double link_bytes_per_s,
                                                 bool move) {
    HostDeviceOptions options;
    options.link_bytes_per_s = link_bytes_per_s;
    options.move_bytes = move;
    const auto& observer = options_.observer;
    if (!move) {
      // Gradients arrive in any case: zeros would be another measurement.
      options.observer = [&observer, observed = link_bytes_per_s > 0](
                             const HostDeviceCopy& copy, bool begins) {
        if (begins && copy.direction == HostDeviceCopy::Direction::kToHost) {
          std::memcpy(copy.to, copy.from, copy.bytes);
        }
        if (observed && observer) observer(copy, begins);
      };
    } else if (observer) {
      options.observer = observer;
    }
    return Side::Create(kernel_, pool_, std::move(options), options_.numel);
  }

  absl::StatusOr<std::unique_ptr<Stepper>> MakeStepper(Side& side,
                                                       int64_t piece_numel,
                                                       int buffers) {
    return Stepper::Create(kernel_, pool_, side, options_.numel, piece_numel,
                           buffers);
  }

  // A first production_. Steps alone, one after the other, are faster than
  // those between steps over a link, during which the CPU also rests: they only
  // serve for a pass that is like the others.
  absl::Status Calibrate() {
    ONEPASS_RETURN_IF_ERROR(unlinked_->Step().status());
    StepReport step;
    ONEPASS_ASSIGN_OR_RETURN(step, unlinked_->Step());
    production_ = copied_bytes() / step.seconds;
    std::vector<PipelinePoint> dropped;
    return MeasureLink({&kCalibrationRow, 1}, kCalibrationRounds, dropped);
  }

  absl::Status MeasureLink(absl::Span<const Row> rows, int64_t rounds,
                           std::vector<PipelinePoint>& points) {
    const double link_over_cpu = rows[0].link_over_cpu;
    const double bandwidth = production_ * link_over_cpu;
    std::unique_ptr<Side> side;
    ONEPASS_ASSIGN_OR_RETURN(side, MakeSide(bandwidth, real_copies_));

    // The rows' ways, and after them that of `serial`.
    std::vector<Way> ways(rows.size() + 1);
    for (size_t i = 0; i < rows.size(); ++i) {
      ONEPASS_ASSIGN_OR_RETURN(
          ways[i].stepper, MakeStepper(*side, piece_numel_, rows[i].buffers));
    }
    ONEPASS_ASSIGN_OR_RETURN(ways.back().stepper,
                             MakeStepper(*side, options_.numel, 1));

    // A clock that goes on in steps only.
    double stepped_s = 0;
    std::vector<Variant> variants = {
        {"a step without a link", [&]() -> absl::Status {
           StepReport step;
           ONEPASS_ASSIGN_OR_RETURN(step, unlinked_->Step());
           stepped_s += step.seconds;
           return absl::OkStatus();
         }}};
    for (Way& way : ways) {
      variants.push_back({absl::StrCat("a step over a link of ", link_over_cpu),
                          [&]() -> absl::Status {
                            ONEPASS_ASSIGN_OR_RETURN(way.report,
                                                     way.stepper->Step());
                            stepped_s += way.report.seconds;
                            return absl::OkStatus();
                          }});
    }
    Timings seconds;
    ONEPASS_ASSIGN_OR_RETURN(
        seconds, MeasureInterleaved(variants, rounds,
                                    [&stepped_s] { return stepped_s; }));
    production_ = copied_bytes() / SpreadOf(seconds[0]).median;

    for (size_t i = 0; i < rows.size(); ++i) {
      const Row& row = rows[i];
      PipelinePoint point;
      point.link_over_cpu = link_over_cpu;
      point.pieces = ways[i].report.pieces;
      point.buffers = row.buffers;
      std::vector<double> bounds;
      for (const double cpu_s : seconds[0]) {
        bounds.push_back(
            PipelineBound(cpu_s, copied_bytes() / bandwidth, point.pieces));
      }
      const std::vector<double>& measured = seconds[1 + i];
      point.ms = Milliseconds(measured);
      point.bound_over_measured = RatioOf(bounds, measured);
      point.serial_over_pipelined = RatioOf(seconds.back(), measured);
      if (point.pieces == kTargetPieces) {
        point.bound_target =
            Target(row.bound_over_measured, point.bound_over_measured);
        point.serial_target =
            Target(row.serial_over_pipelined, point.serial_over_pipelined);
      }
      points.push_back(point);
    }
    return absl::OkStatus();
  }

  static PipelineTarget Target(double at_least, const Spread& spread) {
    return {at_least, at_least > 0 && spread.median >= at_least};
  }

  double copied_bytes() const {
    return static_cast<double>(options_.numel * kBFloat16Bytes);
  }

  const Kernel& kernel_;
  ThreadPool& pool_;
  const PipelineBenchOptions& options_;
  const bool real_copies_;
  const int64_t piece_numel_;
  // Of Tc.
  std::unique_ptr<Side> unlinked_side_;
  std::unique_ptr<Stepper> unlinked_;
  // Bytes of copies that a second of such steps produces, by the latest.
  double production_ = 0;
};

// --- Ranks. ---

// Ranks of a ZeroOptimizer, each on a thread of its own.
class Team {
 public:
  static absl::StatusOr<std::unique_ptr<Team>> Create(const Kernel& kernel,
                                                      int64_t numel,
                                                      int ranks) {
    auto team = std::make_unique<Team>();
    ONEPASS_ASSIGN_OR_RETURN(team->threads_, ThreadPool::Create({ranks}));
    ONEPASS_ASSIGN_OR_RETURN(team->communicators_,
                             CreateThreadCommunicators(ranks, {}));
    team->ranks_.resize(ranks);
    ONEPASS_RETURN_IF_ERROR(team->OnEach(
        [&](int rank) { return team->MakeRank(kernel, numel, rank); }));
    return team;
  }

  // The seconds of a step, from when the last rank is ready.
  absl::StatusOr<double> Step() {
    std::vector<double> ready(ranks_.size());
    std::vector<double> done(ranks_.size());
    ONEPASS_RETURN_IF_ERROR(OnEach([&](int i) -> absl::Status {
      Rank& rank = ranks_[i];
      ONEPASS_RETURN_IF_ERROR(rank.optimizer->ReduceGradients(
          0, {rank.side->gradient()}, rank.side->stream()));
      ready[i] = MonotonicSeconds();
      ONEPASS_RETURN_IF_ERROR(rank.optimizer->Step({}).status());
      done[i] = MonotonicSeconds();
      return absl::OkStatus();
    }));
    return *std::max_element(done.begin(), done.end()) -
           *std::max_element(ready.begin(), ready.end());
  }

 private:
  struct Rank {
    std::unique_ptr<ThreadPool> pool;
    std::unique_ptr<Side> side;
    std::unique_ptr<ZeroOptimizer> optimizer;
  };

  // Calls `work` for all ranks at the same time. An error of one rank is found
  // by all, which name it.
  template <typename Work>
  absl::Status OnEach(const Work& work) {
    std::vector<absl::Status> statuses(ranks_.size());
    threads_->Run([&](int rank) { statuses[rank] = work(rank); });
    absl::Status first;
    for (const absl::Status& status : statuses) first.Update(status);
    return first;
  }

  absl::Status MakeRank(const Kernel& kernel, int64_t numel, int i) {
    Rank& rank = ranks_[i];
    const absl::Status made = [&]() -> absl::Status {
      ONEPASS_ASSIGN_OR_RETURN(rank.pool, ThreadPool::Create({1}));
      ONEPASS_ASSIGN_OR_RETURN(rank.side,
                               Side::Create(kernel, *rank.pool, {}, numel));
      return absl::OkStatus();
    }();
    if (!made.ok()) {
      communicators_[i]->Abort(made.message());
      return made;
    }
    ZeroOptions options;
    options.shard.groups = {StepOptions()};
    ZeroUnit unit = {"all", {{"all", {numel}, 0, &FillRandom}}};
    ONEPASS_ASSIGN_OR_RETURN(
        rank.optimizer,
        ZeroOptimizer::Create({kernel, rank.side->device(), *rank.pool},
                              *communicators_[i], options, {std::move(unit)}));
    return absl::OkStatus();
  }

  std::unique_ptr<ThreadPool> threads_;  // one a rank
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<Rank> ranks_;
};

absl::Status MeasureRanks(const Kernel& kernel,
                          const PipelineBenchOptions& options,
                          PipelineReport& report) {
  std::vector<std::unique_ptr<Team>> teams;
  double stepped_s = 0;
  std::vector<Variant> variants;
  for (const int64_t part : kPartsOfNumel) {
    for (const int ranks : kRanks) {
      RanksPoint& point = report.ranks.emplace_back();
      point.numel = options.numel / part;
      point.ranks = ranks;
      ONEPASS_ASSIGN_OR_RETURN(teams.emplace_back(),
                               Team::Create(kernel, point.numel, ranks));
      variants.push_back(
          {absl::StrCat("ranks: ", ranks),
           [&stepped_s, team = teams.back().get()]() -> absl::Status {
             double seconds;
             ONEPASS_ASSIGN_OR_RETURN(seconds, team->Step());
             stepped_s += seconds;
             return absl::OkStatus();
           }});
    }
  }
  Timings seconds;
  ONEPASS_ASSIGN_OR_RETURN(
      seconds, MeasureInterleaved(variants, options.rounds,
                                  [&stepped_s] { return stepped_s; }));
  for (size_t i = 0; i < report.ranks.size(); ++i) {
    RanksPoint& point = report.ranks[i];
    // Of as many elements on one rank.
    const size_t one = i - i % std::size(kRanks);
    point.speedup = RatioOf(seconds[one], seconds[i]);
    point.ms = Milliseconds(seconds[i]);
    point.ns_per_element =
        point.ms.median * 1e6 / static_cast<double>(point.numel);
  }
  return absl::OkStatus();
}

}  // namespace

double PipelineBound(double cpu_s, double link_s, int64_t pieces) {
  return std::max(cpu_s, link_s) +
         std::min(cpu_s, link_s) / static_cast<double>(pieces);
}

bool CopiesAreReal(int threads, int processors) { return threads < processors; }

absl::StatusOr<int64_t> PipelineBenchBytes(
    const PipelineBenchOptions& options) {
  // At most one optimizer without a link, two rows of one, and `serial`, whose
  // staging buffer holds all; gradients of both devices; staging buffers of
  // pieces.
  constexpr int64_t kOptimizers = 4;
  constexpr int64_t kElementBytes = kOptimizers * kOptimizerElementBytes +
                                    kBFloat16Bytes + 2 * kBFloat16Bytes;
  constexpr int64_t kStagingPieces = 2 + 2 + 1;
  constexpr int64_t kFixedBytes = kOptimizers * kOptimizerSlackBytes;
  constexpr int64_t kMostNumel =
      (std::numeric_limits<int64_t>::max() - kFixedBytes) /
      (kElementBytes + kStagingPieces * kBFloat16Bytes);
  if (options.numel < PipelineBenchOptions::kLeastNumel ||
      options.numel > kMostNumel) {
    return absl::InvalidArgumentError(
        absl::StrCat("--numel is ", options.numel, ", expected ",
                     PipelineBenchOptions::kLeastNumel, " to ", kMostNumel));
  }
  if (options.pieces < 1 ||
      options.pieces > PipelineBenchOptions::kMostPieces) {
    return absl::InvalidArgumentError(
        absl::StrCat("--pieces is ", options.pieces, ", expected 1 to ",
                     PipelineBenchOptions::kMostPieces));
  }
  if (options.threads < 0 || options.threads > ThreadPool::kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("--threads is ", options.threads, ", expected 0 to ",
                     ThreadPool::kMaxThreads));
  }
  if (options.rounds < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rounds is ", options.rounds, ", expected at least 1"));
  }
  const int64_t staging =
      kStagingPieces * kBFloat16Bytes * DivideUp(options.numel, options.pieces);
  const int64_t pipeline =
      options.numel * kElementBytes + staging + kFixedBytes;
  // These come when those are gone.
  int64_t ranks = 0;
  for (const int64_t part : kPartsOfNumel) {
    for (const int count : kRanks) {
      ranks += options.numel / part *
                   (kRankElementBytes + count * kReductionElementBytes) +
               count * kOptimizerSlackBytes;
    }
  }
  return std::max(pipeline, ranks);
}

absl::StatusOr<PipelineReport> RunPipelineBench(
    const Kernel& kernel, const PipelineBenchOptions& options) {
  ONEPASS_RETURN_IF_ERROR(PipelineBenchBytes(options).status());
  if (!kernel.copy_types.Contains(DType::kBFloat16) ||
      !kernel.gradient_types.Contains(DType::kBFloat16)) {
    return absl::FailedPreconditionError(
        absl::StrCat("kernel ", kernel.name,
                     " writes no bf16 copies, or reads no bf16 gradients"));
  }
  PipelineReport report;
  {
    std::unique_ptr<ThreadPool> pool;
    ONEPASS_ASSIGN_OR_RETURN(pool, ThreadPool::Create({Threads(options)}));
    ONEPASS_RETURN_IF_ERROR(PipelineBench(kernel, *pool, options).Run(report));
  }
  ONEPASS_RETURN_IF_ERROR(MeasureRanks(kernel, options, report));
  return report;
}

}  // namespace onepass
