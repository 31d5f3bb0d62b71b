// onepass train: trains a language model on a text, with the optimizer on the
// CPU.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "dispatch/kernel.h"
#include "dispatch/thread_pool.h"
#include "nlohmann/json.hpp"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/common_flags.h"
#include "tools/memory.h"
#include "tools/select_kernel.h"
#include "tools/trainer.h"

namespace onepass {
namespace {

constexpr int64_t kProgressLines = 20;

absl::StatusOr<int64_t> TextBytes(const std::string& path) {
  namespace fs = std::filesystem;
  const auto error = [&path](absl::string_view problem) {
    return absl::InvalidArgumentError(
        absl::StrCat("--text ", path, ": ", problem));
  };
  std::error_code code;
  const fs::file_status status = fs::status(path, code);
  if (!fs::exists(status)) {
    return error(code ? code.message() : "No such file or directory");
  }
  if (fs::is_directory(status)) return error("is a directory, expected a file");
  // A device or a pipe may have no end.
  if (!fs::is_regular_file(status)) return error("is not a regular file");
  const uintmax_t bytes = fs::file_size(path, code);
  if (code) return error(code.message());
  if (bytes == 0) return error("is empty");
  return static_cast<int64_t>(bytes);
}

absl::StatusOr<std::string> ReadText(const std::string& path, int64_t bytes) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::InvalidArgumentError(
        absl::StrCat("--text ", path, ": ", std::strerror(errno)));
  }
  std::string text(bytes, '\0');
  file.read(text.data(), bytes);
  if (file.gcount() != bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--text ", path, ": read ", file.gcount(), " of ", bytes, " bytes"));
  }
  return text;
}

double BitsOf(double nats) { return nats / std::log(2.0); }

// What happened since the last progress line.
struct Interval {
  std::chrono::steady_clock::time_point begin =
      std::chrono::steady_clock::now();
  int64_t steps = 0;
  double loss = 0;  // sum over the steps
  double optimizer_s = 0;
};

class TrainCommand : public Command {
 public:
  TrainCommand() { options_.steps = 2500; }

  const char* name() const override { return "train"; }
  const char* summary() const override {
    return "Trains a language model over bytes, with its optimizer on the CPU.";
  }

  void AddFlags(Flags& flags) override {
    LanguageModelOptions& model = options_.model;
    flags.Add("text", &text_, "file",
              "What to learn; the last tenth is held out.");
    flags.Add("steps", &options_.steps, "updates", "Length of the training.");
    flags.Add("batch", &options_.batch, "positions", "Positions in a step.");
    flags.Add("context", &model.context, "bytes",
              "Bytes before the predicted one.");
    flags.Add("embedding", &model.embedding, "numbers",
              "Width of a byte's vector.");
    flags.Add("hidden", &model.hidden, "numbers", "Width of a hidden layer.");
    flags.Add("layers", &model.layers, "layers", "Hidden layers.");
    flags.Add("lr", &options_.lr, "rate", "Learning rate of Adam.");
    flags.Add("clip", &options_.clip, "norm",
              "Largest norm of the gradient; 0: no limit.");
    flags.Add("seed", &options_.seed, "number",
              "Seed of weights and positions.");
    AddThreadsFlag(flags, &threads_);
    AddKernelFlag(flags, &kernel_);
    flags.Add("piece_numel", &options_.piece_numel, "elements",
              "Piece of the fused step; up to 4096 elements run on one "
              "thread.");
    flags.Add(
        "fused", &fused_,
        "Scale, step and bf16 copy in one pass, by pieces. [the default]");
    flags.Add("separate", &options_.separate,
              "A pass each for scale, step and bf16 copy.");
    flags.Add("json", &json_, "Print a JSON object a line.");
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    if (fused_ && options_.separate) {
      return absl::InvalidArgumentError(
          "--fused and --separate exclude each other");
    }
    const absl::Status threads = CheckThreads(threads_);
    if (!threads.ok()) return threads;
    const absl::StatusOr<KernelChoice> choice = ChooseKernel(kernel_);
    if (!choice.ok()) return choice.status();
    if (!choice->selected.ok()) return choice->selected.status();
    absl::StatusOr<std::string> text = LoadText();
    if (!text.ok()) return text.status();
    const absl::StatusOr<std::unique_ptr<ThreadPool>> pool =
        ThreadPool::Create({static_cast<int>(threads_)});
    if (!pool.ok()) return pool.status();
    const absl::StatusOr<std::unique_ptr<Trainer>> trainer =
        Trainer::Create(**choice->selected, **pool, options_, *std::move(text));
    if (!trainer.ok()) return trainer.status();

    if (!options_.separate && !(*trainer)->fused()) {
      err << "kernel " << (*choice->selected)->name
          << " writes no bf16 copies: casting after the step\n";
    }
    if (!json_) {
      out << absl::StreamFormat(
          "%d parameters, kernel %s, %d threads, %s step\n",
          (*trainer)->parameters(), (*choice->selected)->name,
          (*pool)->threads(), (*trainer)->fused() ? "fused" : "separate");
    }
    return Train(**choice->selected, **pool, **trainer, out);
  }

 private:
  // Checks everything that can be checked without allocating, then reads.
  absl::StatusOr<std::string> LoadText() const {
    const absl::StatusOr<int64_t> text_bytes = TextBytes(text_);
    if (!text_bytes.ok()) return text_bytes.status();
    const absl::StatusOr<int64_t> needed = TrainingBytes(options_, *text_bytes);
    if (!needed.ok()) return needed.status();
    const absl::Status fits = CheckMemory(
        "training", *needed,
        "lower --hidden, --layers, --context, --embedding or --batch");
    if (!fits.ok()) return fits;
    return ReadText(text_, *text_bytes);
  }

  absl::Status Train(const Kernel& kernel, const ThreadPool& pool,
                     Trainer& trainer, std::ostream& out) {
    const int64_t every = std::max<int64_t>(options_.steps / kProgressLines, 1);
    int64_t skipped = 0;
    Interval interval;
    for (int64_t i = 1; i <= options_.steps; ++i) {
      const absl::StatusOr<TrainStep> step = trainer.Step();
      if (!step.ok()) return step.status();
      if (step->skipped) ++skipped;
      ++interval.steps;
      interval.loss += step->loss;
      interval.optimizer_s += step->optimizer_s;
      if (i % every == 0 || i == options_.steps) {
        PrintProgress(i, interval, *step, skipped, out);
        interval = Interval();
      }
    }
    const absl::StatusOr<double> bits = trainer.HeldOutBits();
    if (!bits.ok()) return bits.status();
    const double baseline = trainer.FrequencyBits();
    if (json_) {
      out << nlohmann::ordered_json{{"steps", options_.steps},
                                    {"skipped", skipped},
                                    {"parameters", trainer.parameters()},
                                    {"kernel", kernel.name},
                                    {"threads", pool.threads()},
                                    {"fused", trainer.fused()},
                                    {"bits_per_byte", *bits},
                                    {"baseline_bits_per_byte", baseline},
                                    {"digest", trainer.Digest()}}
                 .dump()
          << "\n";
    } else {
      out << absl::StreamFormat(
          "held out: %.4f bits a byte; by frequencies of bytes alone: %.4f\n"
          "skipped steps: %d\n"
          "digest: %s\n",
          *bits, baseline, skipped, trainer.Digest());
    }
    if (std::isfinite(*bits)) return absl::OkStatus();
    return absl::OutOfRangeError(
        absl::StrCat("training diverged: the held-out loss is ", *bits,
                     " with --lr ", options_.lr));
  }

  void PrintProgress(int64_t step, const Interval& interval,
                     const TrainStep& last, int64_t skipped,
                     std::ostream& out) const {
    const double elapsed =
        std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                      interval.begin)
            .count();
    const double steps = static_cast<double>(interval.steps);
    const double loss = interval.loss / steps;
    const double tokens_per_s =
        steps * static_cast<double>(options_.batch) / elapsed;
    const double optimizer_ms = 1e3 * interval.optimizer_s / steps;
    if (json_) {
      // A number that is not finite becomes null.
      out << nlohmann::ordered_json{{"step", step},
                                    {"loss", loss},
                                    {"bits_per_byte", BitsOf(loss)},
                                    {"gradient_norm", last.norm},
                                    {"clip_factor", last.clip_factor},
                                    {"skipped", skipped},
                                    {"tokens_per_s", tokens_per_s},
                                    {"optimizer_ms", optimizer_ms}}
                 .dump()
          << "\n";
    } else {
      out << absl::StreamFormat(
          "step %6d  loss %.4f  bits/byte %.4f  norm %.4f  clip %.4f  "
          "tokens/s %.0f  optimizer %.3f ms%s\n",
          step, loss, BitsOf(loss), last.norm, last.clip_factor, tokens_per_s,
          optimizer_ms,
          skipped == 0 ? "" : absl::StrCat("  skipped ", skipped));
    }
    out.flush();
  }

  TrainOptions options_;
  std::string text_ = "/usr/share/common-licenses/GPL-3";
  std::string kernel_;
  int64_t threads_ = 0;
  bool fused_ = false;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewTrainCommand() {
  return std::make_unique<TrainCommand>();
}

}  // namespace onepass
