#include "checkpoint/save.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/agreement.h"
#include "checkpoint/export_state.h"
#include "checkpoint/files.h"
#include "checkpoint/find.h"
#include "checkpoint/gather_state.h"
#include "checkpoint/manifest.h"
#include "checkpoint/manifest_messages.h"
#include "checkpoint/publish.h"
#include "checkpoint/state_files.h"
#include "dispatch/host_buffer.h"
#include "dispatch/kernel.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

using Clock = std::chrono::steady_clock;

// Chunks and scratch, as the budget has them.
struct Plan {
  int64_t chunk_bytes;
  int buffers;
  int64_t scratch_bytes;
  MemoryBudget::Bytes taken;
};

// Where `arrays` are written, and as many more chunks are needed.
absl::StatusOr<Plan> MakePlan(const StateTensors& tensors,
                              const std::vector<StoredArray>& arrays,
                              const SaveOptions& options,
                              const MemoryBudget& budget, int more_chunks) {
  Plan plan;
  // One for each file that is being filled, one that is being written, and one
  // more where there is room.
  const int files = StateFiles::FileCount(arrays);
  plan.buffers = std::max(files, 1) + 2;
  const int chunks = plan.buffers + more_chunks;
  int64_t total = 0;
  for (const StoredArray& array : arrays) total += array.bytes();
  const auto down = [](int64_t bytes) {
    return bytes / kOutputAlignment * kOutputAlignment;
  };
  const int64_t host = budget.limit().host;
  // Small state needs no large buffers.
  const int64_t enough =
      down(total + kOutputAlignment - 1) + 2 * kOutputAlignment;
  plan.chunk_bytes = std::min(down(options.chunk_bytes), down(host / chunks));
  // Where others give chunks, they are of the same size on all ranks.
  if (more_chunks == 0) plan.chunk_bytes = std::min(plan.chunk_bytes, enough);
  if (plan.chunk_bytes < kOutputAlignment) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the budget of ", host, " bytes of the host, in chunks of ",
        options.chunk_bytes, ", is too small for ", chunks,
        " chunks of at least ", kOutputAlignment, " bytes"));
  }
  // Of the device one chunk of fp32 values, where something is converted.
  plan.scratch_bytes =
      std::min(budget.limit().device,
               std::max(options.chunk_bytes, kLeafNumel * int64_t{4}));
  plan.taken.host = plan.chunk_bytes * chunks;
  plan.taken.device =
      tensors.on_device() && options.granularity == ExportGranularity::kChunk &&
              options.form != ExportForm::kExact
          ? plan.scratch_bytes
          : 0;
  return plan;
}

// Whether each tensor lies behind one fence of `count`, and a remainder behind
// that of its weight: what is read last opens it.
absl::Status CheckFences(const StateTensors& tensors, int count) {
  for (const StateTensor& tensor : tensors.tensors()) {
    const int fence = tensor.views.front()->fence;
    bool same = fence >= 0 && fence < count;
    for (const StateView* view : tensor.views) same &= view->fence == fence;
    if (tensor.type == StateType::kInt16Remainder) {
      same &= tensors.tensors()[tensor.param].views.front()->fence == fence;
    }
    if (same) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "state \"", tensor.name, "\" does not lie behind one fence of ", count,
        ", with what belongs to it"));
  }
  return absl::OkStatus();
}

// As a RankParameters.
std::string SerializeParameters(const CheckpointMeta& meta) {
  checkpoint::RankParameters parameters;
  for (const StateGroup& group : meta.groups) {
    auto& names = *parameters.add_groups();
    for (const std::string& parameter : group.parameters) {
      names.add_names(parameter);
    }
  }
  return parameters.SerializeAsString();
}

class Saver {
 public:
  Saver(const Runtime& runtime, Communicator& communicator,
        absl::string_view parent, absl::string_view name,
        const CheckpointMeta& meta, const SaveOptions& options)
      : runtime_(runtime),
        communicator_(communicator),
        parent_(parent),
        name_(name),
        meta_(meta),
        options_(options),
        parameters_(SerializeParameters(meta)) {}

  absl::StatusOr<SaveReport> Run(const StateLease& lease);

 private:
  // Rank 0 makes the directory, and all see that it is the same.
  absl::Status Begin(const absl::Status& mine);
  // This rank's files. What it tells rank 0 of them.
  absl::StatusOr<std::string> WriteFiles(const StateTensors& tensors);
  // The same of whole tensors, on rank 0. Collective; an error is that of all.
  absl::StatusOr<std::string> WriteWhole(const StateTensors& tensors);
  // Tensors that lie behind each fence; one fewer, and where it was the last
  // the fence opens.
  void CountFences(const StateTensors& tensors);
  absl::Status Exported(const StateTensors& tensors, int tensor);
  absl::StatusOr<StateTransfer> MakeTransfer(const StateTensors& tensors,
                                             const Plan& plan);
  absl::StatusOr<std::unique_ptr<StateFiles>> MakeFiles(
      const StateTensors& tensors, const Plan& plan);
  // `files` may be null: there are none.
  absl::StatusOr<std::string> WriteIndex(checkpoint::Index index,
                                         const StateFiles* files);
  // RankParameters of all ranks, or of this one where they are all the same.
  absl::StatusOr<std::vector<std::string>> ExchangeParameters(
      const std::vector<std::string>& entries);
  // On rank 0, from what each rank said of its index and its parameters.
  absl::Status WriteManifest(const std::vector<std::string>& entries,
                             const std::vector<std::string>& parameters);
  absl::Status CheckWhole(const checkpoint::Manifest& manifest) const;
  // What all ranks have to have alike.
  std::string Fingerprint() const {
    return absl::StrCat(
        name_, options_.full ? " full " : " sharded ",
        onepass::Fingerprint(meta_, options_.form, options_.layout));
  }
  // The error of a rank that did not hear of the end.
  absl::Status Unknown(const absl::Status& status) const;
  // After all agreed on an error.
  void RemoveWritten();

  bool root() const { return communicator_.rank() == 0; }

  const Runtime& runtime_;
  Communicator& communicator_;
  const std::string parent_;
  const std::string name_;
  const CheckpointMeta& meta_;
  const SaveOptions& options_;
  const std::string parameters_;  // RankParameters of this one
  StateFences* fences_ = nullptr;
  absl::flat_hash_map<int, int> behind_;
  std::unique_ptr<MemoryBudget> own_budget_;
  MemoryBudget* budget_ = nullptr;
  PartialDirectory partial_;
  SaveReport report_;
};

absl::StatusOr<SaveReport> Saver::Run(const StateLease& lease) {
  const auto begin = Clock::now();
  report_.path = JoinPath(parent_, name_);
  budget_ = options_.budget;
  fences_ = lease.fences();
  absl::Status status;
  if (budget_ == nullptr) {
    auto own = MemoryBudget::Create(kDefaultBudget);
    status = own.status();
    if (own.ok()) {
      own_budget_ = *std::move(own);
      budget_ = own_budget_.get();
    }
  }
  absl::StatusOr<StateTensors> tensors =
      StateTensors::Create(lease.views(), options_.form);
  status.Update(tensors.status());
  if (tensors.ok() && fences_ != nullptr) {
    status.Update(CheckFences(*tensors, fences_->count()));
  }
  ONEPASS_RETURN_IF_ERROR(Begin(status));
  CountFences(*tensors);
  const absl::StatusOr<std::string> entry =
      options_.full ? WriteWhole(*tensors) : WriteFiles(*tensors);
  absl::StatusOr<std::vector<std::string>> entries =
      IsAgreed(entry.status()) ? entry.status()
                               : ExchangeOrFail(communicator_, entry);
  // Whatever came out, nothing is read any more.
  if (fences_ != nullptr) fences_->OpenAll();
  if (!entries.ok()) {
    if (IsAgreed(entries.status())) {
      RemoveWritten();
      return entries.status();
    }
    // Rank 0 may have heard of all.
    return root() || !entry.ok() ? entries.status() : Unknown(entries.status());
  }
  absl::StatusOr<std::vector<std::string>> parameters =
      ExchangeParameters(*entries);
  if (!parameters.ok() && !IsAgreed(parameters.status())) {
    return root() ? parameters.status() : Unknown(parameters.status());
  }
  absl::Status published = parameters.status();
  if (root() && published.ok()) {
    published = WriteManifest(*entries, *parameters);
  }
  status = Agree(communicator_, published);
  if (!status.ok()) {
    if (IsAgreed(status)) {
      RemoveWritten();
      return status;
    }
    // On rank 0 it is what it is: done, though not all may have heard of it.
    if (!root()) return Unknown(status);
    if (!published.ok()) return status;
  }
  report_.peak = budget_->peak();
  report_.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return report_;
}

absl::Status Saver::Begin(const absl::Status& mine) {
  absl::StatusOr<std::string> said = std::string();
  if (!mine.ok()) {
    said = mine;
  } else if (root()) {
    absl::StatusOr<PartialDirectory> partial = CreatePartial(parent_, name_);
    if (partial.ok()) {
      partial_ = *std::move(partial);
      said = absl::StrCat(partial_.nonce, partial_.path);
    } else {
      said = partial.status();
    }
  } else {
    // What must be the same as on rank 0.
    said = Fingerprint();
  }
  absl::StatusOr<std::vector<std::string>> all =
      ExchangeOrFail(communicator_, said);
  absl::Status status = all.status();
  if (status.ok()) {
    if (!root()) {
      constexpr size_t kNonceSize = 32;
      partial_.nonce = (*all)[0].substr(0, kNonceSize);
      partial_.path = (*all)[0].substr(kNonceSize);
      status = CheckNonce(partial_.path, partial_.nonce);
    } else {
      const std::string own = Fingerprint();
      for (size_t rank = 1; rank < all->size() && status.ok(); ++rank) {
        if ((*all)[rank] == own) continue;
        status = absl::FailedPreconditionError(absl::StrCat(
            "rank ", rank,
            " saves another step, other options of groups, another loss scale "
            "or in another form"));
      }
    }
    status = Agree(communicator_, status);
  }
  if (!status.ok() && IsAgreed(status)) RemoveWritten();
  return status;
}

absl::StatusOr<std::string> Saver::WriteFiles(const StateTensors& tensors) {
  Plan plan;
  ONEPASS_ASSIGN_OR_RETURN(
      plan, MakePlan(tensors, tensors.arrays(), options_, *budget_, 0));
  MemoryBudget::Share share;
  ONEPASS_ASSIGN_OR_RETURN(share, budget_->Take(plan.taken));
  absl::StatusOr<StateTransfer> transfer = MakeTransfer(tensors, plan);
  ONEPASS_RETURN_IF_ERROR(transfer.status());
  std::unique_ptr<StateFiles> files;
  ONEPASS_ASSIGN_OR_RETURN(files, MakeFiles(tensors, plan));
  const auto exported = [&](int tensor) { return Exported(tensors, tensor); };
  ONEPASS_RETURN_IF_ERROR(ExportState(tensors, *transfer, *files, exported));
  checkpoint::Index index;
  ONEPASS_RETURN_IF_ERROR(
      FillTensors(tensors.arrays(), tensors.form(), meta_, index));
  return WriteIndex(std::move(index), files.get());
}

absl::StatusOr<std::string> Saver::WriteWhole(const StateTensors& tensors) {
  WholeState whole;
  ONEPASS_ASSIGN_OR_RETURN(whole,
                           FindWholeState(communicator_, tensors, meta_));
  // Chunks are the same on all ranks: as the smallest budget has them.
  Plan plan;
  const std::vector<StoredArray> nothing;
  const std::vector<StoredArray>& written = root() ? whole.arrays : nothing;
  absl::StatusOr<std::string> chunk_bytes;
  {
    const absl::StatusOr<Plan> planned =
        MakePlan(tensors, written, options_, *budget_, 2);
    if (planned.ok()) {
      plan = *planned;
      chunk_bytes = absl::StrCat(plan.chunk_bytes);
    } else {
      chunk_bytes = planned.status();
    }
  }
  std::vector<std::string> all;
  ONEPASS_ASSIGN_OR_RETURN(all, ExchangeOrFail(communicator_, chunk_bytes));
  for (const std::string& text : all) {
    int64_t bytes = 0;
    if (absl::SimpleAtoi(text, &bytes) && bytes < plan.chunk_bytes) {
      plan.taken.host = plan.taken.host / plan.chunk_bytes * bytes;
      plan.chunk_bytes = bytes;
    }
  }
  MemoryBudget::Share share;
  HostBuffer buffer;
  std::unique_ptr<StateFiles> files;
  std::optional<StateTransfer> transfer;
  const auto prepare = [&]() -> absl::Status {
    ONEPASS_ASSIGN_OR_RETURN(share, budget_->Take(plan.taken));
    HostBufferOptions memory;
    memory.huge_pages = false;
    ONEPASS_ASSIGN_OR_RETURN(
        buffer,
        HostBuffer::Create(runtime_.pool, 2 * plan.chunk_bytes, memory));
    absl::StatusOr<StateTransfer> made = MakeTransfer(tensors, plan);
    ONEPASS_RETURN_IF_ERROR(made.status());
    transfer.emplace(*std::move(made));
    if (!root()) return absl::OkStatus();
    ONEPASS_ASSIGN_OR_RETURN(files, MakeFiles(tensors, plan));
    return absl::OkStatus();
  };
  ONEPASS_RETURN_IF_ERROR(Agree(communicator_, prepare()));
  const auto exported = [&](int tensor) { return Exported(tensors, tensor); };
  ONEPASS_RETURN_IF_ERROR(GatherState(communicator_, tensors, *transfer, whole,
                                      buffer.span<char>(), files.get(),
                                      exported));
  checkpoint::Index index;
  if (root()) index = std::move(whole.index);
  index.set_leaf(kLeafNumel);
  index.set_checksum_algorithm(checkpoint::CHECKSUM_XXH3_64);
  return WriteIndex(std::move(index), files.get());
}

void Saver::CountFences(const StateTensors& tensors) {
  if (fences_ == nullptr) return;
  std::vector<bool> counted(tensors.tensors().size());
  for (const StoredArray& array : tensors.arrays()) {
    if (counted[array.tensor]) continue;
    counted[array.tensor] = true;
    ++behind_[tensors.tensor_of(array).views.front()->fence];
  }
}

absl::Status Saver::Exported(const StateTensors& tensors, int tensor) {
  if (fences_ == nullptr) return absl::OkStatus();
  const int fence = tensors.tensors()[tensor].views.front()->fence;
  if (--behind_[fence] == 0) fences_->Open(fence);
  return absl::OkStatus();
}

absl::StatusOr<StateTransfer> Saver::MakeTransfer(const StateTensors& tensors,
                                                  const Plan& plan) {
  StateTransferOptions options;
  options.scratch_bytes = plan.scratch_bytes;
  options.granularity = options_.granularity;
  options.fences = fences_;
  return StateTransfer::Create(runtime_, tensors, options);
}

absl::StatusOr<std::unique_ptr<StateFiles>> Saver::MakeFiles(
    const StateTensors& tensors, const Plan& plan) {
  StateFilesOptions options;
  options.directory = partial_.path;
  options.prefix = RankFilePrefix(communicator_.rank(), communicator_.size());
  options.chunk_bytes = plan.chunk_bytes;
  options.buffers = plan.buffers;
  options.sharded = !options_.full;
  options.pinned = tensors.on_device();
  options.file = options_.file;
  return StateFiles::Create(runtime_, options);
}

absl::StatusOr<std::string> Saver::WriteIndex(checkpoint::Index index,
                                              const StateFiles* files) {
  index.set_rank(communicator_.rank());
  index.set_world(communicator_.size());
  if (files != nullptr) {
    FillFiles(*files, index);
    report_.direct = files->direct();
    for (const StoredFile& file : files->files()) report_.bytes += file.bytes;
  }
  std::string bytes;
  ONEPASS_ASSIGN_OR_RETURN(bytes, EncodeIndex(index));
  const std::string name = absl::StrCat(
      RankFilePrefix(communicator_.rank(), communicator_.size()), ".index");
  ONEPASS_RETURN_IF_ERROR(WriteSmallFile(JoinPath(partial_.path, name), bytes));
  ONEPASS_RETURN_IF_ERROR(SyncDirectory(partial_.path));
  checkpoint::RankEntry entry;
  checkpoint::RankIndex& rank_index = *entry.mutable_index();
  rank_index.set_rank(communicator_.rank());
  rank_index.set_file(name);
  rank_index.set_length(static_cast<int64_t>(bytes.size()));
  rank_index.set_checksum(Checksum(bytes));
  for (const checkpoint::DataFile& stored : index.files()) {
    checkpoint::File& file = *entry.add_files();
    file.set_name(stored.name());
    file.set_length(stored.length());
  }
  entry.set_parameters_checksum(Checksum(parameters_));
  return entry.SerializeAsString();
}

absl::StatusOr<std::vector<std::string>> Saver::ExchangeParameters(
    const std::vector<std::string>& entries) {
  const uint64_t checksum = Checksum(parameters_);
  // All ranks see the same, and go the same way.
  const bool same =
      std::all_of(entries.begin(), entries.end(), [&](const std::string& text) {
        checkpoint::RankEntry entry;
        return entry.ParseFromString(text) &&
               entry.parameters_checksum() == checksum;
      });
  if (same) return std::vector<std::string>{parameters_};
  return ExchangeOrFail(communicator_, parameters_);
}

// Nothing is published that could not be opened.
absl::Status Saver::CheckWhole(const checkpoint::Manifest& manifest) const {
  std::vector<checkpoint::Index> indexes;
  for (int rank = 0; rank < manifest.world(); ++rank) {
    const std::string path =
        JoinPath(partial_.path, manifest.indexes(rank).file());
    std::string bytes;
    ONEPASS_ASSIGN_OR_RETURN(bytes, ReadWholeFile(path, kMostIndexBytes));
    checkpoint::Index index;
    ONEPASS_ASSIGN_OR_RETURN(index, DecodeIndex(bytes, manifest, rank, path));
    indexes.push_back(std::move(index));
  }
  ONEPASS_RETURN_IF_ERROR(CheckFiles(manifest, indexes, partial_.path));
  if (absl::Status status = CheckBoxes(indexes, "the state of all ranks");
      !status.ok()) {
    return absl::InvalidArgumentError(status.message());
  }
  return absl::OkStatus();
}

absl::Status Saver::WriteManifest(const std::vector<std::string>& entries,
                                  const std::vector<std::string>& parameters) {
  checkpoint::Manifest manifest;
  FillManifest(meta_, options_.layout, manifest);
  manifest.set_world(communicator_.size());
  manifest.set_distribution(options_.full ? checkpoint::DISTRIBUTION_FULL
                                          : checkpoint::DISTRIBUTION_SHARDED);
  std::vector<absl::flat_hash_set<std::string>> names(meta_.groups.size());
  for (const std::string& text : entries) {
    checkpoint::RankEntry entry;
    if (!entry.ParseFromString(text)) {
      return absl::InternalError("what a rank says of its files is no message");
    }
    *manifest.add_indexes() = entry.index();
    checkpoint::File& index = *entry.add_files();
    index.set_name(entry.index().file());
    index.set_length(entry.index().length());
    for (const checkpoint::File& file : entry.files()) {
      // That it is there, and as long, for whoever made the manifest.
      ONEPASS_RETURN_IF_ERROR(
          OpenExpected(JoinPath(partial_.path, file.name()), file.length())
              .status());
      *manifest.add_files() = file;
    }
  }
  for (const std::string& text : parameters) {
    checkpoint::RankParameters groups;
    if (!groups.ParseFromString(text)) {
      return absl::InternalError(
          "what a rank says of its groups is no message");
    }
    for (int g = 0; g < groups.groups_size(); ++g) {
      for (const std::string& name : groups.groups(g).names()) {
        if (!names[g].insert(name).second) continue;
        manifest.mutable_groups(g)->add_parameters(name);
      }
    }
  }
  std::sort(manifest.mutable_files()->begin(), manifest.mutable_files()->end(),
            [](const checkpoint::File& a, const checkpoint::File& b) {
              return a.name() < b.name();
            });
  std::string bytes;
  ONEPASS_ASSIGN_OR_RETURN(bytes, EncodeManifest(manifest));
  ONEPASS_RETURN_IF_ERROR(CheckWhole(manifest));
  ONEPASS_RETURN_IF_ERROR(
      WriteSmallFile(JoinPath(partial_.path, kManifestName), bytes));
  return onepass::Publish(partial_.path, parent_, name_);
}

absl::Status Saver::Unknown(const absl::Status& status) const {
  return absl::Status(status.code(),
                      absl::StrCat("whether \"", report_.path,
                                   "\" was published is unknown, a look "
                                   "decides: ",
                                   status.message()));
}

void Saver::RemoveWritten() {
  if (root() && !partial_.path.empty()) {
    RemovePartial(partial_.path).IgnoreError();
  }
}

}  // namespace

absl::StatusOr<SaveReport> SaveCheckpoint(
    const Runtime& runtime, Communicator& communicator,
    absl::string_view parent, absl::string_view name, const StateLease& lease,
    const CheckpointMeta& meta, const SaveOptions& options) {
  return Saver(runtime, communicator, parent, name, meta, options).Run(lease);
}

absl::Status KeepLast(absl::string_view parent, int keep) {
  if (keep < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("keep is ", keep, ", expected at least 1"));
  }
  std::vector<FoundCheckpoint> found;
  ONEPASS_ASSIGN_OR_RETURN(found, FindCheckpoints(parent));
  // The newest are first; what is damaged counts for nothing, and stays.
  int complete = 0;
  for (const FoundCheckpoint& checkpoint : found) {
    if (!checkpoint.status.ok() || ++complete <= keep) continue;
    ONEPASS_RETURN_IF_ERROR(RemovePublished(parent, checkpoint.name));
  }
  return absl::OkStatus();
}

}  // namespace onepass
