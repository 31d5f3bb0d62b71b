// Exported state in memory, by name.
//
//   StateDict dict;
//   RETURN_IF_ERROR(ExportState(tensors, transfer, dict));
//   dict.tensors().at("state.w.exp_avg").bytes
//
// The keys of tensors are flat, "state.<parameter>.<kind>"; checkpoint/layout.h
// has the nested layout, and the keys of groups.

#ifndef ONEPASS_CHECKPOINT_STATE_DICT_H_
#define ONEPASS_CHECKPOINT_STATE_DICT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/state_sink.h"
#include "checkpoint/state_tensors.h"
#include "dispatch/state.h"

namespace onepass {

class StateDict : public StateSink {
 public:
  struct Tensor {
    SafetensorsType type;
    std::vector<int64_t> shape;  // of the whole
    Box box;                     // what is here
    std::vector<char> bytes;     // in C order
  };

  StateDict() = default;

  // Valid after Close().
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }

  absl::Status Open(const std::vector<StoredArray>& arrays) override;
  absl::StatusOr<absl::Span<char>> Next(int array, int64_t bytes) override;
  absl::Status Written(int array, int64_t bytes) override;
  absl::Status Close() override;

 private:
  struct Filling {
    std::string name;
    Tensor* tensor;
    int64_t done = 0;
  };

  std::map<std::string, Tensor> tensors_;
  std::vector<Filling> filling_;  // of the arrays
};

}  // namespace onepass

#endif  // ONEPASS_CHECKPOINT_STATE_DICT_H_
