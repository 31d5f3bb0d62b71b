// onepass checkpoint inspect: what a checkpoint holds, or which checkpoints
// there are in a directory.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/files.h"
#include "checkpoint/find.h"
#include "checkpoint/meta.h"
#include "checkpoint/publish.h"
#include "checkpoint/safetensors.h"
#include "dispatch/kernel.h"
#include "dispatch/return_if_error.h"
#include "dispatch/state.h"
#include "nlohmann/json.hpp"
#include "tools/checkpoint_text.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/step_checkpoints.h"

namespace onepass {
namespace {

using nlohmann::ordered_json;

const char* ModeText(WeightDecay mode) {
  return mode == WeightDecay::kL2 ? "l2" : "adamw";
}

const char* LayoutText(const Checkpoint& checkpoint) {
  return checkpoint.manifest().layout() == checkpoint::LAYOUT_NESTED ? "nested"
                                                                     : "flat";
}

const char* DistributionText(const Checkpoint& checkpoint) {
  return checkpoint.manifest().distribution() == checkpoint::DISTRIBUTION_FULL
             ? "full"
             : "sharded";
}

// What is kept: "scaled e4m3"; of scales "scales".
std::string StateText(const Checkpoint::Tensor& tensor) {
  return tensor.scales ? "scales" : Name(tensor.state_type);
}

int64_t Chunks(const Checkpoint::Tensor& tensor) {
  int64_t chunks = 0;
  for (const Checkpoint::Piece& piece : tensor.pieces) {
    chunks += piece.entry->chunks_size();
  }
  return chunks;
}

int64_t TensorBytes(const Checkpoint& checkpoint) {
  int64_t bytes = 0;
  for (const auto& item : checkpoint.tensors()) bytes += item.second.bytes();
  return bytes;
}

// --- A checkpoint ---

void PrintJson(const Checkpoint& checkpoint, std::ostream& out) {
  const CheckpointMeta meta = checkpoint.meta();
  auto groups = ordered_json::array();
  for (const StateGroup& group : meta.groups) {
    groups.push_back({{"step", group.step},
                      {"lr", group.lr},
                      {"beta1", group.beta1},
                      {"beta2", group.beta2},
                      {"eps", group.eps},
                      {"weight_decay", group.weight_decay},
                      {"mode", ModeText(group.mode)},
                      {"bias_correction", group.bias_correction},
                      {"parameters", group.parameters}});
  }
  ordered_json loss_scale = nullptr;
  if (meta.loss_scale.has_value()) {
    loss_scale = {{"scale", meta.loss_scale->scale},
                  {"hysteresis_left", meta.loss_scale->hysteresis_left},
                  {"clean_steps", meta.loss_scale->clean_steps}};
  }
  auto tensors = ordered_json::array();
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    tensors.push_back({{"name", name},
                       {"type", Name(tensor.type)},
                       {"state", StateText(tensor)},
                       {"exact", tensor.exact},
                       {"shape", tensor.shape},
                       {"ranks", tensor.pieces.size()},
                       {"chunks", Chunks(tensor)},
                       {"bytes", tensor.bytes()},
                       {"step", tensor.step}});
  }
  out << JsonText({{"path", checkpoint.path()},
                   {"step", meta.step},
                   {"world", checkpoint.manifest().world()},
                   {"leaf", checkpoint.manifest().leaf()},
                   {"layout", LayoutText(checkpoint)},
                   {"distribution", DistributionText(checkpoint)},
                   {"user_bytes", meta.user.size()},
                   {"loss_scale", loss_scale},
                   {"groups", groups},
                   {"bytes", TensorBytes(checkpoint)},
                   {"tensors", tensors}})
      << "\n";
}

void PrintTable(const Checkpoint& checkpoint, std::ostream& out) {
  const CheckpointMeta meta = checkpoint.meta();
  out << absl::StreamFormat(
      "%s: step %d, %s, %s, %s; %s, %d bytes; %s of the trainer's own\n",
      Printable(checkpoint.path()), meta.step,
      Count(checkpoint.manifest().world(), "rank"), LayoutText(checkpoint),
      DistributionText(checkpoint),
      Count(static_cast<int64_t>(checkpoint.tensors().size()), "tensor"),
      TensorBytes(checkpoint),
      Count(static_cast<int64_t>(meta.user.size()), "byte"));
  if (meta.loss_scale.has_value()) {
    out << absl::StreamFormat(
        "loss scale %g, hysteresis left %d, clean steps %d\n",
        meta.loss_scale->scale, meta.loss_scale->hysteresis_left,
        meta.loss_scale->clean_steps);
  }
  for (size_t g = 0; g < meta.groups.size(); ++g) {
    const StateGroup& group = meta.groups[g];
    out << absl::StreamFormat(
        "group %d: step %d, %s, lr %g, beta1 %g, beta2 %g, eps %g, "
        "weight_decay %g, %s%s\n",
        g, group.step,
        Count(static_cast<int64_t>(group.parameters.size()), "parameter"),
        group.lr, group.beta1, group.beta2, group.eps, group.weight_decay,
        ModeText(group.mode),
        group.bias_correction ? "" : ", no bias correction");
  }
  size_t name_width = 4;
  size_t shape_width = 5;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    name_width = std::max(name_width, Printable(name).size());
    shape_width = std::max(shape_width, ShapeText(tensor.shape).size());
  }
  const auto row = [&](const std::string& name, const char* type,
                       const std::string& state, const std::string& shape,
                       const std::string& chunks, const std::string& bytes) {
    out << absl::StreamFormat(
        "%-*s  %-4s  %-15s  %-*s  %6s  %12s\n", static_cast<int>(name_width),
        name, type, state, static_cast<int>(shape_width), shape, chunks, bytes);
  };
  out << "\n";
  row("name", "type", "state", "shape", "chunks", "bytes");
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    row(Printable(name), Name(tensor.type), StateText(tensor),
        ShapeText(tensor.shape), absl::StrCat(Chunks(tensor)),
        absl::StrCat(tensor.bytes()));
  }
}

// --- A directory of them ---

// Of one of them; not the checkpoint, so that a list of many takes no more
// memory than the largest.
struct Listed {
  std::string name;
  absl::Status status;
  // Where it can be read.
  int64_t step = 0;
  int64_t world = 0;
  int64_t tensors = 0;
  int64_t bytes = 0;
};

Listed Look(const FoundCheckpoint& found) {
  Listed listed;
  listed.name = found.name;
  listed.status = found.status;
  if (!listed.status.ok()) return listed;
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(found.path);
  listed.status = checkpoint.status();
  if (!checkpoint.ok()) return listed;
  listed.step = checkpoint->manifest().step();
  listed.world = checkpoint->manifest().world();
  listed.tensors = static_cast<int64_t>(checkpoint->tensors().size());
  listed.bytes = TensorBytes(*checkpoint);
  return listed;
}

// Leftovers of saves that did not end.
struct Leftover {
  std::string path;
  bool removed;
};

void PrintJson(const std::string& path, const std::vector<Listed>& checkpoints,
               const std::vector<Leftover>& partials, std::ostream& out) {
  auto list = ordered_json::array();
  for (const Listed& listed : checkpoints) {
    ordered_json entry = {{"name", listed.name}};
    if (listed.status.ok()) {
      entry["step"] = listed.step;
      entry["world"] = listed.world;
      entry["tensors"] = listed.tensors;
      entry["bytes"] = listed.bytes;
      entry["damage"] = nullptr;
    } else {
      entry["damage"] = std::string(listed.status.message());
    }
    list.push_back(std::move(entry));
  }
  auto leftovers = ordered_json::array();
  for (const Leftover& partial : partials) {
    leftovers.push_back({{"path", partial.path}, {"removed", partial.removed}});
  }
  out << JsonText(
             {{"path", path}, {"checkpoints", list}, {"partials", leftovers}})
      << "\n";
}

void PrintLines(const std::string& path, const std::vector<Listed>& checkpoints,
                const std::vector<Leftover>& partials, std::ostream& out) {
  for (const Listed& listed : checkpoints) {
    out << Printable(listed.name) << ": ";
    if (listed.status.ok()) {
      out << "step " << listed.step << ", " << Count(listed.world, "rank")
          << ", " << Count(listed.tensors, "tensor") << ", " << listed.bytes
          << " bytes\n";
    } else {
      out << "DAMAGED: " << Printable(listed.status.message()) << "\n";
    }
  }
  for (const Leftover& partial : partials) {
    out << Printable(partial.path) << ": "
        << (partial.removed
                ? "removed, of a save that did not end\n"
                : "partial, of a save that goes on or did not end\n");
  }
  if (checkpoints.empty() && partials.empty()) {
    out << Printable(path) << ": no checkpoints\n";
  }
}

class CheckpointInspectCommand : public Command {
 public:
  const char* name() const override { return "checkpoint inspect"; }
  const char* summary() const override {
    return "Prints what a checkpoint holds, or lists those in a directory, the "
           "newest first.";
  }

  void AddFlags(Flags& flags) override {
    flags.AddArgument("PATH", &path_, "A checkpoint, or a directory of them.");
    flags.Add("remove_partials", &remove_partials_,
              "Remove what saves that did not end left in the directory. None "
              "may be going on.");
    flags.Add("json", &json_, "Print one JSON object instead of a table.");
  }

  absl::Status Run(std::ostream& out, std::ostream&) override {
    std::vector<std::string> names;
    ONEPASS_ASSIGN_OR_RETURN(names, ListDirectory(path_));
    if (std::find(names.begin(), names.end(), kManifestName) == names.end()) {
      if (std::any_of(names.begin(), names.end(), IsRankFileName)) {
        return Checkpoint::Open(path_).status();
      }
      return List(out);
    }
    if (remove_partials_) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", path_,
                       "\" is a checkpoint, expected with --remove_partials a "
                       "directory of them"));
    }
    const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(path_);
    ONEPASS_RETURN_IF_ERROR(checkpoint.status());
    json_ ? PrintJson(*checkpoint, out) : PrintTable(*checkpoint, out);
    return absl::OkStatus();
  }

 private:
  absl::Status List(std::ostream& out) const {
    std::vector<FoundCheckpoint> found;
    ONEPASS_ASSIGN_OR_RETURN(found, FindStepCheckpoints(path_));
    std::vector<Listed> checkpoints;
    int64_t damaged = 0;
    for (const FoundCheckpoint& checkpoint : found) {
      checkpoints.push_back(Look(checkpoint));
      damaged += checkpoints.back().status.ok() ? 0 : 1;
    }
    std::vector<std::string> paths;
    ONEPASS_ASSIGN_OR_RETURN(paths, ListPartials(path_));
    std::vector<Leftover> partials;
    absl::Status status;
    for (std::string& path : paths) {
      const bool remove = remove_partials_ && status.ok();
      if (remove) status = RemovePartial(path);
      partials.push_back({std::move(path), remove && status.ok()});
    }
    if (json_) {
      PrintJson(path_, checkpoints, partials, out);
    } else {
      PrintLines(path_, checkpoints, partials, out);
    }
    ONEPASS_RETURN_IF_ERROR(status);
    if (damaged == 0) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat(
        damaged, " of ",
        Count(static_cast<int64_t>(checkpoints.size()), "checkpoint"),
        " cannot be read"));
  }

  std::string path_;
  bool remove_partials_ = false;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewCheckpointInspectCommand() {
  return std::make_unique<CheckpointInspectCommand>();
}

}  // namespace onepass
