#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tools/mpi_rank.h"

namespace onepass {
namespace {

TEST(NoMpiRankTest, SaysHowToBuild) {
  const absl::Status status = CreateMpiRank().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(absl::StrContains(status.message(), "--config=mpi")) << status;
}

}  // namespace
}  // namespace onepass
