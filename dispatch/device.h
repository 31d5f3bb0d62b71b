// An accelerator, as the offload pipeline sees it: memory of its own, pinned
// host memory, streams of work that run beside the host, and events between
// them.
//
//   ASSIGN_OR_RETURN(DeviceBuffer weights, device.Allocate(bytes));
//   ASSIGN_OR_RETURN(PinnedBuffer staging, device.AllocatePinned(pool, bytes));
//   ASSIGN_OR_RETURN(auto stream, device.CreateStream());
//   ASSIGN_OR_RETURN(auto copied, device.CreateEvent());
//   RETURN_IF_ERROR(stream->CopyToDevice(weights.data(), staging.data(),
//                                        bytes));
//   RETURN_IF_ERROR(stream->Record(*copied));
//   ...                                   // the copy goes on meanwhile
//   RETURN_IF_ERROR(copied->Wait());      // now `staging` may be refilled
//
// The model is that of CUDA: what is put on a stream runs in order and after
// the call has returned; streams run beside one another; an event marks a place
// on a stream, which the host or another stream can wait for. dispatch/
// host_device.h implements it in host memory, without any hardware.
//
// Errors. A call that is refused (InvalidArgument: a null pointer, a negative
// size; ResourceExhausted: no memory) changes nothing, and the device goes on.
// Work that fails while it runs makes the device unusable: what is on its
// streams is dropped, waits end, and every call, also those that wait, returns
// that first error from then on, once nothing runs any more: what the work was
// on may then be freed. Buffers, streams and events can always be destroyed.
//
// All functions may be called from any thread; those of one stream or event by
// one at a time. A device must outlive what it made.
//
// Another kind of accelerator is a class derived from each of Event, Stream and
// Device. Another operation is an alternative of DeviceOperation, which
// CheckOperations() checks and every Stream runs.

#ifndef ONEPASS_DISPATCH_DEVICE_H_
#define ONEPASS_DISPATCH_DEVICE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dispatch/dtype.h"
#include "dispatch/host_buffer.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/thread_pool.h"

namespace onepass {

class Device;

// An operation of dispatch/kernel.h or dispatch/operations.h over device
// memory, with the same bits as on the CPU. AdamStepArgs::stream_copy has no
// meaning.
using DeviceOperation =
    std::variant<AdamStepArgs, AccumulateArgs, ScaleArgs, CastArgs,
                 SquaredNormArgs, AbsMaxArgs, SplitRemainderArgs,
                 JoinRemainderArgs, QuantizeArgs, DequantizeArgs, SumLeavesArgs,
                 AdvanceStepArgs, DeferredAdamStepArgs>;

// A place on a stream, and the time when the stream came by.
class Event {
 public:
  // Records and waits for it that are on streams stay there.
  virtual ~Event() = default;

  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // The one that made it.
  const Device& device() const { return device_; }

  // Returns when the work before the latest Record() of this event has ended;
  // at once where there was none.
  virtual absl::Status Wait() = 0;
  // Whether Wait() would return at once.
  virtual absl::StatusOr<bool> Done() = 0;

 protected:
  explicit Event(const Device& device) : device_(device) {}

 private:
  const Device& device_;
};

class Stream {
 public:
  // Waits until the work on it has ended, at least as far as this object put it
  // there.
  virtual ~Stream() = default;

  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // The one that made it.
  const Device& device() const { return device_; }

  // `bytes` bytes from one place to another that does not overlap it; where
  // they are 0, pointers may be null. Host memory that is not pinned is taken
  // too, but the call may then wait for the copy. Both sides belong to the
  // stream until the copy has ended.
  virtual absl::Status CopyToDevice(void* device, const void* host,
                                    int64_t bytes) = 0;
  virtual absl::Status CopyToHost(void* host, const void* device,
                                  int64_t bytes) = 0;
  virtual absl::Status CopyOnDevice(void* to, const void* from,
                                    int64_t bytes) = 0;
  virtual absl::Status SetZero(void* device, int64_t bytes) = 0;

  // Runs `operations`, which are copied, one after the other. All pointers in
  // them are of device memory, which belongs to the stream until they have
  // ended. InvalidArgument, with none of them run: as in dispatch/operations.h.
  virtual absl::Status Run(absl::Span<const DeviceOperation> operations) = 0;

  // InvalidArgument: an event of another device.
  virtual absl::Status Record(Event& event) = 0;
  // Lets later work on this stream wait for the latest Record() of `event`
  // before this call, on whichever stream; for nothing where there was none.
  // InvalidArgument: an event of another device.
  virtual absl::Status Wait(const Event& event) = 0;
  // Returns when all that was put on the stream has ended.
  virtual absl::Status Synchronize() = 0;

  // What Device::WrapStream() takes.
  virtual void* native() = 0;

 protected:
  explicit Stream(const Device& device) : device_(device) {}

 private:
  const Device& device_;
};

// The checks of arguments, for classes derived from Stream. InvalidArgument
// names `call`, as "copy_to_device".
absl::Status CheckCopy(absl::string_view call, const void* to, const void* from,
                       int64_t bytes);
absl::Status CheckSetZero(const void* data, int64_t bytes);
absl::Status CheckOperations(const Device& device,
                             absl::Span<const DeviceOperation> operations);
absl::Status CheckEvent(absl::string_view call, const Event& event,
                        const Device& device);

// Bytes that are held now, and the most that ever were at once.
struct MemoryUse {
  int64_t in_use = 0;
  int64_t peak = 0;
  int64_t allocations = 0;  // all until now
};

// Memory of a device; without any by default. What streams do with it must have
// ended before it is destroyed.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  friend class Device;

  Device* device_ = nullptr;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Host memory that a device copies from and to without the help of a thread;
// otherwise as DeviceBuffer.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;

  void* data() const { return buffer_.data(); }
  int64_t bytes() const { return buffer_.bytes(); }
  template <typename T>
  T* as() const {
    return buffer_.as<T>();
  }

 private:
  friend class Device;

  Device* device_ = nullptr;
  HostBuffer buffer_;
};

class Device {
 public:
  virtual ~Device() = default;

  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // As users write it: "host", "cuda:0".
  virtual absl::string_view name() const = 0;
  // Whether threads of the host may read and write device memory, while no
  // stream works on it.
  virtual bool host_accessible() const = 0;
  // Types that AdamStepArgs may have, as those of a Kernel.
  virtual DTypeSet gradient_types() const = 0;
  virtual DTypeSet moment_types() const = 0;
  virtual DTypeSet copy_types() const = 0;

  // Where device memory begins, in bytes.
  static constexpr int64_t kAlignment = 256;

  // `bytes` bytes, not initialised, aligned to kAlignment; of 0 bytes null.
  // InvalidArgument: bytes below 0. ResourceExhausted: says how many there are
  // and how many were asked for.
  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes);
  // Zeros, touched first by the workers of `pool`. Errors: those of
  // HostBuffer::Create(); ResourceExhausted where the system refuses to pin:
  // pageable memory then does the same, more slowly.
  absl::StatusOr<PinnedBuffer> AllocatePinned(
      ThreadPool& pool, int64_t bytes, const HostBufferOptions& options = {});

  MemoryUse memory() const { return device_memory_.use(); }
  MemoryUse pinned_memory() const { return pinned_memory_.use(); }
  // From now on peaks are counted from what is in use.
  void ResetPeaks();

  // `name` is for whoever looks at threads or traces; kept short.
  virtual absl::StatusOr<std::unique_ptr<Stream>> CreateStream(
      absl::string_view name = "stream") = 0;
  // A stream of the caller's (Stream::native(), or a cudaStream_t), which must
  // outlive the result. Null stands for the device's own default stream, which
  // those of CreateStream() run beside, as beside any other.
  virtual absl::StatusOr<std::unique_ptr<Stream>> WrapStream(void* native) = 0;

  virtual absl::StatusOr<std::unique_ptr<Event>> CreateEvent() = 0;
  // Seconds from the time of `from` to that of `to`, both of this device.
  // FailedPrecondition: one was not recorded, or is not done.
  virtual absl::StatusOr<double> SecondsBetween(const Event& from,
                                                const Event& to) = 0;

 protected:
  Device() = default;

  // What is above without the counting; `bytes` is above 0.
  virtual absl::StatusOr<void*> AllocateBytes(int64_t bytes) = 0;
  virtual void FreeBytes(void* data, int64_t bytes) = 0;
  virtual absl::Status Pin(void* data, int64_t bytes) = 0;
  virtual void Unpin(void* data, int64_t bytes) = 0;

 private:
  friend class DeviceBuffer;
  friend class PinnedBuffer;

  class Counter {
   public:
    void Add(int64_t bytes);
    void Subtract(int64_t bytes);
    void ResetPeak();
    MemoryUse use() const;

   private:
    mutable std::mutex mutex_;
    MemoryUse use_;
  };

  Counter device_memory_;
  Counter pinned_memory_;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_DEVICE_H_
