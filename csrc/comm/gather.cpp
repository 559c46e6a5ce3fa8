// Gather to one member.
#include "collectives.hpp"
#include "pipeline.hpp"

namespace elastic::comm {

void gather(const Call& call, const Part& send, const std::vector<Part>& receive, int root) {
  Operation op(call.hub, call.group, call.generation, call.timeout);
  std::vector<Part> out(size_t(op.size()));
  out[size_t(root)] = send;
  const std::vector<Part> nothing(size_t(op.size()));
  exchange(op, out, op.me() == root ? receive : nothing);
  op.finish();
}

}  // namespace elastic::comm
