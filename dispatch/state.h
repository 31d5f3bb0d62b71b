// The view of optimizer state that its owner hands out: where each state tensor
// lies, without a copy.
//
//   ASSIGN_OR_RETURN(StateLease lease, optimizer.LeaseState());
//   for (const StateView& view : lease.views()) Write(view);
//   // When `lease` goes, the optimizer may step again.
//
// Names are those of PyTorch's flat optimizer state: "state.<parameter>.<kind>"
// with kind "master_param", "exp_avg" or "exp_avg_sq".

#ifndef ONEPASS_DISPATCH_STATE_H_
#define ONEPASS_DISPATCH_STATE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "dispatch/dtype.h"

namespace onepass {

// What Adam keeps for each element.
enum class StateKind : uint8_t { kMaster, kExpAvg, kExpAvgSq };

// "master_param", "exp_avg", "exp_avg_sq".
const char* Name(StateKind kind);

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

// A range of the elements of one state tensor of one rank.
struct StateView {
  std::string name;
  DType type;
  std::vector<int64_t> shape;  // of the whole tensor
  Box box;                     // what this rank has of it
  // Elements [offset, offset + numel) of the box in C order. The views of a
  // name cover its box, one after the other.
  int64_t offset;
  int64_t numel;
  bool on_device;    // else in host memory
  const void* data;  // numel elements of `type`
};

// Keeps the state in its place, unchanged, while it lives.
class StateLease {
 public:
  StateLease(std::vector<StateView> views, std::function<void()> release)
      : views_(std::move(views)), release_(std::move(release)) {}
  ~StateLease() {
    if (release_) release_();
  }
  StateLease(StateLease&& other) noexcept
      : views_(std::move(other.views_)),
        release_(std::exchange(other.release_, nullptr)) {}
  StateLease& operator=(StateLease&& other) noexcept {
    if (this != &other) {
      if (release_) release_();
      views_ = std::move(other.views_);
      release_ = std::exchange(other.release_, nullptr);
    }
    return *this;
  }

  // In the order in which a step updates them.
  const std::vector<StateView>& views() const { return views_; }

 private:
  std::vector<StateView> views_;
  std::function<void()> release_;
};

}  // namespace onepass

#endif  // ONEPASS_DISPATCH_STATE_H_
