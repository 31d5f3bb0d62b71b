// Casts and remainders over all their inputs: 2^32 fp32 patterns (every
// LongTestStride()-th outside the default configuration), 2^16 and 2^8 codes,
// held to the definition of the formats rather than to another implementation;
// and so are codes with scales, over leaves of all magnitudes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

constexpr uint64_t kPatterns = uint64_t{1} << 32;
constexpr uint64_t kChunk = 1 << 16;

// A narrow floating-point format by its definition. Codes are those of
// magnitudes, in the order of their values.
struct Format {
  DType type;
  int mantissa_bits;
  int bias;
  int sign_shift;     // of the sign bit of a code
  uint32_t largest;   // finite
  uint32_t overflow;  // what is beyond it becomes
  uint32_t canonical_nan;
  uint32_t first_nan;  // codes from here on are NaN

  double Value(uint32_t code) const {
    const int exponent = static_cast<int>(code >> mantissa_bits);
    const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
    if (exponent == 0) {
      return std::ldexp(mantissa, 1 - bias - mantissa_bits);
    }
    return std::ldexp((1u << mantissa_bits) | mantissa,
                      exponent - bias - mantissa_bits);
  }
};

constexpr Format kFormats[] = {
    {DType::kBFloat16, 7, 127, 15, 0x7f7f, 0x7f80, 0x7fc0, 0x7f81},
    {DType::kFloat16, 10, 15, 15, 0x7bff, 0x7c00, 0x7e00, 0x7c01},
    {DType::kFloat8E4M3, 3, 7, 7, 0x7e, 0x7e, 0x7f, 0x7f},
};

// The nearest code of a magnitude, ties to the even code. Magnitudes are asked
// for in rising order, so that the walk along the codes costs next to nothing.
class NearestEven {
 public:
  NearestEven(const Format& format, double first) : format_(format) {
    uint32_t low = 0;
    uint32_t high = format.largest + 1;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (format.Value(middle) < first) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    code_ = low == 0 ? 0 : low - 1;
    SetBound();
  }

  uint32_t Encode(double magnitude) {
    while (code_ <= format_.largest &&
           (magnitude > bound_ || (magnitude == bound_ && (code_ & 1) != 0))) {
      ++code_;
      SetBound();
    }
    return code_ > format_.largest ? format_.overflow : code_;
  }

 private:
  // Half way to the next code. The one after the largest has the value that the
  // format would give it if it went on: IEEE 754 rounds to infinity from there
  // on, and e4m3 saturates either way.
  void SetBound() {
    bound_ = (format_.Value(code_) + format_.Value(code_ + 1)) / 2;
  }

  const Format& format_;
  uint32_t code_;
  double bound_;
};

float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Calls check(first pattern, stride, count) for all patterns on all processors;
// check returns a description of what is wrong, or nothing.
std::string ForAllPatterns(
    const std::function<std::string(uint32_t first, uint32_t stride,
                                    int64_t count)>& check) {
  const uint64_t stride = LongTestStride();
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::mutex mutex;
  std::string wrong;
  std::vector<std::thread> workers;
  for (unsigned worker = 0; worker < threads; ++worker) {
    workers.emplace_back([&, worker] {
      // Chunks never span the sign bit: magnitudes rise within each.
      for (uint64_t chunk = worker;; chunk += threads) {
        const uint64_t first = chunk * kChunk * stride;
        if (first >= kPatterns) return;
        uint64_t end = std::min(kPatterns, first + kChunk * stride);
        const uint64_t half = kPatterns / 2;
        std::string found;
        if (first < half && end > half) {
          const uint64_t below = (half - first + stride - 1) / stride;
          found =
              check(static_cast<uint32_t>(first), static_cast<uint32_t>(stride),
                    static_cast<int64_t>(below));
          const uint64_t next = first + below * stride;
          if (found.empty() && next < end) {
            found = check(
                static_cast<uint32_t>(next), static_cast<uint32_t>(stride),
                static_cast<int64_t>((end - next + stride - 1) / stride));
          }
        } else {
          found =
              check(static_cast<uint32_t>(first), static_cast<uint32_t>(stride),
                    static_cast<int64_t>((end - first + stride - 1) / stride));
        }
        std::lock_guard<std::mutex> lock(mutex);
        if (!found.empty()) wrong = found;
        if (!wrong.empty()) return;
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  return wrong;
}

std::string Describe(const Kernel& kernel, const char* what, uint32_t pattern,
                     uint32_t actual, uint32_t expected) {
  char text[160];
  std::snprintf(text, sizeof(text), "%s: %s of %08x is %x, expected %x",
                kernel.name, what, pattern, actual, expected);
  return text;
}

// Runs fp32 -> `format` over one chunk on every kernel.
std::string CheckEncode(const Format& format,
                        const std::vector<const Kernel*>& kernels,
                        uint32_t first, uint32_t stride, int64_t count) {
  std::vector<float> in(count);
  for (int64_t i = 0; i < count; ++i) {
    in[i] = FloatOf(first + static_cast<uint32_t>(i) * stride);
  }
  std::vector<uint32_t> expected(count);
  // A chunk that starts with a NaN holds nothing else, and never walks.
  NearestEven nearest(format, std::fabs(double{in[0]}));
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t sign = std::signbit(in[i]) ? 1u << format.sign_shift : 0;
    expected[i] = std::isnan(in[i])
                      ? format.canonical_nan
                      : sign | nearest.Encode(std::fabs(double{in[i]}));
  }
  std::vector<uint16_t> wide(count);
  std::vector<uint8_t> narrow(count);
  const bool bytes = ByteSize(format.type) == 1;
  for (const Kernel* kernel : kernels) {
    kernel->operations->cast(
        {count, in.data(),
         bytes ? static_cast<void*>(narrow.data()) : wide.data(),
         DType::kFloat32, format.type});
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t actual = bytes ? narrow[i] : wide[i];
      if (actual != expected[i]) {
        return Describe(*kernel, Name(format.type),
                        first + static_cast<uint32_t>(i) * stride, actual,
                        expected[i]);
      }
    }
  }
  return "";
}

class EncodeTest : public testing::TestWithParam<Format> {};

TEST_P(EncodeTest, AllFloats) {
  const std::vector<const Kernel*> kernels = RunnableKernels();
  EXPECT_EQ("",
            ForAllPatterns([&](uint32_t first, uint32_t stride, int64_t count) {
              return CheckEncode(GetParam(), kernels, first, stride, count);
            }));
}

TEST_P(EncodeTest, AllCodesDecode) {
  const Format& format = GetParam();
  const int bits = static_cast<int>(ByteSize(format.type)) * 8;
  const int64_t count = int64_t{1} << bits;
  std::vector<uint16_t> wide(count);
  std::vector<uint8_t> narrow(count);
  for (int64_t code = 0; code < count; ++code) {
    wide[code] = static_cast<uint16_t>(code);
    narrow[code] = static_cast<uint8_t>(code);
  }
  for (const Kernel* kernel : RunnableKernels()) {
    std::vector<float> out(count);
    kernel->operations->cast(
        {count,
         bits == 8 ? static_cast<const void*>(narrow.data()) : wide.data(),
         out.data(), format.type, DType::kFloat32});
    for (int64_t code = 0; code < count; ++code) {
      const uint32_t magnitude = code & ((1u << (bits - 1)) - 1);
      const bool negative = code >> (bits - 1) != 0;
      if (magnitude >= format.first_nan) {
        ASSERT_TRUE(std::isnan(out[code])) << kernel->name << ", code " << code;
        continue;
      }
      const double value = magnitude <= format.largest
                               ? format.Value(magnitude)
                               : std::numeric_limits<double>::infinity();
      ASSERT_EQ(negative ? -value : value, out[code])
          << kernel->name << ", code " << code;
      ASSERT_EQ(negative, std::signbit(out[code]))
          << kernel->name << ", code " << code;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, EncodeTest, testing::ValuesIn(kFormats),
                         [](const testing::TestParamInfo<Format>& info) {
                           return std::string(Name(info.param.type));
                         });

TEST(RemainderTest, AllFloats) {
  const std::vector<const Kernel*> kernels = RunnableKernels();
  EXPECT_EQ(
      "", ForAllPatterns([&](uint32_t first, uint32_t stride, int64_t count) {
        std::vector<float> master(count);
        for (int64_t i = 0; i < count; ++i) {
          const uint32_t bits = first + static_cast<uint32_t>(i) * stride;
          std::memcpy(&master[i], &bits, sizeof(bits));
        }
        std::vector<uint16_t> param(count);
        std::vector<int16_t> remainder(count);
        std::vector<float> rebuilt(count);
        for (const Kernel* kernel : kernels) {
          kernel->operations->split_remainder(
              {count, master.data(), param.data(), remainder.data()});
          kernel->operations->join_remainder(
              {count, param.data(), remainder.data(), rebuilt.data()});
          if (std::memcmp(rebuilt.data(), master.data(),
                          count * sizeof(float)) != 0) {
            return std::string(kernel->name) + ": a master is not rebuilt";
          }
          for (int64_t i = 0; i < count; ++i) {
            const uint32_t bits = first + static_cast<uint32_t>(i) * stride;
            const uint16_t expected =
                static_cast<uint16_t>((bits + 0x8000) >> 16);
            if (param[i] != expected) {
              return Describe(*kernel, "param", bits, param[i], expected);
            }
            if (static_cast<uint16_t>(remainder[i]) != (bits & 0xffff)) {
              return Describe(*kernel, "remainder", bits,
                              static_cast<uint16_t>(remainder[i]),
                              bits & 0xffff);
            }
          }
        }
        return std::string();
      }));
}

// What dispatch/kernel.h says of the split: where it is not a cast, and where
// it hides a NaN.
TEST(RemainderTest, DiffersFromCastWhereDocumented) {
  if (LongTestStride() != 1) {
    GTEST_SKIP() << "counts over all 2^32 patterns; runs in the default "
                    "configuration";
  }
  const KernelOperations& kernel = *ScalarKernel().operations;
  std::vector<float> master(kChunk);
  std::vector<uint16_t> param(kChunk);
  std::vector<int16_t> remainder(kChunk);
  std::vector<uint16_t> cast(kChunk);
  int64_t different = 0;
  int64_t hidden = 0;
  for (uint64_t first = 0; first < kPatterns; first += kChunk) {
    for (uint64_t i = 0; i < kChunk; ++i) {
      const uint32_t bits = static_cast<uint32_t>(first + i);
      std::memcpy(&master[i], &bits, sizeof(bits));
    }
    const int64_t n = kChunk;
    kernel.split_remainder({n, master.data(), param.data(), remainder.data()});
    kernel.cast(
        {n, master.data(), cast.data(), DType::kFloat32, DType::kBFloat16});
    for (int64_t i = 0; i < n; ++i) {
      if (std::isnan(master[i])) {
        hidden += (param[i] & 0x7fff) <= 0x7f80;
      } else {
        different += param[i] != cast[i];
      }
    }
  }
  EXPECT_EQ(32640, different);
  EXPECT_EQ(131070, hidden);
}

// --- Codes with a scale for each leaf, by their definition in double. ---

class QuantizeTest : public testing::TestWithParam<DType> {
 protected:
  const Format& format() const {
    for (const Format& format : kFormats) {
      if (format.type == GetParam()) return format;
    }
    return kFormats[0];
  }
  double largest_code() const {
    return GetParam() == DType::kFloat16 ? 32752 : 448;
  }

  // `x` is written as codes and read again on all kernels, and held to the
  // definition.
  void Check(const std::vector<float>& x) const;

 private:
  struct Expected {
    std::vector<float> scales;
    std::vector<uint32_t> codes;
    std::vector<float> values;
  };
  Expected Define(const std::vector<float>& x) const;
};

QuantizeTest::Expected QuantizeTest::Define(const std::vector<float>& x) const {
  Expected expected;
  for (size_t begin = 0; begin < x.size(); begin += kLeafNumel) {
    const size_t end =
        std::min(x.size(), begin + static_cast<size_t>(kLeafNumel));
    double largest = 0;
    bool finite = true;
    bool nan = false;
    for (size_t i = begin; i < end; ++i) {
      largest = std::max(largest, std::fabs(double{x[i]}));
      finite &= std::isfinite(x[i]);
      nan |= std::isnan(x[i]);
    }
    // The quotient of floats is rounded to float the same by way of double.
    float scale = static_cast<float>(largest / largest_code());
    if (!finite) {
      scale = nan ? std::numeric_limits<float>::quiet_NaN()
                  : std::numeric_limits<float>::infinity();
    }
    const bool zeros = scale < std::numeric_limits<float>::min();
    if (zeros) scale = 1;
    expected.scales.push_back(scale);
    for (size_t i = begin; i < end; ++i) {
      const float ratio = static_cast<float>(double{x[i]} / scale);
      uint32_t code = format().canonical_nan;
      double value = std::numeric_limits<double>::quiet_NaN();
      if (zeros) {
        code = 0;
        value = 0;
      } else if (!std::isnan(ratio)) {
        const double magnitude = std::fabs(double{ratio});
        code = NearestEven(format(), magnitude).Encode(magnitude);
        value = format().Value(code);
        if (std::signbit(ratio)) {
          code |= 1u << format().sign_shift;
          value = -value;
        }
      }
      expected.codes.push_back(code);
      expected.values.push_back(static_cast<float>(value * scale));
    }
  }
  return expected;
}

void QuantizeTest::Check(const std::vector<float>& x) const {
  const Expected expected = Define(x);
  const int64_t n = static_cast<int64_t>(x.size());
  const bool bytes = ByteSize(GetParam()) == 1;
  for (const Kernel* kernel : RunnableKernels()) {
    SCOPED_TRACE(kernel->name);
    std::vector<uint16_t> wide(n, 0x5e5e);
    std::vector<uint8_t> narrow(n, 0x5e);
    void* const codes = bytes ? static_cast<void*>(narrow.data()) : wide.data();
    std::vector<float> scales(LeafCount(n), -1);
    std::vector<float> values(n, -1);
    kernel->operations->quantize(
        {n, x.data(), codes, scales.data(), GetParam()});
    kernel->operations->dequantize(
        {n, codes, scales.data(), values.data(), GetParam()});
    auto bits = [](float value) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof(bits));
      return std::isnan(value) ? 0x7fc00000 : bits;
    };
    for (int64_t leaf = 0; leaf < LeafCount(n); ++leaf) {
      ASSERT_EQ(bits(scales[leaf]), bits(expected.scales[leaf]))
          << "leaf " << leaf << " has scale " << scales[leaf] << ", expected "
          << expected.scales[leaf];
    }
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(bytes ? narrow[i] : wide[i], expected.codes[i])
          << "element " << i << " of " << n << ", " << x[i] << " by "
          << scales[i / kLeafNumel];
      ASSERT_EQ(bits(values[i]), bits(expected.values[i]))
          << "element " << i << " of " << n << ", " << x[i] << " by "
          << scales[i / kLeafNumel];
    }
  }
}

// Magnitudes up to `largest`, of some 40 powers of two, and zeros.
std::vector<float> ValuesUpTo(float largest, size_t numel) {
  std::mt19937 random(5);
  std::vector<float> x(numel);
  for (float& value : x) {
    const uint32_t bits = random();
    value = std::ldexp(largest * static_cast<float>(bits >> 8) * 0x1p-24f,
                       -static_cast<int>(bits & 0x7f) / 3);
    if ((bits & 0x80) != 0) value = -value;
    if ((bits & 0xf00) == 0) value = std::copysign(0.0f, value);
  }
  if (numel > 0) x[random() % numel] = -largest;
  return x;
}

TEST_P(QuantizeTest, AnyLength) {
  for (const size_t numel : {0, 1, 15, 4095, 4096, 4097, 3 * 4096 + 37}) {
    SCOPED_TRACE(numel);
    Check(ValuesUpTo(1.5f, numel));
  }
}

TEST_P(QuantizeTest, AnyMagnitude) {
  constexpr float kLeastNormal = std::numeric_limits<float>::min();
  constexpr float kLargest = std::numeric_limits<float>::max();
  const float least_with_scale =
      static_cast<float>(largest_code()) * kLeastNormal;
  std::vector<float> magnitudes = {
      0,
      std::numeric_limits<float>::denorm_min(),
      kLeastNormal,
      std::nextafter(least_with_scale, 0.0f),
      std::nextafter(std::nextafter(least_with_scale, 0.0f), 0.0f),
      least_with_scale,
      std::nextafter(least_with_scale, 1.0f),
      std::nextafter(kLargest, 0.0f),
      kLargest};
  for (int exponent = -140; exponent < 128; exponent += 9) {
    magnitudes.push_back(std::ldexp(1.2345679f, exponent));
  }
  // Each in a leaf of its own.
  std::vector<float> x;
  for (const float magnitude : magnitudes) {
    SCOPED_TRACE(magnitude);
    const std::vector<float> leaf = ValuesUpTo(magnitude, kLeafNumel);
    x.insert(x.end(), leaf.begin(), leaf.end());
  }
  Check(x);
}

TEST_P(QuantizeTest, TiesAreThoseOfATrueQuotient) {
  // A product with the inverse of a scale is not exact where the quotient is.
  std::mt19937 random(6);
  std::vector<float> x;
  for (int scale = 3; scale < 100; scale += 2) {
    for (int64_t i = 0; i < kLeafNumel; ++i) {
      const uint32_t code = random() % format().largest;
      const double tie = (format().Value(code) + format().Value(code + 1)) / 2;
      x.push_back(static_cast<float>(std::min(tie, largest_code()) * scale));
    }
    x.back() = static_cast<float>(largest_code() * scale);
  }
  Check(x);
}

TEST_P(QuantizeTest, ALeafThatIsNotFiniteShowsInItsScaleAlone) {
  std::vector<float> x = ValuesUpTo(3, 4 * kLeafNumel);
  x[kLeafNumel + 17] = -std::numeric_limits<float>::infinity();
  x[2 * kLeafNumel + 1] = std::numeric_limits<float>::infinity();
  x[3 * kLeafNumel - 1] = -std::numeric_limits<float>::quiet_NaN();
  Check(x);
}

INSTANTIATE_TEST_SUITE_P(Types, QuantizeTest,
                         testing::Values(DType::kFloat16, DType::kFloat8E4M3),
                         [](const testing::TestParamInfo<DType>& info) {
                           return std::string(Name(info.param));
                         });

}  // namespace
}  // namespace onepass
