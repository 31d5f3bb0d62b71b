// A checkpoint for a test, of the state of a FakeModel.
//
//   SaveFakeState(model, FlatBoxes(model, 3, random), directory.path(), "c",
//                 model.Meta(5));

#ifndef ONEPASS_CHECKPOINT_SAVE_FAKE_STATE_H_
#define ONEPASS_CHECKPOINT_SAVE_FAKE_STATE_H_

#include <string>

#include "checkpoint/fake_state.h"
#include "checkpoint/meta.h"
#include "checkpoint/save.h"
#include "gtest/gtest.h"
#include "tests/rank_threads.h"

namespace onepass {

// In chunks of 4096 bytes, so that they are many.
inline SaveOptions SmallChunks() {
  SaveOptions options;
  options.chunk_bytes = 4096;
  return options;
}

// By as many ranks as there are boxes. Fails the test where it fails.
inline void SaveFakeState(const FakeModel& model, const FakeBoxes& boxes,
                          const std::string& parent, const std::string& name,
                          const CheckpointMeta& meta,
                          const SaveOptions& options = SmallChunks()) {
  RankOptions ranks;
  ranks.world = static_cast<int>(boxes.size());
  RunRanks(ranks, [&](Rank& rank) {
    FakeState state(model, boxes[rank.rank()], rank.runtime(),
                    /*on_device=*/false);
    state.Fill();
    const auto report =
        SaveCheckpoint(rank.runtime(), *rank.communicator, parent, name,
                       state.Lease(), meta, options);
    EXPECT_TRUE(report.ok()) << report.status();
  });
}

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_SAVE_FAKE_STATE_H_
