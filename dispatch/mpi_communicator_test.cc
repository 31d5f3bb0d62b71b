// The conformance tests on the ranks that mpirun started, and what only these
// have. Every rank runs this program, and all run the same tests.

#include "dispatch/mpi_communicator.h"

#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/communicator.h"
#include "dispatch/communicator_conformance.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

std::unique_ptr<Communicator> MakeCommunicator(
    std::chrono::milliseconds timeout, int64_t chunk_bytes) {
  absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      CreateMpiCommunicator({{timeout}, chunk_bytes});
  EXPECT_TRUE(communicator.ok()) << communicator.status();
  return *std::move(communicator);
}

}  // namespace

void OnRanks(const CommunicatorOptions& options, RankBody body) {
  // Small chunks: kilobytes are many. All ranks create both with time enough;
  // the timeout under test is that of the calls.
  const auto control = MakeCommunicator(kLong, 1000);
  ASSERT_TRUE(control->Barrier().ok());
  body(MakeCommunicator(options.timeout, 1000), *control);
}

namespace {

TEST(MpiCommunicatorTest, TheUsualChunks) {
  const auto communicator =
      MakeCommunicator(kLong, MpiCommunicatorOptions().chunk_bytes);
  const int64_t chunk = MpiCommunicatorOptions().chunk_bytes;
  int64_t round = 0;
  for (int64_t bytes : {chunk - 1, chunk, chunk + 1, 3 * chunk + 5}) {
    ExpectAllGather(*communicator, bytes, ++round);
    ExpectAllToAll(*communicator, bytes, ++round);
    ExpectBroadcast(*communicator, bytes, ++round, communicator->size() - 1);
  }
}

TEST(MpiCommunicatorTest, ChunksOfOneByte) {
  const auto communicator = MakeCommunicator(kLong, 1);
  ExpectAllGather(*communicator, 300, 1);
  ExpectAllToAll(*communicator, 300, 2);
}

TEST(MpiCommunicatorTest, TheLeastChunkCounts) {
  const int rank = MakeCommunicator(kLong, 1000)->rank();
  const auto communicator = MakeCommunicator(kLong, 100 + 50 * (rank % 3));
  ExpectAllGather(*communicator, 4567, 1);
  ExpectAllToAll(*communicator, 4567, 2);
  const auto duplicate = communicator->Duplicate();
  ASSERT_TRUE(duplicate.ok()) << duplicate.status();
  ExpectAllGather(**duplicate, 4567, 3);
}

TEST(MpiCommunicatorTest, ALongReasonIsCut) {
  const auto communicator = MakeCommunicator(kLong, 1000);
  const std::string whole =
      absl::StrCat("rank 0 aborted: ", std::string(2000, 'x'));
  if (communicator->rank() == 0) communicator->Abort(std::string(2000, 'x'));
  const absl::Status status = communicator->Barrier();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_EQ(status.message(),
            communicator->rank() == 0 ? whole : whole.substr(0, 500));
}

// Memory whose first pages each keep waiting whoever reads them first, as if
// the process had stopped there.
class StallingMemory {
 public:
  StallingMemory(int64_t bytes, int stalling_pages,
                 std::chrono::milliseconds stall)
      : page_(sysconf(_SC_PAGESIZE)), stalling_bytes_(stalling_pages * page_) {
    bytes_ = std::max((bytes + page_ - 1) / page_ * page_, stalling_bytes_);
    void* const memory =
        mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    EXPECT_EQ(mprotect(memory, stalling_bytes_, PROT_NONE), 0);
    memory_ = static_cast<char*>(memory);
    stall_.tv_sec = stall.count() / 1000;
    stall_.tv_nsec = stall.count() % 1000 * 1000000;
    of_handler_ = this;
    struct sigaction action = {};
    action.sa_flags = SA_SIGINFO;
    action.sa_sigaction = [](int, siginfo_t* fault, void*) {
      of_handler_->Stall(static_cast<char*>(fault->si_addr));
    };
    EXPECT_EQ(sigaction(SIGSEGV, &action, &before_), 0);
  }

  ~StallingMemory() {
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(memory_, bytes_);
  }

  const void* data() const { return memory_; }

 private:
  void Stall(char* address) {
    if (address < memory_ || address >= memory_ + stalling_bytes_) {
      // It comes again, and ends the program.
      sigaction(SIGSEGV, &before_, nullptr);
      return;
    }
    nanosleep(&stall_, nullptr);
    mprotect(memory_ + (address - memory_) / page_ * page_, page_, PROT_READ);
  }

  static StallingMemory* of_handler_;

  const int64_t page_;
  const int64_t stalling_bytes_;
  int64_t bytes_;
  char* memory_;
  timespec stall_;
  struct sigaction before_;
};

StallingMemory* StallingMemory::of_handler_ = nullptr;

// In small chunks, which MPI takes at once, and in large ones, of which it
// keeps reading when the communicator is dead.
TEST(MpiCommunicatorTest, ARankThatStopsInTheMiddleIsNamed) {
  constexpr int64_t kBytes = 1 << 20;
  for (int64_t chunk_bytes : {int64_t{1000}, kBytes}) {
    const auto control = MakeCommunicator(kLong, 1000);
    const auto tested = MakeCommunicator(Short(), chunk_bytes);
    const int last = tested->size() - 1;
    if (last == 0) return;
    const StallingMemory stalling(kBytes, 1, 3 * Short());
    const std::vector<char> mine(kBytes, 'm');
    const bool stalls = tested->rank() == last;
    std::vector<char> all(tested->size() * kBytes);
    ASSERT_TRUE(control->Barrier().ok());
    const absl::Status status = tested->AllGather(
        stalls ? stalling.data() : mine.data(), all.data(), kBytes);
    // Whoever found it told all.
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    const std::string says =
        absl::StrCat("rank ", last, " for ", Short().count(), " ms");
    EXPECT_NE(status.message().find("all_gather: nothing passed between rank "),
              absl::string_view::npos)
        << status;
    EXPECT_NE(status.message().find(says), absl::string_view::npos) << status;
    // Nothing is written any more, whatever arrives.
    all.assign(all.size(), 'z');
    ASSERT_TRUE(control->Barrier().ok());
    EXPECT_EQ(tested->Barrier(), status);
    EXPECT_EQ(all, std::vector<char>(all.size(), 'z'));
    // Nor is anything read that is gone.
    ExpectAllGather(*control, kBytes, 1);
  }
}

// Chunks that come put the deadline off, for all ranks.
TEST(MpiCommunicatorTest, ATransferMayTakeLongerThanTheTimeout) {
  OnRanks({Short()}, [](std::unique_ptr<Communicator> tested,
                        Communicator& control) {
    constexpr int kPages = 4;
    const int64_t bytes = kPages * sysconf(_SC_PAGESIZE);
    const StallingMemory stalling(bytes, kPages, Short() * 2 / 5);
    const std::vector<char> mine(bytes, 'm');
    std::vector<char> all(tested->size() * bytes);
    ASSERT_TRUE(control.Barrier().ok());
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status = tested->AllGather(
        tested->rank() == tested->size() - 1 ? stalling.data() : mine.data(),
        all.data(), bytes);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_GT(std::chrono::steady_clock::now() - begin, Short());
  });
}

TEST(MpiCommunicatorTest, ARankThatCreatesNoneIsMissed) {
  const auto control = MakeCommunicator(kLong, 1000);
  const int last = control->size() - 1;
  if (last == 0) return;
  if (control->rank() != last) {
    const absl::Status status = CreateMpiCommunicator({{Short()}}).status();
    EXPECT_EQ(status,
              absl::DeadlineExceededError(absl::StrCat(
                  "communicator: not all ranks of MPI_COMM_WORLD called "
                  "CreateMpiCommunicator within ",
                  Short().count(), " ms")));
  }
  ASSERT_TRUE(control->Barrier().ok());
  // It comes too late for them, and they are there for what it does next.
  if (control->rank() == last) {
    CreateMpiCommunicator({{Short()}}).status().IgnoreError();
  }
  ASSERT_TRUE(control->Barrier().ok());
  ExpectAllGather(*MakeCommunicator(kLong, 1000), 100, 1);
}

TEST(MpiCommunicatorTest, RefusesBadOptions) {
  for (int64_t timeout : {0, -5}) {
    MpiCommunicatorOptions options;
    options.timeout = std::chrono::milliseconds(timeout);
    const absl::Status status = CreateMpiCommunicator(options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_NE(status.message().find(absl::StrCat("timeout is ", timeout)),
              absl::string_view::npos)
        << status;
  }
  for (int64_t chunk_bytes :
       {int64_t{0}, int64_t{-1}, MpiCommunicatorOptions::kMaxChunkBytes + 1,
        std::numeric_limits<int64_t>::max()}) {
    MpiCommunicatorOptions options;
    options.chunk_bytes = chunk_bytes;
    const absl::Status status = CreateMpiCommunicator(options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_NE(
        status.message().find(absl::StrCat("chunk_bytes is ", chunk_bytes)),
        absl::string_view::npos)
        << status;
  }
}

}  // namespace
}  // namespace onepass
