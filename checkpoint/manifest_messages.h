// Between the types of the library and the messages of manifest.proto.

#ifndef ONEPASS_CHECKPOINT_MANIFEST_MESSAGES_H_
#define ONEPASS_CHECKPOINT_MANIFEST_MESSAGES_H_

#include <string>

#include "absl/status/status.h"
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

// Files and tensors of this rank.
absl::Status FillIndex(const StateTensors& tensors, const StateFiles& files,
                       const CheckpointMeta& meta, checkpoint::Index& index);
// All but what ranks have; groups without parameters.
void FillManifest(const CheckpointMeta& meta, CheckpointLayout layout,
                  checkpoint::Manifest& manifest);

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_MANIFEST_MESSAGES_H_
