#include "pipeline.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace elastic::plan {

namespace {

// 1F1B with a whole backward, or ZB-H1 with weight gradients `late` micro-batches behind.
std::vector<Step> fixed_order(int count, int stage, int stages, bool split, int late) {
  const int warm_up = std::min(stages - 1 - stage, count);
  std::vector<Step> order;
  order.reserve(3 * count);
  for (int number = 0; number < warm_up; ++number) order.emplace_back(Op::kForward, number);
  for (int done = 0; done < count; ++done) {
    if (done + warm_up < count) order.emplace_back(Op::kForward, done + warm_up);
    order.emplace_back(split ? Op::kBackwardInput : Op::kBackward, done);
    if (split && done >= late) order.emplace_back(Op::kBackwardWeight, done - late);
  }
  for (int number = std::max(0, count - late); split && number < count; ++number) {
    order.emplace_back(Op::kBackwardWeight, number);
  }
  return order;
}

// Runs the orders of all stages, numbered by micro-batch, each action as soon as it can.
Time walk(const std::vector<Stage>& stages, int count, const std::vector<std::vector<Step>>& orders) {
  constexpr Time kNever = -1;
  const int depth = static_cast<int>(stages.size());
  std::vector<Time> forward(static_cast<std::size_t>(depth) * count, kNever), gradient(forward);
  std::vector<Time> now(depth, 0);
  std::vector<std::size_t> at(depth, 0);
  for (bool moved = true; moved;) {
    moved = false;
    // Down for forwards, up for gradients: each sweep carries arrivals as far as they go.
    for (int turn = 0; turn < 2 * depth; ++turn) {
      const int stage = turn < depth ? turn : 2 * depth - 1 - turn;
      const std::vector<Step>& order = orders[stage];
      for (; at[stage] < order.size(); ++at[stage], moved = true) {
        const auto [op, number] = order[at[stage]];
        const std::size_t here = static_cast<std::size_t>(stage) * count + number;
        Time arrived = now[stage];
        if (op == Op::kForward && stage > 0) {
          const Time sent = forward[here - count];
          if (sent == kNever) break;
          arrived = std::max(arrived, sent + stages[stage - 1].hop);
        } else if ((op == Op::kBackward || op == Op::kBackwardInput) && stage + 1 < depth) {
          const Time sent = gradient[here + count];
          if (sent == kNever) break;
          arrived = std::max(arrived, sent + stages[stage].hop);
        }
        const Stage& cost = stages[stage];
        if (op == Op::kForward) {
          now[stage] = forward[here] = arrived + cost.forward;
        } else if (op == Op::kBackwardWeight) {
          now[stage] = arrived + cost.weight;
        } else {
          now[stage] = gradient[here] = arrived + cost.backward - (op == Op::kBackwardInput ? cost.weight : 0);
        }
      }
    }
  }
  for (int stage = 0; stage < depth; ++stage) {
    if (at[stage] < orders[stage].size()) throw std::logic_error("a pipeline's orders deadlock");
  }
  return *std::max_element(now.begin(), now.end());
}

Time fixed_time(const std::vector<Stage>& stages, int count, bool split, const std::vector<int>& late) {
  const int depth = static_cast<int>(stages.size());
  std::vector<std::vector<Step>> orders;
  orders.reserve(depth);
  for (int stage = 0; stage < depth; ++stage) {
    orders.push_back(fixed_order(count, stage, depth, split, split ? late[stage] : 0));
  }
  return walk(stages, count, orders);
}

// Sets the number of micro-batches by which each stage may defer weight gradients; false if not even 1F1B fits.
bool weight_delays(const std::vector<Stage>& stages, int count, std::int64_t rows, std::vector<int>& late) {
  const int depth = static_cast<int>(stages.size());
  for (int stage = 0; stage < depth; ++stage) {
    // Rounded down also below zero: the memory of a stage may not even suffice for its parameters.
    const std::int64_t fits = stages[stage].room;
    const std::int64_t room = fits >= 0 ? fits / rows : -((-fits + rows - 1) / rows);
    const int held = std::min(depth - stage, count);
    if (held > room) return false;
    late.push_back(room >= count ? stage : static_cast<int>(std::min<std::int64_t>(stage, room - held)));
  }
  return true;
}

bool even(const std::vector<Stage>& stages) {
  return std::all_of(stages.begin(), stages.end(), [&](const Stage& stage) {
    return stage.forward == stages[0].forward && stage.backward == stages[0].backward;
  });
}

Group unrolled(const std::vector<Stage>& stages, int count, std::int64_t rows) {
  const int depth = static_cast<int>(stages.size());
  std::vector<Piece> pieces;
  std::vector<Edge> edges;
  pieces.reserve(static_cast<std::size_t>(depth) * count);
  edges.reserve(pieces.capacity());
  for (int number = 0; number < count; ++number) {
    for (int stage = 0; stage < depth; ++stage) {
      const Stage& cost = stages[stage];
      const int piece = static_cast<int>(pieces.size());
      if (stage + 1 < depth) edges.push_back({piece, piece + 1, cost.hop});
      pieces.push_back({stage, number, rows, cost.forward, cost.backward, cost.weight});
    }
  }
  return Group(std::move(pieces), std::move(edges), depth);
}

}  // namespace

Time pipeline_time(const std::vector<Stage>& stages, int count, std::int64_t rows, bool split_backward) {
  if (stages.empty() || count < 1 || rows < 1)
    throw std::invalid_argument("a pipeline needs at least one stage, micro-batch and row");
  if (!split_backward) return fixed_time(stages, count, false, {});
  const int depth = static_cast<int>(stages.size());
  Time best = std::numeric_limits<Time>::max();
  std::vector<int> late;
  if (weight_delays(stages, count, rows, late)) {
    best = fixed_time(stages, count, true, late);
    bool full = even(stages);
    for (int stage = 0; stage < depth; ++stage) full = full && late[stage] == stage;
    if (full) return best;
  }
  const Group group = unrolled(stages, count, rows);
  std::vector<std::int64_t> thrifty(depth), generous(depth);
  for (int stage = 0; stage < depth; ++stage) {
    const auto capped = [&](std::int64_t wanted) {
      return std::max<std::int64_t>(1, std::min(wanted, stages[stage].room));
    };
    thrifty[stage] = capped((depth - stage) * rows);
    generous[stage] = capped(depth * rows);
  }
  const auto tried = [&](const std::vector<std::int64_t>& caps) {
    for (bool forward_first : {true, false}) {
      best = std::min(best, list_schedule(group, caps, true, forward_first).makespan);
    }
  };
  tried(thrifty);
  if (generous != thrifty) tried(generous);
  return best;
}

}  // namespace elastic::plan
