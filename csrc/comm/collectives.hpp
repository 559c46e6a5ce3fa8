// The collectives, each in a file of its own. All run over the living members of
// a group, block until done, and throw the types of errors.hpp.
//
// `Call` says on whose behalf. Positions (root, parts by member) count living
// members; translation from torch's ranks is the binding's business.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "dtype.hpp"
#include "hub.hpp"
#include "operation.hpp"

namespace elastic::comm {

struct Call {
  Hub& hub;
  Group& group;
  uint64_t generation;
  double timeout;
  // Of a call in the background: whether a thread waits for it. Until then its waits are not waits of the process: a
  // rank that computes is not to look as if it waited for a peer that computes too.
  const std::atomic<bool>* awaited = nullptr;
};

// In place. `data` may be in pieces (coalesced tensors).
void all_reduce(const Call& call, const Part& data, DType type, ReduceOp op);
// The result lands at `root` only; other members' data is left as it was.
void reduce_to(const Call& call, const Part& data, DType type, ReduceOp op, int root);
void broadcast(const Call& call, void* data, size_t size, int root);
// outputs[j]: where member j's bytes go; outputs[me] holds this member's already.
void all_gather(const Call& call, const std::vector<Part>& outputs);
// inputs[j]: contribution to member j's part; the sum of this member's goes to `target`.
void reduce_scatter(const Call& call, const std::vector<Part>& inputs, const Part& target, DType type, ReduceOp op);
void all_to_all(const Call& call, const std::vector<Part>& send, const std::vector<Part>& receive);
// At root, receive[j] gets member j's `send`; elsewhere `receive` is ignored.
void gather(const Call& call, const Part& send, const std::vector<Part>& receive, int root);
void scatter(const Call& call, const std::vector<Part>& send, const Part& receive, int root);
void barrier(const Call& call);
// Every member reports to member 0, which names those missing after the time-out (global ranks).
void monitored_barrier(const Call& call, bool wait_all);

}  // namespace elastic::comm
