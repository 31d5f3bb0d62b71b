#include "tools/bench/peers.h"

#include <cstring>

#include "tools/bench/peer_table.h"

namespace onepass {

const Peers* FindPeers(const Kernel& kernel) {
  for (int i = 0; i < kPeerCount; ++i) {
    if (std::strcmp(kPeers[i].kernel, kernel.name) == 0) return kPeers[i].peers;
  }
  return nullptr;
}

}  // namespace onepass
