#include "tools/stop_signals.h"

#include <signal.h>

#include <atomic>

namespace onepass {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};

std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free,
              "a handler may use no other");
// What there was before, of each.
struct sigaction before[2];

void Restore() {
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &before[i], nullptr);
}

void Note(int signal) {
  int none = 0;
  if (received.compare_exchange_strong(none, signal)) return;
  // It comes again, as soon as this returns.
  Restore();
  raise(signal);
}

}  // namespace

StopSignals::StopSignals() {
  received = 0;
  struct sigaction note = {};
  note.sa_handler = &Note;
  // What it interrupts goes on.
  note.sa_flags = SA_RESTART;
  sigemptyset(&note.sa_mask);
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &note, &before[i]);
}

StopSignals::~StopSignals() {
  Restore();
  received = 0;
}

int StopSignals::Received() { return received; }

}  // namespace onepass
