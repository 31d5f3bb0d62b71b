#include "tools/language_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "Eigen/Core"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "dispatch/fp_environment.h"

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

// An integer that remembers whether a result did not fit.
class Checked {
 public:
  Checked(int64_t value) : value_(value) {}  // NOLINT: meant to convert

  friend Checked operator+(Checked a, Checked b) {
    Checked sum(0);
    sum.overflow_ = __builtin_add_overflow(a.value_, b.value_, &sum.value_) ||
                    a.overflow_ || b.overflow_;
    return sum;
  }
  friend Checked operator*(Checked a, Checked b) {
    Checked product(0);
    product.overflow_ =
        __builtin_mul_overflow(a.value_, b.value_, &product.value_) ||
        a.overflow_ || b.overflow_;
    return product;
  }

  absl::StatusOr<int64_t> Get(absl::string_view what) const {
    if (!overflow_) return value_;
    return absl::OutOfRangeError(
        absl::StrCat("the number of ", what, " does not fit 64 bits"));
  }

 private:
  int64_t value_;
  bool overflow_ = false;
};

}  // namespace

// outputs[0] is the window of embeddings, outputs[i] what layer i makes of
// outputs[i - 1]; the last is the softmax. deltas[i] is the derivative of the
// loss by outputs[i], before tanh or softmax. A column for each position.
struct LanguageModel::Activations {
  std::vector<Matrix> outputs;
  std::vector<Matrix> deltas;
  Eigen::VectorXd losses;
};

absl::StatusOr<int64_t> LanguageModel::ParameterCount(
    const LanguageModelOptions& options) {
  const Checked hidden = options.hidden;
  const Checked inputs = Checked(options.context) * options.embedding;
  const Checked count = Checked(kSymbols) * options.embedding +
                        hidden * (inputs + 1) +
                        Checked(options.layers - 1) * hidden * (hidden + 1) +
                        Checked(kSymbols) * (hidden + 1);
  return count.Get("parameters");
}

absl::StatusOr<int64_t> LanguageModel::ActivationBytes(
    const LanguageModelOptions& options, int64_t max_batch) {
  const Checked column = Checked(options.context) * options.embedding +
                         Checked(options.layers) * options.hidden + kSymbols;
  const Checked bytes =
      Checked(max_batch) *
      (Checked(2 * sizeof(float)) * column + Checked(sizeof(double)));
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
  for (size_t i = 0; i < layers_.size(); ++i) {
    const int64_t rows = i == 0 ? inputs : layers_[i].rows;
    activations_->outputs.emplace_back(rows, max_batch);
    activations_->deltas.emplace_back(rows, max_batch);
  }
  activations_->losses.resize(max_batch);
}

LanguageModel::~LanguageModel() = default;

void LanguageModel::Initialize(
    uint64_t seed, absl::Span<const absl::Span<float>> weights) const {
  Random random(seed);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const bool has_bias = i > 0;
    const int64_t inputs = layer.columns - (has_bias ? 1 : 0);
    const float bound =
        has_bias ? std::sqrt(6.0f / static_cast<float>(inputs + layer.rows))
                 : 1.0f;
    const auto bias = weights[i].begin() + layer.rows * inputs;
    std::generate(weights[i].begin(), bias,
                  [&] { return random.Symmetric() * bound; });
    std::fill(bias, weights[i].end(), 0.0f);
  }
}

double LanguageModel::Forward(
    absl::string_view text, absl::Span<const int64_t> positions,
    absl::Span<const absl::Span<const float>> weights) {
  const int64_t batch = static_cast<int64_t>(positions.size());
  std::vector<Matrix>& outputs = activations_->outputs;
  Eigen::VectorXd& losses = activations_->losses;

  const auto embedding = AsMatrix(layers_[0], weights[0]);
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
    const auto w = AsMatrix(layer, weights[i]);
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

double LanguageModel::ForwardBackward(
    absl::string_view text, absl::Span<const int64_t> positions,
    absl::Span<const absl::Span<const float>> weights,
    absl::Span<const absl::Span<float>> gradients) {
  const double loss = Forward(text, positions, weights);
  const int64_t batch = static_cast<int64_t>(positions.size());
  const std::vector<Matrix>& outputs = activations_->outputs;
  std::vector<Matrix>& deltas = activations_->deltas;

  // Of the mean cross entropy after softmax: (p - [target]) / batch.
  ForTiles(pool_, batch, [&](int64_t first, int64_t count) {
    for (int64_t b = first; b < first + count; ++b) {
      auto delta = deltas.back().col(b);
      delta = outputs.back().col(b);
      delta(static_cast<uint8_t>(text[positions[b]])) -= 1.0f;
      delta /= static_cast<float>(batch);
    }
  });

  for (size_t i = layers_.size() - 1; i > 0; --i) {
    const Layer& layer = layers_[i];
    const auto w = AsMatrix(layer, weights[i]);
    auto gradient = AsMatrix(layer, gradients[i]);
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
  }

  auto gradient = AsMatrix(layers_[0], gradients[0]);
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
  return loss;
}

}  // namespace onepass
