#include "checkpoint/restore.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "checkpoint/agreement.h"
#include "checkpoint/manifest_messages.h"
#include "checkpoint/state_files.h"
#include "checkpoint/state_tensors.h"
#include "checkpoint/state_transfer.h"
#include "dispatch/host_buffer.h"
#include "dispatch/kernel.h"
#include "dispatch/operations.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

absl::Status Mismatch(absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat("the checkpoint ", what));
}

std::string Sizes(absl::Span<const int64_t> sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

const char* ModeName(WeightDecay mode) {
  return mode == WeightDecay::kL2 ? "L2" : "AdamW";
}

// So that different numbers look different.
std::string Exactly(float value) { return absl::StrFormat("%.9g", value); }
std::string Exactly(int value) { return absl::StrCat(value); }
std::string Exactly(absl::string_view value) { return std::string(value); }

// An option of a group, where it differs.
absl::Status CompareOptions(int group, const StateGroup& saved,
                            const StateGroup& wanted) {
  const auto compare = [&](const char* name, auto a, auto b) -> absl::Status {
    if (a == b) return absl::OkStatus();
    return Mismatch(absl::StrCat("has ", name, " ", Exactly(a), " in group ",
                                 group, ", the trainer has ", Exactly(b)));
  };
  ONEPASS_RETURN_IF_ERROR(compare("beta1", saved.beta1, wanted.beta1));
  ONEPASS_RETURN_IF_ERROR(compare("beta2", saved.beta2, wanted.beta2));
  ONEPASS_RETURN_IF_ERROR(compare("eps", saved.eps, wanted.eps));
  ONEPASS_RETURN_IF_ERROR(
      compare("weight_decay", saved.weight_decay, wanted.weight_decay));
  ONEPASS_RETURN_IF_ERROR(compare("mode",
                                  absl::string_view(ModeName(saved.mode)),
                                  absl::string_view(ModeName(wanted.mode))));
  return compare("bias_correction", saved.bias_correction ? 1 : 0,
                 wanted.bias_correction ? 1 : 0);
}

// Whether groups are the trainer's: parameters by name, options but lr.
absl::Status CompareGroups(const std::vector<StateGroup>& saved,
                           const std::vector<StateGroup>& wanted) {
  absl::flat_hash_map<absl::string_view, size_t> group_of;  // in `wanted`
  for (size_t g = 0; g < wanted.size(); ++g) {
    for (const std::string& name : wanted[g].parameters) group_of[name] = g;
  }
  size_t found = 0;
  for (size_t g = 0; g < saved.size(); ++g) {
    for (const std::string& name : saved[g].parameters) {
      const auto group = group_of.find(name);
      if (group == group_of.end()) {
        return Mismatch(absl::StrCat("has a parameter \"", name,
                                     "\", which the trainer has not"));
      }
      if (group->second != g) {
        return Mismatch(
            absl::StrCat("has the parameter \"", name, "\" in group ", g,
                         ", the trainer has it in group ", group->second));
      }
      ++found;
    }
  }
  if (found != group_of.size()) {
    absl::flat_hash_set<absl::string_view> names;
    for (const StateGroup& group : saved) {
      names.insert(group.parameters.begin(), group.parameters.end());
    }
    for (const StateGroup& group : wanted) {
      for (const std::string& name : group.parameters) {
        if (names.contains(name)) continue;
        return Mismatch(absl::StrCat("lacks the parameter \"", name, "\""));
      }
    }
  }
  if (saved.size() != wanted.size()) {
    return Mismatch(absl::StrCat("has ", saved.size(),
                                 " parameter groups, the trainer has ",
                                 wanted.size()));
  }
  for (size_t g = 0; g < saved.size(); ++g) {
    ONEPASS_RETURN_IF_ERROR(
        CompareOptions(static_cast<int>(g), saved[g], wanted[g]));
  }
  return absl::OkStatus();
}

class Restorer {
 public:
  Restorer(const Runtime& runtime, Checkpoint& checkpoint,
           const StateRestore& target, const RestoreOptions& options)
      : runtime_(runtime),
        checkpoint_(checkpoint),
        target_(target),
        options_(options) {}

  // What can be known before anything is written.
  absl::Status Prepare();
  absl::Status Write();

 private:
  absl::StatusOr<const Checkpoint::Tensor*> Find(absl::string_view name) const;
  absl::Status CompareTensor(const StateTensor& wanted) const;
  absl::Status CompareNames() const;
  absl::Status ReadArray(const StoredArray& array);
  // Rounds `n` elements of a tensor to the type of an array.
  absl::StatusOr<const char*> Convert(const Checkpoint::Tensor& from,
                                      const StoredArray& to, int64_t n,
                                      const char* data);

  const Runtime& runtime_;
  Checkpoint& checkpoint_;
  const StateRestore& target_;
  const RestoreOptions& options_;
  std::optional<StateTensors> tensors_;
  std::optional<StateTransfer> transfer_;
  std::unique_ptr<MemoryBudget> own_budget_;
  MemoryBudget::Share share_;
  HostBuffer buffer_;
  // Of a cast: fp32 values, then those of the target.
  std::vector<float> values_;
  std::vector<uint16_t> rounded_;
};

absl::StatusOr<const Checkpoint::Tensor*> Restorer::Find(
    absl::string_view name) const {
  const auto found = checkpoint_.tensors().find(std::string(name));
  if (found == checkpoint_.tensors().end()) {
    return Mismatch(absl::StrCat("lacks \"", name, "\""));
  }
  return &found->second;
}

absl::Status Restorer::Prepare() {
  if (checkpoint_.manifest().leaf() != kLeafNumel) {
    return Mismatch(absl::StrCat("has leaves of ",
                                 checkpoint_.manifest().leaf(),
                                 " elements, expected ", kLeafNumel));
  }
  const CheckpointMeta meta = checkpoint_.meta();
  ONEPASS_RETURN_IF_ERROR(CompareGroups(meta.groups, options_.groups));
  if (options_.check) ONEPASS_RETURN_IF_ERROR(options_.check(meta));
  absl::StatusOr<StateTensors> tensors =
      StateTensors::Create(target_.targets(), ExportForm::kExact);
  ONEPASS_RETURN_IF_ERROR(tensors.status());
  tensors_ = *std::move(tensors);
  for (const StateTensor& tensor : tensors_->tensors()) {
    ONEPASS_RETURN_IF_ERROR(CompareTensor(tensor));
  }
  ONEPASS_RETURN_IF_ERROR(CompareNames());
  for (const StoredArray& array : tensors_->arrays()) {
    const Checkpoint::Tensor* saved = nullptr;
    ONEPASS_ASSIGN_OR_RETURN(saved, Find(array.name));
    ONEPASS_RETURN_IF_ERROR(checkpoint_.FindFiles(*saved, array.box));
  }
  MemoryBudget* budget = options_.budget;
  if (budget == nullptr) {
    ONEPASS_ASSIGN_OR_RETURN(own_budget_, MemoryBudget::Create(kDefaultBudget));
    budget = own_budget_.get();
  }
  // As much again for a cast, which goes through a quarter of the buffer, and
  // needs as many bytes twice and once for its results.
  constexpr int64_t kPage = 4096;
  const int64_t bytes =
      std::min(budget->limit().host / 2, int64_t{64} << 20) / kPage * kPage;
  const int64_t least = options_.cast ? 4 * kPage : kPage;
  if (bytes < least) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the budget of ", budget->limit().host,
        " bytes of the host is too small, expected at least ", 2 * least));
  }
  if (options_.cast) {
    constexpr int64_t kLeastElement = 2;
    values_.reserve(bytes / 4 / kLeastElement);
    rounded_.reserve(bytes / 4 / kLeastElement);
  }
  ONEPASS_ASSIGN_OR_RETURN(share_, budget->Take({0, 2 * bytes}));
  HostBufferOptions memory;
  memory.huge_pages = false;
  ONEPASS_ASSIGN_OR_RETURN(buffer_,
                           HostBuffer::Create(runtime_.pool, bytes, memory));
  absl::StatusOr<StateTransfer> transfer =
      StateTransfer::Create(runtime_, *tensors_, {});
  ONEPASS_RETURN_IF_ERROR(transfer.status());
  transfer_.emplace(*std::move(transfer));
  return absl::OkStatus();
}

absl::Status Restorer::CompareTensor(const StateTensor& wanted) const {
  const Checkpoint::Tensor* saved = nullptr;
  ONEPASS_ASSIGN_OR_RETURN(saved, Find(wanted.name));
  if (saved->scales) {
    return Mismatch(
        absl::StrCat("has scales in the place of \"", wanted.name, "\""));
  }
  if (saved->shape != wanted.shape) {
    return Mismatch(absl::StrCat("has \"", wanted.name, "\" of shape ",
                                 Sizes(saved->shape), ", the trainer has ",
                                 Sizes(wanted.shape)));
  }
  const bool same = saved->state_type == wanted.type &&
                    saved->type == StoredType(wanted.type, ExportForm::kExact);
  const auto plain = [](StateType type) {
    return type == StateType::kFloat32 || type == StateType::kBFloat16 ||
           type == StateType::kFloat16;
  };
  const bool castable =
      options_.cast && plain(wanted.type) &&
      (plain(saved->state_type) || saved->type == SafetensorsType::kF32);
  if (!same && !castable) {
    return Mismatch(absl::StrCat("has \"", wanted.name, "\" of type ",
                                 Name(saved->state_type),
                                 saved->exact ? "" : ", stored unscaled",
                                 ", the trainer has ", Name(wanted.type)));
  }
  if (wanted.type == StateType::kInt16Remainder) {
    const std::string name = absl::StrCat("state.", ParameterOf(wanted.name),
                                          ".", Name(StateKind::kParam));
    const Checkpoint::Tensor* param = nullptr;
    ONEPASS_ASSIGN_OR_RETURN(param, Find(name));
    if (param->step != saved->step) {
      return Mismatch(absl::StrCat(
          "has \"", wanted.name, "\" of step ", saved->step, " and \"", name,
          "\" of step ", param->step, ": they are one number only together"));
    }
  }
  if (!IsScaled(wanted.type)) return absl::OkStatus();
  const Checkpoint::Tensor* scales = nullptr;
  ONEPASS_ASSIGN_OR_RETURN(scales, Find(ScalesName(wanted.name)));
  const std::vector<int64_t> leaves = {LeafCount(NumelOf(wanted.shape))};
  if (saved->scales_name == scales->name && scales->scales &&
      scales->shape == leaves) {
    return absl::OkStatus();
  }
  return Mismatch(absl::StrCat("has \"", wanted.name, "\" with the scales \"",
                               saved->scales_name, "\", expected \"",
                               scales->name, "\", one a leaf"));
}

absl::Status Restorer::CompareNames() const {
  absl::flat_hash_set<std::string> parameters;  // of which this rank has some
  absl::flat_hash_set<absl::string_view> names;
  for (const StateTensor& tensor : tensors_->tensors()) {
    parameters.insert(ParameterOf(tensor.name));
    names.insert(tensor.name);
  }
  absl::flat_hash_map<std::string, int64_t> step_of;
  for (const StateGroup& group : checkpoint_.meta().groups) {
    for (const std::string& name : group.parameters) step_of[name] = group.step;
  }
  for (const auto& [name, tensor] : checkpoint_.tensors()) {
    if (tensor.scales) continue;
    const std::string parameter = ParameterOf(name);
    const auto step = step_of.find(parameter);
    if (step == step_of.end() ||
        (parameters.contains(parameter) && !names.contains(name))) {
      return Mismatch(
          absl::StrCat("has \"", name, "\", which the trainer has not"));
    }
    if (step->second != tensor.step) {
      return Mismatch(absl::StrCat("has \"", name, "\" of step ", tensor.step,
                                   ", and its group is at step ",
                                   step->second));
    }
  }
  return absl::OkStatus();
}

absl::Status Restorer::Write() {
  for (const StoredArray& array : tensors_->arrays()) {
    ONEPASS_RETURN_IF_ERROR(ReadArray(array));
  }
  return absl::OkStatus();
}

absl::Status Restorer::ReadArray(const StoredArray& array) {
  const Checkpoint::Tensor* saved = nullptr;
  ONEPASS_ASSIGN_OR_RETURN(saved, Find(array.name));
  int64_t done = 0;
  // A quarter of what there is, where as much is needed for a cast.
  const bool casts = saved->type != array.type;
  const absl::Span<char> buffer =
      absl::MakeSpan(buffer_.as<char>(), static_cast<size_t>(buffer_.bytes()))
          .subspan(0, static_cast<size_t>(casts ? buffer_.bytes() / 4
                                                : buffer_.bytes()));
  ONEPASS_RETURN_IF_ERROR(checkpoint_.Read(
      *saved, array.box, buffer,
      [&](int64_t first, int64_t n, const char* data) -> absl::Status {
        const char* from = data;
        if (casts) {
          ONEPASS_ASSIGN_OR_RETURN(from, Convert(*saved, array, n, data));
        }
        done += n;
        ONEPASS_RETURN_IF_ERROR(transfer_->Write(array, first, n, from));
        // What was converted lies in a buffer that the next run needs.
        return casts ? transfer_->FinishWriting() : absl::OkStatus();
      },
      [&] { return transfer_->FinishWriting(); }));
  if (done == array.numel) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("the checkpoint has ", done, " elements of \"", array.name,
                   "\" where ", array.numel, " are wanted"));
}

absl::StatusOr<const char*> Restorer::Convert(const Checkpoint::Tensor& from,
                                              const StoredArray& to, int64_t n,
                                              const char* data) {
  const auto type_of = [](SafetensorsType type) {
    return type == SafetensorsType::kBF16  ? DType::kBFloat16
           : type == SafetensorsType::kF16 ? DType::kFloat16
                                           : DType::kFloat32;
  };
  const DType in = type_of(from.type);
  const DType out = type_of(to.type);
  const void* values = data;
  if (in != DType::kFloat32) {
    values_.resize(n);
    ONEPASS_RETURN_IF_ERROR(
        Cast(runtime_.kernel, runtime_.pool,
             {n, data, values_.data(), in, DType::kFloat32}));
    values = values_.data();
  }
  if (out == DType::kFloat32) return static_cast<const char*>(values);
  rounded_.resize(n);
  ONEPASS_RETURN_IF_ERROR(
      Cast(runtime_.kernel, runtime_.pool,
           {n, values, rounded_.data(), DType::kFloat32, out}));
  return reinterpret_cast<const char*>(rounded_.data());
}

// That all ranks are prepared to restore the same.
absl::Status AgreeOnCheckpoint(Communicator& communicator,
                               const Checkpoint& checkpoint,
                               const absl::Status& prepared) {
  absl::StatusOr<std::string> mine =
      absl::StrCat(Checksum(checkpoint.manifest().SerializeAsString()));
  if (!prepared.ok()) mine = prepared;
  std::vector<std::string> all;
  ONEPASS_ASSIGN_OR_RETURN(all, ExchangeOrFail(communicator, mine));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    // All ranks see it.
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank, " has opened another checkpoint than rank 0"));
  }
  return absl::OkStatus();
}

// The groups in the order of the trainer's names are those of the checkpoint:
// CompareGroups() has them alike.
CheckpointMeta InOrderOf(const std::vector<StateGroup>& wanted,
                         CheckpointMeta meta) {
  for (size_t g = 0; g < wanted.size(); ++g) {
    meta.groups[g].parameters = wanted[g].parameters;
  }
  return meta;
}

}  // namespace

absl::StatusOr<CheckpointMeta> RestoreCheckpoint(
    const Runtime& runtime, Communicator& communicator, Checkpoint& checkpoint,
    StateRestore target, const RestoreOptions& options) {
  Restorer restorer(runtime, checkpoint, target, options);
  ONEPASS_RETURN_IF_ERROR(
      AgreeOnCheckpoint(communicator, checkpoint, restorer.Prepare()));
  target.BeginWriting();
  ONEPASS_RETURN_IF_ERROR(Agree(communicator, restorer.Write()));
  if (absl::Status status = Agree(communicator, target.Commit());
      !status.ok()) {
    target.Abandon();
    return status;
  }
  return InOrderOf(options.groups, checkpoint.meta());
}

}  // namespace onepass
