// Steps of other shapes than the fused one, to measure it against: written from
// descriptions of what others do, over the traits of each kernel's instruction
// set, as one pass and one thread over whole spans.
//
//   const Peers* peers = FindPeers(kernel);
//   peers->one_pass_two_div(args);
//
// Spans, types and constants are those of an AdamStep with fp32 gradients and
// moments, a bf16 copy and AdamW, but for constants.bias_correction2: others
// divide by c = sqrt(1 - beta2^t), so it is that. To add one: its function in
// generic_peers.h and its field here.

#ifndef ONEPASS_TOOLS_BENCH_PEERS_H_
#define ONEPASS_TOOLS_BENCH_PEERS_H_

#include "dispatch/kernel.h"

namespace onepass {

struct Peers {
  // Loads and stores what the fused step does, with its prefetches and, where
  // args.stream_copy, its stores, and computes nothing but the rounding of the
  // copy, which is the gradient's.
  void (*twin)(const AdamStepArgs& args);
  // Each gradient is divided by `loss_scale`, and what comes of it is stored in
  // `grad`; then as one_pass_two_div. No copy: a cast of the weights follows.
  void (*scaling_step)(const AdamStepArgs& args, float* grad, float loss_scale);
  // In one pass with the copy: two divisions an element, of m by sqrt(v) / c +
  // eps, ordinary stores, no prefetch.
  void (*one_pass_two_div)(const AdamStepArgs& args);
};

// Those compiled for the instruction set of a built-in kernel, by its name;
// null where there are none.
const Peers* FindPeers(const Kernel& kernel);

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_PEERS_H_
