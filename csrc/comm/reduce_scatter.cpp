// Reduce-scatter of parts of any size and number of pieces (tensor, list and block-list forms).
#include "collectives.hpp"
#include "pipeline.hpp"
#include "reduce.hpp"

namespace elastic::comm {

void reduce_scatter(const Call& call, const std::vector<Part>& inputs, const Part& target, DType type,
                    ReduceOp reduction) {
  expect_defined(type, reduction);
  Operation op(call.hub, call.group, call.generation, call.timeout, call.awaited);
  PipelineJob job;
  job.type = type;
  job.op = reduction;
  job.inputs = &inputs;
  job.target = &target;
  run_pipeline(op, job);
  op.finish();
}

}  // namespace elastic::comm
