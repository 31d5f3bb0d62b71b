#include "checkpoint/consolidate.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "checkpoint/files.h"
#include "checkpoint/output_file.h"
#include "checkpoint/read_range.h"
#include "checkpoint/safetensors.h"
#include "dispatch/dtype.h"
#include "dispatch/host_buffer.h"
#include "dispatch/operations.h"
#include "dispatch/return_if_error.h"
#include "dispatch/state.h"

namespace onepass {
namespace {

using Tensor = Checkpoint::Tensor;

constexpr int64_t kLeastBufferBytes = 128 << 10;

// A file written in pieces of any length, in blocks.
class BlockWriter {
 public:
  BlockWriter(OutputFile& file, absl::Span<char> block)
      : file_(file), block_(block) {}

  absl::Status Append(const char* data, int64_t bytes) {
    while (bytes > 0) {
      const int64_t room = static_cast<int64_t>(block_.size()) - used_;
      const int64_t n = std::min(bytes, room);
      std::memcpy(block_.data() + used_, data, static_cast<size_t>(n));
      used_ += n;
      data += n;
      bytes -= n;
      if (n == room) ONEPASS_RETURN_IF_ERROR(Flush());
    }
    return absl::OkStatus();
  }

  absl::Status Close() {
    ONEPASS_RETURN_IF_ERROR(Flush());
    return file_.Close();
  }

 private:
  absl::Status Flush() {
    if (used_ == 0) return absl::OkStatus();
    const int64_t n = std::exchange(used_, 0);
    return file_.Write(block_.subspan(0, static_cast<size_t>(n)));
  }

  OutputFile& file_;
  const absl::Span<char> block_;
  int64_t used_ = 0;
};

// A tensor of the file, and what it is made of.
struct Source {
  const Tensor* tensor;
  const Tensor* scales = nullptr;  // where codes are unscaled with them
  const Tensor* weight = nullptr;  // where a remainder is joined with it
  SafetensorsType type;            // in the file

  int64_t bytes() const { return tensor->numel() * ByteSize(type); }
};

absl::StatusOr<const Tensor*> WeightOf(const Checkpoint& checkpoint,
                                       const Tensor& remainder) {
  const size_t dot = remainder.name.rfind('.');
  const std::string name =
      absl::StrCat(remainder.name.substr(0, dot == std::string::npos ? 0 : dot),
                   ".", Name(StateKind::kParam));
  const auto found = checkpoint.tensors().find(name);
  if (found == checkpoint.tensors().end() ||
      found->second.state_type != StateType::kBFloat16 ||
      found->second.scales || found->second.shape != remainder.shape) {
    return absl::FailedPreconditionError(
        absl::StrCat("\"", remainder.name, "\" is a remainder, expected \"",
                     name, "\", its weight, of bf16 and its shape"));
  }
  if (found->second.step != remainder.step) {
    return absl::FailedPreconditionError(absl::StrCat(
        "\"", remainder.name, "\" is a remainder of step ", remainder.step,
        ", and \"", name, "\", its weight, of step ", found->second.step));
  }
  return &found->second;
}

absl::StatusOr<std::vector<Source>> Sources(const Checkpoint& checkpoint,
                                            ConsolidatedForm form) {
  std::vector<Source> sources;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    Source source;
    source.tensor = &tensor;
    source.type = tensor.type;
    if (form == ConsolidatedForm::kFloat32) {
      if (tensor.scales) continue;
      source.type = SafetensorsType::kF32;
      if (!tensor.scales_name.empty()) {
        const auto scales = checkpoint.tensors().find(tensor.scales_name);
        if (scales == checkpoint.tensors().end() ||
            scales->second.type != SafetensorsType::kF32 ||
            scales->second.numel() != LeafCount(tensor.numel())) {
          return absl::DataLossError(
              absl::StrCat("\"", name, "\" has no scales for its leaves"));
        }
        source.scales = &scales->second;
      }
      if (tensor.type == SafetensorsType::kI16) {
        ONEPASS_ASSIGN_OR_RETURN(source.weight, WeightOf(checkpoint, tensor));
      }
    }
    sources.push_back(source);
  }
  std::sort(sources.begin(), sources.end(),
            [](const Source& a, const Source& b) {
              const int64_t a_bytes = ByteSize(a.type);
              const int64_t b_bytes = ByteSize(b.type);
              return a_bytes != b_bytes ? a_bytes > b_bytes
                                        : a.tensor->name < b.tensor->name;
            });
  return sources;
}

DType DTypeOf(SafetensorsType type) {
  switch (type) {
    case SafetensorsType::kF16:
      return DType::kFloat16;
    case SafetensorsType::kBF16:
      return DType::kBFloat16;
    case SafetensorsType::kU8:
      return DType::kFloat8E4M3;
    default:
      return DType::kFloat32;
  }
}

// Memory is a block of the file, a buffer to read chunks through, and four of
// elements: of codes or remainders, of scales or weights, of weights that were
// read in fp32, and of values.
class Consolidation {
 public:
  static constexpr int kParts = 6;

  Consolidation(const Kernel& kernel, ThreadPool& pool, Checkpoint& checkpoint,
                absl::Span<char> memory, const ConsolidateOptions& options)
      : kernel_(kernel),
        pool_(pool),
        checkpoint_(checkpoint),
        part_(static_cast<int64_t>(memory.size()) / kParts),
        memory_(memory.data()),
        options_(options) {}

  absl::Status Write(const std::vector<Source>& sources,
                     const std::string& header, OutputFile& file) {
    BlockWriter writer(file, Part(0));
    ONEPASS_RETURN_IF_ERROR(
        writer.Append(header.data(), static_cast<int64_t>(header.size())));
    int64_t done = 0;
    int64_t all = 0;
    for (const Source& source : sources) all += source.bytes();
    // Whole leaves, of any type.
    const int64_t most =
        part_ / static_cast<int64_t>(sizeof(float)) / kLeafNumel * kLeafNumel;
    for (const Source& source : sources) {
      const int64_t numel = source.tensor->numel();
      for (int64_t first = 0; first < numel; first += most) {
        const int64_t n = std::min(most, numel - first);
        const int64_t bytes = n * ByteSize(source.type);
        const char* data = nullptr;
        ONEPASS_ASSIGN_OR_RETURN(data, Elements(source, first, n));
        ONEPASS_RETURN_IF_ERROR(writer.Append(data, bytes));
        done += bytes;
        if (options_.progress) options_.progress(done, all);
      }
    }
    return writer.Close();
  }

 private:
  absl::Span<char> Part(int i) const {
    return absl::MakeSpan(memory_ + i * part_, static_cast<size_t>(part_));
  }

  absl::Status Read(const Tensor& tensor, int64_t first, int64_t n,
                    absl::Span<char> to) {
    return ReadRange(checkpoint_, tensor, first, n, Part(1), to.data());
  }

  // What the file holds of [first, first + n), which begins at a leaf.
  absl::StatusOr<const char*> Elements(const Source& source, int64_t first,
                                       int64_t n) {
    const Tensor& tensor = *source.tensor;
    char* const codes = Part(2).data();
    char* const beside = Part(3).data();
    float* const values = reinterpret_cast<float*>(Part(5).data());
    ONEPASS_RETURN_IF_ERROR(Read(tensor, first, n, Part(2)));
    if (source.scales != nullptr) {
      ONEPASS_RETURN_IF_ERROR(
          Read(*source.scales, first / kLeafNumel, LeafCount(n), Part(3)));
      DequantizeArgs args;
      args.numel = n;
      args.codes = codes;
      args.scales = reinterpret_cast<const float*>(beside);
      args.out = values;
      args.type = DTypeOf(tensor.type);
      ONEPASS_RETURN_IF_ERROR(Dequantize(kernel_, pool_, args));
      return Part(5).data();
    }
    if (source.weight != nullptr) {
      ONEPASS_RETURN_IF_ERROR(ReadWeight(*source.weight, first, n));
      JoinRemainderArgs args;
      args.numel = n;
      args.param = reinterpret_cast<const uint16_t*>(beside);
      args.remainder = reinterpret_cast<const int16_t*>(codes);
      args.master = values;
      ONEPASS_RETURN_IF_ERROR(JoinRemainder(kernel_, pool_, args));
      return Part(5).data();
    }
    if (source.type == tensor.type) return codes;
    ONEPASS_RETURN_IF_ERROR(
        Cast(kernel_, pool_,
             {n, codes, values, DTypeOf(tensor.type), DType::kFloat32}));
    return Part(5).data();
  }

  // As bf16, to part 3. Unscaled checkpoints have it in fp32, exactly.
  absl::Status ReadWeight(const Tensor& weight, int64_t first, int64_t n) {
    if (weight.type == SafetensorsType::kBF16) {
      return Read(weight, first, n, Part(3));
    }
    ONEPASS_RETURN_IF_ERROR(Read(weight, first, n, Part(4)));
    return Cast(
        kernel_, pool_,
        {n, Part(4).data(), Part(3).data(), DType::kFloat32, DType::kBFloat16});
  }

  const Kernel& kernel_;
  ThreadPool& pool_;
  Checkpoint& checkpoint_;
  const int64_t part_;
  char* const memory_;
  const ConsolidateOptions& options_;
};

// Gives the file `partial` its name, on the disk; after an error it may have
// either.
absl::Status Publish(const std::string& partial, const std::string& path) {
  ONEPASS_RETURN_IF_ERROR(RenameToNew(partial, path));
  const std::string parent = std::filesystem::path(path).parent_path();
  const absl::Status synced = SyncDirectory(parent.empty() ? "." : parent);
  if (!synced.ok()) unlink(path.c_str());
  return synced;
}

}  // namespace

absl::StatusOr<ConsolidateReport> ConsolidateCheckpoint(
    const Kernel& kernel, ThreadPool& pool, Checkpoint& checkpoint,
    const std::string& out, const ConsolidateOptions& options) {
  if (options.buffer_bytes < kLeastBufferBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("buffer_bytes is ", options.buffer_bytes,
                     ", expected at least ", kLeastBufferBytes));
  }
  // Looked at early, so that nobody reads for hours in vain; renaming decides.
  ONEPASS_RETURN_IF_ERROR(RefuseExisting(out));
  std::vector<Source> sources;
  ONEPASS_ASSIGN_OR_RETURN(sources, Sources(checkpoint, options.form));
  SafetensorsHeader header;
  header.metadata["format"] = "pt";
  int64_t end = 0;
  for (const Source& source : sources) {
    const int64_t begin = end;
    end += source.bytes();
    header.tensors.push_back(
        {source.tensor->name, source.type, source.tensor->shape, begin, end});
  }
  std::string bytes;
  ONEPASS_ASSIGN_OR_RETURN(bytes, SerializeSafetensorsHeader(header));

  constexpr int64_t kUnit = Consolidation::kParts * kOutputAlignment;
  HostBufferOptions memory_options;
  memory_options.huge_pages = false;
  HostBuffer memory;
  ONEPASS_ASSIGN_OR_RETURN(
      memory, HostBuffer::Create(pool, options.buffer_bytes / kUnit * kUnit,
                                 memory_options));
  const std::string partial = absl::StrCat(out, ".partial-", getpid());
  std::unique_ptr<OutputFile> file;
  ONEPASS_ASSIGN_OR_RETURN(file, OutputFile::Create(partial));
  Consolidation consolidation(
      kernel, pool, checkpoint,
      absl::MakeSpan(memory.as<char>(), static_cast<size_t>(memory.bytes())),
      options);
  absl::Status status = consolidation.Write(sources, bytes, *file);
  if (status.ok()) status = Publish(partial, out);
  if (!status.ok()) {
    // Closed first. That it could not be removed is less than why.
    file.reset();
    unlink(partial.c_str());
    return status;
  }
  ConsolidateReport report;
  report.tensors = static_cast<int64_t>(sources.size());
  report.bytes = file->size();
  return report;
}

}  // namespace onepass
