// Moves all state of a lease to a sink, a piece at a time: each is converted,
// comes to the host and goes to the sink before the next.
//
//   ASSIGN_OR_RETURN(StateTensors tensors,
//                    StateTensors::Create(lease.views(), ExportForm::kExact));
//   ASSIGN_OR_RETURN(StateTransfer transfer,
//                    StateTransfer::Create(runtime, tensors, {}));
//   RETURN_IF_ERROR(ExportState(tensors, transfer, sink));
//
// Live state is only read. checkpoint/save.h does this for a checkpoint, inside
// its budget.

#ifndef ONEPASS_CHECKPOINT_EXPORT_STATE_H_
#define ONEPASS_CHECKPOINT_EXPORT_STATE_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "checkpoint/state_sink.h"
#include "checkpoint/state_tensors.h"
#include "checkpoint/state_transfer.h"

namespace onepass {

// `exported` is called with the index of each tensor once nothing of it is read
// any more; an error of it ends the export. Errors: its, those of the transfer
// and of the sink, which is then not valid.
absl::Status ExportState(
    const StateTensors& tensors, StateTransfer& transfer, StateSink& sink,
    absl::FunctionRef<absl::Status(int tensor)> exported = [](int) {
      return absl::OkStatus();
    });

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_EXPORT_STATE_H_
