// A device that is the host: its memory is host memory, its streams are
// threads that really copy and compute while others go on. For trainers without
// an accelerator, and to test, trace and measure what an accelerator would do.
//
//   HostDeviceOptions options;
//   options.link_bytes_per_s = 50e9;   // a simulated link
//   ASSIGN_OR_RETURN(auto device, HostDevice::Create(*kernel, options));
//
// Operations run on the stream's thread, by the given kernel. "Pinned" memory
// is memory that was touched, and counted; large device memory asks for huge
// pages.
// What is put on streams allocates nothing, but where more is waiting there
// than ever before.
//
// The simulated link has two directions, which do not slow one another; the
// streams of the device share each. A copy takes link_latency_s +
// bytes / link_bytes_per_s from when it was put on the stream, or from when
// what it had to wait for ended: the work before it on the stream, the copy
// before it in the same direction, or that before the event of a Wait(). These
// are the times of events, too. (That a thread was woken late, or took longer
// to move the bytes, does not lengthen the copies behind it: a link is to be
// slower than memory.) Copies on the device take no link.

#ifndef ONEPASS_DISPATCH_HOST_DEVICE_H_
#define ONEPASS_DISPATCH_HOST_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/device.h"
#include "dispatch/kernel.h"

namespace onepass {

// A copy over the link, as an observer sees it.
struct HostDeviceCopy {
  enum class Direction { kToDevice, kToHost };

  Direction direction;
  const void* from;
  void* to;
  int64_t bytes;
};

struct HostDeviceOptions {
  std::string name = "host";
  // Device memory that there is; 0: as much as the host has.
  int64_t memory_bytes = 0;
  // What the device says of its memory, which is the host's in any case: false
  // lets users take the ways that other devices need.
  bool host_accessible = true;
  // Of each direction; 0: copies take the time that moving the bytes takes.
  double link_bytes_per_s = 0;
  // Only of a link that has a bandwidth.
  double link_latency_s = 0;
  // False: copies over the link take their time, but move nothing: to measure
  // where no processor is left for the threads that would.
  bool move_bytes = true;
  // Where set, called on the stream's thread when a copy over the link begins
  // (its source is read from now on) and when it has ended, time of the link
  // included. Calls may come from several threads at once. It may call those
  // functions of the device that return no status.
  std::function<void(const HostDeviceCopy& copy, bool begins)> observer;
};

// A call that can be made to fail.
enum class HostDeviceCall {
  kAllocate,
  kPin,
  kCreateStream,
  kWrapStream,
  kCreateEvent,
  kCopyToDevice,
  kCopyToHost,
  kCopyOnDevice,
  kSetZero,
  kRun,
  kRecord,
  kStreamWait,   // Stream::Wait
  kSynchronize,  // Stream::Synchronize
  kEventWait,    // Event::Wait, by the host
};

class HostDevice : public Device {
 public:
  // `kernel`, which must be supported here, must outlive the device.
  // InvalidArgument: a negative or non-finite number in the options, a latency
  // without a bandwidth.
  static absl::StatusOr<std::unique_ptr<HostDevice>> Create(
      const Kernel& kernel, HostDeviceOptions options = {});

  // Lets the call of this kind after `skip` further ones return `error` and do
  // nothing: refused, as by a driver. kSynchronize and kEventWait make the
  // device unusable with it.
  virtual void RefuseCall(HostDeviceCall call, int64_t skip,
                          absl::Status error) = 0;
  // Lets the work of that call (a copy, SetZero or Run) fail when its turn
  // comes, with none of it done, which makes the device unusable.
  virtual void FailWork(HostDeviceCall call, int64_t skip,
                        absl::Status error) = 0;
  // Calls of this kind until now, those that were refused among them.
  virtual int64_t Calls(HostDeviceCall call) const = 0;
  // Copies, operations, records and waits that were put on streams and have not
  // ended.
  virtual int64_t WorkInFlight() const = 0;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_HOST_DEVICE_H_
