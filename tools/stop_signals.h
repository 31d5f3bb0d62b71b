// SIGINT and SIGTERM as a wish that is granted at the next good moment.
//
//   const StopSignals signals;
//   while (StopSignals::Received() == 0) Step();
//   Save();

#ifndef ONEPASS_TOOLS_STOP_SIGNALS_H_
#define ONEPASS_TOOLS_STOP_SIGNALS_H_

namespace onepass {

// While it lives, the first of these signals is noted; one within a second of
// it is taken for the same wish; one after that does what it did before: by
// default it ends the process. What was ignored before stays ignored. One at a
// time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The number of the first one, 0 where there was none.
  static int Received();
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_STOP_SIGNALS_H_
