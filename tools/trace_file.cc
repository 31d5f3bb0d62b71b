#include "tools/trace_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "dispatch/return_if_error.h"
#include "tools/chrome_trace.h"

namespace onepass {

absl::StatusOr<std::unique_ptr<TraceFile>> TraceFile::Create(
    const std::string& path, Communicator& communicator) {
  std::unique_ptr<Communicator> own;
  ONEPASS_ASSIGN_OR_RETURN(own, communicator.Duplicate());
  const int rank = own->rank();
  auto file = absl::WrapUnique(new TraceFile(path, std::move(own)));
  file->events_ = TraceHead(rank);
  ONEPASS_RETURN_IF_ERROR(
      file->WriteInTurn(rank == 0 ? std::ios::trunc : std::ios::app));
  file->begun_ = true;
  return file;
}

TraceFile::~TraceFile() {
  if (!begun_ || ended_) return;
  if (!spans_.spans.empty()) EndStep();
  // Out of turn: a rank that failed hears nothing of the others any more. They
  // append what they have at once, so that it stays together.
  if (!events_.empty()) WriteMine(std::ios::app).IgnoreError();
}

void TraceFile::EndStep() {
  AppendTraceEvents(communicator_->rank(), ++step_, spans_.spans, &events_);
  spans_.spans.clear();
}

absl::Status TraceFile::Write() { return WriteInTurn(std::ios::app); }

absl::Status TraceFile::End() {
  ONEPASS_RETURN_IF_ERROR(Write());
  if (communicator_->rank() == 0) absl::StrAppend(&events_, kTraceEnd);
  ONEPASS_RETURN_IF_ERROR(Write());
  ended_ = true;
  return absl::OkStatus();
}

absl::Status TraceFile::WriteInTurn(std::ios::openmode mode) {
  for (int turn = 0; turn < communicator_->size(); ++turn) {
    if (turn == communicator_->rank()) {
      if (absl::Status error = WriteMine(mode); !error.ok()) {
        communicator_->Abort(error.message());
        return error;
      }
    }
    ONEPASS_RETURN_IF_ERROR(communicator_->Barrier());
  }
  return absl::OkStatus();
}

absl::Status TraceFile::WriteMine(std::ios::openmode mode) {
  std::ofstream file(path_, std::ios::binary | mode);
  file << events_;
  file.close();
  // Also where that failed: none of it is to be there twice.
  events_.clear();
  if (file) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("--trace ", path_, ": ", std::strerror(errno)));
}

}  // namespace onepass
