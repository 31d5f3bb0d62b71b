// Trains tools/language_model.h on the ranks of a ZeroOptimizer: each layer is
// a unit, whose weights are gathered for use and released after, and whose
// gradient goes to its owners as soon as it is there.
//
//   ASSIGN_OR_RETURN(auto trainer,
//                    Trainer::Create({*kernel, *device, *pool}, communicator,
//                                    options, text));
//   for (int64_t i = 0; i < steps; ++i) {
//     ASSIGN_OR_RETURN(TrainStep step, trainer->Step());
//   }
//   ASSIGN_OR_RETURN(std::string digest, trainer->Digest());
//
// Create(), Step(), HeldOutBits(), Digest(), Save() and Restore() are
// collective: every rank calls them, in the same order. An error leaves the
// trainer unusable, but one of Save() on which ranks agreed.
//
// The same text, model, batch, micro-batches, lr, clip, seed, precision and
// number of ranks give the same masters, bit by bit, for any kernel, number of
// threads, piece, part on the device, kind of ranks and way of updating.

#ifndef ONEPASS_TOOLS_TRAINER_H_
#define ONEPASS_TOOLS_TRAINER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/memory_budget.h"
#include "checkpoint/meta.h"
#include "checkpoint/save.h"
#include "dispatch/communicator.h"
#include "dispatch/device.h"
#include "dispatch/dtype.h"
#include "dispatch/runtime.h"
#include "offload/shard_optimizer.h"
#include "offload/step_trace.h"
#include "offload/zero_optimizer.h"
#include "tools/data_position.h"
#include "tools/language_model.h"

namespace onepass {

// Defaults are those of `onepass train`; errors name the flags.
struct TrainOptions {
  LanguageModelOptions model;
  int64_t steps = 1;
  int64_t batch = 64;         // positions of a rank in a micro-batch
  int64_t micro_batches = 1;  // in a step
  double lr = 1e-3;
  double clip = 1;  // largest norm of the gradient; 0: not clipped
  int64_t seed = 1;
  // Of the weights on the device, and of the gradients that travel. In fp16 the
  // loss is scaled, dynamically.
  DType precision = DType::kBFloat16;
  // Three passes over the state (scale, step, cast) instead of one.
  bool separate = false;
  // As in ShardOptimizerOptions.
  double ratio = 1;  // cpu_ratio
  int64_t piece_numel = 65536;
  int64_t staging_buffers = 2;
  int64_t sub_group_numel = int64_t{1} << 28;
  bool pin_memory = true;
};

// Bytes that training takes on each of `ranks` ranks, beside the program, the
// text and what communicators take, at most, provided that freed memory goes
// back to the system (tools/onepass.cc). InvalidArgument: an option that makes
// no sense, or a text too short for it. OutOfRange: the model does not fit 64
// bits.
absl::StatusOr<int64_t> TrainingBytes(const TrainOptions& options,
                                      int64_t text_bytes, int ranks);

struct TrainStep {
  // Mean over the positions of all ranks before the update, in nats a byte.
  double loss;
  StepReport report;
  double optimizer_s;  // norm, update and copy to the device
};

class Trainer {
 public:
  // What `runtime` names, the communicator, which is the trainer's, and `text`
  // outlive it. The device is host_accessible(). Errors: those of
  // TrainingBytes() and of ZeroOptimizer::Create().
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(
      const Runtime& runtime, Communicator& communicator,
      const TrainOptions& options, absl::string_view text);

  // Micro-batches of random positions, forward and backward, and the update.
  absl::StatusOr<TrainStep> Step();

  // Of the last tenth of the text, with the weights on the device, in bits a
  // byte.
  absl::StatusOr<double> HeldOutBits();

  // What the frequencies of the bytes of the training part alone (each counted
  // once more than seen) give on the held-out part, in bits a byte.
  double FrequencyBits() const;

  // XXH3 (64 bits) of all fp32 masters in the order of the layers, as 16 hex
  // digits.
  absl::StatusOr<std::string> Digest();

  // The state of all ranks, as checkpoint `name` below `parent`, with where
  // they are in the data. Errors: those of SaveCheckpoint().
  absl::StatusOr<SaveReport> Save(Communicator& communicator,
                                  absl::string_view parent,
                                  absl::string_view name, MemoryBudget& budget);
  // The same while training goes on (checkpoint/async_save.h). `budget`, and
  // the device of `runtime`, outlive the save; this need not, as what it
  // destroys waits until it was read. Errors: those of AsyncSaver::Start().
  absl::Status StartSave(AsyncSaver& saver, absl::string_view parent,
                         absl::string_view name, MemoryBudget& budget);
  // Goes on where that was saved, on any number of ranks: they go on drawing
  // from their common stream of positions where it was left. The learning rate
  // is that of the checkpoint. FailedPrecondition: it is of another text, seed,
  // precision or model. Others: those of RestoreCheckpoint().
  absl::Status Restore(Communicator& communicator, Checkpoint& checkpoint,
                       MemoryBudget& budget);

  // The options that are not those of what was restored, so that the digest
  // will not be that of one run: "--batch is 8, and was 4".
  const std::vector<std::string>& differences() const { return differences_; }

  // Steps that were taken, and those of them that were skipped, since the run
  // began: also before Restore().
  int64_t steps() const { return steps_; }
  int64_t skipped() const { return steps_ - optimizer_->shards().step(0); }
  float lr() const { return optimizer_->shards().groups()[0].lr; }

  // Each step appends what it did and when; null ends that.
  absl::Status SetTrace(StepTrace* trace);

  int64_t parameters() const;
  // Bytes of weights that are gathered, and the most that ever were: two
  // layers, one in use and the next.
  const MemoryUse& gathered() const { return optimizer_->gathered(); }
  // Those of all layers, if they were gathered at once.
  int64_t all_gathered_bytes() const;

 private:
  Trainer(const Runtime& runtime, const TrainOptions& options,
          absl::string_view text);

  absl::Status Initialize(Communicator& communicator);
  std::vector<ZeroUnit> Units() const;
  absl::string_view TrainingPart() const;
  // The next positions, those of this rank.
  void DrawPositions();
  DataPosition Position() const;
  // That a checkpoint is of this run, and where it is in the data.
  absl::StatusOr<DataPosition> CheckSame(const CheckpointMeta& meta) const;
  // fp32 weights of a layer, as LanguageModel::GetWeights.
  absl::StatusOr<absl::Span<const float>> Weights(int layer, bool backward);
  void ReleaseWeights();

  CheckpointMeta Meta() const;

  const Runtime runtime_;
  const TrainOptions options_;
  const absl::string_view text_;
  const int64_t held_out_begin_;
  LanguageModel model_;
  Random random_;
  int64_t drawn_ = 0;  // of its numbers, by all ranks
  std::vector<int64_t> positions_;
  int64_t steps_ = 0;
  std::vector<std::string> differences_;

  std::unique_ptr<Communicator> communicator_;
  // On the device: of the largest layer.
  DeviceBuffer widened_;
  DeviceBuffer gradient_;
  std::unique_ptr<ZeroOptimizer> optimizer_;
  // The layer in use, and the one that comes after it.
  int layer_ = -1;
  std::optional<Gathered> current_;
  int next_layer_ = -1;
  std::optional<Gathered> next_;
  // Ends before the memory goes that it reads.
  std::unique_ptr<Stream> stream_;
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_TRAINER_H_
