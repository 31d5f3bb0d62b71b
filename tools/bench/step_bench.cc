#include "tools/bench/step_bench.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "dispatch/dtype.h"
#include "dispatch/host_buffer.h"
#include "dispatch/operations.h"
#include "offload/adam_options.h"
#include "offload/cpu_adam.h"
#include "tools/bench/adam_state.h"
#include "tools/bench/peers.h"

namespace onepass {
namespace {

// Of the pieces of "pieces", and the buffers that take turns.
constexpr int64_t kPieceNumel = 512 << 10;
constexpr int64_t kStagingBuffers = 2;

// Of the bf16 gradient and moments beside the first state, and of the fresh
// buffer.
constexpr int64_t kBFloat16Bytes = 3 * 2;
constexpr int64_t kFreshBytes = 2;
constexpr int64_t kStates = 4;
// What arrays begin beyond a multiple of their pages, and are rounded up by.
constexpr int64_t kSlackBytes = HostBuffer::kHugePageBytes;
constexpr int64_t kArrays = AdamState::kArrays * kStates + 3 + kStagingBuffers;

// What passes scale gradients by in place, in turns: they stay what they were,
// nearly.
constexpr float kScales[] = {1 + 0x1p-10f, 1 / (1 + 0x1p-10f)};

// A ratio of two ways, by their names.
struct RatioOfWays {
  const char* name;
  const char* over;
  const char* under;
  const char* meaning;
  // Of the median; 0: none.
  double at_least;
  double at_most;
};

constexpr RatioOfWays kRatios[] = {
    {"three_pass/fused", "three_pass", "fused",
     "scale, Adam, cast: three passes over resident buffers", 1.55, 0},
    {"three_pass_fresh/fused", "three_pass_fresh", "fused",
     "the same, with the cast into a fresh buffer", 2.0, 0},
    {"scale_fused/fused", "scale_fused", "fused",
     "scale fused, the cast a pass of its own", 0, 0},
    {"fused/adam_only", "fused", "adam_only", "what the copy adds to Adam", 0,
     1.12},
    {"twin/fused", "twin", "fused", "the same bytes, and nothing computed",
     0.90, 0},
    {"torch_shape/fused", "torch_shape", "fused",
     "divides, writes scaled gradients back, casts apart; no prefetch in its "
     "step",
     1.4, 0},
    {"one_pass_two_div/fused", "one_pass_two_div", "fused",
     "one pass, two divisions, ordinary stores, no prefetch", 1.03, 0},
    {"avx2/avx512", "avx2", "fused", "the step of the AVX2 kernel", 0, 1.25},
    {"bf16_grad/fp32_grad", "bf16_grad", "fused", "gradients in 16 bits", 0,
     0.97},
    {"bf16_grad_moments/fp32", "bf16_grad_moments", "fused",
     "gradients and moments in 16 bits", 0, 0.80},
    {"pieces/one_call", "pieces", "fused",
     "pieces of 512Ki through two small buffers", 0, 1.12},
    {"streaming/ordinary", "streaming", "ordinary",
     "stores of the copy around the caches", 0, 0},
    {"huge_pages/small_pages", "fused", "small_pages", "pages of 2 MiB", 0, 0},
    {"equal_bases/bases_apart", "equal_bases", "fused",
     "all arrays begin at one offset of a page", 0, 0},
    {"subnormal/normal", "subnormal", "fused",
     "gradients and moments of subnormal numbers", 0, 0},
};

// Whether advice to use huge pages has an effect on this system.
bool HugePagesAreOn() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;  // "always [madvise] never"
  return std::getline(file, modes) && !absl::StrContains(modes, "[never]");
}

// A way to do a step, and the bytes an element that it has to read and write.
struct Way {
  std::string name;
  int64_t bytes;
  std::function<absl::Status()> run;
};

class StepBench {
 public:
  static absl::StatusOr<std::unique_ptr<StepBench>> Create(
      const Dispatcher& dispatcher, const Kernel& kernel, ThreadPool& pool,
      int64_t numel) {
    AdamOptions options;
    options.lr = 1e-4;
    options.weight_decay = 0.01;
    absl::StatusOr<AdamConstants> constants =
        ComputeAdamConstants(options, kStep);
    if (!constants.ok()) return constants.status();
    absl::StatusOr<CpuAdam> adam = CpuAdam::Create(kernel, pool, {options});
    if (!adam.ok()) return adam.status();
    auto bench = std::make_unique<StepBench>(dispatcher, kernel, pool, numel,
                                             *std::move(adam), *constants);
    if (absl::Status status = bench->Allocate(); !status.ok()) return status;
    return bench;
  }

  StepBench(const Dispatcher& dispatcher, const Kernel& kernel,
            ThreadPool& pool, int64_t numel, CpuAdam adam,
            const AdamConstants& constants)
      : dispatcher_(dispatcher),
        kernel_(kernel),
        pool_(pool),
        numel_(numel),
        adam_(std::move(adam)),
        constants_(constants) {}

  std::vector<Way> Ways() {
    std::vector<Way> ways = {
        {"fused", AdamState::kMovedBytes,
         [this] { return Fused(state_.Span()); }},
        {"adam_only", AdamState::kMovedBytes - 2,
         [this] { return AdamOnly(kScales[0]); }},
        {"three_pass", 42, [this] { return ThreePass(state_.Span().copy); }},
        {"three_pass_fresh", 42, [this] { return ThreePassIntoFreshBuffer(); }},
        {"scale_fused", 34,
         [this] {
           const absl::Status status = AdamOnly(kScales[0]);
           return status.ok() ? CastTo(state_.Span().copy) : status;
         }},
        {"bf16_grad", AdamState::kMovedBytes - 2,
         [this] {
           AdamSpan span = state_.Span();
           span.grad = grad16_.data();
           span.grad_type = DType::kBFloat16;
           return Fused(span);
         }},
        {"bf16_grad_moments", 20,
         [this] {
           AdamSpan span = state_.Span();
           span.grad = grad16_.data();
           span.grad_type = DType::kBFloat16;
           span.exp_avg = exp_avg16_.data();
           span.exp_avg_type = DType::kBFloat16;
           span.exp_avg_sq = exp_avg_sq16_.data();
           span.exp_avg_sq_type = DType::kBFloat16;
           return Fused(span);
         }},
        {"pieces", AdamState::kMovedBytes, [this] { return Pieces(); }},
    };
    if (kernel_.operations->streams_copies) {
      const auto with_stores = [this](CopyStores stores) {
        AdamSpan span = state_.Span();
        span.copy_stores = stores;
        return Fused(span);
      };
      ways.push_back({"streaming", AdamState::kMovedBytes,
                      [=] { return with_stores(CopyStores::kStreaming); }});
      ways.push_back({"ordinary", AdamState::kMovedBytes,
                      [=] { return with_stores(CopyStores::kOrdinary); }});
    }
    if (peers_ != nullptr) {
      ways.push_back({"twin", AdamState::kMovedBytes, [this] {
                        return RunPeer([this](const AdamStepArgs& args,
                                              int64_t) { peers_->twin(args); });
                      }});
      ways.push_back({"torch_shape", 38, [this] { return TorchShape(); }});
      ways.push_back({"one_pass_two_div", AdamState::kMovedBytes, [this] {
                        return RunPeer(
                            [this](const AdamStepArgs& args, int64_t) {
                              peers_->one_pass_two_div(args);
                            });
                      }});
    }
    if (avx2_.has_value()) {
      ways.push_back({"avx2", AdamState::kMovedBytes, [this] {
                        return avx2_->Step(state_.Span(), kStep, kScales[0]);
                      }});
    }
    // On other arrays, after all that are on the same.
    if (state_.huge_pages() && HugePagesAreOn()) {
      ways.push_back({"small_pages", AdamState::kMovedBytes,
                      [this] { return Fused(small_pages_.Span()); }});
    }
    ways.push_back({"equal_bases", AdamState::kMovedBytes,
                    [this] { return Fused(equal_bases_.Span()); }});
    ways.push_back({"subnormal", AdamState::kMovedBytes,
                    [this] { return Fused(subnormal_.Span()); }});
    return ways;
  }

  bool streams() const {
    return adam_.StreamsCopy(DType::kBFloat16, CopyStores::kAuto, numel_);
  }

 private:
  static constexpr int64_t kStep = 100;

  absl::Status Allocate() {
    AdamStateOptions small_pages;
    small_pages.huge_pages = false;
    AdamStateOptions equal_bases;
    equal_bases.equal_bases = true;
    AdamStateOptions subnormal;
    // Such that both averages stay subnormal, whatever the number of steps: the
    // square of a gradient is 0.
    subnormal.moments = 0x1p-128f;
    const struct {
      AdamState* state;
      AdamStateOptions options;
    } states[] = {{&state_, {}},
                  {&small_pages_, small_pages},
                  {&equal_bases_, equal_bases},
                  {&subnormal_, subnormal}};
    for (const auto& s : states) {
      absl::StatusOr<AdamState> made =
          AdamState::Create(pool_, numel_, s.options);
      if (!made.ok()) return made.status();
      *s.state = *std::move(made);
    }
    // After those of a state.
    int64_t i = AdamState::kArrays;
    const auto allocate = [&](StateArray& array, int64_t numel) {
      absl::StatusOr<StateArray> made = StateArray::Create(
          pool_, DType::kBFloat16, numel, i++ * StateArray::kStaggerBytes);
      if (made.ok()) array = *std::move(made);
      return made.status();
    };
    const AdamSpan span = state_.Span();
    const struct {
      StateArray* array;
      const void* from;
    } arrays16[] = {{&grad16_, span.grad},
                    {&exp_avg16_, span.exp_avg},
                    {&exp_avg_sq16_, span.exp_avg_sq}};
    for (const auto& a : arrays16) {
      absl::Status status = allocate(*a.array, numel_);
      if (status.ok()) status = ToBFloat16(a.from, a.array->data());
      if (!status.ok()) return status;
    }
    for (StateArray& array : staging_) {
      const absl::Status status =
          allocate(array, std::min(kPieceNumel, numel_));
      if (!status.ok()) return status;
    }
    peers_ = FindPeers(kernel_);
    if (absl::string_view(kernel_.name) == "avx512") {
      for (const KernelReport& report : dispatcher_.Report()) {
        if (report.kernel->name != absl::string_view("avx2")) continue;
        if (!report.supported) continue;
        absl::StatusOr<CpuAdam> adam =
            CpuAdam::Create(*report.kernel, pool_, adam_.groups());
        if (!adam.ok()) return adam.status();
        avx2_ = *std::move(adam);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Fused(const AdamSpan& span) {
    return adam_.Step(span, kStep, kScales[0]);
  }

  absl::Status AdamOnly(float scale) {
    AdamSpan span = state_.Span();
    span.copy = nullptr;
    return adam_.Step(span, kStep, scale);
  }

  absl::Status ToBFloat16(const void* in, void* out) {
    CastArgs args;
    args.numel = numel_;
    args.in = in;
    args.out = out;
    args.out_type = DType::kBFloat16;
    return Cast(kernel_, pool_, args);
  }

  absl::Status CastTo(void* copy) {
    return ToBFloat16(state_.Span().param, copy);
  }

  absl::Status ThreePass(void* copy) {
    ScaleArgs scale;
    scale.numel = numel_;
    scale.in = state_.grad();
    scale.out = state_.grad();
    scale.factor = kScales[three_passes_++ % 2];
    if (absl::Status status = Scale(kernel_, pool_, scale); !status.ok()) {
      return status;
    }
    if (absl::Status status = AdamOnly(1); !status.ok()) return status;
    return CastTo(copy);
  }

  absl::Status ThreePassIntoFreshBuffer() {
    // Untouched: its pages come with the cast, as those of a tensor that is
    // made for it. An allocator would give the last one back.
    const size_t bytes = static_cast<size_t>(numel_) * sizeof(uint16_t);
    void* const fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "could not map ", bytes, " bytes: ", std::strerror(errno)));
    }
    const absl::Status status = ThreePass(fresh);
    munmap(fresh, bytes);
    return status;
  }

  absl::Status Pieces() {
    AdamSpan span = state_.Span();
    span.copy = nullptr;
    int64_t piece = 0;
    return adam_.StepPieces(
        span, kStep, kScales[0], kPieceNumel,
        [&](const AdamPiece&) -> absl::StatusOr<void*> {
          return staging_[piece++ % kStagingBuffers].data();
        },
        [](const AdamPiece&, void*) { return absl::OkStatus(); });
  }

  // Runs `peer(args, begin)` over each worker's range, which begins at `begin`.
  template <typename Peer>
  absl::Status RunPeer(const Peer& peer) {
    AdamStepArgs args;
    args.numel = numel_;
    const AdamSpan span = state_.Span();
    args.param = span.param;
    args.grad = span.grad;
    args.exp_avg = span.exp_avg;
    args.exp_avg_sq = span.exp_avg_sq;
    args.copy = span.copy;
    args.stream_copy = streams();
    args.grad_scale = kScales[0];
    args.constants = constants_;
    args.constants.bias_correction2 = 1 / constants_.bias_correction2;
    pool_.ParallelFor(numel_, kLeafNumel, [&](int64_t begin, int64_t end) {
      peer(AdamStepPart(args, begin, end - begin), begin);
    });
    return absl::OkStatus();
  }

  absl::Status TorchShape() {
    const float scale = kScales[torch_shapes_++ % 2];
    const absl::Status status =
        RunPeer([this, scale](const AdamStepArgs& args, int64_t begin) {
          peers_->scaling_step(args, state_.grad() + begin, scale);
        });
    return status.ok() ? CastTo(state_.Span().copy) : status;
  }

  const Dispatcher& dispatcher_;
  const Kernel& kernel_;
  ThreadPool& pool_;
  const int64_t numel_;
  const CpuAdam adam_;
  const AdamConstants constants_;
  const Peers* peers_ = nullptr;
  std::optional<CpuAdam> avx2_;
  // Of those that scale gradients in place: each undoes what the one of the
  // same kind before it did.
  int64_t three_passes_ = 0;
  int64_t torch_shapes_ = 0;

  AdamState state_;
  StateArray grad16_;
  StateArray exp_avg16_;
  StateArray exp_avg_sq16_;
  StateArray staging_[kStagingBuffers];
  AdamState small_pages_;
  AdamState equal_bases_;
  AdamState subnormal_;
};

}  // namespace

absl::StatusOr<int64_t> StepBenchBytes(const StepBenchOptions& options) {
  constexpr int64_t kElementBytes =
      kStates * AdamState::kElementBytes + kBFloat16Bytes + kFreshBytes;
  constexpr int64_t kFixedBytes =
      kArrays * kSlackBytes + kStagingBuffers * kPieceNumel * 2;
  constexpr int64_t kMostNumel =
      (std::numeric_limits<int64_t>::max() - kFixedBytes) / kElementBytes;
  if (options.numel < 1 || options.numel > kMostNumel) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--numel is ", options.numel, ", expected 1 to ", kMostNumel));
  }
  if (options.rounds < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rounds is ", options.rounds, ", expected at least 1"));
  }
  return options.numel * kElementBytes + kFixedBytes;
}

absl::StatusOr<StepBenchReport> RunStepBench(const Dispatcher& dispatcher,
                                             const Kernel& kernel,
                                             ThreadPool& pool,
                                             const StepBenchOptions& options) {
  if (absl::StatusOr<int64_t> bytes = StepBenchBytes(options); !bytes.ok()) {
    return bytes.status();
  }
  absl::StatusOr<std::unique_ptr<StepBench>> bench =
      StepBench::Create(dispatcher, kernel, pool, options.numel);
  if (!bench.ok()) return bench.status();
  const std::vector<Way> ways = (*bench)->Ways();
  std::vector<Variant> variants;
  for (const Way& way : ways) variants.push_back({way.name, way.run});
  const absl::StatusOr<Timings> seconds =
      MeasureInterleaved(variants, options.rounds);
  if (!seconds.ok()) return seconds.status();

  StepBenchReport report;
  report.store = (*bench)->streams() ? "streaming" : "ordinary";
  for (size_t i = 0; i < ways.size(); ++i) {
    const double median = SpreadOf((*seconds)[i]).median;
    report.rates.push_back(
        {ways[i].name, static_cast<double>(ways[i].bytes) *
                           static_cast<double>(options.numel) / median / 1e9});
  }
  const auto find = [&ways](absl::string_view name) {
    return std::find_if(ways.begin(), ways.end(),
                        [name](const Way& way) { return way.name == name; }) -
           ways.begin();
  };
  const auto measured = static_cast<std::ptrdiff_t>(ways.size());
  for (const RatioOfWays& r : kRatios) {
    const std::ptrdiff_t over = find(r.over);
    const std::ptrdiff_t under = find(r.under);
    if (over == measured || under == measured) continue;
    StepRatio ratio;
    ratio.name = r.name;
    ratio.meaning = r.meaning;
    ratio.spread = RatioOf((*seconds)[over], (*seconds)[under]);
    if (r.at_least > 0) {
      ratio.target = absl::StrFormat(">= %.2f", r.at_least);
      ratio.reached = ratio.spread.median >= r.at_least;
    } else if (r.at_most > 0) {
      ratio.target = absl::StrFormat("<= %.2f", r.at_most);
      ratio.reached = ratio.spread.median <= r.at_most;
    }
    report.ratios.push_back(std::move(ratio));
  }
  return report;
}

}  // namespace onepass
