// Trains tools/language_model.h the way an offloaded trainer does: weights in
// bf16 on the device, fp32 masters and moments on the CPU.
//
//   ASSIGN_OR_RETURN(Trainer trainer,
//                    Trainer::Create(*kernel, *pool, options, text));
//   for (int64_t i = 0; i < steps; ++i) {
//     ASSIGN_OR_RETURN(TrainStep step, trainer.Step());
//   }
//   trainer.Digest();
//
// The same text, model, batch, lr, clip and seed give the same masters, bit by
// bit, for any kernel, number of threads, piece size and way of updating. A
// layer is a unit with buffers of its own: what a sharded trainer gathers and
// reduces.

#ifndef ONEPASS_TOOLS_TRAINER_H_
#define ONEPASS_TOOLS_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "offload/cpu_adam.h"
#include "tools/language_model.h"

namespace onepass {

// Defaults are those of `onepass train`; errors name the flags.
struct TrainOptions {
  LanguageModelOptions model;
  int64_t steps = 1;
  int64_t batch = 64;  // positions a step
  double lr = 1e-3;
  double clip = 1;  // largest norm of the gradient; 0: not clipped
  int64_t seed = 1;
  // Elements of a piece of the fused step.
  int64_t piece_numel = 65536;
  // Three passes over the state (scale, step, cast) instead of one.
  bool separate = false;
};

// Bytes that training takes beside the program: state, weights, activations,
// staging, what keeps each layer, and the text. InvalidArgument: an option that
// makes no sense, or a text too short for it. OutOfRange: the model does not
// fit 64 bits.
absl::StatusOr<int64_t> TrainingBytes(const TrainOptions& options,
                                      int64_t text_bytes);

struct TrainStep {
  double loss;         // mean over the batch before the update, in nats a byte
  double norm;         // of the gradient before clipping
  float clip_factor;   // what it was multiplied by; 0 where skipped
  bool skipped;        // the norm was not finite: nothing was changed
  double optimizer_s;  // norm, update and copy to the device
};

class Trainer {
 public:
  // `kernel` and `pool` must outlive the trainer. Errors: those of
  // TrainingBytes().
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(
      const Kernel& kernel, ThreadPool& pool, const TrainOptions& options,
      std::string text);

  // One batch of random positions, forward, backward and update. An error
  // leaves the trainer unusable.
  absl::StatusOr<TrainStep> Step();

  // Of the last tenth of the text, with the weights on the device, in bits a
  // byte.
  absl::StatusOr<double> HeldOutBits();

  // What the frequencies of the bytes of the training part alone (each counted
  // once more than seen) give on the held-out part, in bits a byte.
  double FrequencyBits() const;

  // XXH3 (64 bits) of all fp32 masters in the order of the layers, as 16 hex
  // digits.
  std::string Digest() const;

  int64_t parameters() const;
  // Whether the step writes the bf16 copy itself: fused, and the kernel can.
  bool fused() const { return fused_; }

 private:
  // Everything of one layer.
  struct Unit {
    explicit Unit(int64_t numel);

    int64_t numel() const { return static_cast<int64_t>(master.size()); }
    AdamSpan Span();

    // On the device, for now plain memory: the weights, and what forward and
    // backward make of and from them.
    std::vector<uint16_t> weights;  // bf16
    std::vector<float> widened;
    std::vector<float> gradient;
    // On the CPU.
    std::vector<float> master;
    std::vector<float> exp_avg;
    std::vector<float> exp_avg_sq;
  };

  Trainer(const Kernel& kernel, ThreadPool& pool, const TrainOptions& options,
          std::string text, CpuAdam adam);

  absl::string_view TrainingPart() const;
  // fp32 copies of the device's weights, for forward and backward.
  absl::Status Widen();
  // One pass: pieces through two staging buffers.
  absl::Status UpdateInPieces(float factor);
  // Three passes, or two where only the copy is left to do (`scale` false).
  absl::Status UpdateInPasses(float factor, bool scale);
  absl::Status CastToDevice();

  const Kernel& kernel_;
  ThreadPool& pool_;
  const TrainOptions options_;
  const std::string text_;
  const int64_t held_out_begin_;
  const bool fused_;
  CpuAdam adam_;
  LanguageModel model_;
  Random random_;
  int64_t updates_ = 0;

  std::vector<Unit> units_;
  std::vector<absl::Span<const float>> widened_;
  std::vector<absl::Span<float>> gradients_;
  std::vector<int64_t> positions_;
  // bf16 on its way to the device: two pieces, or one whole layer.
  std::vector<uint16_t> staging_[2];
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_TRAINER_H_
