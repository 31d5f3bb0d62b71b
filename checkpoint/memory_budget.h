// The bytes that an export or a restore may have at once for elements of
// tensors, of the device and of the host: every stage takes what it is about to
// allocate for them from here, and gives it back when that is freed. So the
// peak does not depend on how large tensors are. Not counted: what there is of
// each tensor besides its elements, as its name, its entry in headers and
// indexes, and the checksums of its chunks: some hundred bytes for what each
// rank has of it, of all ranks where they come together, as on rank 0.
//
//   ASSIGN_OR_RETURN(auto budget, MemoryBudget::Create({device, host}));
//   ASSIGN_OR_RETURN(MemoryBudget::Share share, budget->Take({chunk, chunk}));
//   ...                                      // allocate, work, free
//   share = {};                              // others go on

#ifndef ONEPASS_CHECKPOINT_MEMORY_BUDGET_H_
#define ONEPASS_CHECKPOINT_MEMORY_BUDGET_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace onepass {

// May be used by many threads. Outlives its shares.
class MemoryBudget {
 public:
  struct Bytes {
    int64_t device = 0;
    int64_t host = 0;
  };

  // What was taken, until it goes.
  class Share {
   public:
    Share() = default;
    ~Share() { Release(); }
    Share(Share&& other) noexcept;
    Share& operator=(Share&& other) noexcept;

    Bytes bytes() const { return bytes_; }

   private:
    friend class MemoryBudget;
    Share(MemoryBudget* budget, Bytes bytes) : budget_(budget), bytes_(bytes) {}
    void Release();

    MemoryBudget* budget_ = nullptr;
    Bytes bytes_;
  };

  // InvalidArgument: bytes below 0.
  static absl::StatusOr<std::unique_ptr<MemoryBudget>> Create(Bytes limit);

  // Waits until there is as much of both, and takes both at once: nobody holds
  // the one while it waits for the other. In the order of the calls, so that a
  // large one is not passed over for ever. InvalidArgument: bytes below 0.
  // ResourceExhausted: more than the whole budget. What Cancel() was given:
  // from then on.
  absl::StatusOr<Share> Take(Bytes bytes);

  // Ends all waits, also those to come, with `error`.
  void Cancel(const absl::Status& error);

  Bytes limit() const { return limit_; }
  Bytes in_use() const;
  // Calls of Take() that wait.
  int64_t waiting() const;
  // The most that ever was, of each.
  Bytes peak() const;

 private:
  explicit MemoryBudget(Bytes limit) : limit_(limit) {}

  bool Fits(Bytes bytes) const {
    return bytes.device <= limit_.device - in_use_.device &&
           bytes.host <= limit_.host - in_use_.host;
  }
  void Give(Bytes bytes);

  const Bytes limit_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Bytes in_use_;
  Bytes peak_;
  // Callers take numbers; the one whose number it is goes next.
  int64_t next_number_ = 0;
  int64_t serving_ = 0;
  absl::Status cancelled_;
};

// What a save or a restore takes where it is given no budget.
inline constexpr MemoryBudget::Bytes kDefaultBudget = {int64_t{64} << 20,
                                                       int64_t{64} << 20};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_MEMORY_BUDGET_H_
