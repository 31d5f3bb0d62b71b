// The view of optimizer state that its owner hands out, to be read or to be
// restored: where each state tensor lies, without a copy.
//
//   ASSIGN_OR_RETURN(StateLease lease, optimizer.LeaseState());
//   for (const StateView& view : lease.views()) Write(view);
//   // When `lease` goes, the optimizer may step again.
//
//   ASSIGN_OR_RETURN(StateRestore restore, optimizer.RestoreState());
//   restore.BeginWriting();
//   for (const StateTarget& target : restore.targets()) Read(target);
//   RETURN_IF_ERROR(restore.Commit());
//
// Names are those of PyTorch's flat optimizer state: "state.<parameter>.<kind>"
// with kind "param", "master_param", "exp_avg" or "exp_avg_sq".

#ifndef ONEPASS_DISPATCH_STATE_H_
#define ONEPASS_DISPATCH_STATE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dispatch/kernel.h"

namespace onepass {

// What Adam keeps for each element.
enum class StateKind : uint8_t {
  kMaster,
  kExpAvg,
  kExpAvgSq,
  // The weights themselves, where no master holds all their bits: they are then
  // state of the optimizer.
  kParam,
};

// "master_param", "exp_avg", "exp_avg_sq", "param".
const char* Name(StateKind kind);

// How elements of state are stored. The values are stable.
enum class StateType : uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  // Codes, and a scale (fp32) for each leaf of them: QuantizeArgs of
  // dispatch/kernel.h.
  kScaledFloat16 = 3,
  kScaledFloat8E4M3 = 4,
  // What a bf16 weight lacks to its fp32 master (SplitRemainderArgs), as int16.
  // The weight is the kParam of the same parameter.
  kInt16Remainder = 5,
};

inline constexpr StateType kAllStateTypes[] = {
    StateType::kFloat32,          StateType::kBFloat16,
    StateType::kFloat16,          StateType::kScaledFloat16,
    StateType::kScaledFloat8E4M3, StateType::kInt16Remainder};

// Bytes of one element, without its scale.
int64_t ByteSize(StateType type);

// "fp32", "bf16", "fp16", "scaled fp16", "scaled e4m3", "int16 remainder".
const char* Name(StateType type);

// Whether it has a scale for each leaf.
inline constexpr bool IsScaled(StateType type) {
  return type == StateType::kScaledFloat16 ||
         type == StateType::kScaledFloat8E4M3;
}

// The part of a tensor that one rank has: `extent` elements from `offset` on in
// each dimension. Of the tensor's own number of dimensions, or of one: a range
// of its elements in C order.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> extent;

  // Elements in it.
  int64_t numel() const {
    int64_t n = 1;
    for (const int64_t e : extent) n *= e;
    return n;
  }
};

// The elements of a box of a tensor of that shape. InvalidArgument says why
// there can be none such.
absl::StatusOr<int64_t> CheckBox(absl::Span<const int64_t> shape,
                                 const Box& box);

// Whether the leaves of a box are leaves of its tensor, so that scaled types
// can be of it: it is the whole tensor, a range of its elements that begins at
// a multiple of a leaf and ends at one or with the tensor, or empty. Of a box
// that CheckBox() finds right.
bool HasLeavesOfTensor(absl::Span<const int64_t> shape, const Box& box);

// A range of the elements of one state tensor of one rank.
struct StateView {
  std::string name;
  StateType type;
  std::vector<int64_t> shape;  // of the whole tensor
  Box box;                     // what this rank has of it
  // Elements [offset, offset + numel) of the box in C order. The views of a
  // name cover its box, one after the other; all but the last end at a multiple
  // of a leaf of the box.
  int64_t offset;
  int64_t numel;
  bool on_device;    // else in host memory
  const void* data;  // numel elements of `type`
  // Of scaled types: LeafCount(numel) floats, where the data is. Their box is a
  // range of the tensor's elements that begins at a multiple of a leaf.
  const float* scales = nullptr;
  // The fence that it lies behind, where the lease has any. Views behind one
  // follow each other; those of a tensor, and of a remainder and its weight,
  // are behind the same.
  int fence = 0;
};

// Between who reads leased state and its owner, who goes on meanwhile: what
// lies behind a fence is not changed before that is open.
//
//   RETURN_IF_ERROR(fences.BeginReading());    // the reader, for each piece
//   ... read ...
//   fences.EndReading();
//   fences.Open(fence);                        // all behind it has been read
//
//   fences.Wait(fence, timeout);               // the owner, before a change
//
// A fence never fails the owner: where the reader is too slow it is cancelled.
class StateFences {
 public:
  // None of them open.
  explicit StateFences(int count) : open_(count) {}

  // Whether something may be read until EndReading(); the reason why not, once
  // it is cancelled.
  absl::Status BeginReading();
  void EndReading();
  void Open(int fence);
  // Nothing will be read any more.
  void OpenAll();

  // Returns when the fence is open; after `timeout` it cancels the reading
  // first (DeadlineExceeded). Whether it had to wait.
  bool Wait(int fence, std::chrono::milliseconds timeout);
  // Lets nothing be read any more, waits for what is being read, and opens all.
  void Cancel(const absl::Status& reason);

  int count() const { return static_cast<int>(open_.size()); }
  bool all_open() const;

 private:
  void OpenAllLocked();

  std::mutex mutex_;
  std::condition_variable changed_;
  // So that an open one costs its owner no lock.
  std::vector<std::atomic<bool>> open_;
  bool reading_ = false;
  absl::Status cancelled_;
};

// Keeps the state in its place, unchanged, while it lives; where it has fences,
// only what lies behind those that are not open.
class StateLease {
 public:
  // `release` may be null.
  StateLease(std::vector<StateView> views, std::function<void()> release,
             std::shared_ptr<StateFences> fences = nullptr)
      : views_(std::move(views)),
        release_(std::move(release)),
        fences_(std::move(fences)) {}
  ~StateLease() { Release(); }
  StateLease(StateLease&& other) noexcept { *this = std::move(other); }
  StateLease& operator=(StateLease&& other) noexcept {
    if (this != &other) {
      Release();
      views_ = std::move(other.views_);
      release_ = std::exchange(other.release_, nullptr);
      fences_ = std::exchange(other.fences_, nullptr);
    }
    return *this;
  }

  // In the order in which a step updates them. Those of a kParam come directly
  // before those of the remainder that belongs to it.
  const std::vector<StateView>& views() const { return views_; }
  // Null: its owner changes nothing of it while the lease lives.
  StateFences* fences() const { return fences_.get(); }

 private:
  void Release() {
    if (fences_ != nullptr) fences_->OpenAll();
    if (release_) release_();
    fences_ = nullptr;
    release_ = nullptr;
  }

  std::vector<StateView> views_;
  std::function<void()> release_;
  std::shared_ptr<StateFences> fences_;
};

// The same to be written. `data` and `scales` are the same memory.
struct StateTarget : StateView {
  void* out_data = nullptr;
  float* out_scales = nullptr;
};

// Lets the state be replaced, in its place. Until BeginWriting() its owner is
// as it was; from then on it is unusable, unless Commit() returns OK: nobody
// goes on with half of a state.
class StateRestore {
 public:
  // What the owner does with it. Both are called at most once.
  struct Owner {
    // Takes what was written for its state, and derives from it what else there
    // is, as weights.
    std::function<absl::Status()> commit;
    // It ends, written to or not; committed or not.
    std::function<void(bool written, bool committed)> end;
  };

  StateRestore(std::vector<StateTarget> targets, Owner owner)
      : targets_(std::move(targets)), owner_(std::move(owner)) {}
  ~StateRestore() { End(); }
  StateRestore(StateRestore&& other) noexcept { *this = std::move(other); }
  StateRestore& operator=(StateRestore&& other) noexcept {
    if (this != &other) {
      End();
      targets_ = std::move(other.targets_);
      owner_ = std::exchange(other.owner_, {});
      written_ = other.written_;
      committed_ = other.committed_;
    }
    return *this;
  }

  // As StateLease::views().
  const std::vector<StateTarget>& targets() const { return targets_; }

  // Before the first byte is written.
  void BeginWriting() { written_ = true; }
  // After all are written, and no stream works on them. Errors: those of the
  // owner, which is then unusable.
  absl::Status Commit() {
    const absl::Status status =
        owner_.commit ? owner_.commit() : absl::OkStatus();
    committed_ = status.ok();
    return status;
  }
  // After Commit(): what belongs to it did not come. The owner is unusable, as
  // without.
  void Abandon() { committed_ = false; }

 private:
  void End() {
    if (owner_.end) owner_.end(written_, committed_);
    owner_ = {};
  }

  std::vector<StateTarget> targets_;
  Owner owner_;
  bool written_ = false;
  bool committed_ = false;
};

// Updates that a parameter group can have had: one more can always be counted.
inline constexpr int64_t kMostSteps = int64_t{1} << 62;

// A parameter group, as a checkpoint holds it: options as the fp32 values that
// kernels use.
struct StateGroup {
  std::vector<std::string> parameters;  // their names
  int64_t step = 0;                     // updates that it has had
  float lr = 0;
  float beta1 = 0;
  float beta2 = 0;
  float eps = 0;
  float weight_decay = 0;
  WeightDecay mode = WeightDecay::kAdamW;  // kL2 or kAdamW
  bool bias_correction = true;
};

// Of a loss scaler (offload/loss_scaler.h).
struct LossScaleState {
  double scale = 1;
  int64_t hysteresis_left = 1;  // the scale is halved at so many overflows more
  int64_t clean_steps = 0;      // since the last overflow or growth
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_STATE_H_
