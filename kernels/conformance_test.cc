// Every kernel that runs here against the scalar one, bit by bit: each
// operation, each combination of types, every length up to three blocks and
// some beyond, each pointer off its alignment in turn, values over the whole
// range. Spans end at unreadable memory.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "tests/guarded_buffer.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

constexpr DType kGradients[] = {DType::kFloat32, DType::kBFloat16,
                                DType::kFloat16};
constexpr DType kMoments[] = {DType::kFloat32, DType::kBFloat16};
constexpr int64_t kMostElements = 3 * kLeafNumel;
constexpr int64_t kMostBytes = (kMostElements + 16) * 4;

// Values that formulas trip over, as fp32 bits.
constexpr uint32_t kEdges[] = {
    0x00000000,  // 0
    0x00000001,  // least subnormal
    0x007fffff,  // largest subnormal
    0x00800000,  // least normal
    0x33000000,  // 2^-25: half of fp16's least subnormal, a tie
    0x33000001,  // just above
    0x33800000,  // fp16's least subnormal
    0x387fe000,  // between fp16's subnormals and normals, a tie
    0x3a800000,  // 2^-10: half of e4m3's least subnormal, a tie
    0x3b000000,  // e4m3's least subnormal
    0x3c700000,  // between e4m3's subnormals and normals, a tie
    0x3f800000,  // 1
    0x3f808000,  // 1 + 2^-8: a tie in bf16
    0x3f818000,  // 1 + 3 * 2^-8: a tie in bf16, to even above
    0x3f801000,  // 1 + 2^-11: a tie in fp16
    0x3f880000,  // 1 + 2^-4: a tie in e4m3
    0x43e00000,  // 448: e4m3's largest
    0x43e80000,  // 464: a tie to what would be 480
    0x477fefff,  // below 65520: rounds to fp16's largest
    0x477ff000,  // 65520: rounds to infinity in fp16
    0x7f7f7fff,  // rounds to bf16's largest
    0x7f7f8000,  // rounds to infinity in bf16
    0x7f7fffff,  // largest
    0x7f800000,  // infinity
    0x7f800001,  // a signalling NaN
    0x7fc00000,  // NaN
    0x7fffffff,  // NaN of all bits
};

enum class Range {
  kWhole,     // any bits, and kEdges
  kModerate,  // magnitudes 2^-20 to 2^3, as in training
  kPositive,  // the same without signs
};

class Values {
 public:
  explicit Values(uint32_t seed) : random_(seed) {}

  uint32_t Bits(Range range) {
    const uint32_t bits = random_();
    if (range == Range::kWhole) {
      if (bits % 4 != 0) return random_();
      return kEdges[(bits >> 3) % std::size(kEdges)] | (bits & 0x80000000);
    }
    const uint32_t exponent = 107 + (bits >> 8) % 24;
    const uint32_t sign = range == Range::kPositive ? 0 : bits << 31;
    return sign | exponent << 23 | (random_() & 0x7fffff);
  }

  // Fills `numel` elements of `type`: 16-bit types take the upper bits for
  // bf16, any bits for fp16.
  void Fill(void* out, int64_t numel, DType type, Range range) {
    for (int64_t i = 0; i < numel; ++i) {
      const uint32_t bits = Bits(range);
      if (type == DType::kFloat32) {
        std::memcpy(static_cast<char*>(out) + 4 * i, &bits, 4);
      } else if (type == DType::kFloat8E4M3) {
        static_cast<uint8_t*>(out)[i] = static_cast<uint8_t>(bits >> 24);
      } else {
        uint16_t code = static_cast<uint16_t>(bits >> 16);
        if (type == DType::kFloat16 && range != Range::kWhole) {
          // Magnitudes 2^-10 to 2^0.
          code = static_cast<uint16_t>((bits >> 16 & 0x8000) |
                                       (5 + (bits >> 8) % 11) << 10 |
                                       (bits & 0x3ff));
        }
        std::memcpy(static_cast<char*>(out) + 2 * i, &code, 2);
      }
    }
  }

 private:
  std::mt19937 random_;
};

// Compares bits; fp32 and fp64 NaN equals any NaN, since its payload is not
// promised. Codes of narrower types are compared as they are.
template <typename T>
testing::AssertionResult SameBits(const T* actual, const T* expected,
                                  int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    if (std::memcmp(&actual[i], &expected[i], sizeof(T)) == 0) continue;
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
    }
    return testing::AssertionFailure()
           << "element " << i << " of " << numel << " is " << +actual[i]
           << ", expected " << +expected[i];
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult SameBits(const void* actual, const void* expected,
                                  int64_t numel, DType type) {
  switch (type) {
    case DType::kFloat32:
      return SameBits(static_cast<const float*>(actual),
                      static_cast<const float*>(expected), numel);
    case DType::kBFloat16:
    case DType::kFloat16:
      return SameBits(static_cast<const uint16_t*>(actual),
                      static_cast<const uint16_t*>(expected), numel);
    case DType::kFloat8E4M3:
      return SameBits(static_cast<const uint8_t*>(actual),
                      static_cast<const uint8_t*>(expected), numel);
  }
  return testing::AssertionFailure() << "unknown type";
}

// A span of the kernel under test and its twin for the scalar kernel, with the
// same contents.
class Twin {
 public:
  // `gap` elements off the end of the page.
  void Place(int64_t numel, DType type, int64_t gap) {
    numel_ = numel;
    type_ = type;
    data_ = PlaceIn(buffer_, numel, type, gap);
    expected_ = PlaceIn(expected_buffer_, numel, type, 0);
  }
  void Fill(Values& values, Range range) {
    values.Fill(data_, numel_, type_, range);
    std::memcpy(expected_, data_, numel_ * ByteSize(type_));
  }
  // For what is written only: contents that no operation would leave.
  void Poison() {
    std::memset(data_, 0x5e, numel_ * ByteSize(type_));
    std::memset(expected_, 0x5e, numel_ * ByteSize(type_));
  }

  void* data() const { return data_; }
  void* expected() const { return expected_; }

  testing::AssertionResult Same() const {
    if (!buffer_.Intact()) {
      return testing::AssertionFailure() << "wrote outside its span";
    }
    return SameBits(data_, expected_, numel_, type_);
  }

 private:
  static void* PlaceIn(GuardedBuffer& buffer, int64_t numel, DType type,
                       int64_t gap) {
    switch (ByteSize(type)) {
      case 1:
        return buffer.Place<uint8_t>(numel, gap);
      case 2:
        return buffer.Place<uint16_t>(numel, gap);
      default:
        return buffer.Place<float>(numel, gap);
    }
  }

  GuardedBuffer buffer_{kMostBytes};
  GuardedBuffer expected_buffer_{kMostBytes};
  int64_t numel_ = 0;
  DType type_ = DType::kFloat32;
  void* data_ = nullptr;
  void* expected_ = nullptr;
};

std::vector<uint32_t> BitsOf(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (float value : values) {
    bits.emplace_back();
    std::memcpy(&bits.back(), &value, sizeof(value));
  }
  return bits;
}

float* AsFloat(void* p) { return static_cast<float*>(p); }

// A length, and how many elements each of up to five pointers is off.
struct Layout {
  int64_t numel;
  int64_t gaps[5];
};

class ConformanceTest : public testing::TestWithParam<const Kernel*> {
 protected:
  const Kernel& kernel() const { return *GetParam(); }
  const KernelOperations& tested() const { return *kernel().operations; }
  const KernelOperations& scalar() const { return *ScalarKernel().operations; }

  // 0 to three blocks and one more, large primes, lengths around a leaf; then
  // each of `pointers` pointers off its alignment in turn.
  std::vector<Layout> Layouts(int pointers) const {
    const int64_t block = tested().block_numel();
    std::vector<Layout> layouts;
    for (int64_t n = 0; n <= 3 * block + 1; ++n) {
      layouts.push_back({n, {}});
    }
    for (int64_t n : {int64_t{1009}, kLeafNumel - 1, kLeafNumel, kLeafNumel + 1,
                      int64_t{8209}, int64_t{12281}}) {
      layouts.push_back({n, {}});
    }
    for (int pointer = 0; pointer < pointers; ++pointer) {
      for (int64_t gap : {int64_t{1}, int64_t{3}, int64_t{8}, block - 1}) {
        // Less than what an aligned store needs first, and more.
        for (int64_t n :
             {int64_t{1}, int64_t{5}, block / 4 + 1, block, 3 * block - 1}) {
          Layout layout = {n, {}};
          layout.gaps[pointer] = gap;
          layouts.push_back(layout);
        }
      }
    }
    return layouts;
  }
};

AdamConstants MakeConstants(WeightDecay decay_mode) {
  AdamConstants c;
  c.beta1 = 0.9f;
  c.beta2 = 0.999f;
  c.one_minus_beta1 = 1.0f - c.beta1;
  c.one_minus_beta2 = 1.0f - c.beta2;
  c.eps = 1e-8f;
  c.weight_decay = 0.01f;
  c.step_size = -0.0123f;
  c.bias_correction2 = 7.5f;
  c.decay = -1.3e-5f;
  c.decay_mode = decay_mode;
  return c;
}

TEST_P(ConformanceTest, AdamStep) {
  Values values(1);
  Twin param, grad, exp_avg, exp_avg_sq, copy;
  // Sanitizers take long: of seven combinations one, which has each value.
  const int stride = UnderSanitizer() ? 7 : 1;
  int combination = 0;
  for (DType grad_type : kGradients) {
    for (DType exp_avg_type : kMoments) {
      for (DType exp_avg_sq_type : kMoments) {
        for (int copy_choice = 0; copy_choice < 5; ++copy_choice) {
          for (WeightDecay decay_mode :
               {WeightDecay::kNone, WeightDecay::kL2, WeightDecay::kAdamW}) {
            if (combination++ % stride != 0) continue;
            const bool has_copy = copy_choice > 0;
            const bool streams = copy_choice > 2;
            const DType copy_type =
                copy_choice % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
            // Kernels without such stores would take the other way again.
            if (streams && !tested().streams_copies) continue;
            for (const Layout& layout : Layouts(has_copy ? 5 : 4)) {
              const int64_t n = layout.numel;
              SCOPED_TRACE(testing::Message()
                           << "grad " << Name(grad_type) << ", exp_avg "
                           << Name(exp_avg_type) << ", exp_avg_sq "
                           << Name(exp_avg_sq_type) << ", copy "
                           << (has_copy ? Name(copy_type) : "none")
                           << (streams ? ", streaming" : "") << ", decay mode "
                           << static_cast<int>(decay_mode) << ", numel " << n);
              param.Place(n, DType::kFloat32, layout.gaps[0]);
              grad.Place(n, grad_type, layout.gaps[1]);
              exp_avg.Place(n, exp_avg_type, layout.gaps[2]);
              exp_avg_sq.Place(n, exp_avg_sq_type, layout.gaps[3]);
              copy.Place(n, copy_type, layout.gaps[4]);
              // Two of three layouts as in training: of any bits most results
              // are NaN.
              const bool moderate = (n + layout.gaps[0]) % 3 != 0;
              const Range range = moderate ? Range::kModerate : Range::kWhole;
              param.Fill(values, range);
              grad.Fill(values, range);
              exp_avg.Fill(values, range);
              exp_avg_sq.Fill(values,
                              moderate ? Range::kPositive : Range::kWhole);
              copy.Poison();
              AdamStepArgs args;
              args.numel = n;
              args.param = AsFloat(param.data());
              args.grad = grad.data();
              args.exp_avg = exp_avg.data();
              args.exp_avg_sq = exp_avg_sq.data();
              args.copy = has_copy ? copy.data() : nullptr;
              args.grad_type = grad_type;
              args.exp_avg_type = exp_avg_type;
              args.exp_avg_sq_type = exp_avg_sq_type;
              args.copy_type = copy_type;
              args.stream_copy = streams;
              args.grad_scale = 0.37f;
              args.constants = MakeConstants(decay_mode);
              tested().adam_step(args);
              args.param = AsFloat(param.expected());
              args.grad = grad.expected();
              args.exp_avg = exp_avg.expected();
              args.exp_avg_sq = exp_avg_sq.expected();
              args.copy = has_copy ? copy.expected() : nullptr;
              scalar().adam_step(args);
              ASSERT_TRUE(param.Same());
              ASSERT_TRUE(grad.Same());
              ASSERT_TRUE(exp_avg.Same());
              ASSERT_TRUE(exp_avg_sq.Same());
              ASSERT_TRUE(copy.Same());
            }
          }
        }
      }
    }
  }
}

TEST_P(ConformanceTest, Accumulate) {
  Values values(2);
  Twin sum, term, out;
  for (DType term_type : kGradients) {
    for (DType out_type : kGradients) {
      for (bool has_sum : {false, true}) {
        for (float divisor : {1.0f, 3.0f}) {
          for (bool has_norm : {false, true}) {
            for (const Layout& layout : Layouts(3)) {
              const int64_t n = layout.numel;
              SCOPED_TRACE(testing::Message()
                           << Name(term_type) << " to " << Name(out_type)
                           << (has_sum ? " with" : " without")
                           << " sum, divisor " << divisor << ", norm "
                           << has_norm << ", numel " << n);
              sum.Place(n, DType::kFloat32, layout.gaps[0]);
              term.Place(n, term_type, layout.gaps[1]);
              out.Place(n, out_type, layout.gaps[2]);
              const Range range = n % 2 != 0 ? Range::kModerate : Range::kWhole;
              sum.Fill(values, range);
              term.Fill(values, range);
              out.Poison();
              std::vector<double> sums(LeafCount(n), -1);
              std::vector<double> expected_sums(LeafCount(n), -1);
              AccumulateArgs args;
              args.numel = n;
              args.sum = has_sum ? AsFloat(sum.data()) : nullptr;
              args.term = term.data();
              args.out = out.data();
              args.leaf_sums = has_norm ? sums.data() : nullptr;
              args.term_type = term_type;
              args.out_type = out_type;
              args.divisor = divisor;
              tested().accumulate(args);
              args.sum = has_sum ? AsFloat(sum.expected()) : nullptr;
              args.term = term.expected();
              args.out = out.expected();
              args.leaf_sums = has_norm ? expected_sums.data() : nullptr;
              scalar().accumulate(args);
              ASSERT_TRUE(out.Same());
              ASSERT_TRUE(sum.Same());
              ASSERT_TRUE(term.Same());
              ASSERT_TRUE(
                  SameBits(sums.data(), expected_sums.data(), LeafCount(n)));
            }
          }
        }
      }
    }
  }
}

TEST_P(ConformanceTest, AccumulateInPlace) {
  Values values(3);
  Twin sum, term;
  for (const Layout& layout : Layouts(2)) {
    const int64_t n = layout.numel;
    SCOPED_TRACE(n);
    sum.Place(n, DType::kFloat32, layout.gaps[0]);
    term.Place(n, DType::kBFloat16, layout.gaps[1]);
    sum.Fill(values, Range::kWhole);
    term.Fill(values, Range::kWhole);
    tested().accumulate({n, AsFloat(sum.data()), term.data(), sum.data(),
                         nullptr, DType::kBFloat16, DType::kFloat32, 1.0f});
    scalar().accumulate({n, AsFloat(sum.expected()), term.expected(),
                         sum.expected(), nullptr, DType::kBFloat16,
                         DType::kFloat32, 1.0f});
    ASSERT_TRUE(sum.Same());
  }
}

TEST_P(ConformanceTest, Scale) {
  Values values(4);
  Twin in, out;
  for (float factor : {1.0f, 0.37f, 1e-30f, 3e38f}) {
    for (const Layout& layout : Layouts(2)) {
      const int64_t n = layout.numel;
      SCOPED_TRACE(testing::Message() << factor << " times " << n);
      in.Place(n, DType::kFloat32, layout.gaps[0]);
      out.Place(n, DType::kFloat32, layout.gaps[1]);
      in.Fill(values, Range::kWhole);
      out.Poison();
      tested().scale({n, AsFloat(in.data()), AsFloat(out.data()), factor});
      scalar().scale(
          {n, AsFloat(in.expected()), AsFloat(out.expected()), factor});
      ASSERT_TRUE(out.Same());
      // And in place.
      tested().scale({n, AsFloat(in.data()), AsFloat(in.data()), factor});
      ASSERT_TRUE(SameBits(in.data(), out.expected(), n, DType::kFloat32));
    }
  }
}

TEST_P(ConformanceTest, Cast) {
  Values values(5);
  Twin in, out;
  for (DType narrow : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3}) {
    for (bool widen : {false, true}) {
      const DType in_type = widen ? narrow : DType::kFloat32;
      const DType out_type = widen ? DType::kFloat32 : narrow;
      for (const Layout& layout : Layouts(2)) {
        const int64_t n = layout.numel;
        SCOPED_TRACE(testing::Message() << Name(in_type) << " to "
                                        << Name(out_type) << ", numel " << n);
        in.Place(n, in_type, layout.gaps[0]);
        out.Place(n, out_type, layout.gaps[1]);
        in.Fill(values, Range::kWhole);
        out.Poison();
        tested().cast({n, in.data(), out.data(), in_type, out_type});
        scalar().cast({n, in.expected(), out.expected(), in_type, out_type});
        ASSERT_TRUE(out.Same());
        ASSERT_TRUE(in.Same());
      }
    }
  }
}

TEST_P(ConformanceTest, SquaredNormAndAbsMax) {
  Values values(6);
  Twin x;
  for (DType type : kGradients) {
    for (Range range : {Range::kWhole, Range::kModerate}) {
      for (const Layout& layout : Layouts(1)) {
        const int64_t n = layout.numel;
        SCOPED_TRACE(testing::Message() << Name(type) << ", numel " << n);
        x.Place(n, type, layout.gaps[0]);
        x.Fill(values, range);
        const int64_t leaves = LeafCount(n);
        std::vector<double> sums(leaves, -1);
        std::vector<double> expected_sums(leaves, -1);
        tested().squared_norm({n, x.data(), sums.data(), type});
        scalar().squared_norm({n, x.expected(), expected_sums.data(), type});
        ASSERT_TRUE(SameBits(sums.data(), expected_sums.data(), leaves));
        std::vector<float> largest(leaves, -1);
        std::vector<float> expected_largest(leaves, -1);
        tested().absmax({n, x.data(), largest.data(), type});
        scalar().absmax({n, x.expected(), expected_largest.data(), type});
        // NaN too: it is canonical here.
        ASSERT_EQ(BitsOf(expected_largest), BitsOf(largest));
        ASSERT_TRUE(x.Same());
      }
    }
  }
}

TEST_P(ConformanceTest, Remainder) {
  Values values(7);
  Twin master, param, remainder, rebuilt;
  for (const Layout& layout : Layouts(4)) {
    const int64_t n = layout.numel;
    SCOPED_TRACE(n);
    master.Place(n, DType::kFloat32, layout.gaps[0]);
    param.Place(n, DType::kBFloat16, layout.gaps[1]);
    remainder.Place(n, DType::kBFloat16, layout.gaps[2]);
    rebuilt.Place(n, DType::kFloat32, layout.gaps[3]);
    master.Fill(values, Range::kWhole);
    param.Poison();
    remainder.Poison();
    rebuilt.Poison();
    auto run = [n](const KernelOperations& kernel, void* master_data,
                   void* param_data, void* remainder_data, void* rebuilt_data) {
      auto* codes = static_cast<uint16_t*>(param_data);
      auto* low = static_cast<int16_t*>(remainder_data);
      kernel.split_remainder({n, AsFloat(master_data), codes, low});
      kernel.join_remainder({n, codes, low, AsFloat(rebuilt_data)});
    };
    run(tested(), master.data(), param.data(), remainder.data(),
        rebuilt.data());
    run(scalar(), master.expected(), param.expected(), remainder.expected(),
        rebuilt.expected());
    ASSERT_TRUE(param.Same());
    ASSERT_TRUE(remainder.Same());
    ASSERT_TRUE(rebuilt.Same());
    ASSERT_EQ(0, std::memcmp(rebuilt.data(), master.data(), n * sizeof(float)));
  }
}

TEST_P(ConformanceTest, Quantize) {
  Values values(8);
  Twin in, codes, scales, out;
  for (DType type : {DType::kFloat16, DType::kFloat8E4M3}) {
    for (Range range : {Range::kWhole, Range::kModerate}) {
      for (const Layout& layout : Layouts(4)) {
        const int64_t n = layout.numel;
        SCOPED_TRACE(testing::Message() << Name(type) << ", numel " << n);
        in.Place(n, DType::kFloat32, layout.gaps[0]);
        codes.Place(n, type, layout.gaps[1]);
        scales.Place(LeafCount(n), DType::kFloat32, layout.gaps[2]);
        out.Place(n, DType::kFloat32, layout.gaps[3]);
        in.Fill(values, range);
        codes.Poison();
        scales.Poison();
        out.Poison();
        tested().quantize({n, AsFloat(in.data()), codes.data(),
                           AsFloat(scales.data()), type});
        scalar().quantize({n, AsFloat(in.expected()), codes.expected(),
                           AsFloat(scales.expected()), type});
        ASSERT_TRUE(codes.Same());
        ASSERT_TRUE(scales.Same());
        ASSERT_TRUE(in.Same());
        // Any codes and scales, too.
        if (range == Range::kWhole) {
          codes.Fill(values, range);
          scales.Fill(values, range);
        }
        tested().dequantize({n, codes.data(), AsFloat(scales.data()),
                             AsFloat(out.data()), type});
        scalar().dequantize({n, codes.expected(), AsFloat(scales.expected()),
                             AsFloat(out.expected()), type});
        ASSERT_TRUE(out.Same());
        ASSERT_TRUE(codes.Same());
        ASSERT_TRUE(scales.Same());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, ConformanceTest,
                         testing::ValuesIn(RunnableKernels()), KernelName);

}  // namespace
}  // namespace onepass
