#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/box_runs.h"
#include "checkpoint/file_error.h"
#include "checkpoint/manifest.h"
#include "checkpoint/manifest_messages.h"
#include "checkpoint/publish.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/state_files.h"
#include "dispatch/return_if_error.h"
#include "xxhash.h"

namespace onepass {
class Checkpoint::Hash {
 public:
  Hash() : state_(XXH3_createState()) { XXH3_64bits_reset(state_); }
  ~Hash() { XXH3_freeState(state_); }
  Hash(const Hash&) = delete;
  Hash& operator=(const Hash&) = delete;

  void Add(absl::Span<const char> bytes) {
    XXH3_64bits_update(state_, bytes.data(), bytes.size());
  }
  uint64_t Value() const { return XXH3_64bits_digest(state_); }

 private:
  XXH3_state_t* const state_;
};

// Elements [first, first + numel) of a piece, which are of a chunk that is read
// a buffer at a time, all of it, so that what was taken has been verified when
// the chunk ends.
struct Checkpoint::Window {
  explicit Window(Release release) : release(release) {}

  const Release release;
  int64_t first = 0;
  int64_t numel = 0;
  const checkpoint::Chunk* chunk = nullptr;  // whose end is still to be read
  std::unique_ptr<Hash> hash;
};

absl::StatusOr<Checkpoint> Checkpoint::Open(absl::string_view path) {
  std::vector<absl::Status> problems;
  absl::StatusOr<Checkpoint> checkpoint = OpenDamaged(path, &problems);
  if (!problems.empty()) return problems.front();
  return checkpoint;
}

absl::StatusOr<Checkpoint> Checkpoint::OpenDamaged(
    absl::string_view path, std::vector<absl::Status>* problems) {
  Checkpoint checkpoint;
  checkpoint.path_ = std::string(path);
  ONEPASS_RETURN_IF_ERROR(checkpoint.ReadManifest());
  const int world = checkpoint.manifest_->world();
  checkpoint.indexes_ = std::make_unique<std::vector<checkpoint::Index>>(world);
  for (int rank = 0; rank < world; ++rank) {
    absl::StatusOr<checkpoint::Index> index = checkpoint.ReadIndex(rank);
    if (index.ok()) {
      (*checkpoint.indexes_)[rank] = *std::move(index);
    } else if (absl::IsDataLoss(index.status())) {
      problems->push_back(index.status());
    } else {
      return index.status();
    }
  }
  // What is said of all together is said of those that are there.
  if (problems->empty()) {
    if (absl::Status status = checkpoint.CheckIndexes(); !status.ok()) {
      problems->push_back(status);
    }
  }
  checkpoint.CollectFiles();
  // What is damaged keeps no rules: it has none.
  if (problems->empty()) checkpoint.CollectTensors();
  return checkpoint;
}

CheckpointMeta Checkpoint::meta() const { return MetaOf(*manifest_); }

absl::Status Checkpoint::ReadManifest() {
  const std::string file = JoinPath(path_, kManifestName);
  const absl::StatusOr<std::string> bytes =
      ReadWholeFile(file, kMostManifestBytes);
  if (absl::IsNotFound(bytes.status())) {
    // Without one it is no checkpoint; but what has files of ranks was one, or
    // is still to be one.
    std::vector<std::string> names;
    ONEPASS_ASSIGN_OR_RETURN(names, ListDirectory(path_));
    if (std::none_of(names.begin(), names.end(), IsRankFileName)) {
      return bytes.status();
    }
  }
  ONEPASS_RETURN_IF_ERROR(AsDamage(bytes.status()));
  checkpoint::Manifest manifest;
  ONEPASS_ASSIGN_OR_RETURN(manifest, DecodeManifest(*bytes, file));
  manifest_ = std::make_unique<checkpoint::Manifest>(std::move(manifest));
  return absl::OkStatus();
}

absl::StatusOr<checkpoint::Index> Checkpoint::ReadIndex(int rank) const {
  const std::string file = JoinPath(path_, manifest_->indexes(rank).file());
  const absl::StatusOr<std::string> bytes =
      ReadWholeFile(file, kMostIndexBytes);
  ONEPASS_RETURN_IF_ERROR(AsDamage(bytes.status()));
  return DecodeIndex(*bytes, *manifest_, rank, file);
}

absl::Status Checkpoint::CheckIndexes() const {
  ONEPASS_RETURN_IF_ERROR(CheckFiles(*manifest_, *indexes_, path_));
  return CheckBoxes(*indexes_, path_);
}

void Checkpoint::CollectFiles() {
  for (const checkpoint::Index& index : *indexes_) {
    for (int i = 0; i < index.files_size(); ++i) {
      files_.push_back(
          {JoinPath(path_, index.files(i).name()), &index, i, &index.files(i)});
    }
  }
}

void Checkpoint::CollectTensors() {
  int first_file = 0;
  for (const checkpoint::Index& index : *indexes_) {
    for (const checkpoint::Tensor& entry : index.tensors()) {
      Tensor& tensor = tensors_[entry.name()];
      if (tensor.pieces.empty()) {
        tensor.name = entry.name();
        tensor.type = FromMessage(entry.element_type());
        tensor.scales = entry.state_type() == checkpoint::STATE_SCALES;
        tensor.state_type = FromMessage(entry.state_type());
        tensor.exact = entry.form() == checkpoint::FORM_EXACT;
        tensor.shape.assign(entry.shape().begin(), entry.shape().end());
        tensor.scales_name = entry.scales();
        tensor.step = entry.step();
      }
      Piece& piece = tensor.pieces.emplace_back();
      piece.box.offset.assign(entry.offset().begin(), entry.offset().end());
      piece.box.extent.assign(entry.extent().begin(), entry.extent().end());
      piece.file = first_file + entry.file();
      piece.entry = &entry;
    }
    first_file += index.files_size();
  }
}

absl::StatusOr<const InputFile*> Checkpoint::OpenFile(int file) {
  if (open_ == file) return &file_;
  open_ = -1;
  ONEPASS_ASSIGN_OR_RETURN(
      file_, OpenExpected(files_[file].path, files_[file].entry->length()));
  open_ = file;
  return &file_;
}

absl::Status Checkpoint::ReadAt(int file, int64_t offset,
                                absl::Span<char> out) {
  const InputFile* opened = nullptr;
  ONEPASS_ASSIGN_OR_RETURN(opened, OpenFile(file));
  bytes_read_ += static_cast<int64_t>(out.size());
  return opened->ReadAt(offset, out);
}

absl::Status Checkpoint::FindFiles(const Tensor& tensor, const Box& box) {
  for (const Piece& piece : tensor.pieces) {
    bool common = false;
    // The first run tells.
    ForEachCommonRun(tensor.shape, piece.box, box,
                     [&](int64_t, int64_t, int64_t) {
                       common = true;
                       return absl::CancelledError();
                     })
        .IgnoreError();
    if (common) ONEPASS_RETURN_IF_ERROR(OpenFile(piece.file).status());
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::Read(const Tensor& tensor, const Box& box,
                              absl::Span<char> buffer, Take take,
                              Release release) {
  const int64_t element = ByteSize(tensor.type);
  const auto read = [&](const Piece& piece) -> absl::Status {
    Window window(release);
    ONEPASS_RETURN_IF_ERROR(ForEachCommonRun(
        tensor.shape, piece.box, box,
        [&](int64_t i, int64_t j, int64_t n) -> absl::Status {
          while (n > 0) {
            ONEPASS_RETURN_IF_ERROR(Load(tensor, piece, i, buffer, window));
            const int64_t in_window = i - window.first;
            const int64_t some = std::min(n, window.numel - in_window);
            ONEPASS_RETURN_IF_ERROR(
                take(j, some, buffer.data() + in_window * element));
            i += some;
            j += some;
            n -= some;
          }
          return absl::OkStatus();
        }));
    return Finish(tensor, piece, buffer, window);
  };
  absl::Status status;
  for (const Piece& piece : tensor.pieces) {
    status = read(piece);
    // The buffer is the next one's, or the caller's.
    status.Update(release());
    if (!status.ok()) break;
  }
  return status;
}

absl::Status Checkpoint::Load(const Tensor& tensor, const Piece& piece,
                              int64_t at, absl::Span<char> buffer,
                              Window& window) {
  const auto holds = [&] {
    return at >= window.first && at < window.first + window.numel;
  };
  if (holds()) return absl::OkStatus();
  if (window.chunk == nullptr ||
      at >= window.chunk->first() + window.chunk->elements()) {
    ONEPASS_RETURN_IF_ERROR(Finish(tensor, piece, buffer, window));
    // The chunk that holds the element.
    const auto& chunks = piece.entry->chunks();
    const auto next =
        std::upper_bound(chunks.begin(), chunks.end(), at,
                         [](int64_t first, const checkpoint::Chunk& chunk) {
                           return first < chunk.first();
                         });
    window.chunk = &*(next - 1);
    window.first = window.chunk->first();
    window.numel = 0;
    window.hash = std::make_unique<Hash>();
  }
  while (!holds()) {
    ONEPASS_RETURN_IF_ERROR(NextWindow(tensor, piece, buffer, window));
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::NextWindow(const Tensor& tensor, const Piece& piece,
                                    absl::Span<char> buffer, Window& window) {
  const checkpoint::Chunk& chunk = *window.chunk;
  const int64_t element = ByteSize(tensor.type);
  const int64_t end = chunk.first() + chunk.elements();
  window.first += window.numel;
  window.numel = std::min(static_cast<int64_t>(buffer.size()) / element,
                          end - window.first);
  const absl::Span<char> bytes =
      buffer.subspan(0, static_cast<size_t>(window.numel * element));
  ONEPASS_RETURN_IF_ERROR(window.release());
  ONEPASS_RETURN_IF_ERROR(
      ReadAt(piece.file,
             chunk.offset() + (window.first - chunk.first()) * element, bytes));
  window.hash->Add(bytes);
  if (window.first + window.numel < end) return absl::OkStatus();
  window.chunk = nullptr;
  return CompareChecksum(piece.file, chunk, tensor.name, window.hash->Value());
}

absl::Status Checkpoint::Finish(const Tensor& tensor, const Piece& piece,
                                absl::Span<char> buffer, Window& window) {
  while (window.chunk != nullptr) {
    ONEPASS_RETURN_IF_ERROR(NextWindow(tensor, piece, buffer, window));
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::VerifyChunk(int file, const checkpoint::Chunk& chunk,
                                     absl::string_view tensor,
                                     absl::Span<char> buffer) {
  const int64_t most = static_cast<int64_t>(buffer.size());
  Hash hash;
  for (int64_t done = 0; done < chunk.length(); done += most) {
    const absl::Span<char> bytes = buffer.subspan(
        0, static_cast<size_t>(std::min(most, chunk.length() - done)));
    ONEPASS_RETURN_IF_ERROR(ReadAt(file, chunk.offset() + done, bytes));
    hash.Add(bytes);
  }
  return CompareChecksum(file, chunk, tensor, hash.Value());
}

absl::Status Checkpoint::CompareChecksum(int file,
                                         const checkpoint::Chunk& chunk,
                                         absl::string_view tensor,
                                         uint64_t checksum) const {
  if (checksum == chunk.checksum()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("\"", files_[file].path, "\" is damaged between bytes ",
                   chunk.offset(), " and ", chunk.offset() + chunk.length(),
                   ", in \"", tensor, "\": its checksum is another"));
}

absl::Status Checkpoint::VerifyFile(
    int file, absl::Span<char> buffer,
    absl::FunctionRef<void(int64_t bytes)> progress) {
  const DataFile& data = files_[file];
  std::string header(static_cast<size_t>(data.entry->header_length()), '\0');
  ONEPASS_RETURN_IF_ERROR(
      ReadAt(file, 0, absl::MakeSpan(&header[0], header.size())));
  progress(data.entry->header_length());
  if (Checksum(header) != data.entry->header_checksum()) {
    return absl::DataLossError(absl::StrCat(
        "\"", data.path, "\" is damaged in its header, before byte ",
        header.size(), ": its checksum is another"));
  }
  ONEPASS_RETURN_IF_ERROR(CompareHeader(file, header, data.entry->length()));
  for (const checkpoint::Tensor& tensor : data.index->tensors()) {
    if (tensor.file() != data.number) continue;
    for (const checkpoint::Chunk& chunk : tensor.chunks()) {
      ONEPASS_RETURN_IF_ERROR(VerifyChunk(file, chunk, tensor.name(), buffer));
      progress(chunk.length());
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CompareHeader(int file, absl::string_view text,
                                       int64_t file_bytes) const {
  const auto damaged = [&](absl::string_view problem) {
    return absl::DataLossError(
        absl::StrCat("\"", files_[file].path, "\": ", problem));
  };
  absl::StatusOr<int64_t> length = SafetensorsHeaderLength(
      text.substr(0, kSafetensorsLengthBytes), file_bytes);
  if (!length.ok()) return damaged(length.status().message());
  if (*length + kSafetensorsLengthBytes != static_cast<int64_t>(text.size())) {
    return damaged("the header has another length than in the index");
  }
  absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(text.substr(kSafetensorsLengthBytes), file_bytes);
  if (!header.ok()) return damaged(header.status().message());
  std::map<absl::string_view, const SafetensorsTensor*> by_name;
  for (const SafetensorsTensor& tensor : header->tensors) {
    by_name[tensor.name] = &tensor;
  }
  const int64_t data_begin = static_cast<int64_t>(text.size());
  size_t found = 0;
  for (const checkpoint::Tensor& tensor : files_[file].index->tensors()) {
    if (tensor.file() != files_[file].number) continue;
    ++found;
    const auto entry = by_name.find(tensor.name());
    if (entry == by_name.end() ||
        entry->second->type != FromMessage(tensor.element_type()) ||
        absl::MakeConstSpan(entry->second->shape) !=
            absl::MakeConstSpan(tensor.extent()) ||
        (tensor.chunks_size() > 0 &&
         tensor.chunks(0).offset() != data_begin + entry->second->begin)) {
      return damaged(absl::StrCat("the header has \"", tensor.name(),
                                  "\" not as the index has it"));
    }
  }
  if (found != by_name.size()) {
    return damaged("the header has tensors that the index has not");
  }
  return absl::OkStatus();
}

}  // namespace onepass
