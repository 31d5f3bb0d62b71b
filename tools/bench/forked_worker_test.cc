#include "tools/bench/forked_worker.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

using Work = ForkedWorker::Work;

template <typename Prepare>
std::unique_ptr<ForkedWorker> StartWorker(std::string name, Prepare prepare) {
  absl::StatusOr<std::unique_ptr<ForkedWorker>> worker =
      ForkedWorker::Start(std::move(name), prepare);
  EXPECT_TRUE(worker.ok()) << worker.status();
  return *std::move(worker);
}

// Whether this process has a child, running or not waited for.
bool HasChildren() {
  siginfo_t info;
  return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 ||
         errno != ECHILD;
}

TEST(ForkedWorkerTest, WorksInAProcessOfItsOwn) {
  int calls = 0;
  const auto worker = StartWorker("worker", [&]() -> absl::StatusOr<Work> {
    return [&](double argument) -> absl::StatusOr<double> {
      ++calls;
      return argument + calls * 1000;
    };
  });
  ASSERT_TRUE(worker->AwaitReady().ok());
  for (int i = 1; i <= 3; ++i) {
    ASSERT_TRUE(worker->Send(i).ok());
    const absl::StatusOr<double> result = worker->Receive();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(*result, i + i * 1000);
  }
  EXPECT_EQ(calls, 0) << "called in the parent";
}

TEST(ForkedWorkerTest, SeveralWorkAtOnceEachWithThreads) {
  std::vector<std::unique_ptr<ForkedWorker>> workers;
  for (int threads : {1, 2, 3}) {
    workers.push_back(StartWorker(
        absl::StrCat("worker ", threads), [threads]() -> absl::StatusOr<Work> {
          absl::StatusOr<std::unique_ptr<ThreadPool>> made =
              ThreadPool::Create({threads});
          if (!made.ok()) return made.status();
          std::shared_ptr<ThreadPool> pool = *std::move(made);
          return [pool](double argument) -> absl::StatusOr<double> {
            std::atomic<int> parts{0};
            pool->Run([&parts](int) { ++parts; });
            return argument * parts;
          };
        }));
  }
  for (const auto& worker : workers) ASSERT_TRUE(worker->AwaitReady().ok());
  for (int round = 1; round <= 3; ++round) {
    for (const auto& worker : workers) ASSERT_TRUE(worker->Send(round).ok());
    for (size_t i = 0; i < workers.size(); ++i) {
      const absl::StatusOr<double> result = workers[i]->Receive();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(*result, round * static_cast<double>(i + 1));
    }
  }
}

TEST(ForkedWorkerTest, ErrorsAreThoseOfTheNamedWorker) {
  const auto unprepared =
      StartWorker("process 1 of 2", []() -> absl::StatusOr<Work> {
        return absl::ResourceExhaustedError("no memory");
      });
  EXPECT_EQ(unprepared->AwaitReady(),
            absl::ResourceExhaustedError("process 1 of 2: no memory"));
  const auto failing =
      StartWorker("process 2 of 2", []() -> absl::StatusOr<Work> {
        return [](double argument) -> absl::StatusOr<double> {
          if (argument == 0) {
            return absl::InternalError(std::string(10000, 'x'));
          }
          return argument;
        };
      });
  ASSERT_TRUE(failing->AwaitReady().ok());
  ASSERT_TRUE(failing->Send(0).ok());
  const absl::Status status = failing->Receive().status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_TRUE(absl::StartsWith(status.message(), "process 2 of 2: xxx"));
  // It goes on.
  ASSERT_TRUE(failing->Send(5).ok());
  EXPECT_EQ(*failing->Receive(), 5);
}

TEST(ForkedWorkerTest, AnEndIsAnErrorThatSaysHow) {
  const auto end_with = [](std::function<void()> end) {
    const auto worker = StartWorker("worker", [&end]() -> absl::StatusOr<Work> {
      return [end](double) -> absl::StatusOr<double> {
        end();
        return 0.0;
      };
    });
    EXPECT_TRUE(worker->AwaitReady().ok());
    EXPECT_TRUE(worker->Send(1).ok());
    const absl::Status status = worker->Receive().status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    // Nor can it be reached afterwards.
    EXPECT_TRUE(absl::IsUnavailable(worker->Send(1)));
    EXPECT_TRUE(absl::IsUnavailable(worker->Receive().status()));
    return std::string(status.message());
  };
  EXPECT_EQ(end_with([] { _exit(3); }), "worker ended with status 3");
  EXPECT_EQ(end_with([] { raise(SIGKILL); }),
            absl::StrCat("worker was ended by signal ", SIGKILL));
}

// The socket that this process would open next.
int NextSocket() {
  const int next = dup(STDERR_FILENO);
  EXPECT_GE(next, 0);
  close(next);
  return next;
}

TEST(ForkedWorkerTest, AWorkerThatCannotBeHeardIsEnded) {
  const int socket = NextSocket();
  const auto worker = StartWorker("worker", []() -> absl::StatusOr<Work> {
    return [](double argument) -> absl::StatusOr<double> { return argument; };
  });
  ASSERT_TRUE(worker->AwaitReady().ok());
  // It lives on and waits for a message.
  ASSERT_EQ(shutdown(socket, SHUT_RD), 0);
  EXPECT_EQ(worker->Receive().status(),
            absl::UnavailableError("worker ended with status 0"));
}

TEST(ForkedWorkerTest, AllEndWithTheProcessThatStartedThem) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t parent = fork();
  ASSERT_GE(parent, 0);
  if (parent == 0) {
    const auto busy = []() -> absl::StatusOr<Work> {
      return [](double) -> absl::StatusOr<double> {
        for (;;) pause();
      };
    };
    const auto first = StartWorker("first", busy);
    const auto second = StartWorker("second", busy);
    const bool at_work = first->AwaitReady().ok() && first->Send(1).ok() &&
                         second->AwaitReady().ok() && second->Send(1).ok();
    _exit(at_work ? 0 : 1);
  }
  close(ends[1]);
  int status = -1;
  EXPECT_EQ(waitpid(parent, &status, 0), parent);
  EXPECT_EQ(status, 0);
  // Of the pipe the workers have the other end, until both are gone.
  pollfd end = {ends[0], POLLIN, 0};
  EXPECT_EQ(poll(&end, 1, /*milliseconds*/ 30000), 1) << "they live on";
  close(ends[0]);
}

TEST(ForkedWorkerTest, LeavesNoProcess) {
  ASSERT_FALSE(HasChildren());
  const auto forever = []() -> absl::StatusOr<Work> {
    return [](double) -> absl::StatusOr<double> {
      for (;;) pause();
    };
  };
  // Before it is ready, waiting, at work, and ended.
  StartWorker("a", forever);
  auto waiting = StartWorker("b", forever);
  ASSERT_TRUE(waiting->AwaitReady().ok());
  auto working = StartWorker("c", forever);
  ASSERT_TRUE(working->AwaitReady().ok());
  ASSERT_TRUE(working->Send(1).ok());
  EXPECT_TRUE(HasChildren());
  ASSERT_EQ(kill(waiting->pid(), SIGKILL), 0);
  EXPECT_FALSE(waiting->Receive().ok());
  waiting.reset();
  working.reset();
  EXPECT_FALSE(HasChildren());
}

}  // namespace
}  // namespace onepass
