// A plugin for QEMU's user-mode emulation: counts the instructions that the
// emulated process executes between its two calls of getppid(), and writes the
// count to a file at the second:
//
//   QEMU_PLUGIN=file=libqemu_plugin.so,count=FILE qemu-aarch64 PROGRAM
//
// (The start of a process varies by some hundred instructions.)
//
// Linux distributions install no header for plugins; declared here is what is
// used of the documented interface (docs/devel/tcg-plugins in QEMU), version 1:
// QEMU 6.0 to 8.2. QEMU 9 refuses it and wants version 2, in which these
// functions are the same.

#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

extern "C" {

// Of QEMU. Pointers to what a plugin may not look into are void* here.
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id,
                                           void (*translated)(uint64_t id,
                                                              void* block));
size_t qemu_plugin_tb_n_insns(const void* block);
void* qemu_plugin_tb_get_insn(const void* block, size_t index);
void qemu_plugin_register_vcpu_insn_exec_cb(void* instruction,
                                            void (*executed)(unsigned cpu,
                                                             void* data),
                                            int registers_used, void* data);
void qemu_plugin_register_vcpu_syscall_cb(
    uint64_t id, void (*called)(uint64_t id, unsigned cpu, int64_t number,
                                uint64_t, uint64_t, uint64_t, uint64_t,
                                uint64_t, uint64_t, uint64_t, uint64_t));

// Of every plugin.
__attribute__((visibility("default"))) int qemu_plugin_version = 1;
__attribute__((visibility("default"))) int qemu_plugin_install(uint64_t id,
                                                               const void* info,
                                                               int argc,
                                                               char** argv);

}  // extern "C"

namespace {

constexpr int kNoRegisters = 0;
// Of aarch64 and riscv64, which share Linux's generic table of calls.
constexpr int64_t kGetppid = 173;

// What the callbacks share. Never freed: QEMU may call up to its end.
struct Counter {
  std::string file;
  int marks = 0;
  uint64_t executed = 0;  // of one thread: the programs counted have no other
};
Counter* counter = nullptr;

void Executed(unsigned, void*) { ++counter->executed; }

// Each instruction has its callback: the number of instructions of a block, at
// its entry, would count those too that a signal or fault leaves out.
void Translated(uint64_t, void* block) {
  for (size_t i = 0; i < qemu_plugin_tb_n_insns(block); ++i) {
    qemu_plugin_register_vcpu_insn_exec_cb(qemu_plugin_tb_get_insn(block, i),
                                           &Executed, kNoRegisters, nullptr);
  }
}

void Called(uint64_t, unsigned, int64_t number, uint64_t, uint64_t, uint64_t,
            uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) {
  if (number != kGetppid) return;
  if (++counter->marks == 1) counter->executed = 0;
  if (counter->marks != 2) return;
  // Where this fails the file is missing or empty, and its reader says so.
  std::FILE* out = std::fopen(counter->file.c_str(), "w");
  if (out == nullptr) return;
  std::fprintf(out, "%" PRIu64 "\n", counter->executed);
  std::fclose(out);
}

}  // namespace

int qemu_plugin_install(uint64_t id, const void*, int argc, char** argv) {
  constexpr char kCount[] = "count=";
  if (argc != 1 || std::strncmp(argv[0], kCount, std::strlen(kCount)) != 0) {
    std::fprintf(stderr, "qemu_plugin: expected one argument, count=FILE\n");
    return 1;
  }
  counter = new Counter;
  counter->file = argv[0] + std::strlen(kCount);
  qemu_plugin_register_vcpu_tb_trans_cb(id, &Translated);
  qemu_plugin_register_vcpu_syscall_cb(id, &Called);
  return 0;
}
