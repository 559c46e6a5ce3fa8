// All-gather of parts of any size and number of pieces (tensor, list and block-list forms).
#include "collectives.hpp"
#include "pipeline.hpp"

namespace elastic::comm {

void all_gather(const Call& call, const std::vector<Part>& outputs) {
  Operation op(call.hub, call.group, call.generation, call.timeout, call.awaited);
  PipelineJob job;
  job.outputs = &outputs;
  run_pipeline(op, job);
  op.finish();
}

}  // namespace elastic::comm
