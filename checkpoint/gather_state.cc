#include "checkpoint/gather_state.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "checkpoint/agreement.h"
#include "checkpoint/box_runs.h"
#include "checkpoint/manifest.h"
#include "checkpoint/manifest_messages.h"
#include "dispatch/return_if_error.h"

namespace onepass {
namespace {

Box BoxOf(const checkpoint::Tensor& tensor) {
  return {{tensor.offset().begin(), tensor.offset().end()},
          {tensor.extent().begin(), tensor.extent().end()}};
}

absl::StatusOr<std::string> Describe(const StateTensors& tensors,
                                     const CheckpointMeta& meta, int rank,
                                     int world) {
  checkpoint::Index index;
  index.set_rank(rank);
  index.set_world(world);
  ONEPASS_RETURN_IF_ERROR(
      FillTensors(tensors.arrays(), tensors.form(), meta, index));
  return index.SerializeAsString();
}

}  // namespace

absl::StatusOr<WholeState> FindWholeState(Communicator& communicator,
                                          const StateTensors& tensors,
                                          const CheckpointMeta& meta) {
  std::vector<std::string> texts;
  ONEPASS_ASSIGN_OR_RETURN(
      texts,
      ExchangeOrFail(communicator, Describe(tensors, meta, communicator.rank(),
                                            communicator.size())));
  std::vector<checkpoint::Index> indexes(texts.size());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!indexes[rank].ParseFromString(texts[rank])) {
      return absl::InternalError("what a rank says of its state is no message");
    }
  }
  // All ranks find the same.
  if (absl::Status status = CheckBoxes(indexes, "the state of all ranks");
      !status.ok()) {
    return absl::InvalidArgumentError(status.message());
  }
  WholeState whole;
  whole.index.set_world(communicator.size());
  whole.index.set_leaf(indexes[0].leaf());
  whole.index.set_checksum_algorithm(indexes[0].checksum_algorithm());
  absl::flat_hash_map<std::string, size_t> index_of_name;
  for (size_t rank = 0; rank < indexes.size(); ++rank) {
    for (int i = 0; i < indexes[rank].tensors_size(); ++i) {
      const checkpoint::Tensor& tensor = indexes[rank].tensors(i);
      const auto [found, added] =
          index_of_name.emplace(tensor.name(), whole.arrays.size());
      if (added) {
        StoredArray& array = whole.arrays.emplace_back();
        array.name = tensor.name();
        array.type = FromMessage(tensor.element_type());
        array.shape.assign(tensor.shape().begin(), tensor.shape().end());
        array.box = {std::vector<int64_t>(array.shape.size()), array.shape};
        array.numel = NumelOf(array.shape);
        array.tensor = -1;
        array.scales = tensor.state_type() == checkpoint::STATE_SCALES;
        array.state_type = FromMessage(tensor.state_type());
        whole.parts.emplace_back();
        checkpoint::Tensor& entry = *whole.index.add_tensors();
        entry = tensor;
        entry.mutable_offset()->Clear();
        entry.mutable_extent()->Clear();
        entry.mutable_offset()->Add(array.box.offset.begin(),
                                    array.box.offset.end());
        entry.mutable_extent()->Add(array.shape.begin(), array.shape.end());
      }
      whole.parts[found->second].push_back(
          {static_cast<int>(rank), i, BoxOf(tensor)});
    }
  }
  return whole;
}

namespace {

class Gatherer {
 public:
  Gatherer(Communicator& communicator, const StateTensors& tensors,
           StateTransfer& transfer, const WholeState& whole,
           absl::Span<char> buffer, StateSink* sink,
           absl::FunctionRef<absl::Status(int tensor)> exported)
      : communicator_(communicator),
        tensors_(tensors),
        transfer_(transfer),
        whole_(whole),
        // One part for what is gathered, one for what comes.
        gathered_(buffer.subspan(0, buffer.size() / 2)),
        message_(buffer.subspan(buffer.size() / 2)),
        sink_(sink),
        exported_(exported),
        arrays_left_(tensors.tensors().size()) {
    for (const StoredArray& array : tensors.arrays()) {
      ++arrays_left_[array.tensor];
    }
  }

  absl::Status Run() {
    absl::Status status =
        sink_ == nullptr ? absl::OkStatus() : sink_->Open(whole_.arrays);
    for (size_t i = 0; i < whole_.arrays.size(); ++i) {
      // Whether rank 0 goes on.
      ONEPASS_RETURN_IF_ERROR(Agree(communicator_, status));
      const StoredArray& array = whole_.arrays[i];
      const int64_t most = Most(ByteSize(array.type));
      for (int64_t first = 0; first < array.numel; first += most) {
        const int64_t numel = std::min(most, array.numel - first);
        for (const WholeState::Part& part : whole_.parts[i]) {
          status.Update(Move(array, part, first, numel));
        }
        if (sink_ != nullptr && status.ok()) {
          status = Put(static_cast<int>(i), numel * ByteSize(array.type));
        }
      }
      for (const WholeState::Part& part : whole_.parts[i]) {
        if (part.rank != communicator_.rank()) continue;
        const int tensor = tensors_.arrays()[part.array].tensor;
        if (--arrays_left_[tensor] == 0) status.Update(exported_(tensor));
      }
    }
    if (sink_ != nullptr && status.ok()) status = sink_->Close();
    return Agree(communicator_, status);
  }

 private:
  int64_t Most(int64_t element) const {
    return static_cast<int64_t>(gathered_.size()) / 16 * 16 / element;
  }

  // What a part has of elements [first, first + numel) of an array goes to
  // where they are gathered, on rank 0.
  absl::Status Move(const StoredArray& array, const WholeState::Part& part,
                    int64_t first, int64_t numel) {
    const Box range = {{first}, {numel}};
    const int64_t element = ByteSize(array.type);
    const bool mine = part.rank == communicator_.rank();
    const bool root = communicator_.rank() == 0;
    absl::Status status;
    int64_t bytes = 0;
    ONEPASS_RETURN_IF_ERROR(ForEachCommonRun(
        array.shape, part.box, range, [&](int64_t i, int64_t j, int64_t n) {
          if (mine && status.ok()) {
            char* const to =
                root ? gathered_.data() + j * element : message_.data() + bytes;
            status = transfer_.Read(tensors_.arrays()[part.array], i, n, to);
          }
          bytes += n * element;
          return absl::OkStatus();
        }));
    // Rank 0 has its own; all know which others have something.
    if (part.rank == 0 || bytes == 0) return status;
    if (absl::Status sent =
            communicator_.Broadcast(message_.data(), bytes, part.rank);
        !sent.ok()) {
      return sent;
    }
    if (!root) return status;
    int64_t position = 0;
    return ForEachCommonRun(
        array.shape, part.box, range, [&](int64_t, int64_t j, int64_t n) {
          std::memcpy(gathered_.data() + j * element,
                      message_.data() + position, n * element);
          position += n * element;
          return absl::OkStatus();
        });
  }

  // What was gathered goes to the sink.
  absl::Status Put(int array, int64_t bytes) {
    for (int64_t done = 0; done < bytes;) {
      absl::Span<char> room;
      ONEPASS_ASSIGN_OR_RETURN(room, sink_->Next(array, bytes - done));
      std::memcpy(room.data(), gathered_.data() + done, room.size());
      done += static_cast<int64_t>(room.size());
      ONEPASS_RETURN_IF_ERROR(
          sink_->Written(array, static_cast<int64_t>(room.size())));
    }
    return absl::OkStatus();
  }

  Communicator& communicator_;
  const StateTensors& tensors_;
  StateTransfer& transfer_;
  const WholeState& whole_;
  const absl::Span<char> gathered_;
  const absl::Span<char> message_;
  StateSink* const sink_;
  const absl::FunctionRef<absl::Status(int tensor)> exported_;
  std::vector<int> arrays_left_;  // of this rank's tensors
};

}  // namespace

absl::Status GatherState(Communicator& communicator,
                         const StateTensors& tensors, StateTransfer& transfer,
                         const WholeState& whole, absl::Span<char> buffer,
                         StateSink* sink,
                         absl::FunctionRef<absl::Status(int tensor)> exported) {
  return Gatherer(communicator, tensors, transfer, whole, buffer, sink,
                  exported)
      .Run();
}

}  // namespace onepass
