#include "offload/device_collectives.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "dispatch/communicator.h"
#include "dispatch/device.h"
#include "dispatch/host_device.h"
#include "dispatch/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rank_threads.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using ::testing::HasSubstr;

RankOptions Ranks(int world, bool host_accessible) {
  RankOptions options;
  options.world = world;
  options.device.host_accessible = host_accessible;
  return options;
}

DeviceCollectivesOptions Chunks(int64_t bytes, bool pin_memory = true) {
  DeviceCollectivesOptions options;
  options.chunk_bytes = bytes;
  options.pin_memory = pin_memory;
  return options;
}

absl::StatusOr<std::unique_ptr<DeviceCollectives>> Create(
    Rank& rank, const DeviceCollectivesOptions& options) {
  return DeviceCollectives::Create(*rank.device, *rank.pool, *rank.communicator,
                                   options);
}

// Byte i of what `from` has for `to`.
uint8_t Byte(int from, int to, int64_t i) {
  return static_cast<uint8_t>(from * 59 + to * 101 + i * 7 + (i >> 8) * 13);
}

// Device memory that is filled as `stream` comes by, and not before.
struct Filled {
  Filled(Rank& rank, const std::vector<uint8_t>& bytes) : host(bytes) {
    absl::StatusOr<DeviceBuffer> buffer =
        rank.device->Allocate(static_cast<int64_t>(bytes.size()));
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    device = *std::move(buffer);
    const absl::Status status = rank.stream->CopyToDevice(
        device.data(), host.data(), static_cast<int64_t>(host.size()));
    EXPECT_TRUE(status.ok()) << status;
  }

  std::vector<uint8_t> host;
  DeviceBuffer device;
};

// Read by another stream than that of the collective.
std::vector<uint8_t> Read(Rank& rank, const DeviceBuffer& buffer) {
  std::vector<uint8_t> bytes(buffer.bytes());
  auto stream = rank.device->CreateStream("reader");
  EXPECT_TRUE(stream.ok()) << stream.status();
  EXPECT_TRUE(
      (*stream)->CopyToHost(bytes.data(), buffer.data(), buffer.bytes()).ok());
  EXPECT_TRUE((*stream)->Synchronize().ok());
  return bytes;
}

void ExpectAllGather(Rank& rank, DeviceCollectives& collectives,
                     int64_t bytes) {
  std::vector<uint8_t> mine;
  std::vector<uint8_t> expected;
  for (int64_t i = 0; i < bytes; ++i) mine.push_back(Byte(rank.rank(), 0, i));
  for (int from = 0; from < rank.world(); ++from) {
    for (int64_t i = 0; i < bytes; ++i) expected.push_back(Byte(from, 0, i));
  }
  const Filled given(rank, mine);
  Filled all(rank, std::vector<uint8_t>(expected.size()));
  const absl::Status status = collectives.AllGather(
      given.device.data(), all.device.data(), bytes, *rank.stream);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Read(rank, all.device), expected) << bytes;
}

void ExpectAllToAll(Rank& rank, DeviceCollectives& collectives, int64_t bytes) {
  std::vector<uint8_t> send;
  std::vector<uint8_t> expected;
  for (int other = 0; other < rank.world(); ++other) {
    for (int64_t i = 0; i < bytes; ++i) {
      send.push_back(Byte(rank.rank(), other, i));
      expected.push_back(Byte(other, rank.rank(), i));
    }
  }
  const Filled given(rank, send);
  Filled received(rank, std::vector<uint8_t>(expected.size()));
  const absl::Status status = collectives.AllToAll(
      given.device.data(), received.device.data(), bytes, *rank.stream);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Read(rank, received.device), expected) << bytes;
}

TEST(DeviceCollectivesTest, MoveAllBytes) {
  for (const bool host_accessible : {true, false}) {
    for (const int world : {1, 2, 3, 5}) {
      for (const int64_t chunk : {1, 7, 64, 4096}) {
        RunRanks(Ranks(world, host_accessible), [&](Rank& rank) {
          auto collectives = Create(rank, Chunks(chunk));
          ASSERT_TRUE(collectives.ok()) << collectives.status();
          for (const int64_t bytes : {int64_t{0}, int64_t{1}, chunk - 1, chunk,
                                      chunk + 1, 3 * chunk, 3 * chunk + 1}) {
            ExpectAllGather(rank, **collectives, bytes);
            ExpectAllToAll(rank, **collectives, bytes);
          }
        });
      }
    }
  }
}

TEST(DeviceCollectivesTest, PinsTwoChunksForEachRank) {
  for (const int world : {1, 2, 5}) {
    for (const bool host_accessible : {true, false}) {
      for (const bool pin_memory : {true, false}) {
        RunRanks(Ranks(world, host_accessible), [&](Rank& rank) {
          auto collectives = Create(rank, Chunks(33, pin_memory));
          ASSERT_TRUE(collectives.ok()) << collectives.status();
          const bool pins = !host_accessible && pin_memory && world > 1;
          EXPECT_EQ(rank.device->pinned_memory().in_use,
                    pins ? 2 * world * 33 : 0);
          EXPECT_TRUE((*collectives)->pinning_error().ok());
          EXPECT_EQ(rank.device->memory().in_use, 0);
          ExpectAllGather(rank, **collectives, 100);
        });
      }
    }
  }
}

TEST(DeviceCollectivesTest, DoWithoutPinningWhereItIsRefused) {
  RunRanks(Ranks(2, false), [&](Rank& rank) {
    const absl::Status refused = absl::ResourceExhaustedError("no more pages");
    rank.device->RefuseCall(HostDeviceCall::kPin, 0, refused);
    auto collectives = Create(rank, Chunks(33));
    ASSERT_TRUE(collectives.ok()) << collectives.status();
    EXPECT_EQ((*collectives)->pinning_error(), refused);
    EXPECT_EQ(rank.device->pinned_memory().in_use, 0);
    ExpectAllGather(rank, **collectives, 100);
    ExpectAllToAll(rank, **collectives, 100);
  });
}

TEST(DeviceCollectivesTest, RefuseSizesOfChunks) {
  RunRanks(Ranks(2, false), [&](Rank& rank) {
    for (const int64_t chunk : {int64_t{-1}, int64_t{0},
                                std::numeric_limits<int64_t>::max() / 4 + 1}) {
      const absl::Status status = Create(rank, Chunks(chunk)).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << chunk;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("chunk_bytes is ", chunk)));
    }
    EXPECT_EQ(Create(rank, Chunks(int64_t{1} << 60)).status().code(),
              absl::StatusCode::kResourceExhausted);
  });
}

// Where one rank fails, it has what it put on the stream no more, and the
// others learn of it when its communicator goes.
TEST(DeviceCollectivesTest, LeaveNothingOnTheStreamAfterAnError) {
  RankOptions options = Ranks(3, false);
  options.device.link_bytes_per_s = 1e7;  // copies take a while
  const std::pair<HostDeviceCall, int64_t> faults[] = {
      {HostDeviceCall::kCopyToHost, 0},   {HostDeviceCall::kCopyToHost, 1},
      {HostDeviceCall::kCopyToDevice, 1}, {HostDeviceCall::kCopyToDevice, 4},
      {HostDeviceCall::kSynchronize, 0},  {HostDeviceCall::kSynchronize, 3},
  };
  for (const bool gather : {true, false}) {
    for (const auto& [call, skip] : faults) {
      RunRanks(options, [&, call = call, skip = skip](Rank& rank) {
        auto collectives = Create(rank, Chunks(2000));
        ASSERT_TRUE(collectives.ok()) << collectives.status();
        const std::vector<uint8_t> bytes(3 * 10000);
        const Filled given(rank, bytes);
        const Filled received(rank, bytes);
        ASSERT_TRUE(rank.stream->Synchronize().ok());
        if (rank.rank() == 1) {
          rank.device->RefuseCall(call, skip, absl::InternalError("refused"));
        }
        const absl::Status status =
            gather
                ? (*collectives)
                      ->AllGather(given.device.data(), received.device.data(),
                                  10000, *rank.stream)
                : (*collectives)
                      ->AllToAll(given.device.data(), received.device.data(),
                                 10000, *rank.stream);
        EXPECT_EQ(rank.device->WorkInFlight(), 0);
        if (rank.rank() == 1) {
          EXPECT_EQ(status, absl::InternalError("refused"));
        } else {
          EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
          EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
        }
      });
    }
  }
}

TEST(DeviceCollectivesTest, ErrorsOfTheCommunicatorComeThrough) {
  for (const bool host_accessible : {true, false}) {
    RunRanks(Ranks(2, host_accessible), [&](Rank& rank) {
      auto collectives = Create(rank, Chunks(64));
      ASSERT_TRUE(collectives.ok()) << collectives.status();
      const Filled given(rank, std::vector<uint8_t>(200));
      const Filled received(rank, std::vector<uint8_t>(200));
      if (rank.rank() == 1) {
        rank.communicator->Abort("out of coffee");
      }
      for (const absl::Status& status :
           {(*collectives)
                ->AllGather(given.device.data(), received.device.data(), 100,
                            *rank.stream),
            (*collectives)
                ->AllToAll(given.device.data(), received.device.data(), 100,
                           *rank.stream)}) {
        EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr("out of coffee"));
      }
    });
  }
}

}  // namespace
}  // namespace onepass
