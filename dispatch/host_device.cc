#include "dispatch/host_device.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dispatch/adam_constants.h"
#include "dispatch/fp_environment.h"
#include "dispatch/host_buffer.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

using Lock = std::unique_lock<std::mutex>;

// Without the lock for as long as it lives.
class Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }

  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

// --- What is put on a stream. ---

// A Record(): of its own, because the event may be recorded anew, or destroyed,
// while streams wait for this one. Used with the lock of the device.
struct Mark {
  bool done = false;
  double time = 0;
};

struct CopyOnDeviceArgs {
  void* to;
  const void* from;
  int64_t bytes;
};

struct SetZeroArgs {
  void* data;
  int64_t bytes;
};

struct RecordArgs {
  std::shared_ptr<Mark> mark;
};

struct WaitArgs {
  std::shared_ptr<Mark> mark;
};

// In the place of work that is to fail.
struct FailArgs {
  absl::Status error;
};

using Work = std::variant<HostDeviceCopy, CopyOnDeviceArgs, SetZeroArgs,
                          DeviceOperation, RecordArgs, WaitArgs, FailArgs>;

struct Command {
  double put;  // when
  Work work;
};

// First in, first out. Allocates only to grow.
class Ring {
 public:
  bool empty() const { return size_ == 0; }

  void Push(Command command) {
    if (size_ == slots_.size()) Grow();
    slots_[(first_ + size_) % slots_.size()] = std::move(command);
    ++size_;
  }

  Command Pop() {
    Command command = std::move(slots_[first_]);
    first_ = (first_ + 1) % slots_.size();
    --size_;
    return command;
  }

 private:
  void Grow() {
    std::rotate(slots_.begin(), slots_.begin() + first_, slots_.end());
    first_ = 0;
    slots_.resize(2 * slots_.size());
  }

  std::vector<Command> slots_ = std::vector<Command>(64);
  size_t first_ = 0;
  size_t size_ = 0;
};

struct RunOperation {
  void operator()(const AdamStepArgs& args) const { kernel.adam_step(args); }
  void operator()(const AccumulateArgs& args) const { kernel.accumulate(args); }
  void operator()(const ScaleArgs& args) const { kernel.scale(args); }
  void operator()(const CastArgs& args) const { kernel.cast(args); }
  void operator()(const SquaredNormArgs& args) const {
    kernel.squared_norm(args);
  }
  void operator()(const AbsMaxArgs& args) const { kernel.absmax(args); }
  void operator()(const SplitRemainderArgs& args) const {
    kernel.split_remainder(args);
  }
  void operator()(const JoinRemainderArgs& args) const {
    kernel.join_remainder(args);
  }
  void operator()(const QuantizeArgs& args) const { kernel.quantize(args); }
  void operator()(const DequantizeArgs& args) const { kernel.dequantize(args); }
  void operator()(const SumLeavesArgs& args) const {
    for (int64_t i = 0; i < args.count; ++i) args.sum->Add(args.leaf_sums[i]);
  }
  void operator()(const AdvanceStepArgs& args) const {
    ++*args.step;
    *args.constants = ComputeConstants(args.rule, *args.lr, *args.step);
  }
  void operator()(const DeferredAdamStepArgs& args) const {
    AdamStepArgs step = args.step;
    step.constants = *args.constants;
    step.constants.decay_mode = args.step.constants.decay_mode;
    kernel.adam_step(step);
  }

  const KernelOperations& kernel;
};

// --- What the streams and events of a device share. ---

// One lock guards all that changes. Times are in seconds since its creation.
class Core {
 public:
  Core(const Kernel& kernel, HostDeviceOptions options)
      : kernel_(kernel), options_(std::move(options)) {}

  const Kernel& kernel() const { return kernel_; }
  const HostDeviceOptions& options() const { return options_; }

  double Now() const {
    return std::chrono::duration<double>(Clock::now() - epoch_).count();
  }

  Lock Acquire() const { return Lock(mutex_); }

  // What follows wants the lock.

  // Counts the call, and says whether it is refused.
  absl::Status BeginCall(HostDeviceCall call, Lock& lock);
  // Whether the work of the call that has just begun is to fail, and with what.
  absl::Status TakeWorkFault(HostDeviceCall call) {
    return TakeFault(call, /*of_work=*/true);
  }
  void AddFault(HostDeviceCall call, int64_t skip, bool of_work,
                absl::Status error) {
    faults_.push_back(
        {call, calls_[Index(call)] + skip + 1, of_work, std::move(error)});
  }
  int64_t calls(HostDeviceCall call) const { return calls_[Index(call)]; }

  // The error that made the device unusable, once nothing runs any more.
  absl::Status CheckUsable(Lock& lock);
  bool failed() const { return !error_.ok(); }
  void Fail(const absl::Status& error);

  // Returns when `done` says so, or the device has failed.
  void AwaitChange(Lock& lock, absl::FunctionRef<bool()> done);
  // The same for callers that then leave.
  absl::Status Await(Lock& lock, absl::FunctionRef<bool()> done) {
    AwaitChange(lock, done);
    return CheckUsable(lock);
  }

  void BeginCommand() { ++in_flight_; }
  void EndCommand() {
    --in_flight_;
    changed_.notify_all();
  }
  int64_t in_flight() const { return in_flight_; }

  // When a copy ends that could begin at `ready`; the link is its until then.
  double TakeLink(const HostDeviceCopy& copy, double ready);
  // Returns then, or where the device fails.
  void SleepUntil(Lock& lock, double time);

  absl::StatusOr<void*> AllocateBytes(int64_t bytes);
  void FreeBytes(void* data, int64_t bytes);

  // What Stream::native() of the device's streams may be.
  std::vector<const void*>& natives() { return natives_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Fault {
    HostDeviceCall call;
    int64_t number;  // of the call, from 1
    bool of_work;
    absl::Status error;
  };

  static constexpr size_t Index(HostDeviceCall call) {
    return static_cast<size_t>(call);
  }
  // kEventWait is the last.
  static constexpr size_t kCalls =
      static_cast<size_t>(HostDeviceCall::kEventWait) + 1;

  absl::Status TakeFault(HostDeviceCall call, bool of_work);

  const Kernel& kernel_;
  const HostDeviceOptions options_;
  const Clock::time_point epoch_ = Clock::now();

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a command has ended, or all will
  std::condition_variable failed_;
  absl::Status error_;  // the first
  int64_t in_flight_ = 0;
  std::array<int64_t, kCalls> calls_{};
  std::vector<Fault> faults_;
  std::array<double, 2> link_free_at_{};  // by direction
  int64_t allocated_bytes_ = 0;
  std::vector<const void*> natives_;
};

absl::Status Core::BeginCall(HostDeviceCall call, Lock& lock) {
  ++calls_[Index(call)];
  ONEPASS_RETURN_IF_ERROR(CheckUsable(lock));
  const absl::Status refused = TakeFault(call, /*of_work=*/false);
  if (!refused.ok() && (call == HostDeviceCall::kSynchronize ||
                        call == HostDeviceCall::kEventWait)) {
    Fail(refused);
    return CheckUsable(lock);
  }
  return refused;
}

absl::Status Core::TakeFault(HostDeviceCall call, bool of_work) {
  const auto fault =
      std::find_if(faults_.begin(), faults_.end(), [&](const Fault& fault) {
        return fault.call == call && fault.of_work == of_work &&
               fault.number == calls_[Index(call)];
      });
  if (fault == faults_.end()) return absl::OkStatus();
  absl::Status error = std::move(fault->error);
  faults_.erase(fault);
  return error;
}

absl::Status Core::CheckUsable(Lock& lock) {
  if (error_.ok()) return absl::OkStatus();
  changed_.wait(lock, [this] { return in_flight_ == 0; });
  return error_;
}

void Core::Fail(const absl::Status& error) {
  error_.Update(error);
  changed_.notify_all();
  failed_.notify_all();
}

void Core::AwaitChange(Lock& lock, absl::FunctionRef<bool()> done) {
  changed_.wait(lock, [&] { return failed() || done(); });
}

double Core::TakeLink(const HostDeviceCopy& copy, double ready) {
  double& free_at = link_free_at_[static_cast<size_t>(copy.direction)];
  free_at = std::max(free_at, ready) + options_.link_latency_s +
            static_cast<double>(copy.bytes) / options_.link_bytes_per_s;
  return free_at;
}

void Core::SleepUntil(Lock& lock, double time) {
  // In parts, of which none is too long for a clock.
  constexpr double kLongest = 3600;
  while (!failed()) {
    const double left = time - Now();
    if (left <= 0) return;
    failed_.wait_for(lock,
                     std::chrono::duration<double>(std::min(left, kLongest)));
  }
}

absl::StatusOr<void*> Core::AllocateBytes(int64_t bytes) {
  const int64_t capacity = options_.memory_bytes;
  if (capacity > 0 && bytes > capacity - allocated_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "allocate: ", bytes, " bytes were asked for, ", options_.name, " has ",
        capacity, ", of which ", allocated_bytes_, " are in use"));
  }
  // Copies to pages of the usual size are slow enough to hold up an update that
  // they are to run beside.
  const bool huge = bytes >= HostBuffer::kHugePageBytes;
  void* data = nullptr;
  if (posix_memalign(&data,
                     huge ? HostBuffer::kHugePageBytes : Device::kAlignment,
                     bytes) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "allocate: the system refused ", bytes, " bytes for ", options_.name,
        ", of which ", allocated_bytes_, " are in use"));
  }
  // Advice: that it is not taken is no error.
  if (huge) madvise(data, bytes, MADV_HUGEPAGE);
  allocated_bytes_ += bytes;
  return data;
}

void Core::FreeBytes(void* data, int64_t bytes) {
  std::free(data);
  allocated_bytes_ -= bytes;
}

// --- Streams and events. ---

// The commands of a stream, and the thread that runs them. native() is its
// address.
class Queue {
 public:
  // Wants the lock. ResourceExhausted: the system refused the thread.
  static absl::StatusOr<std::unique_ptr<Queue>> Create(Core& core,
                                                       absl::string_view name);
  // Runs what is left.
  ~Queue();

  // These want the lock. The number of the command, from 1.
  int64_t Put(Work work);
  // Commands until now.
  int64_t put() const { return put_; }
  int64_t ended() const { return ended_; }

 private:
  explicit Queue(Core& core) : core_(core) {}

  void Loop(std::string name);
  // Each runs a command, and returns when it ended. They are called with the
  // lock, and give it away while they work.
  double Run(const HostDeviceCopy& copy, Lock& lock);
  double Run(const CopyOnDeviceArgs& args, Lock& lock);
  double Run(const SetZeroArgs& args, Lock& lock);
  double Run(const DeviceOperation& operation, Lock& lock);
  double Run(RecordArgs& args, Lock& lock);
  double Run(WaitArgs& args, Lock& lock);
  double Run(const FailArgs& args, Lock& lock);

  Core& core_;
  Ring ring_;
  int64_t put_ = 0;
  int64_t ended_ = 0;
  bool stopping_ = false;
  std::condition_variable available_;  // a command, or the end
  // When the last command ended, or that which runs could begin.
  double time_ = 0;
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<Queue>> Queue::Create(Core& core,
                                                     absl::string_view name) {
  std::unique_ptr<Queue> queue(new Queue(core));
  // The standard library reports a refused thread in no other way.
  try {
    queue->thread_ = std::thread(&Queue::Loop, queue.get(), std::string(name));
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "could not start the thread of stream ", name, ": ", error.what()));
  }
  core.natives().push_back(queue.get());
  return queue;
}

Queue::~Queue() {
  if (!thread_.joinable()) return;
  {
    const Lock lock = core_.Acquire();
    std::vector<const void*>& natives = core_.natives();
    natives.erase(std::find(natives.begin(), natives.end(), this));
    stopping_ = true;
    available_.notify_one();
  }
  thread_.join();
}

int64_t Queue::Put(Work work) {
  ring_.Push({core_.Now(), std::move(work)});
  core_.BeginCommand();
  available_.notify_one();
  return ++put_;
}

void Queue::Loop(std::string name) {
  constexpr size_t kLongestName = 15;
  name.resize(std::min(name.size(), kLongestName));
  pthread_setname_np(pthread_self(), name.c_str());
  // Wakes up in time for the link, by default some 50 microseconds late.
  prctl(PR_SET_TIMERSLACK, 1UL);
  const ScopedFpEnvironment fp;
  Lock lock = core_.Acquire();
  for (;;) {
    available_.wait(lock, [this] { return stopping_ || !ring_.empty(); });
    if (ring_.empty()) return;
    Command command = ring_.Pop();
    if (!core_.failed()) {
      time_ = std::max(time_, command.put);
      time_ =
          std::visit([&](auto& work) { return Run(work, lock); }, command.work);
    }
    // In the same turn of the lock as Run(RecordArgs&): who waited for an event
    // finds the work before it ended.
    ++ended_;
    core_.EndCommand();
  }
}

double Queue::Run(const HostDeviceCopy& copy, Lock& lock) {
  const HostDeviceOptions& options = core_.options();
  const bool simulated = options.link_bytes_per_s > 0;
  const double end = simulated ? core_.TakeLink(copy, time_) : 0;
  {
    const Unlocked unlocked(lock);
    if (options.observer) options.observer(copy, /*begins=*/true);
    if (options.move_bytes) std::memcpy(copy.to, copy.from, copy.bytes);
  }
  if (simulated) core_.SleepUntil(lock, end);
  if (options.observer) {
    const Unlocked unlocked(lock);
    options.observer(copy, /*begins=*/false);
  }
  return simulated ? end : core_.Now();
}

double Queue::Run(const CopyOnDeviceArgs& args, Lock& lock) {
  const Unlocked unlocked(lock);
  std::memcpy(args.to, args.from, args.bytes);
  return core_.Now();
}

double Queue::Run(const SetZeroArgs& args, Lock& lock) {
  const Unlocked unlocked(lock);
  std::memset(args.data, 0, args.bytes);
  return core_.Now();
}

double Queue::Run(const DeviceOperation& operation, Lock& lock) {
  const Unlocked unlocked(lock);
  std::visit(RunOperation{*core_.kernel().operations}, operation);
  return core_.Now();
}

double Queue::Run(RecordArgs& args, Lock&) {
  args.mark->time = time_;
  args.mark->done = true;
  // With the lock, so that its event finds it free.
  args.mark = nullptr;
  return time_;
}

double Queue::Run(WaitArgs& args, Lock& lock) {
  core_.AwaitChange(lock, [&] { return args.mark->done; });
  const double time = std::max(time_, args.mark->time);
  args.mark = nullptr;
  return time;
}

double Queue::Run(const FailArgs& args, Lock&) {
  core_.Fail(args.error);
  return time_;
}

class HostEvent final : public Event {
 public:
  HostEvent(const Device& device, Core& core) : Event(device), core_(core) {}

  absl::Status Wait() override {
    Lock lock = core_.Acquire();
    ONEPASS_RETURN_IF_ERROR(core_.BeginCall(HostDeviceCall::kEventWait, lock));
    return core_.Await(lock, [this] { return done(); });
  }

  absl::StatusOr<bool> Done() override {
    Lock lock = core_.Acquire();
    ONEPASS_RETURN_IF_ERROR(core_.CheckUsable(lock));
    return done();
  }

  // These want the lock. The latest one is null where there was none.
  std::shared_ptr<Mark> latest() const {
    return marks_.empty() ? nullptr : marks_[latest_];
  }
  std::shared_ptr<Mark> NewMark();

 private:
  bool done() const { return latest() == nullptr || latest()->done; }

  Core& core_;
  // As many as were on streams at once, to be used again.
  std::vector<std::shared_ptr<Mark>> marks_;
  size_t latest_ = 0;
};

std::shared_ptr<Mark> HostEvent::NewMark() {
  const auto free = std::find_if(
      marks_.begin(), marks_.end(),
      [](const std::shared_ptr<Mark>& mark) { return mark.use_count() == 1; });
  latest_ = free - marks_.begin();
  if (free == marks_.end()) {
    marks_.push_back(std::make_shared<Mark>());
  } else {
    **free = Mark();
  }
  return marks_[latest_];
}

class HostStream final : public Stream {
 public:
  HostStream(const Device& device, Core& core, Queue& queue)
      : Stream(device), core_(core), queue_(queue) {}
  HostStream(const Device& device, Core& core, std::unique_ptr<Queue> queue)
      : Stream(device),
        core_(core),
        owned_(std::move(queue)),
        queue_(*owned_) {}

  ~HostStream() override {
    Lock lock = core_.Acquire();
    core_.Await(lock, [this] { return queue_.ended() >= last_; }).IgnoreError();
  }

  absl::Status CopyToDevice(void* device, const void* host,
                            int64_t bytes) override {
    return PutBytes(HostDeviceCall::kCopyToDevice,
                    CheckCopy("copy_to_device", device, host, bytes),
                    HostDeviceCopy{HostDeviceCopy::Direction::kToDevice, host,
                                   device, bytes});
  }

  absl::Status CopyToHost(void* host, const void* device,
                          int64_t bytes) override {
    return PutBytes(HostDeviceCall::kCopyToHost,
                    CheckCopy("copy_to_host", host, device, bytes),
                    HostDeviceCopy{HostDeviceCopy::Direction::kToHost, device,
                                   host, bytes});
  }

  absl::Status CopyOnDevice(void* to, const void* from,
                            int64_t bytes) override {
    return PutBytes(HostDeviceCall::kCopyOnDevice,
                    CheckCopy("copy_on_device", to, from, bytes),
                    CopyOnDeviceArgs{to, from, bytes});
  }

  absl::Status SetZero(void* device, int64_t bytes) override {
    return PutBytes(HostDeviceCall::kSetZero, CheckSetZero(device, bytes),
                    SetZeroArgs{device, bytes});
  }

  absl::Status Run(absl::Span<const DeviceOperation> operations) override {
    return Put(HostDeviceCall::kRun, CheckOperations(device(), operations),
               operations);
  }

  absl::Status Record(Event& event) override {
    Lock lock = core_.Acquire();
    ONEPASS_RETURN_IF_ERROR(core_.BeginCall(HostDeviceCall::kRecord, lock));
    ONEPASS_RETURN_IF_ERROR(CheckEvent("record", event, device()));
    last_ = queue_.Put(RecordArgs{static_cast<HostEvent&>(event).NewMark()});
    return absl::OkStatus();
  }

  absl::Status Wait(const Event& event) override {
    Lock lock = core_.Acquire();
    ONEPASS_RETURN_IF_ERROR(core_.BeginCall(HostDeviceCall::kStreamWait, lock));
    ONEPASS_RETURN_IF_ERROR(CheckEvent("wait", event, device()));
    std::shared_ptr<Mark> mark = static_cast<const HostEvent&>(event).latest();
    if (mark != nullptr) last_ = queue_.Put(WaitArgs{std::move(mark)});
    return absl::OkStatus();
  }

  absl::Status Synchronize() override {
    Lock lock = core_.Acquire();
    ONEPASS_RETURN_IF_ERROR(
        core_.BeginCall(HostDeviceCall::kSynchronize, lock));
    const int64_t put = queue_.put();
    return core_.Await(lock, [this, put] { return queue_.ended() >= put; });
  }

  void* native() override { return &queue_; }

 private:
  // `checked` is what the checks of the arguments gave.
  template <typename T>
  absl::Status Put(HostDeviceCall call, const absl::Status& checked,
                   absl::Span<const T> works) {
    Lock lock = core_.Acquire();
    ONEPASS_RETURN_IF_ERROR(core_.BeginCall(call, lock));
    ONEPASS_RETURN_IF_ERROR(checked);
    if (absl::Status error = core_.TakeWorkFault(call); !error.ok()) {
      last_ = queue_.Put(FailArgs{std::move(error)});
      return absl::OkStatus();
    }
    for (const T& work : works) last_ = queue_.Put(work);
    return absl::OkStatus();
  }

  // Of work on `work.bytes` bytes, of which there may be none.
  template <typename T>
  absl::Status PutBytes(HostDeviceCall call, const absl::Status& checked,
                        const T& work) {
    return Put(call, checked,
               absl::Span<const T>(&work, work.bytes > 0 ? 1 : 0));
  }

  Core& core_;
  const std::unique_ptr<Queue> owned_;  // null: another's
  Queue& queue_;
  int64_t last_ = 0;  // command that was put here
};

class HostDeviceImpl final : public HostDevice {
 public:
  HostDeviceImpl(const Kernel& kernel, HostDeviceOptions options)
      : core_(kernel, std::move(options)) {}

  absl::string_view name() const override { return core_.options().name; }
  bool host_accessible() const override {
    return core_.options().host_accessible;
  }
  DTypeSet gradient_types() const override {
    return core_.kernel().gradient_types;
  }
  DTypeSet moment_types() const override { return core_.kernel().moment_types; }
  DTypeSet copy_types() const override { return core_.kernel().copy_types; }

  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(
      absl::string_view name) override {
    Lock lock = core_.Acquire();
    ONEPASS_RETURN_IF_ERROR(
        core_.BeginCall(HostDeviceCall::kCreateStream, lock));
    absl::StatusOr<std::unique_ptr<Queue>> queue = Queue::Create(core_, name);
    if (!queue.ok()) return queue.status();
    return std::make_unique<HostStream>(*this, core_, *std::move(queue));
  }

  absl::StatusOr<std::unique_ptr<Stream>> WrapStream(void* native) override;

  absl::StatusOr<std::unique_ptr<Event>> CreateEvent() override {
    Lock lock = core_.Acquire();
    ONEPASS_RETURN_IF_ERROR(
        core_.BeginCall(HostDeviceCall::kCreateEvent, lock));
    return std::make_unique<HostEvent>(*this, core_);
  }

  absl::StatusOr<double> SecondsBetween(const Event& from,
                                        const Event& to) override;

  void RefuseCall(HostDeviceCall call, int64_t skip,
                  absl::Status error) override {
    const Lock lock = core_.Acquire();
    core_.AddFault(call, skip, /*of_work=*/false, std::move(error));
  }
  void FailWork(HostDeviceCall call, int64_t skip,
                absl::Status error) override {
    const Lock lock = core_.Acquire();
    core_.AddFault(call, skip, /*of_work=*/true, std::move(error));
  }
  int64_t Calls(HostDeviceCall call) const override {
    const Lock lock = core_.Acquire();
    return core_.calls(call);
  }
  int64_t WorkInFlight() const override {
    const Lock lock = core_.Acquire();
    return core_.in_flight();
  }

 private:
  absl::StatusOr<void*> AllocateBytes(int64_t bytes) override {
    Lock lock = core_.Acquire();
    ONEPASS_RETURN_IF_ERROR(core_.BeginCall(HostDeviceCall::kAllocate, lock));
    return core_.AllocateBytes(bytes);
  }
  void FreeBytes(void* data, int64_t bytes) override {
    const Lock lock = core_.Acquire();
    core_.FreeBytes(data, bytes);
  }
  absl::Status Pin(void*, int64_t) override {
    Lock lock = core_.Acquire();
    return core_.BeginCall(HostDeviceCall::kPin, lock);
  }
  void Unpin(void*, int64_t) override {}

  // When it was recorded, in the time of the device.
  absl::StatusOr<double> TimeOf(const Event& event, absl::string_view name);

  Core core_;
  std::unique_ptr<Queue> default_queue_;  // from its first use on
};

absl::StatusOr<std::unique_ptr<Stream>> HostDeviceImpl::WrapStream(
    void* native) {
  Lock lock = core_.Acquire();
  ONEPASS_RETURN_IF_ERROR(core_.BeginCall(HostDeviceCall::kWrapStream, lock));
  if (native == nullptr) {
    if (default_queue_ == nullptr) {
      absl::StatusOr<std::unique_ptr<Queue>> queue =
          Queue::Create(core_, "default");
      if (!queue.ok()) return queue.status();
      default_queue_ = *std::move(queue);
    }
    native = default_queue_.get();
  }
  const std::vector<const void*>& natives = core_.natives();
  if (std::find(natives.begin(), natives.end(), native) == natives.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("wrap_stream: native is no stream of ", name()));
  }
  return std::make_unique<HostStream>(*this, core_,
                                      *static_cast<Queue*>(native));
}

absl::StatusOr<double> HostDeviceImpl::SecondsBetween(const Event& from,
                                                      const Event& to) {
  Lock lock = core_.Acquire();
  ONEPASS_RETURN_IF_ERROR(core_.CheckUsable(lock));
  const absl::StatusOr<double> begin = TimeOf(from, "from");
  if (!begin.ok()) return begin.status();
  const absl::StatusOr<double> end = TimeOf(to, "to");
  if (!end.ok()) return end.status();
  return *end - *begin;
}

absl::StatusOr<double> HostDeviceImpl::TimeOf(const Event& event,
                                              absl::string_view name) {
  constexpr absl::string_view kCall = "seconds_between";
  ONEPASS_RETURN_IF_ERROR(CheckEvent(kCall, event, *this));
  const auto mark = static_cast<const HostEvent&>(event).latest();
  if (mark == nullptr || !mark->done) {
    return absl::FailedPreconditionError(
        absl::StrCat(kCall, ": ", name,
                     mark == nullptr ? " was not recorded" : " is not done"));
  }
  return mark->time;
}

template <typename T>
absl::Status CheckNumber(absl::string_view name, T value) {
  if (std::isfinite(static_cast<double>(value)) && value >= 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("host device: ", name, " is ", value,
                   ", expected a finite number of at least 0"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostDevice>> HostDevice::Create(
    const Kernel& kernel, HostDeviceOptions options) {
  ONEPASS_RETURN_IF_ERROR(CheckNumber("memory_bytes", options.memory_bytes));
  ONEPASS_RETURN_IF_ERROR(
      CheckNumber("link_bytes_per_s", options.link_bytes_per_s));
  ONEPASS_RETURN_IF_ERROR(
      CheckNumber("link_latency_s", options.link_latency_s));
  if (options.link_latency_s > 0 && options.link_bytes_per_s == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("host device: link_latency_s is ", options.link_latency_s,
                     ", expected 0 where link_bytes_per_s is"));
  }
  return std::make_unique<HostDeviceImpl>(kernel, std::move(options));
}

}  // namespace onepass
