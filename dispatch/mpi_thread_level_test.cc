// A trainer that initialised MPI for one thread only.

#include <mpi.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "dispatch/mpi_communicator.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

TEST(MpiThreadLevelTest, OneThreadIsNotEnough) {
  int provided = MPI_THREAD_SINGLE;
  ASSERT_EQ(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided),
            MPI_SUCCESS);
  const absl::Status status = CreateMpiCommunicator({}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.message().find("expected MPI_THREAD_MULTIPLE"),
            absl::string_view::npos)
      << status;
  // Whoever initialised it finalises it.
  int finalised = 0;
  MPI_Finalized(&finalised);
  EXPECT_EQ(finalised, 0);
  EXPECT_EQ(MPI_Finalize(), MPI_SUCCESS);
}

}  // namespace
}  // namespace onepass
