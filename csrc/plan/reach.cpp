#include "reach.hpp"

#include <algorithm>
#include <stdexcept>

namespace elastic::plan {

Reach::Reach(UnitTimes times, Memory memory, std::int64_t room)
    : times_(std::move(times)), memory_(std::move(memory)), room_(room) {
  const std::size_t marks = times_.forward.size();
  if (marks < 2 || times_.gradient.size() != marks || times_.weight.size() != marks || memory_.fixed.size() != marks ||
      memory_.held.size() != marks) {
    throw std::invalid_argument("prefix sums must be over the same units");
  }
  units_ = static_cast<int>(marks) - 1;
}

Reach::Stage Reach::stage(int first, int end) const {
  const auto &f = times_.forward, &g = times_.gradient, &w = times_.weight;
  return {f[end] - f[first],
          g[end] - g[first],
          w[end] - w[first],
          f[first],
          g[first],
          f.back() - f[end] + g.back() - g[end],
          first ? w[1] : w[end],
          room(first, end)};
}

std::int64_t Reach::room(int first, int end) const {
  const std::int64_t fixed = memory_.bytes(first, end, 0);
  const std::int64_t each = std::max<std::int64_t>(1, memory_.bytes(first, end, 1) - fixed);
  return fixed > room_ ? 0 : (room_ - fixed) / each;
}

namespace {

// Chain, work and round trip.
template <typename Stage>
Time sums(const Stage& s, std::int64_t count, std::int64_t room) {
  const Time each = s.forward + s.gradient;
  const Time late = std::max<std::int64_t>(0, count - room) * s.weight;
  const Time after = s.gradient_before + s.tail;
  const Time chain = s.forward_before + count * each + late + after;
  const Time work = s.forward_before + count * (each + s.weight);
  const Time early = std::min(room, count) * s.forward;
  const Time arrival = s.forward + s.trip;
  return std::max(chain, work) + std::max<Time>(0, arrival - early);
}

// Whole time when a forward ends at `end` with `left` gradients to take, `again` forwards held back.
template <typename Stage>
Time after_return(const Stage& s, Time end, std::int64_t left, std::int64_t again) {
  const Time back = end + s.trip + again * s.forward + left * s.gradient;
  return back + std::max(left * s.weight, again * s.weight + s.gradient_before + s.tail);
}

// With `room` held at once, forward number j follows j - room + 1 weight gradients. Of the micro-batches these belong
// to, all but i went forward as number i or later, for any i: so their gradients came back, and were taken, after
// forward i had ended and its trip was over. So did forwards i + room to j, each of which follows one of those.
// ends[j]: when forward j may have ended; what the stage has still to do after the return of number i gives the whole.
template <typename Stage>
Time returns(const Stage& s, std::int64_t count, std::int64_t room) {
  const Time each = s.forward + s.gradient + s.weight;
  Time end = s.forward_before + s.forward;
  if (count <= room) {
    return std::max(after_return(s, end, count, 0), after_return(s, end + (count - 1) * s.forward, 1, 0));
  }
  std::vector<Time> ends;
  ends.reserve(count);
  Time latest = 0, whole = 0;
  for (std::int64_t j = 0; j < count; ++j) {
    if (j >= room) {
      const std::int64_t i = j - room;
      latest = std::max(latest, ends[i] + s.trip - i * each);
      end = std::max(end, latest + (i + 1) * each);
    }
    ends.push_back(end);
    whole = std::max(whole, after_return(s, end, count - j, std::max<std::int64_t>(0, count - room - j)));
    end += s.forward;
  }
  return whole;
}

}  // namespace

Time Reach::least(int first, int end, std::int64_t count, std::int64_t held) const {
  const Stage found = stage(first, end);
  return std::max(sums(found, count, held), returns(found, count, held));
}

bool Reach::meets(int first, int end, std::int64_t count, Time deadline) const {
  const Stage found = stage(first, end);
  if (!found.room || sums(found, count, found.room) > deadline) return false;  // the costly part only where it matters
  return returns(found, count, found.room) <= deadline;
}

std::optional<Cuts> Reach::cuts(std::int64_t count, Time deadline) const {
  Cuts found{0};
  while (found.back() < units_) {
    int low = found.back(), high = units_;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (meets(found.back(), middle, count, deadline)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    if (low == found.back()) return std::nullopt;
    found.push_back(low);
  }
  return found;
}

std::optional<Cuts> Reach::late_cuts(std::int64_t count, Time deadline) const {
  Cuts found{units_};
  while (found.back() > 0) {
    int low = 0, high = found.back();
    while (low < high) {
      const int middle = (low + high) / 2;
      if (meets(middle, found.back(), count, deadline)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    if (low == found.back()) return std::nullopt;
    found.push_back(low);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

std::vector<int> knapsack(int room, const std::vector<std::int64_t>& values) {
  std::vector<std::int64_t> best(room + 1, 0);
  std::vector<int> choice(room + 1, 0), lengths;
  for (int size = 1; size <= room; ++size) {
    best[size] = best[size - 1];
    for (int length = 1; length <= size && length < static_cast<int>(values.size()); ++length) {
      if (values[length] > 0 && best[size - length] + values[length] > best[size]) {
        best[size] = best[size - length] + values[length];
        choice[size] = length;
      }
    }
  }
  for (int size = room; size > 0; size -= choice[size] ? choice[size] : 1) {
    if (choice[size]) lengths.push_back(choice[size]);
  }
  std::sort(lengths.rbegin(), lengths.rend());
  return lengths;
}

std::vector<std::pair<Cuts, int>> Reach::pipelines(int cells, int total, Time deadline) const {
  std::vector<std::int64_t> most(cells + 1, 0);
  std::vector<Cuts> by_length(cells + 1);
  for (int count = 1; count <= total; ++count) {
    std::optional<Cuts> found = cuts(count, deadline);
    if (!found || static_cast<int>(found->size()) > cells + 1) break;
    const std::size_t length = found->size() - 1;
    most[length] = count;
    by_length[length] = std::move(*found);
  }
  std::vector<std::pair<Cuts, int>> chosen;
  for (int length : knapsack(cells, most)) chosen.emplace_back(by_length[length], static_cast<int>(most[length]));
  return chosen;
}

bool Reach::enough(int cells, int total, Time deadline) const {
  std::int64_t done = 0;
  for (const auto& [cut, count] : pipelines(cells, total, deadline)) done += count;
  return done >= total;
}

std::optional<Time> Reach::least_deadline(int cells, int total, Time quantum, Time low, Time limit) const {
  Time high = 1;
  while (!enough(cells, total, high * quantum)) {
    high *= 2;
    if (high * quantum > limit) return std::nullopt;
  }
  while (low < high) {
    const Time middle = (low + high) / 2;
    if (enough(cells, total, middle * quantum)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low * quantum;
}

}  // namespace elastic::plan
