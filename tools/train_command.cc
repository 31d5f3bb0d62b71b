// onepass train: trains a language model on a text, with ZeRO stage 3 on ranks
// that are threads or MPI processes, and the optimizer on the CPU.

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "checkpoint/memory_budget.h"
#include "checkpoint/save.h"
#include "dispatch/communicator.h"
#include "dispatch/dtype.h"
#include "dispatch/host_device.h"
#include "dispatch/kernel.h"
#include "dispatch/return_if_error.h"
#include "dispatch/thread_pool.h"
#include "nlohmann/json.hpp"
#include "tools/checked_int.h"
#include "tools/checkpoint_text.h"
#include "tools/command_line.h"
#include "tools/commands.h"
#include "tools/common_flags.h"
#include "tools/memory.h"
#include "tools/mpi_rank.h"
#include "tools/ranks.h"
#include "tools/select_kernel.h"
#include "tools/stop_signals.h"
#include "tools/trace_file.h"
#include "tools/train_checkpoints.h"
#include "tools/trainer.h"

namespace onepass {
namespace {

constexpr int64_t kProgressLines = 20;
constexpr double kGiga = 1e9;

// On a slower link a run would not end.
constexpr double kLeastLinkGbps = 1e-6;

// Steps of a trace that are kept before they are written, and pieces of them.
constexpr int64_t kTracedSteps = 50;
constexpr int64_t kTracedPieces = 4096;

// Of --budget_mb; a tebibyte.
constexpr int64_t kMostBudgetMb = int64_t{1} << 20;

// What a communicator of MPI and its duplicates take.
constexpr int64_t kMpiBytes = int64_t{16} << 20;

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

absl::StatusOr<DType> ParsePrecision(const std::string& name) {
  for (const DType type :
       {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    if (name == Name(type)) return type;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--precision is ", name, ", expected bf16, fp16 or fp32"));
}

absl::StatusOr<bool> ParseOnOff(absl::string_view flag,
                                const std::string& value) {
  if (value == "on" || value == "off") return value == "on";
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " is ", value, ", expected on or off"));
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
    flags.Add("batch", &options_.batch, "positions",
              "Positions of a rank in a micro-batch.");
    flags.Add("micro_batches", &options_.micro_batches, "micro-batches",
              "Whose gradients are added up for a step.");
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
    flags.Add("precision", &precision_, "type",
              "Of weights and gradients on the device: bf16, fp16 (with a "
              "dynamic loss scale) or fp32.");
    flags.Add("ranks", &ranks_, "ranks",
              "0: one, or of MPI those that mpirun started.");
    flags.Add("comm", &comm_, "kind",
              "What ranks are: threads, or mpi (under mpirun).");
    AddThreadsFlag(flags, &threads_,
                   "Of each rank. 0: the processors allowed, shared by the "
                   "ranks that are allowed the same.");
    AddKernelFlag(flags, &kernel_);
    flags.Add("ratio", &options_.ratio, "part",
              "Of the parameters that the CPU updates; the device updates the "
              "others.");
    flags.Add("piece_numel", &options_.piece_numel, "elements",
              "Piece of the fused step; up to 4096 elements run on one "
              "thread.");
    flags.Add("staging_buffers", &options_.staging_buffers, "buffers",
              "For pieces on their way to the device.");
    flags.Add("sub_group_numel", &options_.sub_group_numel, "elements",
              "Of one allocation of state on the CPU.");
    flags.Add("pin_memory", &pin_memory_, "on|off",
              "Off: copies to the device are not fused.");
    flags.Add("link_gbps", &link_gbps_, "GB/s",
              "Simulated link to the device, each way; 0: none.");
    flags.Add("fused", &fused_,
              "Scale, step and copy in one pass, by pieces. [the default]");
    flags.Add("separate", &options_.separate,
              "A pass each for scale, step and copy.");
    flags.Add("trace", &trace_, "file",
              "Gets what each step did and when, for Perfetto. Of MPI on "
              "several hosts, one that they share. [none]");
    flags.Add("save_dir", &checkpoints_.save_dir, "directory",
              "Gets checkpoints step-<number>, one of the last step among "
              "them, and one where SIGINT or SIGTERM ends the run; made where "
              "it is missing. Of MPI on several hosts, one that they share. "
              "[none]");
    flags.Add("save_every", &save_every_, "updates",
              "Between two checkpoints.");
    flags.Add("keep_last", &checkpoints_.keep_last, "checkpoints",
              "The newest of --save_dir, which stay; older ones are removed.");
    flags.Add("async_save", &checkpoints_.async,
              "Train on while a checkpoint is written: updates wait for what "
              "has not been read yet.");
    flags.Add("budget_mb", &budget_mb_, "MiB",
              "Memory of a rank to save and to resume with.");
    flags.Add("resume", &checkpoints_.resume,
              "Go on from the newest checkpoint, on any number of ranks, until "
              "--steps in all; where --save_dir has none, begin. It holds "
              "--lr.");
    flags.Add("resume_from_previous", &checkpoints_.resume_from_previous,
              "Let --resume read all of the newest checkpoint first, and where "
              "it is damaged take the one before.");
    flags.Add("load_dir", &checkpoints_.load_dir, "directory",
              "Where --resume looks. [that of --save_dir]");
    flags.Add("json", &json_, "Print a JSON object a line.");
  }

  absl::Status Run(std::ostream& out, std::ostream& err) override {
    if (fused_ && options_.separate) {
      return absl::InvalidArgumentError(
          "--fused and --separate exclude each other");
    }
    ONEPASS_RETURN_IF_ERROR(CheckThreads(threads_));
    if (link_gbps_ != 0 && (!(link_gbps_ >= kLeastLinkGbps) ||
                            !std::isfinite(link_gbps_ * kGiga))) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--link_gbps is ", link_gbps_,
          ", expected 0 or a finite number of at least ", kLeastLinkGbps));
    }
    ONEPASS_RETURN_IF_ERROR(CheckCheckpointFlags());
    checkpoints_.budget_bytes = budget_mb_ << 20;
    ONEPASS_ASSIGN_OR_RETURN(options_.precision, ParsePrecision(precision_));
    ONEPASS_ASSIGN_OR_RETURN(options_.pin_memory,
                             ParseOnOff("--pin_memory", pin_memory_));
    const absl::StatusOr<KernelChoice> choice = ChooseKernel(kernel_);
    if (!choice.ok()) return choice.status();
    if (!choice->selected.ok()) return choice->selected.status();
    const Kernel& kernel = **choice->selected;

    // Where there is no place to save in, signals do what they do.
    std::optional<StopSignals> signals;
    if (!checkpoints_.save_dir.empty()) signals.emplace();
    if (comm_ == "threads") return RunThreads(kernel, out, err);
    if (comm_ == "mpi") return RunMpi(kernel, out, err);
    return absl::InvalidArgumentError(
        absl::StrCat("--comm is ", comm_, ", expected threads or mpi"));
  }

 private:
  absl::Status CheckCheckpointFlags() const {
    const auto check = [](absl::string_view flag, int64_t value, int64_t most) {
      if (value >= 1 && value <= most) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrCat(flag, " is ", value, ", expected 1 to ", most));
    };
    ONEPASS_RETURN_IF_ERROR(check("--save_every", save_every_,
                                  std::numeric_limits<int64_t>::max()));
    ONEPASS_RETURN_IF_ERROR(check("--keep_last", checkpoints_.keep_last,
                                  std::numeric_limits<int>::max()));
    ONEPASS_RETURN_IF_ERROR(check("--budget_mb", budget_mb_, kMostBudgetMb));
    if (checkpoints_.resume && checkpoints_.save_dir.empty() &&
        checkpoints_.load_dir.empty()) {
      return absl::InvalidArgumentError(
          "--resume needs --save_dir or --load_dir");
    }
    if (checkpoints_.async && checkpoints_.save_dir.empty()) {
      return absl::InvalidArgumentError("--async_save needs --save_dir");
    }
    for (const auto& [flag, given] :
         {std::make_pair("--load_dir", !checkpoints_.load_dir.empty()),
          std::make_pair("--resume_from_previous",
                         checkpoints_.resume_from_previous)}) {
      if (given && !checkpoints_.resume) {
        return absl::InvalidArgumentError(
            absl::StrCat(flag, " is for --resume, which is not given"));
      }
    }
    return absl::OkStatus();
  }

  bool has_checkpoints() const {
    return checkpoints_.resume || !checkpoints_.save_dir.empty();
  }

  absl::Status RunThreads(const Kernel& kernel, std::ostream& out,
                          std::ostream& err) {
    // Open MPI's, of each process.
    const char* const started = std::getenv("OMPI_COMM_WORLD_SIZE");
    int64_t processes;
    if (started != nullptr && absl::SimpleAtoi(started, &processes) &&
        processes > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("--comm is threads, and mpirun started ", processes,
                       " processes, each of which would train by itself: "
                       "expected --comm mpi"));
    }
    if (ranks_ < 0 || ranks_ > kMaxThreadRanks) {
      return absl::InvalidArgumentError(
          absl::StrCat("--ranks is ", ranks_, ", expected 0 to ",
                       kMaxThreadRanks, " that are threads"));
    }
    const int ranks = std::max(static_cast<int>(ranks_), 1);
    // They share its processors.
    const int threads = ThreadsOfRank(ranks);
    int64_t text_bytes;
    ONEPASS_ASSIGN_OR_RETURN(text_bytes, CheckRun(ranks, ranks, /*processes=*/1,
                                                  /*process_bytes=*/0));
    std::string text;
    ONEPASS_ASSIGN_OR_RETURN(text, ReadText(text_, text_bytes));
    return RunThreadRanks(ranks, [&](Communicator& communicator) {
      return TrainRank(communicator, kernel, threads, text, out, err);
    });
  }

  absl::Status RunMpi(const Kernel& kernel, std::ostream& out,
                      std::ostream& err) {
    std::unique_ptr<Communicator> communicator;
    ONEPASS_ASSIGN_OR_RETURN(communicator, CreateMpiRank());
    const int ranks = communicator->size();
    if (ranks_ != 0 && ranks_ != ranks) {
      return absl::InvalidArgumentError(
          absl::StrCat("--ranks is ", ranks_, ", and mpirun started ", ranks));
    }
    RankNeighbours neighbours;
    ONEPASS_ASSIGN_OR_RETURN(neighbours, FindNeighbours(*communicator));
    int64_t text_bytes;
    ONEPASS_ASSIGN_OR_RETURN(
        text_bytes, CheckRun(ranks, /*of_process=*/1,
                             /*processes=*/neighbours.on_host, kMpiBytes));
    // Nobody takes memory that another still looks for.
    ONEPASS_RETURN_IF_ERROR(communicator->Barrier());
    std::string text;
    ONEPASS_ASSIGN_OR_RETURN(text, ReadText(text_, text_bytes));
    ONEPASS_RETURN_IF_ERROR(
        CheckSameOnAllRanks(*communicator, "--text (its bytes)", text));
    ONEPASS_RETURN_IF_ERROR(CheckSameOnAllRanks(
        *communicator, absl::StrCat("set of ", kSharedFlags), SharedFlags()));
    return TrainRank(*communicator, kernel,
                     ThreadsOfRank(neighbours.on_processors), text, out, err);
  }

  // What all ranks have to agree in, so that they train one model, for the same
  // steps.
  static constexpr char kSharedFlags[] =
      "--steps, --batch, --micro_batches, --context, --embedding, --hidden, "
      "--layers, --lr, --clip, --seed, --precision, --save_dir, --save_every, "
      "--async_save, --resume, --load_dir and --trace";
  std::string SharedFlags() const {
    const LanguageModelOptions& model = options_.model;
    return absl::StrFormat(
        "%d %d %d %d %d %d %d %a %a %d %s %s\n%d %d %d %s\n%s", options_.steps,
        options_.batch, options_.micro_batches, model.context, model.embedding,
        model.hidden, model.layers, options_.lr, options_.clip, options_.seed,
        precision_, checkpoints_.save_dir, save_every_, checkpoints_.async,
        checkpoints_.resume, checkpoints_.load_dir, trace_);
  }

  // Checks everything that can be checked without allocating, and returns the
  // bytes of the text. On this host are `processes`, with `of_process` of the
  // ranks each, which take `process_bytes` beside them.
  absl::StatusOr<int64_t> CheckRun(int ranks, int of_process, int processes,
                                   int64_t process_bytes) const {
    const absl::StatusOr<int64_t> text_bytes = TextBytes(text_);
    if (!text_bytes.ok()) return text_bytes.status();
    std::error_code none;
    if (!trace_.empty() && std::filesystem::equivalent(text_, trace_, none)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--trace ", trace_, " is the file of --text"));
    }
    const absl::StatusOr<int64_t> of_rank =
        TrainingBytes(options_, *text_bytes, ranks);
    if (!of_rank.ok()) return of_rank.status();
    // What is read and written is what takes memory, on the host.
    const int64_t saving = has_checkpoints() ? checkpoints_.budget_bytes : 0;
    const CheckedInt process = (CheckedInt(*of_rank) + saving) * of_process +
                               *text_bytes + process_bytes;
    int64_t needed;
    ONEPASS_ASSIGN_OR_RETURN(needed,
                             (process * processes).Get("bytes of all ranks"));
    ONEPASS_RETURN_IF_ERROR(CheckMemory(
        "training", needed, needed / processes,
        has_checkpoints()
            ? "lower --hidden, --layers, --context, --embedding, --batch, "
              "--budget_mb or --ranks"
            : "lower --hidden, --layers, --context, --embedding, --batch or "
              "--ranks"));
    return *text_bytes;
  }

  // Where `sharing` ranks run on the same processors.
  int ThreadsOfRank(int sharing) const {
    if (threads_ > 0) return static_cast<int>(threads_);
    return std::max(ThreadPool::AllowedProcessors() / sharing, 1);
  }

  // What each rank does. Only rank 0 writes to the streams.
  absl::Status TrainRank(Communicator& communicator, const Kernel& kernel,
                         int threads, absl::string_view text, std::ostream& out,
                         std::ostream& err) const {
    const bool first = communicator.rank() == 0;
    std::unique_ptr<ThreadPool> pool;
    ONEPASS_ASSIGN_OR_RETURN(pool, ThreadPool::Create({threads}));
    HostDeviceOptions device_options;
    device_options.link_bytes_per_s = link_gbps_ * kGiga;
    std::unique_ptr<HostDevice> device;
    ONEPASS_ASSIGN_OR_RETURN(device,
                             HostDevice::Create(kernel, device_options));
    // Finds what is wrong with directories before anything takes long.
    std::unique_ptr<TrainCheckpoints> checkpoints;
    if (has_checkpoints()) {
      ONEPASS_ASSIGN_OR_RETURN(
          checkpoints, TrainCheckpoints::Create(checkpoints_, kernel, *device,
                                                communicator));
      for (const std::string& remark : checkpoints->remarks()) {
        err << absl::StrCat(remark, "\n");
      }
    }
    // Outlives the trainer, which writes to it.
    std::unique_ptr<TraceFile> trace;
    if (!trace_.empty()) {
      ONEPASS_ASSIGN_OR_RETURN(trace, TraceFile::Create(trace_, communicator));
    }
    std::unique_ptr<Trainer> trainer;
    ONEPASS_ASSIGN_OR_RETURN(
        trainer, Trainer::Create({kernel, *device, *pool}, communicator,
                                 options_, text));
    // The same on all ranks, which write in turn.
    const int64_t about_pieces =
        trainer->parameters() / options_.piece_numel + options_.model.layers;
    const int64_t traced_steps =
        std::clamp<int64_t>(kTracedPieces / about_pieces, 1, kTracedSteps);
    if (trace != nullptr) {
      ONEPASS_RETURN_IF_ERROR(trainer->SetTrace(trace->spans()));
    }

    if (first && !json_) {
      out << absl::StreamFormat(
          "%d parameters in %s, kernel %s, %s of %s, %s step\n",
          trainer->parameters(), precision_, kernel.name,
          Counted(communicator.size(), "rank"), Counted(threads, "thread"),
          options_.separate ? "separate" : "fused");
    }
    if (checkpoints != nullptr) {
      ONEPASS_RETURN_IF_ERROR(Resume(*checkpoints, *trainer, first, err));
    }
    const bool saves = checkpoints != nullptr && checkpoints->saves();
    const auto print = [&](const absl::StatusOr<std::vector<SavedStep>>& saved)
        -> absl::Status {
      ONEPASS_RETURN_IF_ERROR(saved.status());
      for (const SavedStep& save : *saved) {
        if (!first) continue;
        PrintSave(save.step, save.report, out);
        if (save.removal.ok()) continue;
        err << absl::StrCat("not all older checkpoints could be removed: ",
                            save.removal.message(), "\n");
      }
      return absl::OkStatus();
    };
    const int64_t every = std::max<int64_t>(options_.steps / kProgressLines, 1);
    const int64_t begin = trainer->steps();
    if (trace != nullptr) trace->set_step(begin);
    int stopped = 0;  // by this signal
    bool fused = false;
    bool remarked = false;  // that it is not
    int64_t pieces = 0;     // of this rank
    Interval interval;
    while (trainer->steps() < options_.steps && stopped == 0) {
      TrainStep step;
      ONEPASS_ASSIGN_OR_RETURN(step, trainer->Step());
      const int64_t i = trainer->steps();
      if (trace != nullptr) {
        trace->EndStep();
        if (i % traced_steps == 0) ONEPASS_RETURN_IF_ERROR(trace->Write());
      }
      const StepReport& report = step.report;
      pieces = report.pieces;
      // Where the CPU updates nothing, there is nothing to copy.
      const bool copy_fused = report.copy_fused || report.cpu_numel == 0;
      fused = report.scale_fused && copy_fused;
      if (first && !remarked && !options_.separate && !copy_fused) {
        err << "copies to the device are not fused: " << report.copy_reason
            << "\n";
        remarked = true;
      }
      ++interval.steps;
      interval.loss += step.loss;
      interval.optimizer_s += step.optimizer_s;
      if (first && (i % every == 0 || i == options_.steps)) {
        PrintProgress(i, interval, report, trainer->skipped(),
                      communicator.size(), out);
        interval = Interval();
      }
      if (!saves) continue;
      // Ranks stop after the same step.
      ONEPASS_ASSIGN_OR_RETURN(
          stopped, checkpoints->AgreeOnSignal(StopSignals::Received()));
      if (i % save_every_ == 0) {
        ONEPASS_RETURN_IF_ERROR(print(checkpoints->Save(*trainer)));
      }
    }
    if (saves && checkpoints->saved_step() != trainer->steps()) {
      ONEPASS_RETURN_IF_ERROR(print(checkpoints->Save(*trainer)));
    }
    if (saves) ONEPASS_RETURN_IF_ERROR(print(checkpoints->Finish()));
    if (stopped != 0 && trainer->steps() < options_.steps) {
      if (first) {
        // At once: mpirun marks each piece that is written.
        err << absl::StrCat(stopped == SIGINT ? "SIGINT" : "SIGTERM",
                            ": ended after step ", trainer->steps(), " of ",
                            options_.steps,
                            ", which is saved; --resume goes on from there\n");
      }
      return trace != nullptr ? trace->End() : absl::OkStatus();
    }
    double bits;
    ONEPASS_ASSIGN_OR_RETURN(bits, trainer->HeldOutBits());
    std::string digest;
    ONEPASS_ASSIGN_OR_RETURN(digest, trainer->Digest());
    if (first) {
      if (json_) {
        nlohmann::ordered_json summary = {{"steps", options_.steps},
                                          {"skipped", trainer->skipped()},
                                          {"parameters", trainer->parameters()},
                                          {"precision", precision_},
                                          {"kernel", kernel.name},
                                          {"ranks", communicator.size()},
                                          {"comm", comm_},
                                          {"threads", threads}};
        // What steps were, where there were any.
        if (trainer->steps() > begin) {
          summary["fused"] = fused;
          summary["pieces"] = pieces;
        }
        summary["pinned_bytes"] = device->pinned_memory().in_use;
        summary["gathered_peak_bytes"] = trainer->gathered().peak;
        summary["all_gathered_bytes"] = trainer->all_gathered_bytes();
        summary["bits_per_byte"] = bits;
        summary["baseline_bits_per_byte"] = trainer->FrequencyBits();
        summary["digest"] = digest;
        out << JsonText(summary) << "\n";
      } else {
        out << absl::StreamFormat(
            "held out: %.4f bits a byte; by frequencies of bytes alone: %.4f\n"
            "skipped steps: %d\n"
            "weights gathered at once: at most %d bytes; all would be %d\n"
            "digest: %s\n",
            bits, trainer->FrequencyBits(), trainer->skipped(),
            trainer->gathered().peak, trainer->all_gathered_bytes(), digest);
      }
    }
    if (trace != nullptr) ONEPASS_RETURN_IF_ERROR(trace->End());
    if (std::isfinite(bits)) return absl::OkStatus();
    return absl::OutOfRangeError(
        absl::StrCat("training diverged: the held-out loss is ", bits,
                     " with --lr ", options_.lr));
  }

  absl::Status Resume(TrainCheckpoints& checkpoints, Trainer& trainer,
                      bool first, std::ostream& err) const {
    if (checkpoints.found().empty()) return absl::OkStatus();
    ONEPASS_RETURN_IF_ERROR(checkpoints.Resume(trainer));
    if (trainer.steps() > options_.steps) {
      return absl::InvalidArgumentError(
          absl::StrCat("--steps is ", options_.steps, ", and ",
                       checkpoints.found(), " is of step ", trainer.steps()));
    }
    if (!first) return absl::OkStatus();
    err << absl::StrCat("resumed from ", checkpoints.found(), " after step ",
                        trainer.steps(), "\n");
    if (trainer.lr() != static_cast<float>(options_.lr)) {
      err << absl::StrCat("--lr is ", options_.lr,
                          ", and that of the checkpoint, ", trainer.lr(),
                          ", is used\n");
    }
    for (const std::string& difference : trainer.differences()) {
      err << absl::StrCat(difference, ": the digest will differ\n");
    }
    return absl::OkStatus();
  }

  void PrintSave(int64_t step, const SaveReport& report,
                 std::ostream& out) const {
    if (json_) {
      out << JsonText({{"saved", report.path},
                       {"step", step},
                       {"bytes", report.bytes},
                       {"direct", report.direct},
                       {"seconds", report.seconds}})
          << "\n";
    } else {
      out << absl::StreamFormat(
          "saved %s: %d bytes in %.3f s%s\n", report.path, report.bytes,
          report.seconds, report.direct ? "" : ", through the page cache");
    }
    out.flush();
  }

  static std::string Counted(int count, absl::string_view what) {
    return absl::StrCat(count, " ", what, count == 1 ? "" : "s");
  }

  void PrintProgress(int64_t step, const Interval& interval,
                     const StepReport& last, int64_t skipped, int ranks,
                     std::ostream& out) const {
    const double elapsed =
        std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                      interval.begin)
            .count();
    const double steps = static_cast<double>(interval.steps);
    const double loss = interval.loss / steps;
    const double tokens_per_s =
        steps *
        static_cast<double>(options_.batch * options_.micro_batches * ranks) /
        elapsed;
    // The optimizer's factor takes the loss scale off, too.
    const double clip = last.factor * last.loss_scale;
    const double optimizer_ms = 1e3 * interval.optimizer_s / steps;
    if (json_) {
      // A number that is not finite becomes null.
      out << JsonText({{"step", step},
                       {"loss", loss},
                       {"bits_per_byte", BitsOf(loss)},
                       {"gradient_norm", last.norm},
                       {"clip_factor", clip},
                       {"loss_scale", last.loss_scale},
                       {"skipped", skipped},
                       {"tokens_per_s", tokens_per_s},
                       {"optimizer_ms", optimizer_ms}})
          << "\n";
    } else {
      out << absl::StreamFormat(
          "step %6d  loss %.4f  bits/byte %.4f  norm %.4f  clip %.4f  "
          "tokens/s %.0f  optimizer %.3f ms%s%s\n",
          step, loss, BitsOf(loss), last.norm, clip, tokens_per_s, optimizer_ms,
          last.loss_scale == 1 ? ""
                               : absl::StrCat("  loss scale ", last.loss_scale),
          skipped == 0 ? "" : absl::StrCat("  skipped ", skipped));
    }
    out.flush();
  }

  TrainOptions options_;
  TrainCheckpointOptions checkpoints_;
  std::string text_ = "/usr/share/common-licenses/GPL-3";
  std::string kernel_;
  std::string precision_ = Name(DType::kBFloat16);
  std::string comm_ = "threads";
  std::string pin_memory_ = "on";
  std::string trace_;
  double link_gbps_ = 0;
  int64_t save_every_ = 500;
  int64_t budget_mb_ = kDefaultBudget.host >> 20;
  int64_t ranks_ = 0;
  int64_t threads_ = 0;
  bool fused_ = false;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> NewTrainCommand() {
  return std::make_unique<TrainCommand>();
}

}  // namespace onepass
