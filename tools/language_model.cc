#include "tools/language_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "Eigen/Core"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dispatch/fp_environment.h"
#include "dispatch/return_if_error.h"
#include "tools/checked_int.h"

namespace onepass {
namespace {

using Matrix = Eigen::MatrixXf;

// Rows or columns of a tile: wide enough for a matrix product to run at speed,
// narrow enough for a few tiles a thread.
constexpr int64_t kTile = 32;

// Calls work(first, count) for tiles of [0, size), on all threads.
void ForTiles(ThreadPool& pool, int64_t size,
              absl::FunctionRef<void(int64_t first, int64_t count)> work) {
  const int64_t tiles = size / kTile + (size % kTile != 0);
  pool.ParallelFor(tiles, /*grain=*/1, [&](int64_t begin, int64_t end) {
    const ScopedFpEnvironment fp;
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * kTile;
      work(first, std::min(kTile, size - first));
    }
  });
}

// Eigen cuts long sums by the sizes of the caches it finds; with sizes fixed,
// all processors of an architecture add in the same order.
void FixSummationOrder() {
  static const bool done = [] {
    Eigen::setCpuCacheSizes(32 << 10, 512 << 10, 4 << 20);
    return true;
  }();
  static_cast<void>(done);
}

Eigen::Map<const Matrix> AsMatrix(const Layer& layer,
                                  absl::Span<const float> values) {
  return {values.data(), layer.rows, layer.columns};
}

Eigen::Map<Matrix> AsMatrix(const Layer& layer, absl::Span<float> values) {
  return {values.data(), layer.rows, layer.columns};
}

std::vector<Layer> MakeLayers(const LanguageModelOptions& options) {
  std::vector<Layer> layers;
  layers.push_back({"embedding", options.embedding, LanguageModel::kSymbols});
  int64_t inputs = options.context * options.embedding;
  for (int64_t i = 0; i < options.layers; ++i) {
    layers.push_back({absl::StrCat("hidden.", i), options.hidden, inputs + 1});
    inputs = options.hidden;
  }
  layers.push_back({"output", LanguageModel::kSymbols, inputs + 1});
  return layers;
}

}  // namespace

// outputs[0] is the window of embeddings, outputs[i] what layer i makes of
// outputs[i - 1]; the last is the softmax. deltas[i] is the derivative of the
// loss by outputs[i], before tanh or softmax. A column for each position.
struct LanguageModel::Activations {
  std::vector<Matrix> outputs;
  std::vector<Matrix> deltas;
  Eigen::VectorXd losses;
};

std::array<LanguageModel::LayerKind, 4> LanguageModel::LayerKinds(
    const LanguageModelOptions& options) {
  const CheckedInt hidden = options.hidden;
  const CheckedInt inputs = CheckedInt(options.context) * options.embedding;
  return {{{1, CheckedInt(kSymbols) * options.embedding},
           {1, hidden * (inputs + 1)},
           {options.layers - 1, hidden * (hidden + 1)},
           {1, CheckedInt(kSymbols) * (hidden + 1)}}};
}

absl::StatusOr<int64_t> LanguageModel::ParameterCount(
    const LanguageModelOptions& options) {
  CheckedInt count = 0;
  for (const LayerKind& kind : LayerKinds(options)) {
    // What there is none of may be of any size.
    if (kind.count == 0) continue;
    count = count + CheckedInt(kind.count) * kind.numel;
  }
  return count.Get("parameters");
}

absl::StatusOr<int64_t> LanguageModel::ActivationBytes(
    const LanguageModelOptions& options, int64_t max_batch) {
  const CheckedInt column = CheckedInt(options.context) * options.embedding +
                            CheckedInt(options.layers) * options.hidden +
                            kSymbols;
  const CheckedInt bytes =
      CheckedInt(max_batch) *
      (CheckedInt(2 * sizeof(float)) * column + CheckedInt(sizeof(double)));
  return bytes.Get("bytes between layers");
}

LanguageModel::LanguageModel(const LanguageModelOptions& options,
                             int64_t max_batch, ThreadPool& pool)
    : options_(options),
      layers_(MakeLayers(options)),
      pool_(pool),
      activations_(std::make_unique<Activations>()) {
  FixSummationOrder();
  const int64_t inputs = options.context * options.embedding;
  int64_t numbers = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    first_numbers_.push_back(numbers);
    numbers += WeightsWithoutBias(static_cast<int>(i));
    const int64_t rows = i == 0 ? inputs : layers_[i].rows;
    activations_->outputs.emplace_back(rows, max_batch);
    activations_->deltas.emplace_back(rows, max_batch);
  }
  activations_->losses.resize(max_batch);
}

LanguageModel::~LanguageModel() = default;

void LanguageModel::InitialWeights(uint64_t seed, int layer, int64_t offset,
                                   absl::Span<float> values) const {
  const int64_t end = WeightsWithoutBias(layer);
  const float bound =
      layer == 0
          ? 1.0f
          : std::sqrt(6.0f / static_cast<float>(layers_[layer].columns - 1 +
                                                layers_[layer].rows));
  Random random(seed);
  random.Skip(first_numbers_[layer] + offset);
  for (float& value : values) {
    value = offset++ < end ? random.Symmetric() * bound : 0;
  }
}

int64_t LanguageModel::WeightsWithoutBias(int layer) const {
  const Layer& of = layers_[layer];
  return of.rows * (of.columns - (layer > 0 ? 1 : 0));
}

absl::StatusOr<double> LanguageModel::Forward(
    absl::string_view text, absl::Span<const int64_t> positions,
    GetWeights get_weights) {
  const int64_t batch = static_cast<int64_t>(positions.size());
  std::vector<Matrix>& outputs = activations_->outputs;
  Eigen::VectorXd& losses = activations_->losses;

  absl::Span<const float> weights;
  ONEPASS_ASSIGN_OR_RETURN(weights, get_weights(0, /*backward=*/false));
  const auto embedding = AsMatrix(layers_[0], weights);
  ForTiles(pool_, batch, [&](int64_t first, int64_t count) {
    for (int64_t b = first; b < first + count; ++b) {
      const char* window = text.data() + positions[b] - options_.context;
      for (int64_t c = 0; c < options_.context; ++c) {
        outputs[0].col(b).segment(c * options_.embedding, options_.embedding) =
            embedding.col(static_cast<uint8_t>(window[c]));
      }
    }
  });

  for (size_t i = 1; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    ONEPASS_ASSIGN_OR_RETURN(
        weights, get_weights(static_cast<int>(i), /*backward=*/false));
    const auto w = AsMatrix(layer, weights);
    const int64_t inputs = layer.columns - 1;
    const auto x = outputs[i - 1].leftCols(batch);
    const bool hidden = i + 1 < layers_.size();
    ForTiles(pool_, layer.rows, [&](int64_t first, int64_t count) {
      auto y = outputs[i].block(first, 0, count, batch);
      y.noalias() = w.block(first, 0, count, inputs) * x;
      y.colwise() += w.col(inputs).segment(first, count);
      if (hidden) y = y.array().tanh();
    });
  }

  Matrix& output = outputs.back();
  ForTiles(pool_, batch, [&](int64_t first, int64_t count) {
    for (int64_t b = first; b < first + count; ++b) {
      const auto target = static_cast<uint8_t>(text[positions[b]]);
      auto column = output.col(b).array();
      // Without the largest, so that no exponential overflows.
      column -= column.maxCoeff();
      const double logit = column(target);
      column = column.exp();
      const float sum = column.sum();
      column /= sum;
      losses(b) = std::log(static_cast<double>(sum)) - logit;
    }
  });
  double loss = 0;
  for (int64_t b = 0; b < batch; ++b) loss += losses(b);
  return loss / static_cast<double>(batch);
}

absl::StatusOr<double> LanguageModel::ForwardBackward(
    absl::string_view text, absl::Span<const int64_t> positions,
    double loss_scale, GetWeights get_weights,
    absl::Span<float> gradient_buffer, TakeGradient take_gradient) {
  double loss;
  ONEPASS_ASSIGN_OR_RETURN(loss, Forward(text, positions, get_weights));
  const int64_t batch = static_cast<int64_t>(positions.size());
  const std::vector<Matrix>& outputs = activations_->outputs;
  std::vector<Matrix>& deltas = activations_->deltas;

  // Of the mean cross entropy after softmax: (p - [target]) / batch.
  const float scale =
      static_cast<float>(loss_scale / static_cast<double>(batch));
  ForTiles(pool_, batch, [&](int64_t first, int64_t count) {
    for (int64_t b = first; b < first + count; ++b) {
      auto delta = deltas.back().col(b);
      delta = outputs.back().col(b);
      delta(static_cast<uint8_t>(text[positions[b]])) -= 1.0f;
      delta *= scale;
    }
  });

  for (size_t i = layers_.size() - 1; i > 0; --i) {
    const Layer& layer = layers_[i];
    absl::Span<const float> weights;
    ONEPASS_ASSIGN_OR_RETURN(
        weights, get_weights(static_cast<int>(i), /*backward=*/true));
    const auto w = AsMatrix(layer, weights);
    auto gradient = AsMatrix(layer, gradient_buffer.first(layer.numel()));
    const int64_t inputs = layer.columns - 1;
    const auto x = outputs[i - 1].leftCols(batch);
    const auto delta = deltas[i].leftCols(batch);
    ForTiles(pool_, layer.rows, [&](int64_t first, int64_t count) {
      const auto rows = delta.middleRows(first, count);
      gradient.block(first, 0, count, inputs).noalias() = rows * x.transpose();
      gradient.col(inputs).segment(first, count) = rows.rowwise().sum();
    });
    const bool hidden = i > 1;
    ForTiles(pool_, inputs, [&](int64_t first, int64_t count) {
      auto below = deltas[i - 1].block(first, 0, count, batch);
      below.noalias() = w.middleCols(first, count).transpose() * delta;
      // tanh' = 1 - tanh^2.
      if (hidden) {
        below.array() *= 1.0f - x.middleRows(first, count).array().square();
      }
    });
    ONEPASS_RETURN_IF_ERROR(take_gradient(static_cast<int>(i)));
  }

  auto gradient =
      AsMatrix(layers_[0], gradient_buffer.first(layers_[0].numel()));
  ForTiles(pool_, options_.embedding, [&](int64_t first, int64_t count) {
    gradient.middleRows(first, count).setZero();
    for (int64_t b = 0; b < batch; ++b) {
      const char* window = text.data() + positions[b] - options_.context;
      for (int64_t c = 0; c < options_.context; ++c) {
        gradient.col(static_cast<uint8_t>(window[c])).segment(first, count) +=
            deltas[0].col(b).segment(c * options_.embedding + first, count);
      }
    }
  });
  ONEPASS_RETURN_IF_ERROR(take_gradient(0));
  return loss;
}

}  // namespace onepass
