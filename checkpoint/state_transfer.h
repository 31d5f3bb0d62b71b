// Elements of state out of their place and back, converted on the way: on the
// device where they lie there, a piece at a time.
//
//   ASSIGN_OR_RETURN(StateTransfer transfer,
//                    StateTransfer::Create(runtime, tensors, {}));
//   RETURN_IF_ERROR(transfer.Read(tensors.arrays()[0], first, numel, out));
//
//   RETURN_IF_ERROR(transfer.Write(array, first, numel, in));
//   RETURN_IF_ERROR(transfer.FinishWriting());
//
// Neither changes more than what it is given to write: types, places, scales
// and values of what is read stay as they are.

#ifndef ONEPASS_CHECKPOINT_STATE_TRANSFER_H_
#define ONEPASS_CHECKPOINT_STATE_TRANSFER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/device.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"

namespace onepass {

// How much of what is on the device is converted before it travels.
enum class ExportGranularity : uint8_t {
  kChunk,   // as much as the scratch holds
  kTensor,  // a tensor: the published scheme
  kAll,     // everything: what that replaced
};

struct StateTransferOptions {
  // Bytes of device memory for what is converted there, at least those of a
  // leaf in fp32; taken only where something is. With the other granularities
  // it is what they need.
  int64_t scratch_bytes = int64_t{4} << 20;
  ExportGranularity granularity = ExportGranularity::kChunk;
  // Those that what Read() reads lies behind; they outlive the transfer. Null:
  // none.
  StateFences* fences = nullptr;
};

class StateTransfer {
 public:
  // Takes the device memory, which goes with the result. `runtime` and
  // `tensors` outlive it. InvalidArgument: a scratch that is too small.
  // ResourceExhausted: device memory.
  static absl::StatusOr<StateTransfer> Create(
      const Runtime& runtime, const StateTensors& tensors,
      const StateTransferOptions& options);

  // Writes elements [first, first + numel) of the array to `out`: host memory,
  // aligned to them, that nothing else uses. InvalidArgument: names a state
  // whose scale is not finite. What the fences were cancelled with.
  absl::Status Read(const StoredArray& array, int64_t first, int64_t numel,
                    char* out);

  // The inverse, for tensors of StateTargets, whose form is kExact: elements
  // [first, first + numel) become those at `in`, which stays as it is until
  // FinishWriting() returns.
  absl::Status Write(const StoredArray& array, int64_t first, int64_t numel,
                     const char* in);
  // When it returns all is written, whatever came out.
  absl::Status FinishWriting();

 private:
  // Elements of a view, and where they go or come from.
  struct Part {
    const StateView* view;
    int64_t offset;  // in the view
    int64_t numel;
    int64_t position;  // in what was asked for
  };

  StateTransfer(const Runtime& runtime, const StateTensors& tensors)
      : runtime_(runtime), tensors_(&tensors) {}

  absl::Status ReadBehindFences(const StoredArray& array, int64_t first,
                                int64_t numel, char* out);
  absl::Status ConvertAll();
  absl::Status ReadPart(const StateTensor& tensor, const Part& part,
                        bool scales, char* out);
  absl::Status CheckScales(const StateTensor& tensor, const Part& part);
  absl::Status ReadConverted(const StateTensor& tensor, const Part& part,
                             float* out);
  // Puts the fp32 values of [offset, offset + numel) of a view to `out`, on the
  // device where `stream` is not null.
  absl::Status Convert(const StateTensor& tensor, const StateView& view,
                       int64_t offset, int64_t numel, float* out,
                       Stream* stream);
  template <typename Args>
  absl::Status Run(const Args& args, Stream* stream);
  const StateView* ParamOf(const StateTensor& tensor,
                           const StateView& view) const;

  Runtime runtime_;
  const StateTensors* tensors_;
  StateTransferOptions options_;
  // Of kAll: the values of a tensor, where it is on the device.
  std::vector<DeviceBuffer> converted_;
  DeviceBuffer scratch_;
  // After the memory: it ends before that goes.
  std::unique_ptr<Stream> stream_;
};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_STATE_TRANSFER_H_
