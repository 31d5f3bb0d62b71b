// An MPI that fails where a communicator joins it: the process goes on, with
// the trainer's handler of errors.

#include <mpi.h>

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dispatch/communicator.h"
#include "dispatch/mpi_communicator.h"
#include "gtest/gtest.h"

namespace {

bool fail = false;
int errors_handled = 0;

void CountError(MPI_Comm*, int*, ...) { ++errors_handled; }

}  // namespace

// In the place of MPI's own: fails as that would, by way of the handler.
extern "C" int MPI_Comm_idup(MPI_Comm comm, MPI_Comm* duplicate,
                             MPI_Request* request) {
  if (!fail) return PMPI_Comm_idup(comm, duplicate, request);
  MPI_Comm_call_errhandler(comm, MPI_ERR_NO_MEM);
  return MPI_ERR_NO_MEM;
}

namespace onepass {
namespace {

absl::StatusOr<std::unique_ptr<Communicator>> Create() {
  return CreateMpiCommunicator({{std::chrono::seconds(40)}});
}

TEST(MpiErrorTest, IsReturnedAndTheHandlerIsKept) {
  ASSERT_TRUE(Create().ok());  // initialises MPI
  fail = true;
  // MPI's own handler, which would end the process.
  absl::Status status = Create().status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_NE(status.message().find("MPI_Comm_idup: "), absl::string_view::npos)
      << status;

  MPI_Errhandler counting;
  ASSERT_EQ(MPI_Comm_create_errhandler(CountError, &counting), MPI_SUCCESS);
  ASSERT_EQ(MPI_Comm_set_errhandler(MPI_COMM_WORLD, counting), MPI_SUCCESS);
  status = Create().status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  fail = false;
  EXPECT_TRUE(Create().ok());
  EXPECT_EQ(errors_handled, 0);
  MPI_Comm_call_errhandler(MPI_COMM_WORLD, MPI_ERR_OTHER);
  EXPECT_EQ(errors_handled, 1);
  ASSERT_EQ(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL),
            MPI_SUCCESS);
  MPI_Errhandler_free(&counting);
}

}  // namespace
}  // namespace onepass
