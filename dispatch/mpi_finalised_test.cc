// A trainer that initialises and finalises MPI itself.

#include <mpi.h>

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "dispatch/communicator.h"
#include "dispatch/mpi_communicator.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

TEST(MpiFinalisedTest, NothingCallsMpiAfterItsEnd) {
  int provided = MPI_THREAD_SINGLE;
  ASSERT_EQ(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided),
            MPI_SUCCESS);
  absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      CreateMpiCommunicator({{std::chrono::seconds(40)}});
  ASSERT_TRUE(communicator.ok()) << communicator.status();
  EXPECT_TRUE((*communicator)->Barrier().ok());
  ASSERT_EQ(MPI_Finalize(), MPI_SUCCESS);

  const absl::Status finalised =
      absl::FailedPreconditionError("communicator: MPI was finalised");
  EXPECT_EQ((*communicator)->Barrier(), finalised);
  EXPECT_EQ((*communicator)->Duplicate().status(), finalised);
  (*communicator)->Abort("an end without MPI");
  communicator->reset();
  EXPECT_EQ(CreateMpiCommunicator({}).status(), finalised);
}

}  // namespace
}  // namespace onepass
