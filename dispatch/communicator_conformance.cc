#include "dispatch/communicator_conformance.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "tests/allocation_counter.h"
#include "tests/guarded_buffer.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using Ptr = std::unique_ptr<Communicator>;

// Odd ones, and ones around those of the chunks that the tests of a backend
// may use (1000 bytes).
constexpr int64_t kSizes[] = {0,    1,    3,    200,   999,          1000,
                              1001, 2000, 4567, 70001, (1 << 20) + 3};

// The byte `i` of what `sender` has for `receiver`.
uint8_t Byte(int64_t round, int sender, int receiver, int64_t i) {
  return static_cast<uint8_t>(round * 31 + sender * 57 + receiver * 101 +
                              i * 7 + (i >> 8) * 13);
}

// What is sent to all alike has no receiver of its own.
constexpr int kAll = -1;

void Fill(uint8_t* memory, int64_t bytes, int64_t round, int sender,
          int receiver) {
  for (int64_t i = 0; i < bytes; ++i) {
    memory[i] = Byte(round, sender, receiver, i);
  }
}

void ExpectBytes(const uint8_t* memory, int64_t bytes, int64_t round,
                 int sender, int receiver) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (memory[i] == Byte(round, sender, receiver, i)) continue;
    ADD_FAILURE() << "byte " << i << " of " << bytes << " from rank " << sender
                  << " in round " << round << " is wrong";
    return;
  }
}

// "rank 2", "ranks 1, 2, 3".
std::string Ranks(int first, int last) {
  std::vector<int> ranks(last - first + 1);
  std::iota(ranks.begin(), ranks.end(), first);
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ",
                      absl::StrJoin(ranks, ", "));
}

void ExpectOk(const absl::Status& status) {
  EXPECT_TRUE(status.ok()) << status;
}

void ExpectStatus(const absl::Status& status, absl::StatusCode code,
                  const std::string& message) {
  EXPECT_EQ(status, absl::Status(code, message));
}

// The communicator is dead: every call says why.
void ExpectDead(Communicator& communicator, absl::StatusCode code,
                const std::string& message) {
  int64_t mine = 0;
  std::vector<int64_t> all(communicator.size());
  std::vector<int64_t> received(communicator.size());
  ExpectStatus(communicator.AllGather(&mine, all.data(), 8), code, message);
  ExpectStatus(communicator.AllToAll(all.data(), received.data(), 8), code,
               message);
  ExpectStatus(communicator.Broadcast(&mine, 8, 0), code, message);
  ExpectStatus(communicator.Barrier(), code, message);
  ExpectStatus(communicator.Duplicate().status(), code, message);
}

absl::Status GatherNumbers(Communicator& communicator) {
  const int64_t mine = communicator.rank();
  std::vector<int64_t> all(communicator.size());
  return communicator.AllGather(&mine, all.data(), sizeof(mine));
}

Ptr MakeDuplicate(Communicator& communicator) {
  absl::StatusOr<Ptr> duplicate = communicator.Duplicate();
  EXPECT_TRUE(duplicate.ok()) << duplicate.status();
  if (!duplicate.ok()) return nullptr;
  EXPECT_EQ((*duplicate)->rank(), communicator.rank());
  EXPECT_EQ((*duplicate)->size(), communicator.size());
  return *std::move(duplicate);
}

}  // namespace

std::chrono::milliseconds Short() {
  return std::chrono::milliseconds(UnderSanitizer() || UnderEmulator() ? 2000
                                                                       : 500);
}

void ExpectAllGather(Communicator& communicator, int64_t bytes, int64_t round,
                     bool in_place) {
  const int size = communicator.size();
  const int rank = communicator.rank();
  GuardedBuffer all_buffer(bytes * size);
  GuardedBuffer mine_buffer(bytes);
  uint8_t* const all = all_buffer.Place<uint8_t>(bytes * size);
  uint8_t* const own_place = all + rank * bytes;
  uint8_t* const mine =
      in_place ? own_place : mine_buffer.Place<uint8_t>(bytes);
  Fill(mine, bytes, round, rank, kAll);
  ExpectOk(communicator.AllGather(mine, all, bytes));
  ExpectBytes(own_place, bytes, round, rank, kAll);
  std::memset(mine, 0, bytes);
  for (int sender = 0; sender < size; ++sender) {
    if (sender == rank) continue;
    ExpectBytes(all + sender * bytes, bytes, round, sender, kAll);
  }
  EXPECT_TRUE(all_buffer.Intact());
}

void ExpectAllToAll(Communicator& communicator, int64_t bytes, int64_t round) {
  const int size = communicator.size();
  const int rank = communicator.rank();
  GuardedBuffer send_buffer(bytes * size);
  GuardedBuffer received_buffer(bytes * size);
  uint8_t* const send = send_buffer.Place<uint8_t>(bytes * size);
  uint8_t* const received = received_buffer.Place<uint8_t>(bytes * size);
  for (int receiver = 0; receiver < size; ++receiver) {
    Fill(send + receiver * bytes, bytes, round, rank, receiver);
  }
  ExpectOk(communicator.AllToAll(send, received, bytes));
  std::memset(send, 0, bytes * size);
  for (int sender = 0; sender < size; ++sender) {
    ExpectBytes(received + sender * bytes, bytes, round, sender, rank);
  }
  EXPECT_TRUE(received_buffer.Intact());
}

void ExpectBroadcast(Communicator& communicator, int64_t bytes, int64_t round,
                     int root) {
  GuardedBuffer buffer(bytes);
  uint8_t* const data = buffer.Place<uint8_t>(bytes);
  const bool is_root = communicator.rank() == root;
  if (is_root) Fill(data, bytes, round, root, kAll);
  ExpectOk(communicator.Broadcast(data, bytes, root));
  ExpectBytes(data, bytes, round, root, kAll);
  if (is_root) std::memset(data, 0, bytes);
  EXPECT_TRUE(buffer.Intact());
}

namespace {

TEST(CommunicatorConformanceTest, RanksAreNumberedFromZero) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    ASSERT_GE(tested->rank(), 0);
    ASSERT_LT(tested->rank(), tested->size());
    const int64_t mine = tested->rank();
    std::vector<int64_t> all(tested->size(), -1);
    ExpectOk(tested->AllGather(&mine, all.data(), sizeof(mine)));
    std::vector<int64_t> expected(tested->size());
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(all, expected);
  });
}

TEST(CommunicatorConformanceTest, AllGather) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    int64_t round = 0;
    for (int64_t bytes : kSizes) {
      ExpectAllGather(*tested, bytes, ++round, /*in_place=*/false);
      ExpectAllGather(*tested, bytes, ++round, /*in_place=*/true);
    }
  });
}

TEST(CommunicatorConformanceTest, AllToAll) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    int64_t round = 0;
    for (int64_t bytes : kSizes) ExpectAllToAll(*tested, bytes, ++round);
  });
}

TEST(CommunicatorConformanceTest, BroadcastFromEachRank) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    int64_t round = 0;
    for (int64_t bytes : kSizes) {
      for (int root = 0; root < tested->size(); ++root) {
        ExpectBroadcast(*tested, bytes, ++round, root);
      }
    }
  });
}

TEST(CommunicatorConformanceTest, ManyRoundsOfEverything) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    std::mt19937_64 random(7);  // the same on all ranks
    const int rounds = UnderSanitizer() || UnderEmulator() ? 100 : 500;
    for (int round = 0; round < rounds; ++round) {
      const int64_t bytes = static_cast<int64_t>(random() % 5000);
      const int root = static_cast<int>(random() % tested->size());
      switch (random() % 5) {
        case 0:
          ExpectAllGather(*tested, bytes, round, /*in_place=*/false);
          break;
        case 1:
          ExpectAllGather(*tested, bytes, round, /*in_place=*/true);
          break;
        case 2:
          ExpectAllToAll(*tested, bytes, round);
          break;
        case 3:
          ExpectBroadcast(*tested, bytes, round, root);
          break;
        default:
          ExpectOk(tested->Barrier());
      }
    }
  });
}

TEST(CommunicatorConformanceTest, NobodyPassesABarrierBeforeAllHaveCome) {
  OnRanks({kLong}, [](Ptr tested, Communicator& control) {
    const int size = tested->size();
    for (int round = 0; round < 12; ++round) {
      // One comes late.
      if (round % size == tested->rank()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
      }
      // Ranks of one machine have one such clock.
      const auto now = [] {
        return std::chrono::steady_clock::now().time_since_epoch().count();
      };
      int64_t times[2];
      times[0] = now();
      ExpectOk(tested->Barrier());
      times[1] = now();
      std::vector<int64_t> all(2 * size);
      ExpectOk(control.AllGather(times, all.data(), sizeof(times)));
      int64_t last_came = all[0];
      int64_t first_left = all[1];
      for (int rank = 0; rank < size; ++rank) {
        last_came = std::max(last_came, all[2 * rank]);
        first_left = std::min(first_left, all[2 * rank + 1]);
      }
      EXPECT_LE(last_came, first_left);
    }
  });
}

// Ranks that are slow to receive still read what others have given.
TEST(CommunicatorConformanceTest, MemoryIsTheCallersWhenACallReturns) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    const int64_t bytes =
        UnderSanitizer() || UnderEmulator() ? 1 << 20 : 4 << 20;
    const int size = tested->size();
    const int rank = tested->rank();
    std::vector<uint8_t> given(bytes * size);
    for (int round = 0; round < 4; ++round) {
      for (int receiver = 0; receiver < size; ++receiver) {
        std::memset(given.data() + receiver * bytes, 1 + rank + round, bytes);
      }
      // Of pages that come one by one as they are written, and not on rank 0.
      std::vector<uint8_t> touched;
      GuardedBuffer fresh(bytes * size);
      uint8_t* received = fresh.Place<uint8_t>(bytes * size);
      if (rank == 0) {
        touched.resize(bytes * size);
        received = touched.data();
      }
      ExpectOk(tested->AllToAll(given.data(), received, bytes));
      std::fill(given.begin(), given.end(), 0);
      for (int sender = 0; sender < size; ++sender) {
        const uint8_t* const begin = received + sender * bytes;
        EXPECT_EQ(std::count(begin, begin + bytes, 1 + sender + round), bytes);
      }
    }
  });
}

TEST(CommunicatorConformanceTest, NullIsEnoughForNoBytes) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    ExpectOk(tested->AllGather(nullptr, nullptr, 0));
    ExpectOk(tested->AllToAll(nullptr, nullptr, 0));
    ExpectOk(tested->Broadcast(nullptr, 0, 0));
    ExpectAllGather(*tested, 5, 1);
  });
}

TEST(CommunicatorConformanceTest, TheLongestTimeoutIsOne) {
  OnRanks({std::chrono::milliseconds::max()}, [](Ptr tested, Communicator&) {
    ExpectAllGather(*tested, 5, 1);
    const Ptr duplicate = MakeDuplicate(*tested);
    ASSERT_NE(duplicate, nullptr);
    ExpectAllGather(*duplicate, 5, 2);
  });
}

TEST(CommunicatorConformanceTest, SteadyCallsAllocateNothing) {
  OnRanks({kLong}, [](Ptr tested, Communicator& control) {
    const int size = tested->size();
    std::vector<uint8_t> mine(3000, 1);
    std::vector<uint8_t> send(3000 * size, 2);
    std::vector<uint8_t> all(3000 * size);
    const auto call_all = [&] {
      return tested->AllGather(mine.data(), all.data(), 3000).ok() &&
             tested->AllToAll(send.data(), all.data(), 3000).ok() &&
             tested->Broadcast(mine.data(), 3000, size - 1).ok() &&
             tested->Barrier().ok();
    };
    bool ok = call_all() && control.Barrier().ok();
    const int64_t before = AllocationCount();
    ok = control.Barrier().ok() && ok;
    for (int round = 0; round < 5; ++round) ok = call_all() && ok;
    ok = control.Barrier().ok() && ok;
    const int64_t after = AllocationCount();
    ok = control.Barrier().ok() && ok;
    EXPECT_TRUE(ok);
    EXPECT_EQ(after, before);
  });
}

TEST(CommunicatorConformanceTest, ADuplicateWorksBesideTheOriginal) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    const Ptr duplicate = MakeDuplicate(*tested);
    ASSERT_NE(duplicate, nullptr);
    const int rounds = UnderSanitizer() || UnderEmulator() ? 30 : 150;
    std::thread beside([&] {
      for (int round = 0; round < rounds; ++round) {
        ExpectAllGather(*duplicate, 17 * round, round);
      }
    });
    for (int round = 0; round < rounds; ++round) {
      ExpectAllToAll(*tested, 13 * round, 1000 + round);
    }
    beside.join();
  });
}

TEST(CommunicatorConformanceTest, DuplicatesOfSeveralAtOnceAreApart) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    Ptr duplicate = MakeDuplicate(*tested);
    ASSERT_NE(duplicate, nullptr);
    const auto make_and_use = [](Communicator& of, int64_t round) {
      std::vector<Ptr> made;
      for (int i = 0; i < 8; ++i) {
        made.push_back(MakeDuplicate(i % 2 == 0 ? of : *made.back()));
        if (made.back() == nullptr) return;
        for (const Ptr& one : made) ExpectAllGather(*one, 50, round + i);
      }
    };
    std::thread beside([&] { make_and_use(*duplicate, 1000); });
    make_and_use(*tested, 2000);
    beside.join();
  });
}

TEST(CommunicatorConformanceTest, ADuplicateOutlivesTheOriginal) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    const Ptr duplicate = MakeDuplicate(*tested);
    ASSERT_NE(duplicate, nullptr);
    tested.reset();
    ExpectAllToAll(*duplicate, 100, 1);
  });
}

TEST(CommunicatorConformanceTest, DeathOfOneIsNotThatOfTheOther) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    const Ptr first = MakeDuplicate(*tested);
    const Ptr second = MakeDuplicate(*tested);
    ASSERT_NE(first, nullptr);
    ASSERT_NE(second, nullptr);
    if (tested->rank() == 0) first->Abort("enough");
    ExpectDead(*first, absl::StatusCode::kAborted, "rank 0 aborted: enough");
    ExpectAllGather(*tested, 100, 1);
    if (tested->rank() == 0) tested->Abort("more than enough");
    ExpectDead(*tested, absl::StatusCode::kAborted,
               "rank 0 aborted: more than enough");
    ExpectAllGather(*second, 100, 2);
  });
}

// Ranks destroy theirs when they are through with their last call, and the
// others may still be in it.
TEST(CommunicatorConformanceTest, AnOrderlyEndIsNoError) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    for (int round = 0; round < 50; ++round) {
      const Ptr duplicate = MakeDuplicate(*tested);
      ASSERT_NE(duplicate, nullptr);
      switch (round % 3) {
        case 0:
          ExpectOk(duplicate->Barrier());
          break;
        case 1:
          ExpectAllToAll(*duplicate, 1500, round);
          break;
        default:
          ExpectBroadcast(*duplicate, 1500, round, 0);
      }
    }
    ExpectOk(tested->Barrier());
  });
}

// What a rank calls that calls otherwise than rank 0 does.
struct Mismatch {
  std::string rank_0;
  std::string others;
  absl::Status (*call)(Communicator& communicator, char* memory);
};

TEST(CommunicatorConformanceTest, DifferentCallsAreNamedByRank) {
  const Mismatch mismatches[] = {
      {"barrier", "all_gather of 8 bytes",
       [](Communicator& communicator, char* memory) {
         return communicator.rank() == 0
                    ? communicator.Barrier()
                    : communicator.AllGather(memory, memory + 100, 8);
       }},
      {"all_to_all of 9 bytes", "all_to_all of 8 bytes",
       [](Communicator& communicator, char* memory) {
         return communicator.AllToAll(memory, memory + 100,
                                      communicator.rank() == 0 ? 9 : 8);
       }},
      {"broadcast of 8 bytes from rank 0", "broadcast of 8 bytes from rank 1",
       [](Communicator& communicator, char* memory) {
         return communicator.Broadcast(memory, 8,
                                       communicator.rank() == 0 ? 0 : 1);
       }},
      {"broadcast of 8 bytes from rank 0", "duplicate",
       [](Communicator& communicator, char* memory) {
         return communicator.rank() == 0 ? communicator.Broadcast(memory, 8, 0)
                                         : communicator.Duplicate().status();
       }},
      {"barrier", "all_gather of 0 bytes",
       [](Communicator& communicator, char*) {
         return communicator.rank() == 0
                    ? communicator.Barrier()
                    : communicator.AllGather(nullptr, nullptr, 0);
       }}};
  for (const Mismatch& mismatch : mismatches) {
    OnRanks({kLong}, [&](Ptr tested, Communicator&) {
      const int size = tested->size();
      if (size == 1) return;
      std::vector<char> memory(1000);
      const std::string message = absl::StrCat(
          "ranks did not call the same: rank 0 called ", mismatch.rank_0, "; ",
          Ranks(1, size - 1), " called ", mismatch.others);
      ExpectStatus(mismatch.call(*tested, memory.data()),
                   absl::StatusCode::kFailedPrecondition, message);
      ExpectDead(*tested, absl::StatusCode::kFailedPrecondition, message);
    });
  }
}

TEST(CommunicatorConformanceTest, ASilentRankIsNamed) {
  OnRanks({Short()}, [](Ptr tested, Communicator& control) {
    const int last = tested->size() - 1;
    if (last == 0) return;
    const std::string message =
        absl::StrCat("rank ", last, " did not call all_gather within ",
                     Short().count(), " ms");
    ExpectOk(control.Barrier());
    if (tested->rank() != last) {
      const auto begin = std::chrono::steady_clock::now();
      ExpectStatus(GatherNumbers(*tested), absl::StatusCode::kDeadlineExceeded,
                   message);
      const auto waited = std::chrono::steady_clock::now() - begin;
      if (!UnderSanitizer() && !UnderEmulator()) {
        EXPECT_LT(waited, kLong / 2);
      }
    }
    // The last comes when the others have given up.
    ExpectOk(control.Barrier());
    ExpectDead(*tested, absl::StatusCode::kDeadlineExceeded, message);
  });
}

TEST(CommunicatorConformanceTest, AllSilentRanksAreNamed) {
  OnRanks({Short()}, [](Ptr tested, Communicator& control) {
    const int last = tested->size() - 1;
    if (last == 0) return;
    const std::string message =
        absl::StrCat(Ranks(1, last), " did not call barrier within ",
                     Short().count(), " ms");
    if (tested->rank() == 0) {
      const auto begin = std::chrono::steady_clock::now();
      ExpectStatus(tested->Barrier(), absl::StatusCode::kDeadlineExceeded,
                   message);
      EXPECT_GE(std::chrono::steady_clock::now() - begin, Short());
    }
    ExpectOk(control.Barrier());
    ExpectDead(*tested, absl::StatusCode::kDeadlineExceeded, message);
  });
}

TEST(CommunicatorConformanceTest, ADuplicateHasTheTimeoutOfTheOriginal) {
  OnRanks({Short()}, [](Ptr tested, Communicator& control) {
    const int last = tested->size() - 1;
    if (last == 0) return;
    ExpectOk(control.Barrier());
    const Ptr duplicate = MakeDuplicate(*tested);
    ASSERT_NE(duplicate, nullptr);
    const std::string message =
        absl::StrCat(Ranks(1, last), " did not call barrier within ",
                     Short().count(), " ms");
    if (tested->rank() == 0) {
      ExpectStatus(duplicate->Barrier(), absl::StatusCode::kDeadlineExceeded,
                   message);
    }
    ExpectOk(control.Barrier());
    ExpectDead(*duplicate, absl::StatusCode::kDeadlineExceeded, message);
  });
}

TEST(CommunicatorConformanceTest, AbortReachesThoseWhoWait) {
  OnRanks({kLong}, [](Ptr tested, Communicator& control) {
    const std::string message = "rank 0 aborted: the disk is full";
    ExpectOk(control.Barrier());
    if (tested->rank() == 0) {
      // Most likely they wait by then.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      tested->Abort("the disk is full");
    } else {
      const auto begin = std::chrono::steady_clock::now();
      ExpectStatus(GatherNumbers(*tested), absl::StatusCode::kAborted, message);
      const auto waited = std::chrono::steady_clock::now() - begin;
      if (!UnderSanitizer() && !UnderEmulator()) {
        EXPECT_LT(waited, kLong / 2);
      }
    }
    ExpectDead(*tested, absl::StatusCode::kAborted, message);
    // The first reason stays.
    tested->Abort("another reason");
    ExpectDead(*tested, absl::StatusCode::kAborted, message);
  });
}

TEST(CommunicatorConformanceTest, AbortReachesThoseWhoCallLater) {
  OnRanks({kLong}, [](Ptr tested, Communicator& control) {
    const int last = tested->size() - 1;
    if (tested->rank() == last) tested->Abort("the disk is full");
    ExpectOk(control.Barrier());
    ExpectDead(*tested, absl::StatusCode::kAborted,
               absl::StrCat("rank ", last, " aborted: the disk is full"));
  });
}

TEST(CommunicatorConformanceTest, ADestroyedCommunicatorIsNamed) {
  for (bool before_the_call : {false, true}) {
    OnRanks({kLong}, [&](Ptr tested, Communicator& control) {
      const int last = tested->size() - 1;
      if (last == 0) return;
      ExpectOk(tested->Barrier());
      if (tested->rank() == last) {
        if (!before_the_call) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        tested.reset();
      }
      if (before_the_call) ExpectOk(control.Barrier());
      if (tested == nullptr) return;
      const auto begin = std::chrono::steady_clock::now();
      ExpectDead(*tested, absl::StatusCode::kAborted,
                 absl::StrCat("rank ", last, " destroyed its communicator"));
      const auto waited = std::chrono::steady_clock::now() - begin;
      if (!UnderSanitizer() && !UnderEmulator()) {
        EXPECT_LT(waited, kLong / 2);
      }
    });
  }
}

// Calls with arguments that are wrong on one rank already, and what the error
// says.
struct WrongCall {
  absl::Status status;
  std::string says;
};

std::vector<WrongCall> MakeWrongCalls(Communicator& communicator, char* memory,
                                      int64_t bytes) {
  Communicator& c = communicator;
  const int size = c.size();
  char* const own_place = memory + c.rank() * bytes;
  char* const behind = memory + size * bytes;
  std::vector<WrongCall> wrong = {
      {c.AllGather(nullptr, memory, bytes), "all_gather: mine is null"},
      {c.AllGather(behind, nullptr, bytes), "all_gather: all is null"},
      {c.AllGather(behind, memory, -1), "all_gather: bytes is -1"},
      {c.AllGather(own_place + 1, memory, bytes), "all_gather: mine overlaps"},
      {c.AllGather(behind - 1, memory, bytes), "all_gather: mine overlaps"},
      {c.AllGather(memory, memory + bytes - 1, bytes),
       "all_gather: mine overlaps"},
      {c.AllToAll(nullptr, memory, bytes), "all_to_all: send is null"},
      {c.AllToAll(behind, nullptr, bytes), "all_to_all: received is null"},
      {c.AllToAll(behind, memory, -7), "all_to_all: bytes is -7"},
      {c.AllToAll(memory, memory, bytes), "all_to_all: send and received"},
      {c.AllToAll(memory, behind - 1, bytes), "all_to_all: send and received"},
      {c.AllToAll(behind - 1, memory, bytes), "all_to_all: send and received"},
      {c.Broadcast(nullptr, bytes, 0), "broadcast: data is null"},
      {c.Broadcast(memory, -1, 0), "broadcast: bytes is -1"},
      {c.Broadcast(memory, bytes, -1), "broadcast: root is -1, expected 0 to"},
      {c.Broadcast(nullptr, 0, size),
       absl::StrCat("broadcast: root is ", size, ", expected 0 to ",
                    size - 1)}};
  if (size > 1) {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    wrong.push_back({c.AllGather(behind, memory, kMost / size + 1),
                     "does not fit into 64 bits"});
    wrong.push_back(
        {c.AllToAll(behind, memory, kMost), "does not fit into 64 bits"});
    wrong.push_back(
        {c.AllGather(memory + (c.rank() + 1) % size * bytes, memory, bytes),
         "all_gather: mine overlaps"});
  }
  return wrong;
}

TEST(CommunicatorConformanceTest, WrongArgumentsAreTheCallersOwnAffair) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    constexpr int64_t kBytes = 10;
    const std::vector<char> before(3 * tested->size() * kBytes, 'x');
    std::vector<char> memory = before;
    for (int wrong_rank = 0; wrong_rank < tested->size(); ++wrong_rank) {
      if (tested->rank() == wrong_rank) {
        for (const WrongCall& wrong :
             MakeWrongCalls(*tested, memory.data(), kBytes)) {
          EXPECT_TRUE(absl::IsInvalidArgument(wrong.status))
              << wrong.says << ": " << wrong.status;
          EXPECT_NE(wrong.status.message().find(wrong.says),
                    absl::string_view::npos)
              << wrong.says << ": " << wrong.status;
        }
        EXPECT_EQ(memory, before);
      }
      // The others have waited.
      ExpectAllGather(*tested, kBytes, wrong_rank);
    }
  });
}

// Neighbours do not overlap.
TEST(CommunicatorConformanceTest, MemoryMayLieSideBySide) {
  OnRanks({kLong}, [](Ptr tested, Communicator&) {
    constexpr int64_t kBytes = 10;
    const int size = tested->size();
    std::vector<char> memory((2 * size + 1) * kBytes);
    char* const begin = memory.data();
    ExpectOk(tested->AllGather(begin, begin + kBytes, kBytes));
    ExpectOk(tested->AllGather(begin + size * kBytes, begin, kBytes));
    ExpectOk(tested->AllToAll(begin, begin + size * kBytes, kBytes));
    ExpectOk(tested->AllToAll(begin + size * kBytes, begin, kBytes));
  });
}

}  // namespace
}  // namespace onepass
