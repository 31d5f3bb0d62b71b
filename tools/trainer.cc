#include "tools/trainer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/agreement.h"
#include "checkpoint/restore.h"
#include "dispatch/kernel.h"
#include "dispatch/return_if_error.h"
#include "dispatch/state.h"
#include "offload/adam_options.h"
#include "offload/loss_scaler.h"
#include "offload/partition.h"
#include "tools/checked_int.h"
#include "xxhash.h"

namespace onepass {
namespace {

// What a layer takes beside its numbers, at most: names, lists, events, and
// what the heap adds. Measured: up to 2,900.
constexpr int64_t kLayerBytes = 4096;

// Host memory comes in pages: of each array of a sub-group up to one more.
constexpr int64_t kSubGroupBytes = 4 * 4096;

// What keeps a piece of the step, of at least so many elements.
constexpr int64_t kPieceBytes = 640;
constexpr int64_t kLeastPieceNumel = 32;

// Stacks, small buffers and what the heap keeps; and what each rank knows of
// each other one.
constexpr int64_t kRankBytes = int64_t{1} << 20;
constexpr int64_t kOtherRankBytes = 1024;

constexpr int64_t kMasterAndMoments = 3 * sizeof(float);

// The seed of positions is not that of the weights.
constexpr uint64_t kPositionsSeed = 0x706f736974696f6e;

int64_t HeldOutBegin(int64_t text_bytes) {
  return text_bytes - text_bytes / 10;
}

absl::Status CheckAtLeast(absl::string_view flag, int64_t value, int64_t least,
                          int64_t most = std::numeric_limits<int64_t>::max()) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, " is ", value, ", expected a whole number of at least ", least,
      value > most ? absl::StrCat(" and at most ", most) : ""));
}

absl::Status CheckNotNegative(absl::string_view flag, double value) {
  if (value >= 0 && std::isfinite(static_cast<float>(value))) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      flag, " is ", value, ", expected a number of at least 0 that fits fp32"));
}

absl::Status Validate(const TrainOptions& options, int64_t text_bytes) {
  const LanguageModelOptions& model = options.model;
  for (const absl::Status& status :
       {CheckAtLeast("--steps", options.steps, 1),
        CheckAtLeast("--batch", options.batch, 1),
        CheckAtLeast("--micro_batches", options.micro_batches, 1),
        CheckAtLeast("--context", model.context, 1),
        CheckAtLeast("--embedding", model.embedding, 1),
        CheckAtLeast("--hidden", model.hidden, 1),
        CheckAtLeast("--layers", model.layers, 1),
        CheckAtLeast("--seed", options.seed, 0),
        CheckAtLeast("--piece_numel", options.piece_numel, 1),
        CheckAtLeast("--staging_buffers", options.staging_buffers, 1,
                     std::numeric_limits<int>::max()),
        CheckAtLeast("--sub_group_numel", options.sub_group_numel, 1),
        CheckNotNegative("--lr", options.lr),
        CheckNotNegative("--clip", options.clip)}) {
    if (!status.ok()) return status;
  }
  if (!(options.ratio >= 0 && options.ratio <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--ratio is ", options.ratio, ", expected a number from 0 to 1"));
  }
  if (text_bytes < 10) {
    return absl::InvalidArgumentError(
        absl::StrCat("--text has ", text_bytes,
                     " bytes, expected at least 10: the last tenth is held "
                     "out"));
  }
  if (model.context >= HeldOutBegin(text_bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--context is ", model.context, ", expected less than the ",
        HeldOutBegin(text_bytes), " bytes of --text that are trained on"));
  }
  return absl::OkStatus();
}

Random FirstRandom(int64_t seed) {
  return Random(static_cast<uint64_t>(seed) ^ kPositionsSeed);
}

// Of options that the digest depends on.
std::vector<std::string> Differences(const DataPosition& mine,
                                     const DataPosition& saved) {
  std::vector<std::string> differences;
  const auto compare = [&](absl::string_view flag, auto is, auto was) {
    if (is == was) return;
    differences.push_back(absl::StrCat(flag, " is ", is, ", and was ", was));
  };
  compare("--batch", mine.batch, saved.batch);
  compare("--micro_batches", mine.micro_batches, saved.micro_batches);
  compare("--clip", mine.clip, saved.clip);
  return differences;
}

double Seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

absl::StatusOr<int64_t> TrainingBytes(const TrainOptions& options,
                                      int64_t text_bytes, int ranks) {
  ONEPASS_RETURN_IF_ERROR(Validate(options, text_bytes));
  const LanguageModelOptions& model = options.model;
  const bool wide = options.precision == DType::kFloat32;
  const int64_t weight = ByteSize(options.precision);
  // A gradient as it travels, and in fp32 where it is kept so.
  const int64_t kept =
      options.micro_batches > 1 || (options.separate && !wide) ? 4 : 0;
  const int64_t state = kMasterAndMoments + weight + kept;

  CheckedInt bytes = 0;
  CheckedInt owned = 0;
  CheckedInt largest = 0;
  CheckedInt largest_shard = 0;
  int64_t layers = 0;
  for (const LanguageModel::LayerKind& kind :
       LanguageModel::LayerKinds(model)) {
    if (kind.count == 0) continue;
    layers += kind.count;
    int64_t numel;
    ONEPASS_ASSIGN_OR_RETURN(numel, kind.numel.Get("parameters"));
    const absl::StatusOr<UnitPartition> partition =
        UnitPartition::Create({numel}, ranks);
    if (!partition.ok()) return partition.status();
    const CheckedInt shard = partition->shard_numel();
    // The weights, and for the norm a sum of each leaf.
    bytes = bytes + CheckedInt(kind.count) * (shard * weight + kLayerBytes);
    owned = owned + CheckedInt(kind.count) *
                        (CheckedInt(std::min(numel, partition->shard_numel())) +
                         Device::kAlignment);
    largest = Max(largest, CheckedInt(partition->padded_numel()));
    largest_shard = Max(largest_shard, shard);
  }
  int64_t owned_numel;
  ONEPASS_ASSIGN_OR_RETURN(owned_numel, owned.Get("parameters"));
  const int64_t sub_group =
      std::max(options.sub_group_numel / kLeafNumel, int64_t{1}) * kLeafNumel;
  const int64_t pieces =
      owned_numel / std::max(options.piece_numel, kLeastPieceNumel) + layers;
  bytes = bytes + owned * state +
          CheckedInt(owned_numel / sub_group + 1) * kSubGroupBytes +
          CheckedInt(pieces) * kPieceBytes;
  if (!wide) {
    // No more buffers than pieces.
    const CheckedInt staging = Min(
        CheckedInt(options.staging_buffers) * options.piece_numel,
        CheckedInt(owned_numel) + std::min(options.piece_numel, owned_numel));
    bytes = bytes + staging * weight;
  }
  // Two gathered layers; the gradient of one, in fp32, flat and received, and
  // what is summed of it; its weights in fp32. For the digest its masters take
  // the place of the gathered.
  bytes = bytes + largest * (2 * weight + 4 + 2 * weight + (wide ? 0 : 4)) +
          largest_shard * 4;
  int64_t activations;
  ONEPASS_ASSIGN_OR_RETURN(
      activations, LanguageModel::ActivationBytes(model, options.batch));
  bytes = bytes + activations +
          CheckedInt(options.batch) * int64_t{sizeof(int64_t)} + kRankBytes +
          CheckedInt(ranks) * kOtherRankBytes;
  return bytes.Get("bytes of the model and its batch");
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(
    const Runtime& runtime, Communicator& communicator,
    const TrainOptions& options, absl::string_view text) {
  ONEPASS_RETURN_IF_ERROR(TrainingBytes(options,
                                        static_cast<int64_t>(text.size()),
                                        communicator.size())
                              .status());
  auto trainer = absl::WrapUnique(new Trainer(runtime, options, text));
  ONEPASS_RETURN_IF_ERROR(trainer->Initialize(communicator));
  return trainer;
}

Trainer::Trainer(const Runtime& runtime, const TrainOptions& options,
                 absl::string_view text)
    : runtime_(runtime),
      options_(options),
      text_(text),
      held_out_begin_(HeldOutBegin(static_cast<int64_t>(text.size()))),
      model_(options.model, options.batch, runtime.pool),
      random_(FirstRandom(options.seed)) {}

std::vector<ZeroUnit> Trainer::Units() const {
  std::vector<ZeroUnit> units;
  for (size_t i = 0; i < model_.layers().size(); ++i) {
    const Layer& layer = model_.layers()[i];
    ZeroParameter parameter;
    parameter.name = layer.name;
    parameter.shape = {layer.columns, layer.rows};
    parameter.values = [this, i](int64_t offset, absl::Span<float> values) {
      model_.InitialWeights(static_cast<uint64_t>(options_.seed),
                            static_cast<int>(i), offset, values);
      return absl::OkStatus();
    };
    units.push_back({layer.name, {std::move(parameter)}});
  }
  return units;
}

absl::Status Trainer::Initialize(Communicator& communicator) {
  AdamOptions adam;
  adam.lr = options_.lr;
  ZeroOptions zero;
  zero.local_grad_type = DType::kFloat32;
  ShardOptimizerOptions& shard = zero.shard;
  shard.groups = {adam};
  shard.weights_type = options_.precision;
  shard.grad_type = options_.precision;
  shard.micro_batches = options_.micro_batches;
  shard.max_norm = options_.clip;
  if (options_.precision == DType::kFloat16) {
    shard.loss_scale.mode = LossScaleOptions::Mode::kDynamic;
  }
  shard.cpu_ratio = options_.ratio;
  shard.path = options_.separate ? StepPath::kSeparate : StepPath::kFused;
  shard.piece_numel = options_.piece_numel;
  shard.staging_buffers = static_cast<int>(options_.staging_buffers);
  shard.sub_group_numel = options_.sub_group_numel;
  shard.pin_memory = options_.pin_memory;

  int64_t largest = 0;
  for (const Layer& layer : model_.layers()) {
    largest = std::max(largest, layer.numel());
  }
  const int64_t bytes = largest * static_cast<int64_t>(sizeof(float));
  if (options_.precision != DType::kFloat32) {
    ONEPASS_ASSIGN_OR_RETURN(widened_, runtime_.device.Allocate(bytes));
  }
  ONEPASS_ASSIGN_OR_RETURN(gradient_, runtime_.device.Allocate(bytes));
  ONEPASS_ASSIGN_OR_RETURN(stream_, runtime_.device.CreateStream("train"));
  ONEPASS_ASSIGN_OR_RETURN(communicator_, communicator.Duplicate());
  ONEPASS_ASSIGN_OR_RETURN(
      optimizer_,
      ZeroOptimizer::Create(runtime_, communicator, std::move(zero), Units()));
  return absl::OkStatus();
}

absl::string_view Trainer::TrainingPart() const {
  return text_.substr(0, held_out_begin_);
}

void Trainer::DrawPositions() {
  const int64_t context = options_.model.context;
  // Each rank takes its own of the numbers that are drawn for all.
  const int64_t rank = optimizer_->rank();
  random_.Skip(rank * options_.batch);
  positions_.clear();
  for (int64_t i = 0; i < options_.batch; ++i) {
    positions_.push_back(context + random_.Below(held_out_begin_ - context));
  }
  random_.Skip((optimizer_->world() - 1 - rank) * options_.batch);
  drawn_ += optimizer_->world() * options_.batch;
}

absl::StatusOr<absl::Span<const float>> Trainer::Weights(int layer,
                                                         bool backward) {
  const bool fresh = layer != layer_;
  if (fresh) {
    current_.reset();
    layer_ = -1;
    if (next_layer_ == layer) {
      current_ = std::move(next_);
    } else {
      next_.reset();
      ONEPASS_ASSIGN_OR_RETURN(current_, optimizer_->Gather(layer, *stream_));
    }
    next_.reset();
    next_layer_ = -1;
    layer_ = layer;
  }
  // Backward the first layer's are not read.
  const int next = backward ? layer - 1 : layer + 1;
  const int layers = static_cast<int>(model_.layers().size());
  if (next > 0 && next < layers && next != next_layer_) {
    next_.reset();
    ONEPASS_ASSIGN_OR_RETURN(next_, optimizer_->Gather(next, *stream_));
    next_layer_ = next;
  }
  const int64_t numel = model_.layers()[layer].numel();
  const bool widen = options_.precision != DType::kFloat32;
  if (widen && fresh) {
    CastArgs cast;
    cast.numel = numel;
    cast.in = current_->weights(0);
    cast.out = widened_.data();
    cast.in_type = options_.precision;
    cast.out_type = DType::kFloat32;
    ONEPASS_RETURN_IF_ERROR(stream_->Run({cast}));
  }
  ONEPASS_RETURN_IF_ERROR(stream_->Synchronize());
  const void* weights = widen ? widened_.data() : current_->weights(0);
  return absl::MakeConstSpan(static_cast<const float*>(weights), numel);
}

void Trainer::ReleaseWeights() {
  current_.reset();
  next_.reset();
  layer_ = next_layer_ = -1;
}

absl::StatusOr<TrainStep> Trainer::Step() {
  double loss = 0;  // of this rank, the sum over micro-batches
  for (int64_t i = 0; i < options_.micro_batches; ++i) {
    DrawPositions();
    // The optimizer adds micro-batches up.
    const double scale = optimizer_->shards().LossScale() /
                         static_cast<double>(options_.micro_batches);
    double of_batch;
    ONEPASS_ASSIGN_OR_RETURN(
        of_batch, model_.ForwardBackward(
                      TrainingPart(), positions_, scale,
                      [this](int layer, bool backward) {
                        return Weights(layer, backward);
                      },
                      absl::MakeSpan(gradient_.as<float>(),
                                     gradient_.bytes() / sizeof(float)),
                      [this](int layer) {
                        return optimizer_->ReduceGradients(
                            layer, {gradient_.data()}, *stream_);
                      }));
    loss += of_batch;
  }
  ReleaseWeights();

  TrainStep step;
  const auto begin = std::chrono::steady_clock::now();
  ONEPASS_ASSIGN_OR_RETURN(step.report, optimizer_->Step({}));
  step.optimizer_s = Seconds(std::chrono::steady_clock::now() - begin);
  ++steps_;

  std::vector<double> losses(optimizer_->world());
  ONEPASS_RETURN_IF_ERROR(
      communicator_->AllGather(&loss, losses.data(), sizeof(loss)));
  step.loss = 0;
  for (const double of_rank : losses) step.loss += of_rank;
  step.loss /=
      static_cast<double>(optimizer_->world() * options_.micro_batches);
  return step;
}

absl::StatusOr<double> Trainer::HeldOutBits() {
  const int64_t end = static_cast<int64_t>(text_.size());
  double nats = 0;
  for (int64_t begin = held_out_begin_; begin < end; begin += options_.batch) {
    positions_.clear();
    for (int64_t i = begin; i < end && i - begin < options_.batch; ++i) {
      positions_.push_back(i);
    }
    double mean;
    ONEPASS_ASSIGN_OR_RETURN(
        mean,
        model_.Forward(text_, positions_, [this](int layer, bool backward) {
          return Weights(layer, backward);
        }));
    nats += mean * static_cast<double>(positions_.size());
  }
  ReleaseWeights();
  return nats / static_cast<double>(end - held_out_begin_) / std::log(2.0);
}

double Trainer::FrequencyBits() const {
  std::array<int64_t, LanguageModel::kSymbols> counts;
  counts.fill(1);
  for (const char c : TrainingPart()) ++counts[static_cast<uint8_t>(c)];
  const double total =
      static_cast<double>(held_out_begin_ + LanguageModel::kSymbols);
  const absl::string_view held_out = text_.substr(held_out_begin_);
  double bits = 0;
  for (const char c : held_out) {
    bits -=
        std::log2(static_cast<double>(counts[static_cast<uint8_t>(c)]) / total);
  }
  return bits / static_cast<double>(held_out.size());
}

absl::StatusOr<std::string> Trainer::Digest() {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(
      XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  const int rank = optimizer_->rank();
  for (size_t i = 0; i < model_.layers().size(); ++i) {
    const UnitPartition& partition = optimizer_->partition(static_cast<int>(i));
    std::vector<float> all(partition.padded_numel());
    const absl::Span<float> mine = absl::MakeSpan(all).subspan(
        rank * partition.shard_numel(), partition.shard_numel());
    // A layer is one parameter: one range, or none.
    for (const ParameterRange& range : partition.RangesOf(rank)) {
      ONEPASS_RETURN_IF_ERROR(optimizer_->shards().GetState(
          model_.layers()[i].name, StateKind::kMaster,
          mine.first(range.numel)));
    }
    ONEPASS_RETURN_IF_ERROR(communicator_->AllGather(
        mine.data(), all.data(),
        partition.shard_numel() * static_cast<int64_t>(sizeof(float))));
    XXH3_64bits_update(state.get(), all.data(),
                       partition.numel() * sizeof(float));
  }
  return absl::StrCat(
      absl::Hex(XXH3_64bits_digest(state.get()), absl::kZeroPad16));
}

DataPosition Trainer::Position() const {
  DataPosition position;
  position.seed = options_.seed;
  position.text_bytes = static_cast<int64_t>(text_.size());
  position.text_hash = XXH3_64bits(text_.data(), text_.size());
  position.drawn = drawn_;
  position.batch = options_.batch;
  position.micro_batches = options_.micro_batches;
  position.clip = options_.clip;
  position.precision = options_.precision;
  return position;
}

absl::StatusOr<SaveReport> Trainer::Save(Communicator& communicator,
                                         absl::string_view parent,
                                         absl::string_view name,
                                         MemoryBudget& budget) {
  const absl::StatusOr<StateLease> lease = optimizer_->shards().LeaseState();
  ONEPASS_RETURN_IF_ERROR(Agree(communicator, lease.status()));
  SaveOptions options;
  options.budget = &budget;
  return SaveCheckpoint(runtime_, communicator, parent, name, *lease, Meta(),
                        options);
}

absl::Status Trainer::StartSave(AsyncSaver& saver, absl::string_view parent,
                                absl::string_view name, MemoryBudget& budget) {
  absl::StatusOr<StateLease> lease =
      optimizer_->shards().LeaseStateBehindFences();
  // Where one rank starts no save, the others would wait for it in theirs.
  ONEPASS_RETURN_IF_ERROR(Agree(*communicator_, lease.status()));
  SaveOptions options;
  options.budget = &budget;
  return saver.Start(parent, name, *std::move(lease), Meta(), options);
}

CheckpointMeta Trainer::Meta() const {
  CheckpointMeta meta;
  meta.step = steps_;
  meta.groups = optimizer_->StateGroups();
  if (options_.precision == DType::kFloat16) {
    meta.loss_scale = optimizer_->shards().loss_scale_state();
  }
  meta.user = EncodeDataPosition(Position());
  return meta;
}

absl::StatusOr<DataPosition> Trainer::CheckSame(
    const CheckpointMeta& meta) const {
  DataPosition saved;
  ONEPASS_ASSIGN_OR_RETURN(saved, DecodeDataPosition(meta.user));
  const DataPosition mine = Position();
  if (saved.seed != mine.seed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--seed is ", mine.seed, ", and that of the checkpoint ", saved.seed));
  }
  if (saved.text_bytes != mine.text_bytes ||
      saved.text_hash != mine.text_hash) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--text, of ", mine.text_bytes,
        " bytes, is not that of the checkpoint, of ", saved.text_bytes));
  }
  if (saved.precision != mine.precision) {
    return absl::FailedPreconditionError(
        absl::StrCat("--precision is ", Name(mine.precision),
                     ", and that of the checkpoint ", Name(saved.precision)));
  }
  const bool scales = options_.precision == DType::kFloat16;
  if (meta.loss_scale.has_value() != scales) {
    return absl::FailedPreconditionError(
        absl::StrCat("--precision is ", Name(options_.precision),
                     ", and the checkpoint has ", scales ? "no" : "a",
                     " loss scale, which fp16 has"));
  }
  return saved;
}

absl::Status Trainer::Restore(Communicator& communicator,
                              Checkpoint& checkpoint, MemoryBudget& budget) {
  const absl::StatusOr<DataPosition> position = CheckSame(checkpoint.meta());
  ONEPASS_RETURN_IF_ERROR(Agree(communicator, position.status()));
  absl::StatusOr<StateRestore> target = optimizer_->shards().RestoreState();
  ONEPASS_RETURN_IF_ERROR(Agree(communicator, target.status()));
  RestoreOptions options;
  options.groups = optimizer_->StateGroups();
  options.budget = &budget;
  options.check = [this](const CheckpointMeta& saved) {
    return saved.loss_scale.has_value()
               ? optimizer_->shards().CheckLossScaleState(*saved.loss_scale)
               : absl::OkStatus();
  };
  CheckpointMeta meta;
  ONEPASS_ASSIGN_OR_RETURN(meta,
                           RestoreCheckpoint(runtime_, communicator, checkpoint,
                                             *std::move(target), options));
  ONEPASS_RETURN_IF_ERROR(optimizer_->shards().SetStateGroups(meta.groups));
  if (meta.loss_scale.has_value()) {
    ONEPASS_RETURN_IF_ERROR(
        optimizer_->shards().SetLossScaleState(*meta.loss_scale));
  }
  steps_ = meta.step;
  drawn_ = position->drawn;
  differences_ = Differences(Position(), *position);
  if (checkpoint.manifest().world() != communicator.size()) {
    differences_.push_back(absl::StrCat("the number of ranks is ",
                                        communicator.size(), ", and was ",
                                        checkpoint.manifest().world()));
  }
  random_ = FirstRandom(options_.seed);
  random_.Skip(drawn_);
  return absl::OkStatus();
}

absl::Status Trainer::SetTrace(StepTrace* trace) {
  return optimizer_->shards().SetTrace(trace);
}

int64_t Trainer::all_gathered_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < model_.layers().size(); ++i) {
    bytes += optimizer_->partition(static_cast<int>(i)).padded_numel() *
             ByteSize(options_.precision);
  }
  return bytes;
}

int64_t Trainer::parameters() const {
  int64_t count = 0;
  for (const Layer& layer : model_.layers()) count += layer.numel();
  return count;
}

}  // namespace onepass
