// Between the types of the library and the messages of manifest.proto.

#ifndef ONEPASS_CHECKPOINT_MANIFEST_MESSAGES_H_
#define ONEPASS_CHECKPOINT_MANIFEST_MESSAGES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/manifest.pb.h"
#include "checkpoint/meta.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/state_files.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/state.h"

namespace onepass {

checkpoint::ElementType ToMessage(SafetensorsType type);
SafetensorsType FromMessage(checkpoint::ElementType type);
checkpoint::StateType ToMessage(StateType type);
// Of no scales.
StateType FromMessage(checkpoint::StateType type);
checkpoint::Group ToMessage(const StateGroup& group);
StateGroup FromMessage(const checkpoint::Group& group);
CheckpointMeta MetaOf(const checkpoint::Manifest& manifest);

// The name of the parameter of "state.<parameter>.<kind>"; empty where it is no
// such name.
std::string ParameterOf(absl::string_view tensor);

// What all ranks have alike of what they save.
std::string Fingerprint(const CheckpointMeta& meta, ExportForm form,
                        CheckpointLayout layout);

// Adds arrays to an index, without their files. InvalidArgument: one is of a
// parameter that is in no group.
absl::Status FillTensors(const std::vector<StoredArray>& arrays,
                         ExportForm form, const CheckpointMeta& meta,
                         checkpoint::Index& index);
// Adds the files that its tensors, in order, were written to.
void FillFiles(const StateFiles& files, checkpoint::Index& index);
// All but what ranks have; groups without parameters.
void FillManifest(const CheckpointMeta& meta, CheckpointLayout layout,
                  checkpoint::Manifest& manifest);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_MANIFEST_MESSAGES_H_
