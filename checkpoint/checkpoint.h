// A published checkpoint, to be read: by byte ranges, each chunk verified.
//
//   ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open("runs/step-100"));
//   const auto& tensor = checkpoint.tensors().at("state.w.exp_avg");
//   RETURN_IF_ERROR(checkpoint.Read(tensor, box, buffer, Take));
//
// Everything in the directory is outside input. What opens keeps the rules of
// manifest.proto: shapes, boxes and ranges of bytes can be relied on. Of the
// tensors' bytes only what is read is looked at; checkpoint/verify.h reads all.

#ifndef ONEPASS_CHECKPOINT_CHECKPOINT_H_
#define ONEPASS_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/files.h"
#include "checkpoint/manifest.pb.h"
#include "checkpoint/meta.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/state.h"

namespace onepass {

class Checkpoint {
 public:
  // What one rank wrote of a tensor.
  struct Piece {
    Box box;
    int file;  // index in files()
    const checkpoint::Tensor* entry;
  };

  // An array of the checkpoint, of all ranks together.
  struct Tensor {
    std::string name;
    SafetensorsType type;
    bool scales;           // of another tensor
    StateType state_type;  // of no meaning for scales
    bool exact;
    std::vector<int64_t> shape;
    std::string scales_name;  // empty where it has none
    int64_t step;
    std::vector<Piece> pieces;

    int64_t numel() const { return NumelOf(shape); }
    int64_t bytes() const { return numel() * ByteSize(type); }
  };

  struct DataFile {
    std::string path;
    const checkpoint::Index* index;
    int number;  // in that index
    const checkpoint::DataFile* entry;
  };

  // Reads the manifest and the indexes. NotFound: there is no such directory,
  // or it has neither a manifest nor files of ranks. DataLoss, with the file
  // and the place: it is damaged.
  static absl::StatusOr<Checkpoint> Open(absl::string_view path);
  // The same for who wants to know all that is damaged: `problems` gets a
  // DataLoss for each index that is; it is empty then, and tensors() is.
  static absl::StatusOr<Checkpoint> OpenDamaged(
      absl::string_view path, std::vector<absl::Status>* problems);

  const std::string& path() const { return path_; }
  const checkpoint::Manifest& manifest() const { return *manifest_; }
  const std::vector<checkpoint::Index>& indexes() const { return *indexes_; }
  CheckpointMeta meta() const;
  // By name, scales too.
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  const std::vector<DataFile>& files() const { return files_; }

  // Calls take(first, n, data) with the elements of `box`, which is one of the
  // tensor's: elements [first, first + n) of it in C order, in some order, each
  // once. They come through `buffer`, of at least 4096 bytes. DataLoss, with
  // the file and the offset: a chunk that it touches is damaged; others, and
  // where it is larger than the buffer some of its own elements, may have been
  // taken by then. Not by several threads at a time.
  //
  // `data` stays as it is up to the next release(), which is called before the
  // buffer is read into again, and at the end, whatever came out.
  using Take = absl::FunctionRef<absl::Status(int64_t first, int64_t n,
                                              const char* data)>;
  using Release = absl::FunctionRef<absl::Status()>;
  absl::Status Read(const Tensor& tensor, const Box& box,
                    absl::Span<char> buffer, Take take,
                    Release release = absl::OkStatus);

  // Whether the files that Read() would read are there, of their lengths.
  absl::Status FindFiles(const Tensor& tensor, const Box& box);

  // Reads the header and all chunks of a file, and compares the header with the
  // index. `progress` is called with bytes read.
  absl::Status VerifyFile(int file, absl::Span<char> buffer,
                          absl::FunctionRef<void(int64_t bytes)> progress);

  // That were read since it was opened, from files of tensors.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  class Hash;  // XXH3 of what comes

  struct Window;  // what is in the buffer of a Read()

  Checkpoint() = default;

  absl::Status ReadManifest();
  absl::StatusOr<checkpoint::Index> ReadIndex(int rank) const;
  absl::Status CheckIndexes() const;
  void CollectFiles();
  void CollectTensors();
  absl::StatusOr<const InputFile*> OpenFile(int file);
  absl::Status ReadAt(int file, int64_t offset, absl::Span<char> out);
  // Reads on, up to the window that holds element `at`.
  absl::Status Load(const Tensor& tensor, const Piece& piece, int64_t at,
                    absl::Span<char> buffer, Window& window);
  absl::Status NextWindow(const Tensor& tensor, const Piece& piece,
                          absl::Span<char> buffer, Window& window);
  // Reads the rest of its chunk.
  absl::Status Finish(const Tensor& tensor, const Piece& piece,
                      absl::Span<char> buffer, Window& window);
  absl::Status VerifyChunk(int file, const checkpoint::Chunk& chunk,
                           absl::string_view tensor, absl::Span<char> buffer);
  absl::Status CompareChecksum(int file, const checkpoint::Chunk& chunk,
                               absl::string_view tensor,
                               uint64_t checksum) const;
  absl::Status CompareHeader(int file, absl::string_view text,
                             int64_t file_bytes) const;

  std::string path_;
  std::unique_ptr<checkpoint::Manifest> manifest_;
  std::unique_ptr<std::vector<checkpoint::Index>> indexes_;
  std::map<std::string, Tensor> tensors_;
  std::vector<DataFile> files_;
  // The one that was used last.
  int open_ = -1;
  InputFile file_;
  int64_t bytes_read_ = 0;
};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_CHECKPOINT_H_
