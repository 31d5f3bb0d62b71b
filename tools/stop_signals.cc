#include "tools/stop_signals.h"

#include <signal.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace onepass {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};

// What comes within this time of the first is the same wish: `timeout` and
// terminals signal a process, and then all of its group.
constexpr int64_t kOneWishNs = 1'000'000'000;

constexpr int64_t kNever = -1;

// Of the monotonic clock. Decides between threads which signal is the first.
std::atomic<int64_t> first_ns{kNever};
std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free &&
                  std::atomic<int64_t>::is_always_lock_free,
              "a handler may use no other");
// What there was before, of each.
struct sigaction before[2];

// A handler may call this, as POSIX says.
int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Restore() {
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &before[i], nullptr);
}

void Note(int signal) {
  const int64_t now = NowNs();
  int64_t first = kNever;
  if (first_ns.compare_exchange_strong(first, now)) {
    received = signal;
    return;
  }
  // On another thread the first one's time may be a little later.
  if (now - first < kOneWishNs) return;
  // It comes again, as soon as this returns.
  Restore();
  raise(signal);
}

}  // namespace

StopSignals::StopSignals() {
  first_ns = kNever;
  received = 0;
  struct sigaction note = {};
  note.sa_handler = &Note;
  // What it interrupts goes on.
  note.sa_flags = SA_RESTART;
  sigemptyset(&note.sa_mask);
  for (int i = 0; i < 2; ++i) {
    sigaction(kSignals[i], nullptr, &before[i]);
    // As of SIGINT where a script's shell started this in the background.
    if (before[i].sa_handler == SIG_IGN) continue;
    sigaction(kSignals[i], &note, nullptr);
  }
}

StopSignals::~StopSignals() {
  Restore();
  received = 0;
  first_ns = kNever;
}

int StopSignals::Received() { return received; }

}  // namespace onepass
