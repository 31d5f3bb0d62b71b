#include "tools/bench/forked_worker.h"

#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace onepass {
namespace {

// What the child says: a result, or an error.
struct Reply {
  int code;  // absl::StatusCode
  double value;
  char message[240];  // ends with 0
};

ssize_t SendAll(int socket, const void* data, size_t bytes) {
  ssize_t sent;
  // Without a SIGPIPE where the other side has ended.
  do {
    sent = send(socket, data, bytes, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

ssize_t ReceiveAll(int socket, void* data, size_t bytes) {
  ssize_t received;
  do {
    received = recv(socket, data, bytes, 0);
  } while (received < 0 && errno == EINTR);
  return received;
}

bool SendReply(int socket, const absl::StatusOr<double>& result) {
  Reply reply = {};
  reply.code = static_cast<int>(result.status().code());
  if (result.ok()) {
    reply.value = *result;
  } else {
    const absl::string_view message = result.status().message();
    std::memcpy(reply.message, message.data(),
                std::min(message.size(), sizeof(reply.message) - 1));
  }
  return SendAll(socket, &reply, sizeof(reply)) == sizeof(reply);
}

// The life of the child. What is thrown here must not reach the stack that it
// has of its parent.
void Serve(
    int socket,
    absl::FunctionRef<absl::StatusOr<ForkedWorker::Work>()> prepare) noexcept {
  const absl::StatusOr<ForkedWorker::Work> work = prepare();
  if (!work.ok()) {
    SendReply(socket, work.status());
    return;
  }
  if (!SendReply(socket, 0.0)) return;
  double argument;
  while (ReceiveAll(socket, &argument, sizeof(argument)) == sizeof(argument)) {
    if (!SendReply(socket, (*work)(argument))) return;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<ForkedWorker>> ForkedWorker::Start(
    std::string name, absl::FunctionRef<absl::StatusOr<Work>()> prepare) {
  const auto refused = [&name](absl::string_view what) {
    return absl::ResourceExhaustedError(absl::StrCat(
        name, ": could not make a ", what, ": ", std::strerror(errno)));
  };
  // Messages keep their bounds.
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) != 0) {
    return refused("socket");
  }
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    const absl::Status status = refused("process");
    close(sockets[0]);
    close(sockets[1]);
    return status;
  }
  if (pid == 0) {
    close(sockets[0]);
    // Workers forked later hold copies of the parent's end of this socket, so
    // its end does not show there.
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) _exit(1);
    Serve(sockets[1], prepare);
    // Nothing that is the parent's is flushed or destroyed.
    _exit(0);
  }
  close(sockets[1]);
  return absl::WrapUnique(new ForkedWorker(std::move(name), pid, sockets[0]));
}

ForkedWorker::~ForkedWorker() {
  close(socket_);
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

absl::Status ForkedWorker::AwaitReady() { return Receive().status(); }

absl::Status ForkedWorker::Send(double argument) {
  if (SendAll(socket_, &argument, sizeof(argument)) == sizeof(argument)) {
    return absl::OkStatus();
  }
  return Ended();
}

absl::StatusOr<double> ForkedWorker::Receive() {
  Reply reply;
  if (ReceiveAll(socket_, &reply, sizeof(reply)) != sizeof(reply)) {
    return Ended();
  }
  const auto code = static_cast<absl::StatusCode>(reply.code);
  if (code == absl::StatusCode::kOk) return reply.value;
  return absl::Status(code, absl::StrCat(name_, ": ", reply.message));
}

absl::Status ForkedWorker::Ended() {
  int status = 0;
  if (pid_ >= 0) {
    pid_t waited;
    // Where it has not ended, it does now: it can read and write nothing more.
    shutdown(socket_, SHUT_RDWR);
    do {
      waited = waitpid(pid_, &status, 0);
    } while (waited < 0 && errno == EINTR);
    pid_ = -1;
    if (waited > 0 && WIFSIGNALED(status)) {
      return absl::UnavailableError(
          absl::StrCat(name_, " was ended by signal ", WTERMSIG(status)));
    }
    if (waited > 0 && WIFEXITED(status)) {
      return absl::UnavailableError(
          absl::StrCat(name_, " ended with status ", WEXITSTATUS(status)));
    }
  }
  return absl::UnavailableError(absl::StrCat(name_, " has ended"));
}

}  // namespace onepass
