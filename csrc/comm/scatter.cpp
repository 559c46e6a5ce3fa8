// Scatter from one member.
#include "collectives.hpp"
#include "pipeline.hpp"

namespace elastic::comm {

void scatter(const Call& call, const std::vector<Part>& send, const Part& receive, int root) {
  Operation op(call.hub, call.group, call.generation, call.timeout);
  std::vector<Part> in(size_t(op.size()));
  in[size_t(root)] = receive;
  const std::vector<Part> nothing(size_t(op.size()));
  exchange(op, op.me() == root ? send : nothing, in);
  op.finish();
}

}  // namespace elastic::comm
