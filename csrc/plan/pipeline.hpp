// What one plain pipeline takes: the tables of megatron/elastic/plan/schedule/orders.py, timed without being written
// out.
//
// Shapes are compared by thousands; each of their pipelines is the same stages
// over and over, so neither pieces nor actions need exist to know how long its
// tables last.
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
