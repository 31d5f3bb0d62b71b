#include "checkpoint/manifest_messages.h"

#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "dispatch/kernel.h"

namespace onepass {
namespace {

constexpr std::pair<SafetensorsType, checkpoint::ElementType> kElementTypes[] =
    {{SafetensorsType::kF32, checkpoint::ELEMENT_F32},
     {SafetensorsType::kF16, checkpoint::ELEMENT_F16},
     {SafetensorsType::kBF16, checkpoint::ELEMENT_BF16},
     {SafetensorsType::kU8, checkpoint::ELEMENT_U8},
     {SafetensorsType::kI16, checkpoint::ELEMENT_I16}};

constexpr std::pair<StateType, checkpoint::StateType> kStateTypes[] = {
    {StateType::kFloat32, checkpoint::STATE_FP32},
    {StateType::kBFloat16, checkpoint::STATE_BF16},
    {StateType::kFloat16, checkpoint::STATE_FP16},
    {StateType::kScaledFloat16, checkpoint::STATE_FP16_SCALED},
    {StateType::kScaledFloat8E4M3, checkpoint::STATE_E4M3_SCALED},
    {StateType::kInt16Remainder, checkpoint::STATE_INT16_REMAINDER}};

}  // namespace

checkpoint::ElementType ToMessage(SafetensorsType type) {
  for (const auto& [ours, message] : kElementTypes) {
    if (ours == type) return message;
  }
  return checkpoint::ELEMENT_UNKNOWN;
}

SafetensorsType FromMessage(checkpoint::ElementType type) {
  for (const auto& [ours, message] : kElementTypes) {
    if (message == type) return ours;
  }
  return SafetensorsType::kF32;
}

checkpoint::StateType ToMessage(StateType type) {
  for (const auto& [ours, message] : kStateTypes) {
    if (ours == type) return message;
  }
  return checkpoint::STATE_UNKNOWN;
}

StateType FromMessage(checkpoint::StateType type) {
  for (const auto& [ours, message] : kStateTypes) {
    if (message == type) return ours;
  }
  return StateType::kFloat32;
}

checkpoint::Group ToMessage(const StateGroup& group) {
  checkpoint::Group message;
  message.set_lr(group.lr);
  message.set_beta1(group.beta1);
  message.set_beta2(group.beta2);
  message.set_eps(group.eps);
  message.set_weight_decay(group.weight_decay);
  message.set_mode(group.mode == WeightDecay::kL2
                       ? checkpoint::Group::MODE_L2
                       : checkpoint::Group::MODE_ADAMW);
  message.set_bias_correction(group.bias_correction);
  message.set_step(group.step);
  return message;
}

StateGroup FromMessage(const checkpoint::Group& message) {
  StateGroup group;
  group.lr = message.lr();
  group.beta1 = message.beta1();
  group.beta2 = message.beta2();
  group.eps = message.eps();
  group.weight_decay = message.weight_decay();
  group.mode = message.mode() == checkpoint::Group::MODE_L2
                   ? WeightDecay::kL2
                   : WeightDecay::kAdamW;
  group.bias_correction = message.bias_correction();
  group.step = message.step();
  group.parameters.assign(message.parameters().begin(),
                          message.parameters().end());
  return group;
}

CheckpointMeta MetaOf(const checkpoint::Manifest& manifest) {
  CheckpointMeta meta;
  meta.step = manifest.step();
  for (const checkpoint::Group& group : manifest.groups()) {
    meta.groups.push_back(FromMessage(group));
  }
  if (manifest.has_loss_scale()) {
    const checkpoint::LossScale& scale = manifest.loss_scale();
    meta.loss_scale = LossScaleState{scale.scale(), scale.hysteresis_left(),
                                     scale.clean_steps()};
  }
  meta.user = manifest.user();
  return meta;
}

std::string ParameterOf(absl::string_view tensor) {
  if (!absl::ConsumePrefix(&tensor, "state.")) return "";
  const size_t dot = tensor.rfind('.');
  return std::string(tensor.substr(0, dot == tensor.npos ? 0 : dot));
}

std::string Fingerprint(const CheckpointMeta& meta, ExportForm form,
                        CheckpointLayout layout) {
  checkpoint::Manifest manifest;
  FillManifest(meta, layout, manifest);
  // Rank 0's alone.
  manifest.clear_user();
  return absl::StrCat(Name(form), ":", manifest.SerializeAsString());
}

absl::Status FillTensors(const std::vector<StoredArray>& arrays,
                         ExportForm form, const CheckpointMeta& meta,
                         checkpoint::Index& index) {
  absl::flat_hash_map<std::string, int64_t> step_of;  // of the parameters
  for (const StateGroup& group : meta.groups) {
    for (const std::string& name : group.parameters) step_of[name] = group.step;
  }
  index.set_leaf(kLeafNumel);
  index.set_checksum_algorithm(checkpoint::CHECKSUM_XXH3_64);
  const bool exact = form == ExportForm::kExact;
  std::string name;  // of the tensor; its scales follow it
  for (const StoredArray& array : arrays) {
    if (!array.scales) name = array.name;
    checkpoint::Tensor& tensor = *index.add_tensors();
    tensor.set_name(array.name);
    tensor.set_element_type(ToMessage(array.type));
    tensor.set_state_type(array.scales ? checkpoint::STATE_SCALES
                                       : ToMessage(array.state_type));
    tensor.set_form(exact ? checkpoint::FORM_EXACT : checkpoint::FORM_UNSCALED);
    tensor.mutable_shape()->Add(array.shape.begin(), array.shape.end());
    tensor.mutable_offset()->Add(array.box.offset.begin(),
                                 array.box.offset.end());
    tensor.mutable_extent()->Add(array.box.extent.begin(),
                                 array.box.extent.end());
    if (exact && IsScaled(array.state_type) && !array.scales) {
      tensor.set_scales(ScalesName(array.name));
    }
    const std::string parameter = ParameterOf(name);
    const auto step = step_of.find(parameter);
    if (step == step_of.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("state \"", name, "\" is of the parameter \"", parameter,
                       "\", which is in no group"));
    }
    tensor.set_step(step->second);
  }
  return absl::OkStatus();
}

void FillFiles(const StateFiles& files, checkpoint::Index& index) {
  for (const StoredFile& stored : files.files()) {
    checkpoint::DataFile& file = *index.add_files();
    file.set_name(stored.name);
    file.set_length(stored.bytes);
    file.set_header_length(stored.header_bytes);
    file.set_header_checksum(stored.header_checksum);
  }
  for (int i = 0; i < index.tensors_size(); ++i) {
    checkpoint::Tensor& tensor = *index.mutable_tensors(i);
    tensor.set_file(files.file_of(i));
    for (const StoredChunk& stored : files.chunks_of(i)) {
      checkpoint::Chunk& chunk = *tensor.add_chunks();
      chunk.set_offset(stored.offset);
      chunk.set_length(stored.bytes);
      chunk.set_first(stored.first);
      chunk.set_elements(stored.numel);
      chunk.set_checksum(stored.checksum);
    }
  }
}

void FillManifest(const CheckpointMeta& meta, CheckpointLayout layout,
                  checkpoint::Manifest& manifest) {
  manifest.set_step(meta.step);
  manifest.set_leaf(kLeafNumel);
  manifest.set_layout(layout == CheckpointLayout::kFlat
                          ? checkpoint::LAYOUT_FLAT
                          : checkpoint::LAYOUT_NESTED);
  manifest.set_checksum_algorithm(checkpoint::CHECKSUM_XXH3_64);
  for (const StateGroup& group : meta.groups) {
    *manifest.add_groups() = ToMessage(group);
  }
  if (meta.loss_scale.has_value()) {
    checkpoint::LossScale& scale = *manifest.mutable_loss_scale();
    scale.set_scale(meta.loss_scale->scale);
    scale.set_hysteresis_left(meta.loss_scale->hysteresis_left);
    scale.set_clean_steps(meta.loss_scale->clean_steps);
  }
  manifest.set_user(meta.user);
}

}  // namespace onepass
