// A small language model over bytes, to train something real with onepass: an
// embedding, a window of preceding bytes, hidden layers with tanh, and a
// softmax over the 256 values of the next byte (Bengio et al. 2003, without its
// direct connections).
//
//   LanguageModel model(options, /*max_batch=*/64, *pool);
//   for (int i = 0; i < layers; ++i) {
//     model.InitialWeights(seed, i, 0, weights[i]);   // of model.layers()[i]
//   }
//   ASSIGN_OR_RETURN(
//       double loss,
//       model.ForwardBackward(
//           text, positions, /*loss_scale=*/1,
//           [&](int i, bool backward) { return weights[i]; }, buffer,
//           [&](int i) { return Add(buffer, gradients[i]); }));
//
// One layer at a time has its weights or its gradient in memory: the model asks
// for the weights of a layer when it comes to it, and gives its gradient away.
//
// The same inputs give the same bits for any number of threads: work is cut
// into tiles of fixed size, and each tile adds in a fixed order. To change the
// network: MakeLayers(), and the two passes in language_model.cc.

#ifndef ONEPASS_TOOLS_LANGUAGE_MODEL_H_
#define ONEPASS_TOOLS_LANGUAGE_MODEL_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dispatch/thread_pool.h"
#include "tools/checked_int.h"

namespace onepass {

// All at least 1.
struct LanguageModelOptions {
  int64_t context = 8;     // preceding bytes that the model sees
  int64_t embedding = 16;  // width of a byte's vector
  int64_t hidden = 256;    // width of a hidden layer
  int64_t layers = 2;      // hidden layers
};

// The parameters of a layer: one matrix, column by column. In all layers but
// "embedding", which has a column for each byte, the last column is the bias.
struct Layer {
  std::string name;
  int64_t rows;
  int64_t columns;

  int64_t numel() const { return rows * columns; }
};

class LanguageModel {
 public:
  static constexpr int64_t kSymbols = 256;

  // Layers of one size, and how many there are; that may be none.
  struct LayerKind {
    int64_t count;
    CheckedInt numel;
  };

  // Without building the model: its layers, in order. (Those between the first
  // and the last hidden one are alike.)
  static std::array<LayerKind, 4> LayerKinds(
      const LanguageModelOptions& options);
  // Their parameters. OutOfRange: the number does not fit 64 bits.
  static absl::StatusOr<int64_t> ParameterCount(
      const LanguageModelOptions& options);
  // Of the matrices between layers, forward and backward.
  static absl::StatusOr<int64_t> ActivationBytes(
      const LanguageModelOptions& options, int64_t max_batch);

  // The two functions above have succeeded. `pool` must outlive the model.
  LanguageModel(const LanguageModelOptions& options, int64_t max_batch,
                ThreadPool& pool);
  ~LanguageModel();

  const std::vector<Layer>& layers() const { return layers_; }

  // Elements [offset, offset + values.size()) of the first weights of a layer:
  // random (Glorot and Bengio 2010), the same for the same seed on every
  // platform; biases are 0.
  void InitialWeights(uint64_t seed, int layer, int64_t offset,
                      absl::Span<float> values) const;

  // The weights of a layer, numel() of them, which stay until the next call.
  // Forward layers are asked for in order, backward from the last to number 1.
  using GetWeights = absl::FunctionRef<absl::StatusOr<absl::Span<const float>>(
      int layer, bool backward)>;
  // Takes the gradient of a layer out of the buffer.
  using TakeGradient = absl::FunctionRef<absl::Status(int layer)>;

  // The mean over `positions` (1 to max_batch) of -ln p(text[position]), given
  // the `context` bytes before each position; context <= position <
  // text.size(). Errors are those of `get_weights`.
  absl::StatusOr<double> Forward(absl::string_view text,
                                 absl::Span<const int64_t> positions,
                                 GetWeights get_weights);

  // The same, and the derivatives of `loss_scale` times that mean: of each
  // layer, from the last to the first, written to `gradient_buffer`, which
  // holds those of the largest.
  absl::StatusOr<double> ForwardBackward(absl::string_view text,
                                         absl::Span<const int64_t> positions,
                                         double loss_scale,
                                         GetWeights get_weights,
                                         absl::Span<float> gradient_buffer,
                                         TakeGradient take_gradient);

 private:
  struct Activations;  // hides Eigen, which takes long to compile

  int64_t WeightsWithoutBias(int layer) const;

  const LanguageModelOptions options_;
  const std::vector<Layer> layers_;
  // Of the random ones that make the weights of each.
  std::vector<int64_t> first_numbers_;
  ThreadPool& pool_;
  const std::unique_ptr<Activations> activations_;
};

// A stream of random numbers (SplitMix64, Steele et al. 2014), the same
// everywhere; those of the standard library differ between implementations.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // As after `count` calls of Next().
  void Skip(int64_t count) { state_ += kStep * static_cast<uint64_t>(count); }

  uint64_t Next() {
    uint64_t z = (state_ += kStep);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  // In [0, end); end is far below 2^64, so that the remainder's bias is none.
  int64_t Below(int64_t end) {
    return static_cast<int64_t>(Next() % static_cast<uint64_t>(end));
  }

  // In [-1, 1), a multiple of 2^-23.
  float Symmetric() {
    return static_cast<float>(static_cast<int64_t>(Next() >> 40) - (1 << 23)) *
           0x1p-23f;
  }

 private:
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15;

  uint64_t state_;
};

}  // namespace onepass

#endif  // ONEPASS_TOOLS_LANGUAGE_MODEL_H_
