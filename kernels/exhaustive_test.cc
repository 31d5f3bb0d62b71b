// Casts and remainders over all their inputs: 2^32 fp32 patterns (every
// LongTestStride()-th outside the default configuration), 2^16 and 2^8 codes,
// held to the definition of the formats rather than to another implementation.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
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

}  // namespace
}  // namespace onepass
