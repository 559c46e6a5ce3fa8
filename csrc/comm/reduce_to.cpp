// Reduce to one member: reduce-scatter, then the parts go to the root alone.
// Other members' data is left as it was: they reduce into memory of their own.
#include <cstring>
#include <memory>

#include "collectives.hpp"
#include "pipeline.hpp"
#include "reduce.hpp"

namespace elastic::comm {

void reduce_to(const Call& call, const Part& data, DType type, ReduceOp reduction, int root) {
  expect_defined(type, reduction);
  Operation op(call.hub, call.group, call.generation, call.timeout);
  const auto parts = split_evenly(data, size_of(type), op.size());
  const Part& mine = parts[size_t(op.me())];
  std::unique_ptr<char[]> own;
  Part target = mine;
  if (op.me() != root) {
    own.reset(new char[bytes_of(mine) + 1]);
    target = {Span{own.get(), bytes_of(mine)}};
  }
  PipelineJob job;
  job.type = type;
  job.op = reduction;
  job.inputs = job.outputs = &parts;
  job.target = &target;
  job.only = root;
  run_pipeline(op, job);
  op.finish();
}

}  // namespace elastic::comm
