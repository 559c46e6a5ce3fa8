#include "listing.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <stdexcept>

namespace elastic::plan {

Group::Group(std::vector<Piece> pieces, std::vector<Edge> edges, int cells)
    : pieces_(std::move(pieces)), edges_(std::move(edges)), cells_(cells) {
  const int count = static_cast<int>(pieces_.size());
  for (const Piece& piece : pieces_) {
    if (piece.cell < 0 || piece.cell >= cells_) throw std::invalid_argument("a piece names a cell outside the group");
  }
  for (const Edge& edge : edges_) {
    if (std::min(edge.source, edge.target) < 0 || std::max(edge.source, edge.target) >= count) {
      throw std::invalid_argument("an edge names a piece outside the group");
    }
  }
  incoming_ = by(&Edge::target);
  outgoing_ = by(&Edge::source);
}

Group::Adjacency Group::by(int Edge::* end) const {
  Adjacency found;
  found.start.assign(pieces_.size() + 1, 0);
  for (const Edge& edge : edges_) ++found.start[edge.*end + 1];
  for (std::size_t piece = 0; piece < pieces_.size(); ++piece) found.start[piece + 1] += found.start[piece];
  found.edges.resize(edges_.size());
  std::vector<int> at = found.start;
  for (int number = 0; number < static_cast<int>(edges_.size()); ++number) {
    found.edges[at[edges_[number].*end]++] = number;
  }
  return found;
}

namespace {

// Smallest first.
template <typename T>
using Queue = std::priority_queue<T, std::vector<T>, std::greater<T>>;

using Ranked = std::pair<int, int>;  // (wave, piece)

struct CellState {
  Time free_at = 0;
  std::int64_t held = 0;
  Queue<Ranked> forwards, backwards, weights;
};

enum Kind : int { kInput, kGradient, kEnd };

struct Event {
  Time when;
  int kind, number;  // a piece; of kEnd: a cell

  // Only when events happen matters: those of one moment are all taken before anything is started.
  friend bool operator>(const Event& a, const Event& b) { return a.when > b.when; }
};

class Scheduler {
 public:
  Scheduler(const Group& group, const std::vector<std::int64_t>& caps, bool split, bool forward_first)
      : group_(group),
        caps_(caps),
        split_(split),
        forward_first_(forward_first),
        cells_(group.cells()),
        seen_(group.cells(), false) {
    const int count = static_cast<int>(group.pieces().size());
    left_ = count * (split ? 3 : 2);
    listing_.orders.resize(group.cells());
    for (auto& order : listing_.orders) order.reserve(left_ / static_cast<int>(listing_.orders.size()));
    inputs_.resize(count);
    gradients_.resize(count);
    for (int piece = 0; piece < count; ++piece) {
      inputs_[piece] = group.incoming(piece).size();
      gradients_[piece] = group.outgoing(piece).size() + 1;
      if (!inputs_[piece]) cells_[of(piece).cell].forwards.emplace(of(piece).wave, piece);
    }
  }

  Listing run() {
    std::vector<int> touched(group_.cells());
    for (int cell = 0; cell < group_.cells(); ++cell) touched[cell] = cell;
    for (;;) {
      for (int cell : touched) {
        seen_[cell] = false;
        dispatch(cell, false);
      }
      touched.clear();
      if (events_.empty()) {
        if (!left_) break;
        touched.push_back(force());
        continue;
      }
      now_ = events_.top().when;
      while (!events_.empty() && events_.top().when == now_) {
        const Event event = events_.top();
        events_.pop();
        const int cell = arrive(event.kind, event.number);
        if (!seen_[cell]) touched.push_back(cell);
        seen_[cell] = true;
      }
    }
    for (const CellState& state : cells_) listing_.makespan = std::max(listing_.makespan, state.free_at);
    return std::move(listing_);
  }

 private:
  const Piece& of(int piece) const { return group_.pieces()[piece]; }

  // Returns the cell to look at.
  int arrive(int kind, int number) {
    if (kind == kEnd) return number;
    CellState& state = cells_[of(number).cell];
    std::vector<int>& waiting = kind == kInput ? inputs_ : gradients_;
    if (!--waiting[number]) (kind == kInput ? state.forwards : state.backwards).emplace(of(number).wave, number);
    return of(number).cell;
  }

  void dispatch(int cell, bool force) {
    CellState& state = cells_[cell];
    if (state.free_at > now_) return;
    const bool forward = !state.forwards.empty() && (force || fits(cell, state));
    if (!state.backwards.empty() && !(forward && forward_first_)) {
      start_backward(cell, state, taken(state.backwards));
    } else if (forward) {
      start_forward(cell, state, taken(state.forwards));
    } else if (!state.weights.empty()) {
      const int piece = taken(state.weights);
      state.held -= of(piece).rows;
      occupy(cell, state, Op::kBackwardWeight, piece, of(piece).weight);
    }
  }

  static int taken(Queue<Ranked>& queue) {
    const int piece = queue.top().second;
    queue.pop();
    return piece;
  }

  bool fits(int cell, const CellState& state) const {
    return !state.held || state.held + of(state.forwards.top().second).rows <= caps_[cell];
  }

  // Nothing can move: let the earliest waiting forward in.
  int force() {
    int found = -1;
    for (int cell = 0; cell < group_.cells(); ++cell) {
      const Queue<Ranked>& waiting = cells_[cell].forwards;
      if (!waiting.empty() && (found < 0 || waiting.top() < cells_[found].forwards.top())) found = cell;
    }
    if (found < 0) throw std::logic_error("the dependencies of pieces have a cycle");
    ++listing_.forced;
    dispatch(found, true);
    return found;
  }

  void start_forward(int cell, CellState& state, int piece) {
    state.held += of(piece).rows;
    const Time end = occupy(cell, state, Op::kForward, piece, of(piece).forward);
    events_.push({end, kGradient, piece});  // its own part, and the end of the action
    for (int edge : group_.outgoing(piece)) {
      events_.push({end + group_.edges()[edge].time, kInput, group_.edges()[edge].target});
    }
  }

  void start_backward(int cell, CellState& state, int piece) {
    Time end;
    if (split_) {
      end = occupy(cell, state, Op::kBackwardInput, piece, of(piece).backward - of(piece).weight);
      state.weights.emplace(of(piece).wave, piece);
    } else {
      state.held -= of(piece).rows;
      end = occupy(cell, state, Op::kBackward, piece, of(piece).backward);
    }
    for (int edge : group_.incoming(piece)) {
      events_.push({end + group_.edges()[edge].time, kGradient, group_.edges()[edge].source});
    }
  }

  Time occupy(int cell, CellState& state, Op op, int piece, Time duration) {
    listing_.orders[cell].emplace_back(op, piece);
    state.free_at = now_ + duration;
    --left_;
    if (op != Op::kForward) events_.push({state.free_at, kEnd, cell});
    return state.free_at;
  }

  const Group& group_;
  const std::vector<std::int64_t>& caps_;
  const bool split_, forward_first_;
  std::vector<CellState> cells_;
  std::vector<bool> seen_;  // cells to look at at this moment
  std::vector<int> inputs_, gradients_;
  Queue<Event> events_;
  Listing listing_;
  int left_ = 0;
  Time now_ = 0;
};

}  // namespace

Listing list_schedule(const Group& group, const std::vector<std::int64_t>& caps, bool split_backward,
                      bool forward_first) {
  if (static_cast<int>(caps.size()) != group.cells()) throw std::invalid_argument("one cap for each cell is needed");
  return Scheduler(group, caps, split_backward, forward_first).run();
}

}  // namespace elastic::plan
