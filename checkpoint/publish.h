// The life of a checkpoint's directory, `name` below `parent`. It is written
// under another name, and renamed once it is whole, so that what has the name
// of a checkpoint is one, also after a crash at any moment.
//
//   ASSIGN_OR_RETURN(PartialDirectory partial, CreatePartial(parent, name));
//   ...                    // tell other ranks; on each of them:
//   RETURN_IF_ERROR(CheckNonce(partial.path, partial.nonce));
//   ...                    // files, each one written and synced
//   // Then, on one rank:
//   const std::string manifest = JoinPath(partial.path, kManifestName);
//   RETURN_IF_ERROR(WriteSmallFile(manifest, bytes));
//   RETURN_IF_ERROR(Publish(partial.path, parent, name));
//
// Ranks agree above this: nothing here communicates, and one process at a time
// publishes and removes below a parent. Names are those of IsPlainName(), and
// short enough to be that of a partial directory, too: InvalidArgument. Other
// errors are those of FileError() (checkpoint/file_error.h) where none are
// named.

#ifndef ONEPASS_CHECKPOINT_PUBLISH_H_
#define ONEPASS_CHECKPOINT_PUBLISH_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace onepass {

// The file that makes a directory a checkpoint, written last.
inline constexpr char kManifestName[] = "manifest";
// The file of a partial directory by which ranks see that they have the same.
inline constexpr char kNonceName[] = "nonce";

// `<name>.partial-<unique id>`, where the id is three hex numbers, of 16, 8 and
// 16 digits, with '-' between: the time in nanoseconds since 1970, the process,
// and a random one.
bool IsPartialName(absl::string_view name);

// Whether a rank's file of a checkpoint has such a name: it begins with
// RankFilePrefix() of some rank.
bool IsRankFileName(absl::string_view name);
// "rank-00001-of-00004".
std::string RankFilePrefix(int rank, int world);

struct PartialDirectory {
  std::string path;
  // 32 hex digits, random.
  std::string nonce;
};

// Makes the directory in which checkpoint `name` is to be written, with its
// nonce in a file. AlreadyExists: `parent` has something of that name; this is
// looked at early, so that nobody writes for hours in vain, and Publish()
// decides. NotFound: there is no `parent`.
absl::StatusOr<PartialDirectory> CreatePartial(absl::string_view parent,
                                               absl::string_view name);

// Whether this rank sees the directory that another one made. NotFound, or
// FailedPrecondition where there is another nonce: it does not.
absl::Status CheckNonce(absl::string_view path, absl::string_view nonce);

// Gives the partial directory `path` its name; all its files but the nonce have
// to be on the disk. Once it has succeeded, that is on the disk, too.
// AlreadyExists: `parent` has something of that name, if only an empty
// directory; that stays. FailedPrecondition: there is no manifest.
//
// After an error the directory has one of its names, whole, and the call may be
// repeated as long as it is the old one. Where an error says "published", it
// has the new one, and may yet have the old one again should the machine crash.
//
// A filesystem without renameat2(RENAME_NOREPLACE), as NFS, is asked first
// whether there is something of that name; what another process puts there
// between that and the renaming, an empty directory, is replaced.
absl::Status Publish(absl::string_view path, absl::string_view parent,
                     absl::string_view name);

// The paths of partial directories below `parent`, of any checkpoint, in order.
absl::StatusOr<std::vector<std::string>> ListPartials(absl::string_view parent);

// Removes a partial directory and the files in it. InvalidArgument: `path` has
// no name of IsPartialName(), or is no directory. FailedPrecondition: there is
// a directory in it, which no checkpoint has; nothing is removed. NotFound.
absl::Status RemovePartial(absl::string_view path);

// The names of the checkpoints below `parent`: of directories that have a file
// kManifestName and are not partial, in order. What this process may not look
// into is left out.
absl::StatusOr<std::vector<std::string>> ListPublished(
    absl::string_view parent);

// Removes a checkpoint: first its name, so that it never has that and lacks
// files; after a crash it is one of ListPartials(). NotFound: it is none of
// ListPublished(). FailedPrecondition: as RemovePartial().
absl::Status RemovePublished(absl::string_view parent, absl::string_view name);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_PUBLISH_H_
