// State of a trainer for tests: tensors with random bits, split over ranks in
// any way, on the host and on a device, leased and restored as an optimizer's.
//
//   const FakeModel model(tensors, seed);
//   FakeState state(model, boxes, runtime);       // on each rank
//   state.Fill();
//   SaveCheckpoint(..., state.Lease(), model.Meta(7), {});
//   state.ExpectFilled();

#ifndef ONEPASS_CHECKPOINT_FAKE_STATE_H_
#define ONEPASS_CHECKPOINT_FAKE_STATE_H_

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/meta.h"
#include "dispatch/device.h"
#include "dispatch/runtime.h"
#include "dispatch/state.h"

namespace onepass {

// A whole tensor of the optimizer.
struct FakeTensor {
  std::string parameter;
  StateKind kind = StateKind::kExpAvg;
  StateType type = StateType::kFloat32;
  std::vector<int64_t> shape;
  int group = 0;

  std::string name() const;
  int64_t numel() const;
};

class FakeModel {
 public:
  FakeModel(std::vector<FakeTensor> tensors, uint32_t seed);

  const std::vector<FakeTensor>& tensors() const { return tensors_; }
  // Of the whole tensor `i`: its bytes, and its scales.
  const std::vector<char>& bytes(int i) const { return bytes_[i]; }
  const std::vector<float>& scales(int i) const { return scales_[i]; }
  // Two groups, at steps `step` and `step` + 1.
  CheckpointMeta Meta(int64_t step) const;

 private:
  const std::vector<FakeTensor> tensors_;
  std::vector<std::vector<char>> bytes_;
  std::vector<std::vector<float>> scales_;
};

// A box for each tensor and rank: boxes[rank][tensor].
using FakeBoxes = std::vector<std::vector<Box>>;

// Ranges of elements, cut at random multiples of a leaf; some are empty. The
// tensors of one parameter are cut alike.
FakeBoxes FlatBoxes(const FakeModel& model, int world, std::mt19937& random);
// The same, but of what has two dimensions and is not scaled the boxes of a
// grid: random parts of some dimensions.
FakeBoxes GridBoxes(const FakeModel& model, int world, std::mt19937& random);

// What one rank has.
class FakeState {
 public:
  // Elements from the middle of each box on, by leaves, are on the device where
  // `on_device`. A tensor is cut into two views, where it has leaves for that.
  FakeState(const FakeModel& model, std::vector<Box> boxes,
            const Runtime& runtime, bool on_device);

  // With what the model has there.
  void Fill();
  // Whether it is the model's, bit by bit; all of it.
  void ExpectFilled() const;
  // With something else.
  void Clear();

  StateLease Lease();
  StateRestore Restore();
  // Lets the next commit fail.
  void FailCommit(const absl::Status& error) { commit_ = error; }
  // What came of the last restore.
  bool written() const { return written_; }
  bool committed() const { return committed_; }

 private:
  struct Part {
    int tensor;
    int64_t offset;  // in the box
    int64_t numel;
    bool on_device;
    // One of each pair has it.
    std::vector<char> host;
    std::vector<float> host_scales;
    DeviceBuffer device;
    DeviceBuffer device_scales;

    char* data();
    float* scales();
  };

  void ForEachElement(bool expect, bool clear);

  const FakeModel& model_;
  const std::vector<Box> boxes_;
  const Runtime runtime_;
  std::vector<std::unique_ptr<Part>> parts_;
  absl::Status commit_;
  bool written_ = false;
  bool committed_ = false;
};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_FAKE_STATE_H_
