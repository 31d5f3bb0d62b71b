#include "tools/bench/step_bench.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
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
#include "dispatch/dtype.h"
#include "dispatch/host_buffer.h"
#include "dispatch/operations.h"
#include "offload/adam_options.h"
#include "offload/cpu_adam.h"
#include "tools/bench/peers.h"
#include "tools/bench/random_at.h"

namespace onepass {
namespace {

// Of the pieces of "pieces", and the buffers that take turns.
constexpr int64_t kPieceNumel = 512 << 10;
constexpr int64_t kStagingBuffers = 2;

// Bytes an element of one state: four fp32 arrays and the copy.
constexpr int64_t kStateBytes = 4 * 4 + 2;
// Of the bf16 gradient and moments beside the first state, and of the fresh
// buffer.
constexpr int64_t kBFloat16Bytes = 3 * 2;
constexpr int64_t kFreshBytes = 2;
constexpr int64_t kStates = 4;
// What arrays begin beyond a multiple of their pages, and are rounded up by.
constexpr int64_t kSlackBytes = HostBuffer::kHugePageBytes;
constexpr int64_t kArrays = 5 * kStates + 3 + kStagingBuffers;

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
     "divides, writes scaled gradients back, casts apart, no prefetch", 1.4, 0},
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

// Large arrays: some bytes of a buffer.
class Array {
 public:
  static absl::StatusOr<Array> Create(ThreadPool& pool, DType type,
                                      int64_t numel, int64_t offset,
                                      bool huge_pages = true) {
    HostBufferOptions options;
    options.huge_pages = huge_pages;
    options.element_bytes = ByteSize(type);
    absl::StatusOr<HostBuffer> buffer = HostBuffer::Create(
        pool, numel * options.element_bytes + offset, options);
    if (!buffer.ok()) return buffer.status();
    Array array;
    array.buffer_ = *std::move(buffer);
    array.data_ = array.buffer_.as<char>() + offset;
    return array;
  }

  bool huge_pages() const { return buffer_.huge_pages(); }
  template <typename T = void>
  T* data() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  HostBuffer buffer_;
  char* data_ = nullptr;
};

// Fills `numel` elements of `type`, fp32 or bf16, with value(i).
template <typename Value>
void Fill(ThreadPool& pool, const Array& array, DType type, int64_t numel,
          const Value& value) {
  pool.ParallelFor(numel, kLeafNumel, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float x = value(i);
      if (type == DType::kFloat32) {
        array.data<float>()[i] = x;
        continue;
      }
      // The upper half of a float is a bfloat16.
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof(bits));
      array.data<uint16_t>()[i] = static_cast<uint16_t>(bits >> 16);
    }
  });
}

// One optimizer state and what a step reads and writes beside it.
struct State {
  enum class Bases {
    kApart,  // modulo 4096
    kEqual,
  };

  static absl::StatusOr<State> Create(ThreadPool& pool, int64_t numel,
                                      Bases bases, bool huge_pages,
                                      float moments) {
    State state;
    state.numel = numel;
    int64_t i = 0;
    for (Array* array : {&state.param, &state.grad, &state.exp_avg,
                         &state.exp_avg_sq, &state.copy}) {
      // Multiples of a cache line, none like another.
      const int64_t offset = bases == Bases::kEqual ? 0 : i * (512 + 64);
      const DType type =
          array == &state.copy ? DType::kBFloat16 : DType::kFloat32;
      absl::StatusOr<Array> made =
          Array::Create(pool, type, numel, offset, huge_pages);
      if (!made.ok()) return made.status();
      *array = *std::move(made);
      ++i;
    }
    Fill(pool, state.param, DType::kFloat32, numel,
         [](int64_t j) { return RandomAt(j); });
    Fill(pool, state.grad, DType::kFloat32, numel,
         [=](int64_t j) { return RandomAt(numel + j) * moments; });
    Fill(pool, state.exp_avg, DType::kFloat32, numel,
         [=](int64_t j) { return RandomAt(2 * numel + j) * moments; });
    Fill(pool, state.exp_avg_sq, DType::kFloat32, numel, [=](int64_t j) {
      return std::fabs(RandomAt(3 * numel + j)) * moments;
    });
    return state;
  }

  AdamSpan Span() const {
    AdamSpan span;
    span.numel = numel;
    span.param = param.data<float>();
    span.grad = grad.data();
    span.exp_avg = exp_avg.data();
    span.exp_avg_sq = exp_avg_sq.data();
    span.copy = copy.data();
    return span;
  }

  int64_t numel = 0;
  Array param;
  Array grad;
  Array exp_avg;
  Array exp_avg_sq;
  Array copy;
};

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
        {"fused", 30, [this] { return Fused(state_.Span()); }},
        {"adam_only", 28, [this] { return AdamOnly(kScales[0]); }},
        {"three_pass", 42, [this] { return ThreePass(state_.copy.data()); }},
        {"three_pass_fresh", 42, [this] { return ThreePassIntoFreshBuffer(); }},
        {"scale_fused", 34,
         [this] {
           const absl::Status status = AdamOnly(kScales[0]);
           return status.ok() ? CastTo(state_.copy.data()) : status;
         }},
        {"bf16_grad", 28,
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
        {"pieces", 30, [this] { return Pieces(); }},
    };
    if (kernel_.operations->streams_copies) {
      const auto with_stores = [this](CopyStores stores) {
        AdamSpan span = state_.Span();
        span.copy_stores = stores;
        return Fused(span);
      };
      ways.push_back({"streaming", 30,
                      [=] { return with_stores(CopyStores::kStreaming); }});
      ways.push_back(
          {"ordinary", 30, [=] { return with_stores(CopyStores::kOrdinary); }});
    }
    if (peers_ != nullptr) {
      ways.push_back({"twin", 30, [this] {
                        return RunPeer([this](const AdamStepArgs& args,
                                              int64_t) { peers_->twin(args); });
                      }});
      ways.push_back({"torch_shape", 38, [this] { return TorchShape(); }});
      ways.push_back({"one_pass_two_div", 30, [this] {
                        return RunPeer(
                            [this](const AdamStepArgs& args, int64_t) {
                              peers_->one_pass_two_div(args);
                            });
                      }});
    }
    if (avx2_.has_value()) {
      ways.push_back({"avx2", 30, [this] {
                        return avx2_->Step(state_.Span(), kStep, kScales[0]);
                      }});
    }
    // On other arrays, after all that are on the same.
    if (state_.param.huge_pages() && HugePagesAreOn()) {
      ways.push_back(
          {"small_pages", 30, [this] { return Fused(small_pages_.Span()); }});
    }
    ways.push_back(
        {"equal_bases", 30, [this] { return Fused(equal_bases_.Span()); }});
    ways.push_back(
        {"subnormal", 30, [this] { return Fused(subnormal_.Span()); }});
    return ways;
  }

  bool streams() const {
    return adam_.StreamsCopy(DType::kBFloat16, CopyStores::kAuto, numel_);
  }

 private:
  static constexpr int64_t kStep = 100;

  absl::Status Allocate() {
    const struct {
      State* state;
      State::Bases bases;
      bool huge_pages;
      // Such that averages stay subnormal, and their squares 0, whatever the
      // number of steps.
      float moments;
    } states[] = {{&state_, State::Bases::kApart, true, 1},
                  {&small_pages_, State::Bases::kApart, false, 1},
                  {&equal_bases_, State::Bases::kEqual, true, 1},
                  {&subnormal_, State::Bases::kApart, true, 0x1p-128f}};
    for (const auto& s : states) {
      absl::StatusOr<State> made =
          State::Create(pool_, numel_, s.bases, s.huge_pages, s.moments);
      if (!made.ok()) return made.status();
      *s.state = *std::move(made);
    }
    int64_t i = 5;
    for (Array* array : {&grad16_, &exp_avg16_, &exp_avg_sq16_}) {
      absl::StatusOr<Array> made =
          Array::Create(pool_, DType::kBFloat16, numel_, i * (512 + 64));
      if (!made.ok()) return made.status();
      *array = *std::move(made);
      const bool positive = array == &exp_avg_sq16_;
      Fill(pool_, *array, DType::kBFloat16, numel_, [=](int64_t j) {
        const float x = RandomAt(i * numel_ + j);
        return positive ? std::fabs(x) : x;
      });
      ++i;
    }
    for (Array& array : staging_) {
      absl::StatusOr<Array> made =
          Array::Create(pool_, DType::kBFloat16, std::min(kPieceNumel, numel_),
                        i++ * (512 + 64));
      if (!made.ok()) return made.status();
      array = *std::move(made);
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

  absl::Status CastTo(void* copy) {
    CastArgs args;
    args.numel = numel_;
    args.in = state_.param.data();
    args.out = copy;
    args.out_type = DType::kBFloat16;
    return Cast(kernel_, pool_, args);
  }

  absl::Status ThreePass(void* copy) {
    ScaleArgs scale;
    scale.numel = numel_;
    scale.in = state_.grad.data<float>();
    scale.out = state_.grad.data<float>();
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
    args.param = state_.param.data<float>();
    args.grad = state_.grad.data();
    args.exp_avg = state_.exp_avg.data();
    args.exp_avg_sq = state_.exp_avg_sq.data();
    args.copy = state_.copy.data();
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
          peers_->scaling_step(args, state_.grad.data<float>() + begin, scale);
        });
    return status.ok() ? CastTo(state_.copy.data()) : status;
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

  State state_;
  Array grad16_;
  Array exp_avg16_;
  Array exp_avg_sq16_;
  Array staging_[kStagingBuffers];
  State small_pages_;
  State equal_bases_;
  State subnormal_;
};

}  // namespace

absl::StatusOr<int64_t> StepBenchBytes(const StepBenchOptions& options) {
  constexpr int64_t kElementBytes =
      kStates * kStateBytes + kBFloat16Bytes + kFreshBytes;
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
