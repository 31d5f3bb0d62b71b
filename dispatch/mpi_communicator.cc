#include "dispatch/mpi_communicator.h"

#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/collective.h"

namespace onepass {
namespace {

absl::Status Checked(absl::string_view function, int error) {
  if (error == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(error, text, &length);
  return absl::InternalError(
      absl::StrCat(function, ": ", absl::string_view(text, length)));
}

bool Finalised() {
  int finalised = 0;
  MPI_Finalized(&finalised);
  return finalised != 0;
}

absl::Status FinalisedError() {
  return absl::FailedPreconditionError("communicator: MPI was finalised");
}

absl::Status Initialise() {
  if (Finalised()) return FinalisedError();
  int initialised = 0;
  int provided = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialised);
  if (initialised == 0) {
    if (absl::Status status = Checked(
            "MPI_Init_thread",
            MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided));
        !status.ok()) {
      return status;
    }
    std::atexit([] {
      if (!Finalised()) MPI_Finalize();
    });
  } else {
    MPI_Query_thread(&provided);
  }
  if (provided < MPI_THREAD_MULTIPLE) {
    return absl::FailedPreconditionError(absl::StrCat(
        "communicator: MPI was initialised for thread level ", provided,
        ", expected MPI_THREAD_MULTIPLE, ", MPI_THREAD_MULTIPLE));
  }
  return absl::OkStatus();
}

// While it lives, errors of MPI_COMM_WORLD are returned, and do not end the
// process as they do unless the trainer asks for something else.
class ScopedErrorsReturn {
 public:
  ScopedErrorsReturn() {
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before_);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  ~ScopedErrorsReturn() {
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, before_);
    MPI_Errhandler_free(&before_);
  }

  ScopedErrorsReturn(const ScopedErrorsReturn&) = delete;
  ScopedErrorsReturn& operator=(const ScopedErrorsReturn&) = delete;

 private:
  MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

// How a rank waits for others, and how long.
class Patience {
 public:
  explicit Patience(std::chrono::milliseconds timeout) : timeout_(timeout) {
    Renew();
  }

  // The deadline is as far away again.
  void Renew() {
    deadline_ = DeadlineAfter(timeout_);
    waits_ = 0;
  }

  // Lets others have the processor for a moment, then for longer ones. False:
  // the deadline has passed.
  bool Wait() {
    if (std::chrono::steady_clock::now() >= deadline_) return false;
    if (waits_ < kYields) {
      ++waits_;
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  }

 private:
  static constexpr int kYields = 1000;

  const std::chrono::milliseconds timeout_;
  std::chrono::steady_clock::time_point deadline_;
  int waits_ = 0;
};

// A duplicate of MPI_COMM_WORLD, whose messages do not meet those of others.
// Communicators of one such world are told apart by their tags. It is never
// freed: MPI would give its number, and with it messages that nobody has
// received, to the next.
struct World {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 0;
  int64_t max_tag = 0;
  // Rank 0 numbers the communicators.
  std::atomic<int64_t> communicators{1};
};

absl::StatusOr<std::shared_ptr<World>> JoinWorld(
    std::chrono::milliseconds timeout) {
  // Also for the test of the request, which is of MPI_COMM_WORLD.
  const ScopedErrorsReturn errors_return;
  auto world = std::make_unique<World>();
  MPI_Request request = MPI_REQUEST_NULL;
  if (absl::Status status =
          Checked("MPI_Comm_idup",
                  MPI_Comm_idup(MPI_COMM_WORLD, &world->comm, &request));
      !status.ok()) {
    return status;
  }
  Patience patience(timeout);
  for (bool in_time = true;; in_time = patience.Wait()) {
    int complete = 0;
    if (absl::Status status = Checked(
            "MPI_Test", MPI_Test(&request, &complete, MPI_STATUS_IGNORE));
        !status.ok()) {
      return status;
    }
    if (complete != 0) break;
    if (!in_time) {
      // MPI will still write the communicator where it was told to.
      world.release();
      return absl::DeadlineExceededError(
          absl::StrCat("communicator: not all ranks of MPI_COMM_WORLD called "
                       "CreateMpiCommunicator within ",
                       timeout.count(), " ms"));
    }
  }
  MPI_Comm_set_errhandler(world->comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(world->comm, &world->rank);
  MPI_Comm_size(world->comm, &world->size);
  int* max_tag = nullptr;
  int known = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &max_tag, &known);
  // What every MPI has at least.
  world->max_tag = known != 0 ? *max_tag : 32767;
  return std::shared_ptr<World>(std::move(world));
}

// What ranks tell one another before bytes travel. All are built alike, so that
// it travels as it lies in memory, up to the end of its text.
struct Message {
  enum class Kind : int32_t {
    kCall,    // the next call of the sender
    kFailed,  // the sender found this error in a call
    kLeft,    // the sender makes no further call
  };

  Kind kind = Kind::kCall;
  // Of a call.
  Collective::Function function = Collective::Function::kBarrier;
  int64_t bytes = 0;
  int64_t chunk_bytes = 0;
  int64_t communicator = 0;  // the number of a duplicate, where rank 0 says it
  int32_t root = 0;
  // Of the others.
  int32_t code = 0;
  int32_t text_bytes = 0;
  char text[500];

  int sent_bytes() const {
    return static_cast<int>(offsetof(Message, text)) + text_bytes;
  }
};

// A part of what goes to, or comes from, another rank.
struct Chunk {
  int peer;
  int64_t offset;
  int64_t bytes;
};

// Chunks on their way in one direction, at the same time: one travels while
// another is copied.
constexpr int kWindow = 2;

// The transfers of a call in one direction. In step s each rank sends to the
// rank s after it, and receives from the one s before it; after one chunk with
// each of the others comes the next, so that none waits while another is
// served.
struct Transfers {
  int64_t offset = 0;  // of the next chunk
  int step = 1;
  Chunk under_way[kWindow];
};

// A call begins with messages between all ranks: each tells what it calls, and
// goes on when it knows that of all others. Then the bytes travel, with another
// tag. The next message of every rank is always expected, so that also a rank
// that waits for bytes hears that another failed.
class MpiCommunicator final : public CollectiveCommunicator {
 public:
  static absl::StatusOr<std::unique_ptr<Communicator>> Create(
      std::shared_ptr<World> world, int64_t number,
      const MpiCommunicatorOptions& options);

  ~MpiCommunicator() override { Leave(Destroyed()); }

  absl::StatusOr<std::unique_ptr<Communicator>> Duplicate() override;

 private:
  // What MPI reads and writes.
  struct Buffers {
    Buffers(int ranks, int64_t chunk_bytes)
        : incoming(ranks), chunks(new char[2 * kWindow * chunk_bytes]) {}

    std::vector<Message> incoming;  // by rank
    Message call;
    Message last;
    std::unique_ptr<char[]> chunks;  // received ones, then sent ones
  };

  MpiCommunicator(std::shared_ptr<World> world, int64_t number,
                  const MpiCommunicatorOptions& options)
      : CollectiveCommunicator(world->rank, world->size),
        world_(std::move(world)),
        message_tag_(static_cast<int>(2 * number)),
        data_tag_(message_tag_ + 1),
        options_(options),
        buffers_(std::make_unique<Buffers>(size(), options.chunk_bytes)),
        roll_(size()),
        early_(size(), false),
        requests_(3 * size() + 2 * kWindow, MPI_REQUEST_NULL) {}

  absl::Status Run(const Collective& call) override;
  void Leave(const absl::Status& reason) override;

  // Tells the others what this rank calls, and waits until all have told, and
  // called the same.
  absl::Status Meet(const Collective& call);
  // Moves the bytes.
  absl::Status Exchange();
  // Handles what comes until `done`. `overdue` is the error of the deadline,
  // which `renewed` ones put off each time that something comes.
  absl::Status Await(bool renewed, absl::FunctionRef<bool()> done,
                     absl::FunctionRef<absl::Status()> overdue);
  // Handles what has come. False: nothing had.
  absl::StatusOr<bool> Poll();
  absl::Status Handle(int request);

  // Expects the next message of `peer`; takes the one that has come.
  absl::Status Listen(int peer);
  absl::Status Take(int peer);
  absl::Status Tell(const Message& message, MPI_Request* requests);

  // Begins the next transfer, where there is one, with the buffer `slot`.
  absl::Status Send(int slot);
  absl::Status Receive(int slot);
  // Takes the next chunk to send to, or to receive from, another rank.
  std::optional<Chunk> Next(Transfers& transfers, bool to_send) const;
  absl::Status Stalled() const;

  // Ends the communicator, and tells the others why.
  void Die(Message::Kind kind, const absl::Status& failure);

  // Requests of MPI, and where they begin: messages received, told and told
  // last, each by rank; chunks received and sent, each by slot.
  int told() const { return size(); }
  int told_last() const { return 2 * size(); }
  int received() const { return 3 * size(); }
  int sent() const { return received() + kWindow; }
  // The rank at the other end.
  int Peer(int request) const;

  char* ReceiveBuffer(int slot) const {
    return buffers_->chunks.get() + slot * options_.chunk_bytes;
  }
  char* SendBuffer(int slot) const { return ReceiveBuffer(kWindow + slot); }

  const std::shared_ptr<World> world_;
  const int message_tag_;
  const int data_tag_;
  const MpiCommunicatorOptions options_;

  std::unique_ptr<Buffers> buffers_;
  absl::Status failure_;

  // Of the call under way.
  RollCall roll_;
  int64_t chunk_bytes_ = 0;
  int64_t duplicate_ = 0;
  Transfers receiving_;
  Transfers sending_;
  int under_way_ = 0;  // requests, but for messages to come

  // Ranks whose message for the next call has come.
  std::vector<bool> early_;
  std::vector<MPI_Request> requests_;
};

absl::StatusOr<std::unique_ptr<Communicator>> MpiCommunicator::Create(
    std::shared_ptr<World> world, int64_t number,
    const MpiCommunicatorOptions& options) {
  // Alike on all ranks: the number is, and MPI.
  if (2 * number + 1 > world->max_tag) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "communicator: MPI has no tags left after ", number, " communicators"));
  }
  auto communicator = std::unique_ptr<MpiCommunicator>(
      new MpiCommunicator(std::move(world), number, options));
  for (int peer = 0; peer < communicator->size(); ++peer) {
    if (peer == communicator->rank()) continue;
    if (absl::Status status = communicator->Listen(peer); !status.ok()) {
      return status;
    }
  }
  return communicator;
}

absl::StatusOr<std::unique_ptr<Communicator>> MpiCommunicator::Duplicate() {
  if (rank() == 0) duplicate_ = world_->communicators++;
  Collective call;
  call.function = Collective::Function::kDuplicate;
  if (absl::Status status = Run(call); !status.ok()) return status;
  return Create(world_, duplicate_, options_);
}

absl::Status MpiCommunicator::Run(const Collective& call) {
  if (!failure_.ok()) return failure_;
  if (Finalised()) return FinalisedError();
  absl::Status status = Meet(call);
  if (status.ok()) status = Exchange();
  if (!status.ok()) Die(Message::Kind::kFailed, status);
  return status;
}

void MpiCommunicator::Leave(const absl::Status& reason) {
  if (failure_.ok()) Die(Message::Kind::kLeft, reason);
}

absl::Status MpiCommunicator::Meet(const Collective& call) {
  roll_.Clear();
  roll_.Enter(rank(), call);
  chunk_bytes_ = options_.chunk_bytes;
  for (int peer = 0; peer < size(); ++peer) {
    if (!early_[peer]) continue;
    early_[peer] = false;
    if (absl::Status status = Take(peer); !status.ok()) return status;
  }
  Message& message = buffers_->call;
  message.kind = Message::Kind::kCall;
  message.function = call.function;
  message.bytes = call.bytes;
  message.chunk_bytes = options_.chunk_bytes;
  message.communicator = duplicate_;
  message.root = call.root;
  under_way_ = size() - 1;
  if (absl::Status status = Tell(message, &requests_[told()]); !status.ok()) {
    return status;
  }
  absl::Status status = Await(
      /*renewed=*/false, [&] { return roll_.complete(); },
      [&] { return roll_.Silence(call, options_.timeout); });
  return status.ok() ? roll_.Agreement() : status;
}

absl::Status MpiCommunicator::Exchange() {
  receiving_ = Transfers();
  sending_ = Transfers();
  for (int slot = 0; slot < kWindow; ++slot) {
    if (absl::Status status = Receive(slot); !status.ok()) return status;
  }
  for (int slot = 0; slot < kWindow; ++slot) {
    if (absl::Status status = Send(slot); !status.ok()) return status;
  }
  if (absl::Status status = Await(
          /*renewed=*/true, [&] { return under_way_ == 0; },
          [&] { return Stalled(); });
      !status.ok()) {
    return status;
  }
  // Last: nobody waits for it.
  const Collective& call = roll_[rank()];
  CopyBytes(call, rank(), call, rank());
  return absl::OkStatus();
}

absl::Status MpiCommunicator::Await(bool renewed,
                                    absl::FunctionRef<bool()> done,
                                    absl::FunctionRef<absl::Status()> overdue) {
  Patience patience(options_.timeout);
  for (bool in_time = true;;) {
    // Also after the deadline, and where nothing is left to wait for: what has
    // come counts, and so does that a rank failed.
    const absl::StatusOr<bool> came = Poll();
    if (!came.ok()) return came.status();
    if (done()) return absl::OkStatus();
    if (*came) {
      if (renewed) patience.Renew();
      continue;
    }
    if (!in_time) return overdue();
    in_time = patience.Wait();
  }
}

absl::StatusOr<bool> MpiCommunicator::Poll() {
  for (bool came = false;; came = true) {
    int request = MPI_UNDEFINED;
    int complete = 0;
    if (absl::Status status = Checked(
            "MPI_Testany",
            MPI_Testany(static_cast<int>(requests_.size()), requests_.data(),
                        &request, &complete, MPI_STATUS_IGNORE));
        !status.ok()) {
      return status;
    }
    if (complete == 0 || request == MPI_UNDEFINED) return came;
    if (absl::Status status = Handle(request); !status.ok()) return status;
  }
}

absl::Status MpiCommunicator::Handle(int request) {
  if (request < told()) return Take(request);
  --under_way_;
  if (request < received()) return absl::OkStatus();
  if (request >= sent()) return Send(request - sent());
  const int slot = request - received();
  const Chunk& chunk = receiving_.under_way[slot];
  std::memcpy(roll_[rank()].ReceiveFrom(chunk.peer) + chunk.offset,
              ReceiveBuffer(slot), chunk.bytes);
  return Receive(slot);
}

absl::Status MpiCommunicator::Listen(int peer) {
  return Checked("MPI_Irecv",
                 MPI_Irecv(&buffers_->incoming[peer], sizeof(Message), MPI_BYTE,
                           peer, message_tag_, world_->comm, &requests_[peer]));
}

absl::Status MpiCommunicator::Take(int peer) {
  const Message& message = buffers_->incoming[peer];
  // Who leaves has done its part of the calls before.
  const bool of_this_call =
      message.kind == Message::Kind::kFailed || !roll_.Has(peer);
  if (!of_this_call) {
    early_[peer] = true;
    return absl::OkStatus();
  }
  if (message.kind != Message::Kind::kCall) {
    return absl::Status(static_cast<absl::StatusCode>(message.code),
                        absl::string_view(message.text, message.text_bytes));
  }
  Collective call;
  call.function = message.function;
  call.root = message.root;
  call.bytes = message.bytes;
  roll_.Enter(peer, call);
  chunk_bytes_ = std::min(chunk_bytes_, message.chunk_bytes);
  if (peer == 0) duplicate_ = message.communicator;
  return Listen(peer);
}

absl::Status MpiCommunicator::Tell(const Message& message,
                                   MPI_Request* requests) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    if (absl::Status status =
            Checked("MPI_Isend",
                    MPI_Isend(&message, message.sent_bytes(), MPI_BYTE, peer,
                              message_tag_, world_->comm, &requests[peer]));
        !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status MpiCommunicator::Send(int slot) {
  const std::optional<Chunk> chunk = Next(sending_, /*to_send=*/true);
  if (!chunk.has_value()) return absl::OkStatus();
  sending_.under_way[slot] = *chunk;
  std::memcpy(SendBuffer(slot),
              roll_[rank()].SendTo(chunk->peer) + chunk->offset, chunk->bytes);
  ++under_way_;
  return Checked("MPI_Isend",
                 MPI_Isend(SendBuffer(slot), static_cast<int>(chunk->bytes),
                           MPI_BYTE, chunk->peer, data_tag_, world_->comm,
                           &requests_[sent() + slot]));
}

absl::Status MpiCommunicator::Receive(int slot) {
  const std::optional<Chunk> chunk = Next(receiving_, /*to_send=*/false);
  if (!chunk.has_value()) return absl::OkStatus();
  receiving_.under_way[slot] = *chunk;
  ++under_way_;
  return Checked("MPI_Irecv",
                 MPI_Irecv(ReceiveBuffer(slot), static_cast<int>(chunk->bytes),
                           MPI_BYTE, chunk->peer, data_tag_, world_->comm,
                           &requests_[received() + slot]));
}

std::optional<Chunk> MpiCommunicator::Next(Transfers& transfers,
                                           bool to_send) const {
  const Collective& call = roll_[rank()];
  for (; transfers.offset < call.bytes;
       transfers.offset += chunk_bytes_, transfers.step = 1) {
    while (transfers.step < size()) {
      const int step = transfers.step++;
      const int peer = (rank() + (to_send ? step : size() - step)) % size();
      const char* const memory =
          to_send ? call.SendTo(peer) : call.ReceiveFrom(peer);
      if (memory == nullptr) continue;
      return Chunk{peer, transfers.offset,
                   std::min(chunk_bytes_, call.bytes - transfers.offset)};
    }
  }
  return std::nullopt;
}

int MpiCommunicator::Peer(int request) const {
  if (request < received()) return request % size();
  return request < sent() ? receiving_.under_way[request - received()].peer
                          : sending_.under_way[request - sent()].peer;
}

absl::Status MpiCommunicator::Stalled() const {
  std::vector<int> peers;
  for (int request = told(); request < sent() + kWindow; ++request) {
    if (requests_[request] != MPI_REQUEST_NULL) peers.push_back(Peer(request));
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return absl::DeadlineExceededError(absl::StrCat(
      Name(roll_[rank()].function), ": nothing passed between rank ", rank(),
      " and ", RankNames(peers), " for ", options_.timeout.count(), " ms"));
}

void MpiCommunicator::Die(Message::Kind kind, const absl::Status& failure) {
  failure_ = failure;
  if (Finalised()) return;
  Message& last = buffers_->last;
  last.kind = kind;
  last.code = failure.raw_code();
  const absl::string_view text = failure.message().substr(0, sizeof(last.text));
  last.text_bytes = static_cast<int32_t>(text.size());
  std::memcpy(last.text, text.data(), text.size());
  // Whom it does not reach will find silence.
  Tell(last, &requests_[told_last()]).IgnoreError();

  bool all_ended = true;
  for (size_t i = 0; i < requests_.size(); ++i) {
    MPI_Request& request = requests_[i];
    const int index = static_cast<int>(i);
    const bool receives =
        index < told() || (index >= received() && index < sent());
    // What is sent cannot be called back.
    if (receives && request != MPI_REQUEST_NULL) MPI_Cancel(&request);
    // Small messages, and receives that nothing has come for, end at once.
    int complete = 0;
    for (int look = 0; look < 100 && complete == 0; ++look) {
      MPI_Test(&request, &complete, MPI_STATUS_IGNORE);
    }
    if (complete != 0) continue;
    MPI_Request_free(&request);
    all_ended = false;
  }
  // MPI goes on with what has not ended, and with its memory.
  if (!all_ended) buffers_.release();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator(
    const MpiCommunicatorOptions& options) {
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  if (options.chunk_bytes < 1 ||
      options.chunk_bytes > MpiCommunicatorOptions::kMaxChunkBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "communicator: chunk_bytes is ", options.chunk_bytes,
        ", expected 1 to ", MpiCommunicatorOptions::kMaxChunkBytes));
  }
  if (absl::Status status = Initialise(); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<World>> world = JoinWorld(options.timeout);
  if (!world.ok()) return world.status();
  return MpiCommunicator::Create(*std::move(world), 0, options);
}

}  // namespace onepass
