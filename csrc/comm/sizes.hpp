// Sizes: the memory of links, and the chunks of collectives.
//
// The memory that a process shares depends on the number of living ranks on its host, which read from it. Chunk sizes
// depend only on numbers that all members of a job agree on, since all must cut a message at the same places.
#pragma once

#include <algorithm>
#include <cstddef>

namespace elastic::comm {

inline size_t power_of_two_below(size_t n) {
  size_t p = 1;
  while (p * 2 <= n) p *= 2;
  return p;
}

inline size_t clamp_size(size_t low, size_t value, size_t high) {
  return std::min(high, std::max(low, value));
}

constexpr size_t kMostOutbox = size_t(16) << 20;
constexpr size_t kLargestChunk = size_t(512) << 10;
constexpr size_t kSmallestChunk = size_t(16) << 10;

// Shared memory of one rank for what it publishes, with `local` ranks on the host, itself among them.
inline size_t outbox_bytes_for(size_t local) {
  return clamp_size(1 << 20, (size_t(128) << 20) / local, kMostOutbox);
}

// Each direction of a link within a host.
inline size_t ring_bytes_for(size_t local) {
  return power_of_two_below(clamp_size(64 << 10, (size_t(4) << 20) / local, 512 << 10));
}

// Chunks that an outbox holds twice for each rank on the host.
inline size_t chunk_bytes_for(size_t outbox, size_t local) {
  return clamp_size(kSmallestChunk, power_of_two_below(outbox / (4 * local)), kLargestChunk);
}

// A member keeps some chunks of each other member that it cannot read in place.
inline size_t socket_chunk_bytes_for(size_t members) {
  return clamp_size(kSmallestChunk, power_of_two_below((size_t(4) << 20) / std::max<size_t>(members, 1)),
                    kLargestChunk);
}

}  // namespace elastic::comm
