// The peers of each kernel of this architecture, generated.

#ifndef ONEPASS_TOOLS_BENCH_PEER_TABLE_H_
#define ONEPASS_TOOLS_BENCH_PEER_TABLE_H_

#include "tools/bench/peers.h"

namespace onepass {

struct PeersOfKernel {
  const char* kernel;
  const Peers* peers;
};

extern const PeersOfKernel kPeers[];
extern const int kPeerCount;

}  // namespace onepass

#endif  // ONEPASS_TOOLS_BENCH_PEER_TABLE_H_
