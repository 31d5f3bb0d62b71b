#include "checkpoint/publish.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "checkpoint/files.h"
#include "gtest/gtest.h"
#include "tests/process_use.h"
#include "tests/syscall_injector.h"
#include "tests/temp_directory.h"

namespace onepass {
namespace {

using StringList = std::vector<std::string>;

constexpr char kData[] = "data";
constexpr char kText[] = "all of the data";
constexpr char kOfManifest[] = "what is in the manifest";

bool Exists(const std::string& path) {
  return std::filesystem::exists(std::filesystem::symlink_status(path));
}

class PublishTest : public testing::Test {
 protected:
  std::string Path(absl::string_view name) const {
    return JoinPath(parent_, name);
  }

  // A checkpoint of one file and its manifest, from nothing to its name.
  absl::Status Save(absl::string_view name) const {
    const auto partial = CreatePartial(parent_, name);
    if (!partial.ok()) return partial.status();
    absl::Status status = WriteSmallFile(JoinPath(partial->path, kData), kText);
    if (status.ok()) {
      status =
          WriteSmallFile(JoinPath(partial->path, kManifestName), kOfManifest);
    }
    return status.ok() ? Publish(partial->path, parent_, name) : status;
  }

  // The same, at once, where the disk is of no matter.
  void MakeSaved(absl::string_view name) const {
    const std::filesystem::path path = Path(name);
    std::filesystem::create_directory(path);
    std::ofstream(path / kData) << kText;
    std::ofstream(path / kManifestName) << kOfManifest;
  }

  // That what is listed under this name is all there, and nothing else.
  void ExpectWhole(absl::string_view name) const {
    const auto data = ReadWholeFile(JoinPath(Path(name), kData), 100);
    const auto manifest =
        ReadWholeFile(JoinPath(Path(name), kManifestName), 100);
    ASSERT_TRUE(data.ok() && manifest.ok())
        << name << " " << data.status() << " " << manifest.status();
    EXPECT_EQ(*data, kText);
    EXPECT_EQ(*manifest, kOfManifest);
    EXPECT_EQ(Entries(Path(name).c_str()), 2);
  }

  StringList Published() const {
    const auto names = ListPublished(parent_);
    EXPECT_TRUE(names.ok()) << names.status();
    return names.value_or(StringList());
  }

  StringList Partials() const {
    const auto paths = ListPartials(parent_);
    EXPECT_TRUE(paths.ok()) << paths.status();
    return paths.value_or(StringList());
  }

  void ExpectError(const absl::Status& status, absl::StatusCode code,
                   absl::string_view text) const {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), text))
        << status << "\nexpected: " << text;
  }

  const TempDirectory directory_;
  const std::string& parent_ = directory_.path();
};

TEST_F(PublishTest, ACheckpointComesAndGoes) {
  EXPECT_EQ(Published(), StringList());
  const auto partial = CreatePartial(parent_, "step-1");
  ASSERT_TRUE(partial.ok()) << partial.status();
  EXPECT_TRUE(absl::StartsWith(partial->path, Path("step-1.partial-")));
  EXPECT_EQ(partial->nonce.size(), 32u);
  EXPECT_EQ(partial->nonce.find_first_not_of("0123456789abcdef"),
            std::string::npos);
  EXPECT_TRUE(CheckNonce(partial->path, partial->nonce).ok());
  ASSERT_TRUE(WriteSmallFile(JoinPath(partial->path, kData), kText).ok());
  ASSERT_TRUE(
      WriteSmallFile(JoinPath(partial->path, kManifestName), kOfManifest).ok());
  EXPECT_EQ(Published(), StringList());
  EXPECT_EQ(Partials(), StringList{partial->path});

  const absl::Status status = Publish(partial->path, parent_, "step-1");
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Published(), StringList{"step-1"});
  EXPECT_EQ(Partials(), StringList());
  ExpectWhole("step-1");

  ASSERT_TRUE(Save("step-2").ok());
  EXPECT_EQ(Published(), (StringList{"step-1", "step-2"}));
  ASSERT_TRUE(RemovePublished(parent_, "step-1").ok());
  EXPECT_EQ(Published(), StringList{"step-2"});
  EXPECT_EQ(Entries(parent_.c_str()), 1);
  ExpectWhole("step-2");
}

TEST_F(PublishTest, EachPartialIsAnother) {
  const auto a = CreatePartial(parent_, "x");
  const auto b = CreatePartial(parent_, "x");
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_NE(a->path, b->path);
  EXPECT_NE(a->nonce, b->nonce);
  EXPECT_EQ(Partials().size(), 2u);
  // As where ranks see other disks under one path.
  ExpectError(CheckNonce(a->path, b->nonce),
              absl::StatusCode::kFailedPrecondition, a->path);
  ExpectError(CheckNonce(Path("x.partial-none"), b->nonce),
              absl::StatusCode::kNotFound, Path("x.partial-none"));
  EXPECT_TRUE(RemovePartial(a->path).ok());
  EXPECT_EQ(Partials(), StringList{b->path});
}

TEST_F(PublishTest, PartialNamesAreThoseOfThisForm) {
  const std::string id = "0123456789abcdef-00001234-fedcba9876543210";
  for (const std::string& name : {"a.partial-" + id, ".partial-.partial-" + id,
                                  "a.partial-x.partial-" + id}) {
    EXPECT_TRUE(IsPartialName(name)) << name;
  }
  for (const std::string& name :
       StringList{"", id, ".partial-" + id, "a.partial-", "a" + id,
                  "a.partial-" + id + "0", "a.partial-" + id.substr(1),
                  "a.partial-0" + id.substr(1) + "x", "b/a.partial-" + id,
                  "a.Partial-" + id, "a.partial-g" + id.substr(1),
                  "a.partial-A" + id.substr(1),
                  "a.partial-0123456789abcdef_" + id.substr(17),
                  "a.partial-" + id.substr(0, 25) + "_" + id.substr(26),
                  std::string(210, 'a') + ".partial-" + id}) {
    EXPECT_FALSE(IsPartialName(name)) << name;
  }
}

TEST_F(PublishTest, OddNamesAreRefused) {
  const auto partial = CreatePartial(parent_, "x");
  ASSERT_TRUE(partial.ok());
  const std::string partial_name = partial->path.substr(parent_.size() + 1);
  const StringList names = {
      "", ".", "..", "a/b", std::string("a\0b", 3), std::string(256, 'a'),
      // Those of which no partial directory could have the name.
      std::string(205, 'a'), partial_name};
  for (const std::string& name : names) {
    const absl::StatusCode refused = absl::StatusCode::kInvalidArgument;
    EXPECT_EQ(CreatePartial(parent_, name).status().code(), refused) << name;
    EXPECT_EQ(Publish(partial->path, parent_, name).code(), refused) << name;
    EXPECT_EQ(RemovePublished(parent_, name).code(), refused) << name;
  }
  ExpectError(CreatePartial("", "a").status(),
              absl::StatusCode::kInvalidArgument, "empty");
  ExpectError(CreatePartial(Path("none"), "a").status(),
              absl::StatusCode::kNotFound, Path("none"));
  EXPECT_EQ(Entries(parent_.c_str()), 1);
  EXPECT_TRUE(Save(std::string(204, 'a')).ok());
  EXPECT_TRUE(RemovePublished(parent_, std::string(204, 'a')).ok());
}

// Of whatever kind it is; nothing of it changes.
TEST_F(PublishTest, AnExistingTargetIsRefused) {
  const auto exists = absl::StatusCode::kAlreadyExists;
  const StringList kinds = {"whole", "empty", "full", "file", "link"};
  StringList partials;
  for (const std::string& kind : kinds) {
    // What is there when it is to be published was not when it began.
    const auto partial = CreatePartial(parent_, kind);
    ASSERT_TRUE(partial.ok()) << partial.status();
    partials.push_back(partial->path);
    ASSERT_TRUE(
        WriteSmallFile(JoinPath(partial->path, kManifestName), "").ok());
  }
  ASSERT_TRUE(Save("whole").ok());
  ASSERT_EQ(mkdir(Path("empty").c_str(), 0700), 0);
  ASSERT_EQ(mkdir(Path("full").c_str(), 0700), 0);
  ASSERT_TRUE(WriteSmallFile(Path("full/a"), "mine").ok());
  ASSERT_TRUE(WriteSmallFile(Path("file"), "mine").ok());
  ASSERT_EQ(symlink("nowhere", Path("link").c_str()), 0);
  for (size_t i = 0; i < kinds.size(); ++i) {
    ExpectError(CreatePartial(parent_, kinds[i]).status(), exists,
                Path(kinds[i]));
    ExpectError(Publish(partials[i], parent_, kinds[i]), exists,
                Path(kinds[i]));
    EXPECT_TRUE(Exists(JoinPath(partials[i], kManifestName))) << kinds[i];
  }
  ExpectWhole("whole");
  EXPECT_EQ(Entries(Path("empty").c_str()), 0);
  EXPECT_EQ(*ReadWholeFile(Path("full/a"), 10), "mine");
  EXPECT_EQ(*ReadWholeFile(Path("file"), 10), "mine");
  EXPECT_TRUE(Exists(Path("link")));
  EXPECT_FALSE(Exists(Path("nowhere")));
  // Under another name it may be published still.
  EXPECT_TRUE(Publish(partials[0], parent_, "other").ok());
}

TEST_F(PublishTest, OnlyAWholePartialIsPublished) {
  const auto partial = CreatePartial(parent_, "x");
  ASSERT_TRUE(partial.ok());
  ExpectError(Publish(partial->path, parent_, "x"),
              absl::StatusCode::kFailedPrecondition, kManifestName);
  EXPECT_TRUE(CheckNonce(partial->path, partial->nonce).ok());
  ASSERT_TRUE(WriteSmallFile(JoinPath(partial->path, kManifestName), "").ok());
  // Others' directories.
  ASSERT_EQ(mkdir(Path("mine").c_str(), 0700), 0);
  ASSERT_TRUE(WriteSmallFile(Path("mine/manifest"), "").ok());
  const auto refused = absl::StatusCode::kInvalidArgument;
  ExpectError(Publish(Path("mine"), parent_, "x"), refused, Path("mine"));
  ExpectError(Publish(partial->path, Path("mine"), "x"), refused,
              partial->path);
  EXPECT_TRUE(Publish(partial->path, parent_, "x").ok());
}

TEST_F(PublishTest, OnlyCheckpointsAreListed) {
  ASSERT_TRUE(Save("b").ok());
  ASSERT_TRUE(Save("a").ok());
  const auto partial = CreatePartial(parent_, "c");
  ASSERT_TRUE(partial.ok());
  ASSERT_TRUE(WriteSmallFile(JoinPath(partial->path, kManifestName), "").ok());
  ASSERT_EQ(mkdir(Path("no-manifest").c_str(), 0700), 0);
  ASSERT_EQ(mkdir(Path("odd-manifest").c_str(), 0700), 0);
  ASSERT_EQ(mkdir(Path("odd-manifest/manifest").c_str(), 0700), 0);
  ASSERT_TRUE(WriteSmallFile(Path("manifest"), "").ok());
  ASSERT_EQ(symlink("a", Path("link").c_str()), 0);
  // Files and links with names of partial directories.
  const std::string id = "0123456789abcdef-00001234-fedcba9876543210";
  ASSERT_TRUE(WriteSmallFile(Path("f.partial-" + id), "").ok());
  ASSERT_EQ(symlink("a", Path("l.partial-" + id).c_str()), 0);
  EXPECT_EQ(Published(), (StringList{"a", "b"}));
  EXPECT_EQ(Partials(), StringList{partial->path});
  ExpectError(ListPublished(Path("none")).status(), absl::StatusCode::kNotFound,
              Path("none"));
  ExpectError(ListPartials(Path("none")).status(), absl::StatusCode::kNotFound,
              Path("none"));
}

TEST_F(PublishTest, NothingElseIsRemoved) {
  ASSERT_TRUE(Save("a").ok());
  const std::string id = ".partial-0123456789abcdef-00001234-fedcba9876543210";
  ASSERT_EQ(mkdir(Path("dir").c_str(), 0700), 0);
  ASSERT_TRUE(WriteSmallFile(Path("dir/mine"), "").ok());
  ASSERT_TRUE(WriteSmallFile(Path("f" + id), "").ok());
  ASSERT_EQ(symlink("dir", Path("l" + id).c_str()), 0);
  for (const std::string& name : {std::string("a"), std::string("dir"),
                                  "f" + id, "l" + id, std::string(".")}) {
    ExpectError(RemovePartial(Path(name)), absl::StatusCode::kInvalidArgument,
                Path(name));
  }
  ExpectError(RemovePartial(Path("n" + id)), absl::StatusCode::kNotFound,
              Path("n" + id));
  for (const std::string& name : {std::string("dir"), std::string("none")}) {
    ExpectError(RemovePublished(parent_, name), absl::StatusCode::kNotFound,
                Path(name));
  }
  EXPECT_TRUE(Exists(Path("dir/mine")));
  EXPECT_TRUE(Exists(Path("f" + id)));
  ExpectWhole("a");

  // A directory in it is not ours; all stays.
  const auto partial = CreatePartial(parent_, "x");
  ASSERT_TRUE(partial.ok());
  const std::string inner = JoinPath(partial->path, "z");
  ASSERT_EQ(mkdir(inner.c_str(), 0700), 0);
  ExpectError(RemovePartial(partial->path),
              absl::StatusCode::kFailedPrecondition, inner);
  EXPECT_TRUE(Exists(JoinPath(partial->path, kNonceName)));
  ASSERT_EQ(mkdir(Path("a/z").c_str(), 0700), 0);
  ExpectError(RemovePublished(parent_, "a"),
              absl::StatusCode::kFailedPrecondition, Path("a/z"));
  EXPECT_EQ(Published(), StringList{"a"});

  // Of a link, what it leads to stays.
  ASSERT_EQ(rmdir(inner.c_str()), 0);
  ASSERT_EQ(symlink("../dir", inner.c_str()), 0);
  EXPECT_TRUE(RemovePartial(partial->path).ok());
  EXPECT_FALSE(Exists(partial->path));
  EXPECT_TRUE(Exists(Path("dir/mine")));
}

TEST_F(PublishTest, DescriptorsAreClosed) {
  const int64_t descriptors = Entries(kDescriptors);
  ASSERT_TRUE(Save("a").ok());
  EXPECT_FALSE(Save("a").ok());
  EXPECT_EQ(Published(), StringList{"a"});
  EXPECT_TRUE(RemovePublished(parent_, "a").ok());
  EXPECT_EQ(Partials(), StringList());
  EXPECT_EQ(Entries(kDescriptors), descriptors);
}

// What is on the disk when a process is killed at each system call, or that
// fails.
class PublishInjectionTest : public PublishTest {
 protected:
  void SetUp() override {
    const absl::Status status = CanInject();
    if (!status.ok()) GTEST_SKIP() << status.message();
  }

  // Has one of the calls of `act`, which returns 0 where it succeeds, killed or
  // failed after the other, each time on what `prepare` makes, and looks with
  // `check` at what is there then.
  void ForEachCall(const std::function<void()>& prepare,
                   const std::function<int()>& act,
                   const std::function<void(const InjectionOutcome&)>& check) {
    const auto start_anew = [&] {
      for (const auto& entry : std::filesystem::directory_iterator(parent_)) {
        std::filesystem::remove_all(entry.path());
      }
      prepare();
    };
    start_anew();
    const auto calls = TraceFileCalls(parent_, act);
    ASSERT_TRUE(calls.ok()) << calls.status();
    ASSERT_GT(calls->size(), 5u);
    // 0: killed.
    const std::vector<int> errors = {0, ENOSPC, EIO};
    size_t count = 0;
    for (size_t k = 0; k < calls->size(); ++k) {
      for (const int error : errors) {
        start_anew();
        const auto outcome = error == 0 ? RunKilledAt(parent_, k, act)
                                        : RunFailingAt(parent_, k, error, act);
        ASSERT_TRUE(outcome.ok()) << outcome.status();
        count += outcome->injected;
        SCOPED_TRACE(absl::StrCat("call ", k, ", ", outcome->call.name, " ",
                                  outcome->call.path, ", error ", error));
        EXPECT_EQ(outcome->signal, error == 0 ? SIGKILL : 0);
        check(*outcome);
        // What is left can be seen, and removed.
        for (const std::string& path : Partials()) {
          EXPECT_TRUE(RemovePartial(path).ok());
        }
        EXPECT_EQ(Entries(parent_.c_str()),
                  static_cast<int64_t>(Published().size()));
      }
    }
    EXPECT_EQ(count, errors.size() * calls->size());
  }
};

TEST_F(PublishInjectionTest, TheNewestIsTheOldOneOrTheNewOneWhole) {
  bool seen_old = false;
  bool seen_new = false;
  ForEachCall(
      [this] { ASSERT_TRUE(Save("step-1").ok()); },
      [this] { return Save("step-2").ok() ? 0 : 1; },
      [&](const InjectionOutcome& outcome) {
        const StringList published = Published();
        ExpectWhole("step-1");
        if (published == StringList{"step-1"}) {
          seen_old = true;
          // It has not said that it was done.
          EXPECT_NE(outcome.exit_status, 0);
        } else {
          seen_new = true;
          EXPECT_EQ(published, (StringList{"step-1", "step-2"}));
          ExpectWhole("step-2");
        }
        // Nothing that decides over the new one may fail unseen.
        static const StringList kMatter = {"openat",    "write",  "pwrite64",
                                           "fsync",     "mkdir",  "unlink",
                                           "renameat2", "mkdirat"};
        if (std::count(kMatter.begin(), kMatter.end(), outcome.call.name) > 0) {
          EXPECT_NE(outcome.exit_status, 0);
        }
      });
  EXPECT_TRUE(seen_old);
  EXPECT_TRUE(seen_new);
}

TEST_F(PublishInjectionTest, AnOlderOneIsThereWholeOrNotAtAll) {
  bool seen_both = false;
  bool seen_one = false;
  ForEachCall(
      [this] {
        MakeSaved("step-1");
        MakeSaved("step-2");
      },
      [this] { return RemovePublished(parent_, "step-1").ok() ? 0 : 1; },
      [&](const InjectionOutcome& outcome) {
        const StringList published = Published();
        ExpectWhole("step-2");
        if (published == StringList{"step-2"}) {
          seen_one = true;
        } else {
          seen_both = true;
          EXPECT_EQ(published, (StringList{"step-1", "step-2"}));
          ExpectWhole("step-1");
          EXPECT_NE(outcome.exit_status, 0);
        }
      });
  EXPECT_TRUE(seen_both);
  EXPECT_TRUE(seen_one);
}

// Each file is written, then synced; then the nonce goes and the directory is
// synced; then it gets its name, and that is synced.
TEST_F(PublishInjectionTest, ComesToTheDiskInOrder) {
  const auto calls =
      TraceFileCalls(parent_, [this] { return Save("new").ok() ? 0 : 1; });
  ASSERT_TRUE(calls.ok()) << calls.status();
  StringList order;
  std::string partial;
  for (const FileCall& call : *calls) {
    // Of the partial directory, which has another name each time.
    std::string path = call.path.substr(parent_.size());
    const size_t mark = path.find(".partial-");
    if (mark != std::string::npos) {
      const size_t end = std::min(path.find('/', mark), path.size());
      partial = path.substr(0, end);
      path.replace(0, end, "P");
    }
    const std::string name = absl::StartsWith(call.name, "mkdir")    ? "mkdir"
                             : absl::StartsWith(call.name, "unlink") ? "unlink"
                             : absl::StrContains(call.name, "write")
                                 ? "write"
                                 : call.name;
    for (const char* listed : {"mkdir", "write", "fsync", "unlink"}) {
      if (name == listed) order.push_back(name + " " + path);
    }
    if (absl::StartsWith(name, "rename")) {
      order.push_back("rename " + path + " " +
                      call.target.substr(parent_.size()));
    }
  }
  EXPECT_EQ(
      order,
      (StringList{"mkdir P", "write P/nonce", "fsync P/nonce", "write P/data",
                  "fsync P/data", "write P/manifest", "fsync P/manifest",
                  "unlink P/nonce", "fsync P", "rename P /new", "fsync "}));
  EXPECT_TRUE(IsPartialName(partial.substr(1))) << partial;
}

// The name goes, also from the disk, before the first file does.
TEST_F(PublishInjectionTest, GoesFromTheDiskInOrder) {
  MakeSaved("old");
  const auto calls = TraceFileCalls(
      parent_, [this] { return RemovePublished(parent_, "old").ok() ? 0 : 1; });
  ASSERT_TRUE(calls.ok()) << calls.status();
  StringList order;
  for (const FileCall& call : *calls) {
    if (absl::StartsWith(call.name, "rename")) {
      EXPECT_EQ(call.path, Path("old"));
      order.push_back("rename");
    } else if (call.name == "fsync") {
      EXPECT_EQ(call.path, parent_);
      order.push_back("fsync");
    } else if (absl::StartsWith(call.name, "unlink") || call.name == "rmdir") {
      order.push_back("remove");
    }
  }
  EXPECT_EQ(order,
            (StringList{"rename", "fsync", "remove", "remove", "remove"}));
}

// Of filesystems and systems that have no RENAME_NOREPLACE.
TEST_F(PublishInjectionTest, IsPublishedAlsoByPlainRenaming) {
  const auto trace =
      TraceFileCalls(parent_, [this] { return Save("first").ok() ? 0 : 1; });
  ASSERT_TRUE(trace.ok()) << trace.status();
  const auto renaming = std::find_if(
      trace->begin(), trace->end(),
      [](const FileCall& call) { return call.name == "renameat2"; });
  ASSERT_NE(renaming, trace->end());
  const int k = renaming - trace->begin();
  for (const int error : {EINVAL, ENOSYS}) {
    const std::string name = absl::StrCat("error-", error);
    const auto outcome = RunFailingAt(parent_, k, error,
                                      [&] { return Save(name).ok() ? 0 : 1; });
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->call.name, "renameat2");
    EXPECT_EQ(outcome->exit_status, 0);
    ExpectWhole(name);
  }
  // An empty directory, a full one, a file: each came after the partial one.
  for (const char* kind : {"empty", "full", "file"}) {
    const auto act = [&] {
      const auto partial = CreatePartial(parent_, kind);
      if (!partial.ok() ||
          !WriteSmallFile(JoinPath(partial->path, kManifestName), "").ok()) {
        return 1;
      }
      const std::string path = Path(kind);
      if (std::string(kind) == "file") {
        if (!WriteSmallFile(path, "").ok()) return 1;
      } else if (mkdir(path.c_str(), 0700) != 0) {
        return 1;
      }
      if (std::string(kind) == "full" &&
          !WriteSmallFile(JoinPath(path, "a"), "").ok()) {
        return 1;
      }
      return absl::IsAlreadyExists(Publish(partial->path, parent_, kind)) ? 0
                                                                          : 2;
    };
    const auto calls = TraceFileCalls(parent_, act);
    ASSERT_TRUE(calls.ok()) << kind << " " << calls.status();
    std::filesystem::remove_all(Path(kind));
    int call = 0;
    while ((*calls)[call].name != "renameat2") ++call;
    const auto outcome = RunFailingAt(parent_, call, EINVAL, act);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->call.name, "renameat2");
    EXPECT_EQ(outcome->exit_status, 0) << kind;
    EXPECT_EQ(Partials().size(), 2u) << kind;
    for (const std::string& path : Partials()) {
      EXPECT_TRUE(RemovePartial(path).ok());
    }
  }
}

// An error after the renaming says that it was made; one before can be
// repeated.
TEST_F(PublishInjectionTest, AFailedCallTellsWhatWasDone) {
  const auto act = [this] {
    const auto partial = CreatePartial(parent_, "x");
    if (!partial.ok() ||
        !WriteSmallFile(JoinPath(partial->path, kManifestName), "").ok()) {
      return 1;
    }
    const absl::Status status = Publish(partial->path, parent_, "x");
    if (status.ok()) return 0;
    const bool said = absl::StrContains(status.message(), "published, but");
    if (said != !Exists(partial->path)) return 2;
    return said || Publish(partial->path, parent_, "x").ok() ? 3 : 4;
  };
  const auto calls = TraceFileCalls(parent_, act);
  ASSERT_TRUE(calls.ok()) << calls.status();
  int failed = 0;
  for (size_t k = 0; k < calls->size(); ++k) {
    std::filesystem::remove_all(Path("x"));
    const auto outcome = RunFailingAt(parent_, k, EIO, act);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_NE(outcome->exit_status, 2) << outcome->call.name;
    EXPECT_NE(outcome->exit_status, 4) << outcome->call.name;
    failed += outcome->exit_status == 3;
    for (const std::string& path : Partials()) {
      EXPECT_TRUE(RemovePartial(path).ok());
    }
  }
  EXPECT_GE(failed, 5);
}

}  // namespace
}  // namespace onepass
