#include "offload/device_collectives.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "dispatch/return_if_error.h"

namespace onepass {

absl::StatusOr<std::unique_ptr<DeviceCollectives>> DeviceCollectives::Create(
    Device& device, ThreadPool& pool, Communicator& communicator,
    const DeviceCollectivesOptions& options) {
  int64_t bytes;
  if (options.chunk_bytes < 1 ||
      __builtin_mul_overflow(options.chunk_bytes,
                             int64_t{2} * communicator.size(), &bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "chunk_bytes is ", options.chunk_bytes, ", expected at least 1, and 2 ",
        "for each of ", communicator.size(), " ranks in 64 bits"));
  }
  auto collectives =
      absl::WrapUnique(new DeviceCollectives(device, communicator));
  // A rank alone has nothing to exchange.
  if (device.host_accessible() || communicator.size() == 1) return collectives;
  HostBufferOptions buffer_options;
  buffer_options.element_bytes = 1;
  if (options.pin_memory) {
    absl::StatusOr<PinnedBuffer> buffer =
        device.AllocatePinned(pool, bytes, buffer_options);
    if (buffer.ok()) {
      collectives->pinned_ = *std::move(buffer);
    } else {
      collectives->pinning_error_ = buffer.status();
    }
  }
  collectives->out_ = collectives->pinned_.as<char>();
  if (collectives->out_ == nullptr) {
    absl::StatusOr<HostBuffer> buffer =
        HostBuffer::Create(pool, bytes, buffer_options);
    if (!buffer.ok()) return buffer.status();
    collectives->plain_ = *std::move(buffer);
    collectives->out_ = collectives->plain_.as<char>();
  }
  collectives->chunk_bytes_ = options.chunk_bytes;
  collectives->in_ = collectives->out_ + bytes / 2;
  return collectives;
}

absl::Status DeviceCollectives::AllGather(const void* mine, void* all,
                                          int64_t bytes, Stream& stream) {
  if (device_.host_accessible()) {
    ONEPASS_RETURN_IF_ERROR(stream.Synchronize());
    return communicator_.AllGather(mine, all, bytes);
  }
  if (communicator_.size() == 1) {
    ONEPASS_RETURN_IF_ERROR(stream.CopyOnDevice(all, mine, bytes));
    return stream.Synchronize();
  }
  const auto* from = static_cast<const char*>(mine);
  return InChunks(
      bytes, stream, [&](int64_t offset, int64_t chunk) -> absl::Status {
        ONEPASS_RETURN_IF_ERROR(stream.CopyToHost(out_, from + offset, chunk));
        ONEPASS_RETURN_IF_ERROR(stream.Synchronize());
        ONEPASS_RETURN_IF_ERROR(communicator_.AllGather(out_, in_, chunk));
        return Spread(all, bytes, offset, chunk, stream);
      });
}

absl::Status DeviceCollectives::AllToAll(const void* send, void* received,
                                         int64_t bytes, Stream& stream) {
  if (device_.host_accessible()) {
    ONEPASS_RETURN_IF_ERROR(stream.Synchronize());
    return communicator_.AllToAll(send, received, bytes);
  }
  if (communicator_.size() == 1) {
    ONEPASS_RETURN_IF_ERROR(stream.CopyOnDevice(received, send, bytes));
    return stream.Synchronize();
  }
  const auto* from = static_cast<const char*>(send);
  return InChunks(
      bytes, stream, [&](int64_t offset, int64_t chunk) -> absl::Status {
        for (int rank = 0; rank < communicator_.size(); ++rank) {
          ONEPASS_RETURN_IF_ERROR(stream.CopyToHost(
              out_ + rank * chunk, from + rank * bytes + offset, chunk));
        }
        ONEPASS_RETURN_IF_ERROR(stream.Synchronize());
        ONEPASS_RETURN_IF_ERROR(communicator_.AllToAll(out_, in_, chunk));
        return Spread(received, bytes, offset, chunk, stream);
      });
}

absl::Status DeviceCollectives::InChunks(
    int64_t bytes, Stream& stream,
    absl::FunctionRef<absl::Status(int64_t offset, int64_t chunk)> move) {
  int64_t offset = 0;
  absl::Status status;
  do {
    const int64_t chunk = std::min(chunk_bytes_, bytes - offset);
    status = move(offset, chunk);
    // The memory is used again, whether by this or by whoever gets the error.
    status.Update(stream.Synchronize());
    offset += chunk;
  } while (status.ok() && offset < bytes);
  return status;
}

absl::Status DeviceCollectives::Spread(void* all, int64_t bytes, int64_t offset,
                                       int64_t chunk, Stream& stream) {
  for (int rank = 0; rank < communicator_.size(); ++rank) {
    ONEPASS_RETURN_IF_ERROR(
        stream.CopyToDevice(static_cast<char*>(all) + rank * bytes + offset,
                            in_ + rank * chunk, chunk));
  }
  return absl::OkStatus();
}

}  // namespace onepass
