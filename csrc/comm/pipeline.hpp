// Reduce-scatter and all-gather by direct exchange, cut into chunks that overlap.
//
// Member j reduces part j: each member copies its contribution to part j once into
// its outbox (or onto the wire), j reads all of them where they lie, reduces in
// member order, and publishes the result once for all. With shared memory that
// is one copy in, one reduction pass and one copy out for each byte (Thakur,
// Rabenseifner, Gropp 2005, section 4.1: direct algorithms; the pipelining and
// the shared blocks are ours). The order of the sum is the member order for any
// transport, size and chunking.
#pragma once

#include "dtype.hpp"
#include "operation.hpp"

namespace elastic::comm {

struct PipelineJob {
  DType type = DType::U8;
  ReduceOp op = ReduceOp::Sum;
  const std::vector<Part>* inputs = nullptr;   // by member: contributions; null: no reduction
  const Part* target = nullptr;                // where this member's reduced part goes (with inputs)
  const std::vector<Part>* outputs = nullptr;  // by member: where results go; null: no gathering
  int only = -1;                               // gather to this member alone
};

// Sizes of parts must agree between members. Does not call op.finish().
void run_pipeline(Operation& op, const PipelineJob& job);

// The part that member i sends to j arrives in receive[i] at j. Own parts are copied. Empty parts are free.
void exchange(Operation& op, const std::vector<Part>& send, const std::vector<Part>& receive);

// Cuts `whole` into `n` parts of nearly equal size, at multiples of 64 bytes where possible and of `element` always.
std::vector<Part> split_evenly(const Part& whole, size_t element, int n);

}  // namespace elastic::comm
