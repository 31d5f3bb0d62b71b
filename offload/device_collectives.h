// Collectives over device memory: directly where threads of the host may read
// it, else through host memory, a chunk at a time.
//
//   ASSIGN_OR_RETURN(auto collectives,
//                    DeviceCollectives::Create(device, pool, communicator,
//                    {}));
//   RETURN_IF_ERROR(collectives->AllGather(shard, unit, bytes, *stream));

#ifndef ONEPASS_OFFLOAD_DEVICE_COLLECTIVES_H_
#define ONEPASS_OFFLOAD_DEVICE_COLLECTIVES_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/communicator.h"
#include "dispatch/device.h"
#include "dispatch/host_buffer.h"
#include "dispatch/thread_pool.h"

namespace onepass {

struct DeviceCollectivesOptions {
  // What each rank gives, or has for each other, at a time; the same on all
  // ranks. Of no meaning, as what follows, where Device::host_accessible().
  int64_t chunk_bytes = int64_t{1} << 20;
  // Whether to pin the host memory: 2 * chunk_bytes for each rank there is.
  bool pin_memory = true;
};

class DeviceCollectives {
 public:
  // All outlive the result. InvalidArgument: chunk_bytes below 1, or too many
  // of them for 64 bits. ResourceExhausted: no memory for chunks; where only
  // pinning is refused, they are not pinned (pinning_error()).
  static absl::StatusOr<std::unique_ptr<DeviceCollectives>> Create(
      Device& device, ThreadPool& pool, Communicator& communicator,
      const DeviceCollectivesOptions& options);

  // As Communicator::AllGather() and AllToAll(), but that no memory overlaps,
  // over device memory that is complete when `stream` comes by. They return
  // when the result is there, for all streams; after an error, when nothing of
  // it is on `stream` any more.
  absl::Status AllGather(const void* mine, void* all, int64_t bytes,
                         Stream& stream);
  absl::Status AllToAll(const void* send, void* received, int64_t bytes,
                        Stream& stream);

  // Why pinning was refused; OK where it was not, or not wanted.
  const absl::Status& pinning_error() const { return pinning_error_; }

 private:
  DeviceCollectives(Device& device, Communicator& communicator)
      : device_(device), communicator_(communicator) {}

  // Calls move(offset, chunk) for each `chunk` bytes from `offset` on, at least
  // once, and waits for what it put on `stream`.
  absl::Status InChunks(
      int64_t bytes, Stream& stream,
      absl::FunctionRef<absl::Status(int64_t offset, int64_t chunk)> move);
  // What came from each rank goes to its `bytes` bytes of `all`.
  absl::Status Spread(void* all, int64_t bytes, int64_t offset, int64_t chunk,
                      Stream& stream);

  Device& device_;
  Communicator& communicator_;
  // Where the device's memory is its own: a chunk for each rank, to and from.
  int64_t chunk_bytes_ = 0;
  PinnedBuffer pinned_;
  absl::Status pinning_error_;
  HostBuffer plain_;
  char* out_ = nullptr;
  char* in_ = nullptr;
};

}  // namespace onepass

#endif  // ONEPASS_OFFLOAD_DEVICE_COLLECTIVES_H_
