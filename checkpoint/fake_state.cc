#include "checkpoint/fake_state.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/box_runs.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/kernel.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

// The whole tensor as a box.
Box Whole(const FakeTensor& tensor) {
  return {std::vector<int64_t>(tensor.shape.size()), tensor.shape};
}

Box ScaleBox(const FakeTensor& tensor, const Box& box) {
  int64_t begin = 0;
  EXPECT_TRUE(IsFlatRange(tensor.shape, box, &begin));
  return {{begin / kLeafNumel}, {LeafCount(box.numel())}};
}

}  // namespace

std::string FakeTensor::name() const {
  return absl::StrCat("state.", parameter, ".", Name(kind));
}

int64_t FakeTensor::numel() const { return NumelOf(shape); }

FakeModel::FakeModel(std::vector<FakeTensor> tensors, uint32_t seed)
    : tensors_(std::move(tensors)) {
  std::mt19937 random(seed);
  for (const FakeTensor& tensor : tensors_) {
    std::vector<char>& bytes = bytes_.emplace_back(
        static_cast<size_t>(tensor.numel() * ByteSize(tensor.type)));
    for (char& byte : bytes) byte = static_cast<char>(random());
    std::vector<float>& scales = scales_.emplace_back();
    if (!IsScaled(tensor.type)) continue;
    scales.resize(static_cast<size_t>(LeafCount(tensor.numel())));
    for (float& scale : scales) {
      scale = 1.0f / static_cast<float>(1 + random() % 1000);
    }
  }
}

CheckpointMeta FakeModel::Meta(int64_t step) const {
  CheckpointMeta meta;
  meta.step = step;
  meta.groups.resize(2);
  for (int g = 0; g < 2; ++g) {
    StateGroup& group = meta.groups[g];
    group.step = step + g;
    group.lr = 0.5f / static_cast<float>(step + 1);
    group.beta1 = 0.9f;
    group.beta2 = 0.99f;
    group.eps = 1e-8f;
    group.weight_decay = 0.25f;
    group.mode = g == 0 ? WeightDecay::kAdamW : WeightDecay::kL2;
    for (const FakeTensor& tensor : tensors_) {
      if (tensor.group != g ||
          std::count(group.parameters.begin(), group.parameters.end(),
                     tensor.parameter) > 0) {
        continue;
      }
      group.parameters.push_back(tensor.parameter);
    }
  }
  meta.loss_scale = LossScaleState{1024, 2, 17};
  meta.user = std::string("data\0at 7", 9);
  return meta;
}

FakeBoxes FlatBoxes(const FakeModel& model, int world, std::mt19937& random) {
  FakeBoxes boxes(world);
  std::vector<int64_t> cuts;
  std::string parameter;
  for (const FakeTensor& tensor : model.tensors()) {
    const int64_t leaves = LeafCount(tensor.numel());
    if (tensor.parameter != parameter) {
      parameter = tensor.parameter;
      cuts = {0};
      for (int rank = 1; rank < world; ++rank) {
        cuts.push_back(static_cast<int64_t>(random() % (leaves + 1)));
      }
      std::sort(cuts.begin(), cuts.end());
      cuts.push_back(leaves);
    }
    for (int rank = 0; rank < world; ++rank) {
      const int64_t begin = std::min(cuts[rank] * kLeafNumel, tensor.numel());
      const int64_t end = std::min(cuts[rank + 1] * kLeafNumel, tensor.numel());
      boxes[rank].push_back({{begin}, {end - begin}});
    }
  }
  return boxes;
}

FakeBoxes GridBoxes(const FakeModel& model, int world, std::mt19937& random) {
  FakeBoxes boxes = FlatBoxes(model, world, random);
  std::vector<int64_t> parts;  // of each dimension
  std::vector<std::vector<int64_t>> cuts;
  std::string parameter;
  for (size_t i = 0; i < model.tensors().size(); ++i) {
    const FakeTensor& tensor = model.tensors()[i];
    const size_t dimensions = tensor.shape.size();
    if (dimensions < 2 || IsScaled(tensor.type)) continue;
    if (tensor.parameter != parameter) {
      parameter = tensor.parameter;
      parts.assign(dimensions, 1);
      // The factors of the number of ranks, each to some dimension.
      int64_t rest = world;
      for (int64_t factor = 2; rest > 1; ++factor) {
        for (; rest % factor == 0; rest /= factor) {
          parts[random() % dimensions] *= factor;
        }
      }
      cuts.clear();
      for (size_t d = 0; d < dimensions; ++d) {
        std::vector<int64_t>& of_one = cuts.emplace_back();
        of_one = {0, tensor.shape[d]};
        for (int64_t part = 1; part < parts[d]; ++part) {
          of_one.push_back(
              static_cast<int64_t>(random() % (tensor.shape[d] + 1)));
        }
        std::sort(of_one.begin(), of_one.end());
      }
    }
    for (int rank = 0; rank < world; ++rank) {
      Box& box = boxes[rank][i];
      box = Whole(tensor);
      int64_t place = rank;
      for (size_t d = 0; d < dimensions; ++d) {
        const int64_t part = place % parts[d];
        place /= parts[d];
        box.offset[d] = cuts[d][part];
        box.extent[d] = cuts[d][part + 1] - cuts[d][part];
      }
    }
  }
  return boxes;
}

char* FakeState::Part::data() {
  return on_device ? device.as<char>() : host.data();
}
float* FakeState::Part::scales() {
  return on_device ? device_scales.as<float>() : host_scales.data();
}

FakeState::FakeState(const FakeModel& model, std::vector<Box> boxes,
                     const Runtime& runtime, bool on_device)
    : model_(model), boxes_(std::move(boxes)), runtime_(runtime) {
  for (size_t i = 0; i < model_.tensors().size(); ++i) {
    const StateType type = model_.tensors()[i].type;
    const int64_t numel = boxes_[i].numel();
    const int64_t half = LeafCount(numel) / 2 * kLeafNumel;
    std::vector<int64_t> cuts = {0, numel};
    if (half > 0) cuts.insert(cuts.begin() + 1, half);
    for (size_t c = 0; c + 1 < cuts.size(); ++c) {
      auto part = std::make_unique<Part>();
      part->tensor = static_cast<int>(i);
      part->offset = cuts[c];
      part->numel = cuts[c + 1] - cuts[c];
      part->on_device = on_device && c + 2 == cuts.size();
      const int64_t bytes = part->numel * ByteSize(type);
      const int64_t scales = IsScaled(type) ? LeafCount(part->numel) : 0;
      if (part->on_device) {
        auto data = runtime_.device.Allocate(bytes);
        auto scale_data = runtime_.device.Allocate(scales * 4);
        EXPECT_TRUE(data.ok() && scale_data.ok());
        part->device = *std::move(data);
        part->device_scales = *std::move(scale_data);
      } else {
        part->host.resize(static_cast<size_t>(bytes));
        part->host_scales.resize(static_cast<size_t>(scales));
      }
      parts_.push_back(std::move(part));
    }
  }
  Clear();
}

// Device memory is the host's here: that of a HostDevice.
void FakeState::ForEachElement(bool expect, bool clear) {
  const auto move = [&](void* mine, const void* models, int64_t bytes,
                        const std::string& name) {
    if (bytes == 0) return;
    if (clear) {
      std::memset(mine, 0x5a, bytes);
    } else if (expect) {
      EXPECT_EQ(std::memcmp(mine, models, bytes), 0) << name;
    } else {
      std::memcpy(mine, models, bytes);
    }
  };
  for (const std::unique_ptr<Part>& part : parts_) {
    const FakeTensor& tensor = model_.tensors()[part->tensor];
    const Box& box = boxes_[part->tensor];
    const int64_t bytes = ByteSize(tensor.type);
    const char* const whole = model_.bytes(part->tensor).data();
    EXPECT_TRUE(
        ForEachCommonRun(tensor.shape, Whole(tensor), box,
                         [&](int64_t i, int64_t j, int64_t n) {
                           const int64_t from = std::max(j, part->offset);
                           const int64_t to =
                               std::min(j + n, part->offset + part->numel);
                           if (from < to) {
                             move(part->data() + (from - part->offset) * bytes,
                                  whole + (i + from - j) * bytes,
                                  (to - from) * bytes, tensor.name());
                           }
                           return absl::OkStatus();
                         })
            .ok());
    if (!IsScaled(tensor.type) || part->numel == 0) continue;
    const int64_t first =
        ScaleBox(tensor, box).offset[0] + part->offset / kLeafNumel;
    move(part->scales(), model_.scales(part->tensor).data() + first,
         LeafCount(part->numel) * 4, tensor.name());
  }
}

void FakeState::Fill() { ForEachElement(false, false); }
void FakeState::Clear() { ForEachElement(false, true); }
void FakeState::ExpectFilled() const {
  const_cast<FakeState*>(this)->ForEachElement(true, false);
}

StateRestore FakeState::Restore() {
  std::vector<StateTarget> targets;
  for (const std::unique_ptr<Part>& part : parts_) {
    const FakeTensor& tensor = model_.tensors()[part->tensor];
    StateTarget& target = targets.emplace_back();
    target.name = tensor.name();
    target.type = tensor.type;
    target.shape = tensor.shape;
    target.box = boxes_[part->tensor];
    target.offset = part->offset;
    target.numel = part->numel;
    target.on_device = part->on_device;
    target.data = target.out_data = part->data();
    if (IsScaled(tensor.type)) {
      target.scales = target.out_scales = part->scales();
    }
  }
  StateRestore::Owner owner;
  owner.commit = [this] { return commit_; };
  owner.end = [this](bool written, bool committed) {
    written_ = written;
    committed_ = committed;
  };
  return StateRestore(std::move(targets), std::move(owner));
}

StateLease FakeState::Lease() {
  const StateRestore restore = Restore();
  std::vector<StateView> views(restore.targets().begin(),
                               restore.targets().end());
  return StateLease(std::move(views), nullptr);
}

}  // namespace onepass
