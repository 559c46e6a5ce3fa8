// The step time of one plain pipeline: the tables of megatron/elastic/plan/schedule/orders.py, timed without being
// written out.
//
// The planner compares thousands of shapes. In a plain pipeline the same few stages repeat, so its time follows
// without pieces or actions.
#pragma once

#include <cstdint>
#include <vector>

#include "listing.hpp"

namespace elastic::plan {

struct Stage {
  Time forward, backward, weight;  // of a micro-batch; weight: the part of backward that may come late
  Time hop;                        // to the next stage (of the last: not used)
  std::int64_t room;               // rows whose activations fit
};

// Step time of `count` micro-batches of `rows` rows each, by the fastest of the orders that `compute_orders` tries.
Time pipeline_time(const std::vector<Stage>& stages, int count, std::int64_t rows, bool split_backward);

}  // namespace elastic::plan
