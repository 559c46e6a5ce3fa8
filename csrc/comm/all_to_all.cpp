// All-to-all, gather and scatter are one exchange with some parts empty.
#include "collectives.hpp"
#include "pipeline.hpp"

namespace elastic::comm {

void all_to_all(const Call& call, const std::vector<Part>& send, const std::vector<Part>& receive) {
  Operation op(call.hub, call.group, call.generation, call.timeout);
  exchange(op, send, receive);
  op.finish();
}

}  // namespace elastic::comm
