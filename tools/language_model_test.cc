#include "tools/language_model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dispatch/thread_pool.h"
#include "gtest/gtest.h"
#include "tests/test_kernels.h"

namespace onepass {
namespace {

using Buffers = std::vector<std::vector<float>>;

struct Model {
  Model(const LanguageModelOptions& options, int64_t batch, int threads)
      : pool(*ThreadPool::Create({threads})), model(options, batch, *pool) {
    size_t largest = 0;
    for (const Layer& layer : model.layers()) {
      const int index = static_cast<int>(weights.size());
      weights.emplace_back(layer.numel());
      gradients.emplace_back();
      model.InitialWeights(/*seed=*/5, index, 0,
                           absl::MakeSpan(weights.back()));
      largest = std::max(largest, weights.back().size());
    }
    buffer.resize(largest, 7.0f);  // is overwritten
  }

  double ForwardBackward(const std::string& text,
                         const std::vector<int64_t>& positions,
                         double loss_scale = 1) {
    return model
        .ForwardBackward(
            text, positions, loss_scale,
            [this](int layer, bool backward) {
              asked.emplace_back(layer, backward);
              return absl::MakeConstSpan(weights[layer]);
            },
            absl::MakeSpan(buffer),
            [this](int layer) {
              gradients[layer].assign(buffer.begin(),
                                      buffer.begin() + weights[layer].size());
              return absl::OkStatus();
            })
        .value();
  }

  std::unique_ptr<ThreadPool> pool;
  LanguageModel model;
  Buffers weights;
  Buffers gradients;
  std::vector<float> buffer;
  // Layers whose weights were asked for, and whether backward.
  std::vector<std::pair<int, bool>> asked;
};

// The network as its definition reads, one position at a time, in double.
double DirectLoss(const LanguageModelOptions& options,
                  const std::vector<Layer>& layers,
                  const std::vector<std::vector<double>>& weights,
                  const std::string& text,
                  const std::vector<int64_t>& positions) {
  double loss = 0;
  for (const int64_t position : positions) {
    std::vector<double> x;
    for (int64_t c = position - options.context; c < position; ++c) {
      const int64_t symbol = static_cast<uint8_t>(text[c]);
      for (int64_t i = 0; i < options.embedding; ++i) {
        x.push_back(weights[0][symbol * options.embedding + i]);
      }
    }
    for (size_t l = 1; l < layers.size(); ++l) {
      const int64_t rows = layers[l].rows;
      std::vector<double> y(rows);
      for (int64_t i = 0; i < rows; ++i) {
        for (size_t j = 0; j < x.size(); ++j) {
          y[i] += weights[l][j * rows + i] * x[j];
        }
        y[i] += weights[l][x.size() * rows + i];
        if (l + 1 < layers.size()) y[i] = std::tanh(y[i]);
      }
      x = y;
    }
    double sum = 0;
    for (const double logit : x) sum += std::exp(logit);
    loss += std::log(sum) - x[static_cast<uint8_t>(text[position])];
  }
  return loss / static_cast<double>(positions.size());
}

TEST(LanguageModelTest, GradientIsThatOfTheDefinition) {
  LanguageModelOptions options;
  options.context = 3;
  options.embedding = 5;
  options.hidden = 37;  // more than a tile
  options.layers = 2;
  const std::string text = "abcabdab\xff\x80 abracadabra";
  const std::vector<int64_t> positions = {3, 4, 8, 9, 3, 20};
  Model model(options, /*batch=*/8, /*threads=*/2);
  // Biases that are not zero, so that they count.
  for (size_t l = 1; l < model.weights.size(); ++l) {
    const int64_t rows = model.model.layers()[l].rows;
    for (int64_t i = 0; i < rows; ++i) {
      model.weights[l][model.weights[l].size() - 1 - i] = 0.01f * (i % 9);
    }
  }
  const double loss = model.ForwardBackward(text, positions);

  std::vector<std::vector<double>> weights;
  for (const std::vector<float>& w : model.weights) {
    weights.emplace_back(w.begin(), w.end());
  }
  const auto direct = [&] {
    return DirectLoss(options, model.model.layers(), weights, text, positions);
  };
  EXPECT_NEAR(loss, direct(), 1e-5);

  constexpr double kStep = 1e-5;
  const bool whole = LongTestStride() == 1;
  int not_zero = 0;
  for (size_t l = 0; l < weights.size(); ++l) {
    // A prime stride reaches rows, columns and biases alike.
    const size_t stride = l == 0 ? (whole ? 1 : 5) : (whole ? 7 : 31);
    for (size_t i = 0; i < weights[l].size(); i += stride) {
      const double saved = weights[l][i];
      weights[l][i] = saved + kStep;
      const double above = direct();
      weights[l][i] = saved - kStep;
      const double below = direct();
      weights[l][i] = saved;
      const double expected = (above - below) / (2 * kStep);
      ASSERT_NEAR(model.gradients[l][i], expected, 1e-6)
          << model.model.layers()[l].name << " element " << i;
      if (model.gradients[l][i] != 0) ++not_zero;
    }
  }
  EXPECT_GT(not_zero, whole ? 500 : 100);
}

TEST(LanguageModelTest, AsksForLayersInOrder) {
  LanguageModelOptions options;
  options.layers = 2;
  Model model(options, 2, 1);
  model.ForwardBackward("abcdefghijkl", {8, 9});
  EXPECT_EQ(model.asked, (std::vector<std::pair<int, bool>>{{0, false},
                                                            {1, false},
                                                            {2, false},
                                                            {3, false},
                                                            {3, true},
                                                            {2, true},
                                                            {1, true}}));
}

TEST(LanguageModelTest, LossScaleMultipliesGradientsOnly) {
  LanguageModelOptions options;
  Model one(options, 4, 1);
  Model scaled(options, 4, 1);
  const std::string text = "the quick brown fox";
  EXPECT_EQ(scaled.ForwardBackward(text, {8, 9, 10, 11}, 1024),
            one.ForwardBackward(text, {8, 9, 10, 11}));
  for (size_t i = 0; i < one.gradients.size(); ++i) {
    for (float& value : one.gradients[i]) value *= 1024;
    EXPECT_EQ(scaled.gradients[i], one.gradients[i]) << i;
  }
}

TEST(LanguageModelTest, ErrorsOfLayersEndIt) {
  LanguageModelOptions options;
  Model model(options, 1, 1);
  for (int calls = 0; calls < 6; ++calls) {
    int left = calls;
    const auto status = [&] {
      return left-- == 0 ? absl::InternalError("struck") : absl::OkStatus();
    };
    int taken = 0;
    const auto loss = model.model.ForwardBackward(
        "abcdefghijkl", {8}, 1,
        [&](int layer, bool) -> absl::StatusOr<absl::Span<const float>> {
          if (absl::Status error = status(); !error.ok()) return error;
          return absl::MakeConstSpan(model.weights[layer]);
        },
        absl::MakeSpan(model.buffer),
        [&](int) {
          ++taken;
          return status();
        });
    EXPECT_EQ(loss.status().message(), "struck") << calls;
    EXPECT_EQ(taken, calls < 5 ? 0 : 1) << calls;
  }
}

// Any part of a layer is what a whole one has there.
TEST(LanguageModelTest, InitialWeightsBeginAnywhere) {
  LanguageModelOptions options;
  options.hidden = 30;
  const Model model(options, 1, 1);
  for (size_t layer = 0; layer < model.weights.size(); ++layer) {
    const std::vector<float>& whole = model.weights[layer];
    if (layer > 0) {
      EXPECT_NE(whole[0], model.weights[layer - 1][0]);
    }
    for (const size_t offset :
         {size_t{1}, whole.size() / 2, whole.size() - 3}) {
      std::vector<float> part(whole.size() - offset);
      model.model.InitialWeights(5, static_cast<int>(layer), offset,
                                 absl::MakeSpan(part));
      EXPECT_EQ(part, std::vector<float>(whole.begin() + offset, whole.end()));
    }
  }
}

TEST(LanguageModelTest, ThreadsDoNotChangeTheBits) {
  LanguageModelOptions options;
  options.context = 5;
  options.embedding = 33;
  options.hidden = 100;
  options.layers = 2;
  std::string text;
  Random random(3);
  for (int i = 0; i < 500; ++i) text.push_back(random.Below(256));
  std::vector<int64_t> positions;
  for (int i = 0; i < 70; ++i) positions.push_back(5 + random.Below(495));

  Model one(options, 70, 1);
  const double loss = one.ForwardBackward(text, positions);
  for (const int threads : {2, 3, 7}) {
    Model other(options, 70, threads);
    EXPECT_EQ(other.ForwardBackward(text, positions), loss) << threads;
    EXPECT_EQ(other.gradients, one.gradients) << threads;
  }
}

TEST(LanguageModelTest, CountsWhatItBuilds) {
  LanguageModelOptions options;
  options.context = 2;
  options.embedding = 3;
  options.hidden = 4;
  options.layers = 3;
  const Model model(options, 1, 1);
  int64_t count = 0;
  for (const Layer& layer : model.model.layers()) count += layer.numel();
  EXPECT_EQ(LanguageModel::ParameterCount(options).value(), count);
  EXPECT_EQ(LanguageModel::ActivationBytes(options, 10).value(),
            10 * (2 * 4 * (2 * 3 + 3 * 4 + 256) + 8));
}

TEST(LanguageModelTest, SizesThatOverflowAreErrors) {
  LanguageModelOptions options;
  options.hidden = int64_t{1} << 40;
  options.layers = 1 << 20;
  EXPECT_EQ(LanguageModel::ParameterCount(options).status().code(),
            absl::StatusCode::kOutOfRange);
  options = LanguageModelOptions();
  EXPECT_EQ(LanguageModel::ActivationBytes(options,
                                           std::numeric_limits<int64_t>::max())
                .status()
                .code(),
            absl::StatusCode::kOutOfRange);
  options.context = int64_t{1} << 62;
  EXPECT_FALSE(LanguageModel::ParameterCount(options).ok());
  EXPECT_FALSE(LanguageModel::ActivationBytes(options, 1).ok());
}

}  // namespace
}  // namespace onepass
