// What is counted: one operation of one kernel, called once.
//
//   workload describe                       what can be counted here, as JSON
//   workload run OPERATION NUMEL MARK       on the kernel of ONEPASS_KERNEL
//
// The call lies between two marks: MARK is --stop, which raises SIGSTOP for
// stepper.cc, or --getppid, a system call for qemu_plugin.cc. What lies between
// beside the operation does not depend on NUMEL, so that the difference of two
// runs is the operation's alone.
//
// To count one more operation: its line in kOperations.

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <string>

#include "absl/base/config.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/cpu_features.h"
#include "dispatch/dispatcher.h"
#include "dispatch/dtype.h"
#include "dispatch/kernel.h"
#include "kernels/default.h"
#include "nlohmann/json.hpp"

namespace onepass {
namespace {

// Arrays are of this size and filled whole, however little is worked on.
constexpr int64_t kMaxNumel = 2 * kLeafNumel;

// Elements that no kernel has a tail of, where leaves are of no meaning.
constexpr int64_t kBlocks = 1024;
static_assert(kLeafNumel % kBlocks == 0);

// Static, so that no allocator's work depends on anything.
struct Arrays {
  float param[kMaxNumel];
  float grad[kMaxNumel];
  float exp_avg[kMaxNumel];
  float exp_avg_sq[kMaxNumel];
  uint16_t half[kMaxNumel];
  double leaf_sums[LeafCount(kMaxNumel)];
};
alignas(4096) Arrays arrays;

void Fill(Arrays& a) {
  uint32_t state = 1;
  // In [lowest, 1), by a linear congruential generator.
  auto uniform = [&](float lowest) {
    state = state * 1664525u + 1013904223u;
    return lowest + (1 - lowest) * static_cast<float>(state >> 8) * 0x1p-24f;
  };
  for (int64_t i = 0; i < kMaxNumel; ++i) {
    a.param[i] = uniform(-1);
    a.grad[i] = uniform(-1);
    a.exp_avg[i] = uniform(-1);
    a.exp_avg_sq[i] = uniform(0);
    // The upper half of a float is a bfloat16.
    uint32_t bits;
    const float x = uniform(-1);
    std::memcpy(&bits, &x, sizeof(bits));
    a.half[i] = static_cast<uint16_t>(bits >> 16);
  }
  std::fill(std::begin(a.leaf_sums), std::end(a.leaf_sums), 0.0);
}

void AdamStep(const KernelOperations& kernel, int64_t numel, Arrays& a) {
  AdamStepArgs args;
  args.numel = numel;
  args.param = a.param;
  args.grad = a.grad;
  args.exp_avg = a.exp_avg;
  args.exp_avg_sq = a.exp_avg_sq;
  args.copy = a.half;
  args.grad_scale = 0.5f;
  args.constants.beta1 = 0.9f;
  args.constants.beta2 = 0.999f;
  args.constants.one_minus_beta1 = 0.1f;
  args.constants.one_minus_beta2 = 0.001f;
  args.constants.eps = 1e-8f;
  args.constants.step_size = -0.001f;
  args.constants.decay = -0.0001f;
  args.constants.decay_mode = WeightDecay::kAdamW;
  kernel.adam_step(args);
}

void Cast(const KernelOperations& kernel, int64_t numel, Arrays& a) {
  CastArgs args;
  args.numel = numel;
  args.in = a.param;
  args.out = a.half;
  args.in_type = DType::kFloat32;
  args.out_type = DType::kBFloat16;
  kernel.cast(args);
}

void SquaredNorm(const KernelOperations& kernel, int64_t numel, Arrays& a) {
  SquaredNormArgs args;
  args.numel = numel;
  args.x = a.grad;
  args.leaf_sums = a.leaf_sums;
  kernel.squared_norm(args);
}

void Accumulate(const KernelOperations& kernel, int64_t numel, Arrays& a) {
  AccumulateArgs args;
  args.numel = numel;
  args.sum = a.grad;
  args.term = a.half;
  args.out = a.grad;
  args.term_type = DType::kBFloat16;
  kernel.accumulate(args);
}

// No kernel's: two instructions an element, by which a counter is checked.
void TwoInstructions(const KernelOperations&, int64_t numel, Arrays&) {
#if defined(__x86_64__)
  asm volatile("1: subq $1, %0\n\tjnz 1b" : "+r"(numel)::"cc");
#elif defined(__aarch64__)
  asm volatile("1: subs %0, %0, #1\n\tb.ne 1b" : "+r"(numel)::"cc");
#elif defined(__riscv)
  asm volatile("1: addi %0, %0, -1\n\tbnez %0, 1b" : "+r"(numel));
#else
#error "tools/instructions/workload.cc does not know this architecture"
#endif
}

struct Operation {
  const char* name;
  int64_t unit;  // elements after which the same work begins anew
  void (*run)(const KernelOperations& kernel, int64_t numel, Arrays& arrays);
};

constexpr Operation kOperations[] = {
    {"adam_step", kBlocks, &AdamStep},
    {"cast", kBlocks, &Cast},
    {"squared_norm", kLeafNumel, &SquaredNorm},
    {"accumulate", kBlocks, &Accumulate},
};
constexpr Operation kTwoInstructions = {"two_instructions", kBlocks,
                                        &TwoInstructions};

constexpr const char* kArchitecture =
#if defined(__x86_64__)
    "x86_64";
#elif defined(__aarch64__)
    "aarch64";
#elif defined(__riscv)
    "riscv64";
#endif

std::string Compiler() {
#if defined(__clang__)
  return absl::StrCat("clang ", __clang_major__);
#else
  return absl::StrCat("g++ ", __GNUC__);
#endif
}

// What makes counts of this build say nothing of the usual one, or "".
std::string Unusual() {
#if defined(ABSL_HAVE_ADDRESS_SANITIZER) || defined(ABSL_HAVE_THREAD_SANITIZER)
  return "sanitized";
#elif !defined(__OPTIMIZE__)
  return "not optimised";
#else
  return "";
#endif
}

// Bits of a vector where only the machine knows them, else 0: the name of the
// kernel says it.
int VectorBits(absl::string_view kernel) {
  const CpuFeatures cpu = DetectCpu();
  return kernel == "sve" ? cpu.sve_bits : kernel == "rvv" ? cpu.rvv_bits : 0;
}

absl::Status Describe() {
  absl::StatusOr<Dispatcher> dispatcher = CreateDefaultDispatcher();
  if (!dispatcher.ok()) return dispatcher.status();
  nlohmann::ordered_json description = {
      {"architecture", kArchitecture},
      {"compiler", Compiler()},
      {"unusual", Unusual()},
      {"self_check", kTwoInstructions.name},
  };
  for (const Operation& operation : kOperations) {
    description["operations"][operation.name] = operation.unit;
  }
  auto& kernels = description["kernels"] = nlohmann::json::array();
  for (const KernelReport& report : dispatcher->Report()) {
    kernels.push_back({{"name", report.kernel->name},
                       {"supported", report.supported},
                       {"vector_bits", VectorBits(report.kernel->name)}});
  }
  std::cout << description.dump(2) << std::endl;
  return std::cout ? absl::OkStatus()
                   : absl::DataLossError("cannot write the description");
}

using Mark = void (*)();

Mark FindMark(absl::string_view name) {
  if (name == "--stop") return [] { std::raise(SIGSTOP); };
  if (name == "--getppid") return [] { getppid(); };
  return nullptr;
}

absl::Status Run(const std::string& name, const std::string& numel_text,
                 Mark mark) {
  const Operation* operation = nullptr;
  for (const Operation& known : kOperations) {
    if (name == known.name) operation = &known;
  }
  if (name == kTwoInstructions.name) operation = &kTwoInstructions;
  if (operation == nullptr) {
    return absl::NotFoundError(absl::StrCat("no operation is named ", name));
  }
  int64_t numel;
  if (!absl::SimpleAtoi(numel_text, &numel) || numel < 1 || numel > kMaxNumel) {
    return absl::InvalidArgumentError(absl::StrCat(
        "elements: expected 1 to ", kMaxNumel, ", got ", numel_text));
  }
  absl::StatusOr<Dispatcher> dispatcher = CreateDefaultDispatcher();
  if (!dispatcher.ok()) return dispatcher.status();
  absl::StatusOr<const Kernel*> kernel = dispatcher->Select();
  if (!kernel.ok()) return kernel.status();

  Fill(arrays);
  mark();
  operation->run(*(*kernel)->operations, numel, arrays);
  mark();
  return absl::OkStatus();
}

absl::Status Main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  if (command == "describe" && argc == 2) return Describe();
  const Mark mark = argc == 5 ? FindMark(argv[4]) : nullptr;
  if (command == "run" && mark != nullptr) return Run(argv[2], argv[3], mark);
  return absl::InvalidArgumentError(
      "usage: workload describe | workload run OPERATION NUMEL MARK");
}

}  // namespace
}  // namespace onepass

int main(int argc, char** argv) {
  const absl::Status status = onepass::Main(argc, argv);
  if (!status.ok()) {
    std::cerr << "workload: " << status.message() << std::endl;
    return 1;
  }
  return 0;
}
