// The file of --trace, which ranks write to in turn.
//
//   ASSIGN_OR_RETURN(auto file, TraceFile::Create(path, communicator));
//   RETURN_IF_ERROR(trainer->SetTrace(file->spans()));
//   for (...) {
//     RETURN_IF_ERROR(trainer->Step());
//     file->EndStep();
//     if (...) RETURN_IF_ERROR(file->Write());
//   }
//   RETURN_IF_ERROR(file->End());

#ifndef ONEPASS_TOOLS_TRACE_FILE_H_
#define ONEPASS_TOOLS_TRACE_FILE_H_

#include <cstdint>
#include <ios>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/communicator.h"
#include "offload/step_trace.h"

namespace onepass {

class TraceFile {
 public:
  // Begins the file anew. This, Write() and End() are collective.
  // Unavailable: it cannot be written, and why.
  static absl::StatusOr<std::unique_ptr<TraceFile>> Create(
      const std::string& path, Communicator& communicator);
  // Without End(), as after an error, adds what it has, if it can: the steps
  // before an error are those to look at.
  ~TraceFile();

  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // The step before the first, where that is not 0. Before EndStep().
  void set_step(int64_t step) { step_ = step; }
  // Where steps append to.
  StepTrace* spans() { return &spans_; }
  // What was appended since the last call was the next step.
  void EndStep();
  // Writes the steps that have ended, of all ranks.
  absl::Status Write();
  absl::Status End();

 private:
  TraceFile(const std::string& path, std::unique_ptr<Communicator> communicator)
      : path_(path), communicator_(std::move(communicator)) {}

  // Writes and clears events_, each rank in its turn.
  absl::Status WriteInTurn(std::ios::openmode mode);
  absl::Status WriteMine(std::ios::openmode mode);

  const std::string path_;
  const std::unique_ptr<Communicator> communicator_;
  StepTrace spans_;
  int64_t step_ = 0;    // the last that ended
  std::string events_;  // that are not in the file yet
  bool begun_ = false;  // the file, by all ranks
  bool ended_ = false;
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_TRACE_FILE_H_
