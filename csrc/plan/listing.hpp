// List scheduling: tables for plans that fit no fixed pattern (megatron/elastic/plan/schedule/listing.py says how and
// why).
//
// Pieces and cells are numbered from 0. Everything is integer arithmetic on ordered
// structures, so that every process makes the same tables from the same numbers.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "units.hpp"

namespace elastic::plan {

enum class Op : std::uint8_t { kForward, kBackward, kBackwardInput, kBackwardWeight };

using Step = std::pair<Op, int>;  // what, of which piece

struct Piece {
  int cell;
  int wave;           // earlier waves first
  std::int64_t rows;  // held from forward to backward
  Time forward, backward, weight;
};

// A transfer between pieces, the same time both ways (0 within a cell).
struct Edge {
  int source, target;
  Time time;
};

// Pieces that share neither cell nor edge with others.
class Group {
 public:
  // Throws std::invalid_argument when an edge or a cell is out of range.
  Group(std::vector<Piece> pieces, std::vector<Edge> edges, int cells);

  const std::vector<Piece>& pieces() const { return pieces_; }
  const std::vector<Edge>& edges() const { return edges_; }
  int cells() const { return cells_; }
  // Edges that end (begin) at a piece, as a range of iterators.
  struct Range {
    const int *first, *last;
    const int* begin() const { return first; }
    const int* end() const { return last; }
    int size() const { return static_cast<int>(last - first); }
  };
  Range incoming(int piece) const { return incoming_.of(piece); }
  Range outgoing(int piece) const { return outgoing_.of(piece); }

 private:
  std::vector<Piece> pieces_;
  std::vector<Edge> edges_;
  int cells_;
  // Edge numbers by piece, all in one list.
  struct Adjacency {
    std::vector<int> start, edges;
    Range of(int piece) const { return {edges.data() + start[piece], edges.data() + start[piece + 1]}; }
  };
  Adjacency by(int Edge::* end) const;

  Adjacency incoming_, outgoing_;
};

struct Listing {
  std::vector<std::vector<Step>> orders;  // by cell
  Time makespan = 0;
  int forced = 0;  // how often a cap had to give way
};

// caps[cell]: rows it may hold at once. Throws std::logic_error when pieces depend on each other in a circle.
Listing list_schedule(const Group& group, const std::vector<std::int64_t>& caps, bool split_backward,
                      bool forward_first);

}  // namespace elastic::plan
