// Python module megatron.elastic._plan: numbers in, numbers out; no torch headers.
//
// Callers (megatron/elastic/plan) know what cells, units and plans are. Here all
// of them are positions in lists.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "listing.hpp"
#include "matching.hpp"
#include "partition.hpp"
#include "pipeline.hpp"
#include "reach.hpp"

namespace py = pybind11;
namespace ep = elastic::plan;

namespace {

using PieceTuple = std::tuple<int, int, std::int64_t, ep::Time, ep::Time, ep::Time>;
using EdgeTuple = std::tuple<int, int, ep::Time>;
using StageTuple = std::tuple<ep::Time, ep::Time, ep::Time, ep::Time, std::int64_t>;
using SeatTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
using Sums = std::vector<std::int64_t>;
using Pairs = std::vector<std::pair<int, int>>;

template <typename To, typename From>
std::vector<To> made(const std::vector<From>& tuples) {
  std::vector<To> found;
  found.reserve(tuples.size());
  for (const From& tuple : tuples) {
    found.push_back(std::apply([](auto... parts) { return To{parts...}; }, tuple));
  }
  return found;
}

// Orders as (op, piece), op numbered as in ep::Op.
py::list orders_of(const ep::Listing& listing) {
  py::list found;
  for (const auto& order : listing.orders) {
    py::list steps(order.size());
    for (std::size_t at = 0; at < order.size(); ++at) {
      steps[at] = py::make_tuple(static_cast<int>(order[at].first), order[at].second);
    }
    found.append(std::move(steps));
  }
  return found;
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
  m.doc() = "Scheduling, cutting and bounding pipelines (see megatron/elastic/plan)";
  py::class_<ep::Listing>(m, "Listing")
      .def_readonly("makespan", &ep::Listing::makespan)
      .def_readonly("forced", &ep::Listing::forced)
      .def("orders", &orders_of);
  py::class_<ep::Group>(m, "Group")
      .def(py::init([](const std::vector<PieceTuple>& pieces, const std::vector<EdgeTuple>& edges, int cells) {
             return ep::Group(made<ep::Piece>(pieces), made<ep::Edge>(edges), cells);
           }),
           py::arg("pieces"), py::arg("edges"), py::arg("cells"))
      .def("schedule", &ep::list_schedule, py::arg("caps"), py::arg("split_backward"), py::arg("forward_first"));
  m.def(
      "pipeline_time",
      [](const std::vector<StageTuple>& stages, int count, std::int64_t rows, bool split) {
        return ep::pipeline_time(made<ep::Stage>(stages), count, rows, split);
      },
      py::arg("stages"), py::arg("count"), py::arg("rows"), py::arg("split_backward"));
  m.def("matching", &ep::matching, py::arg("weights"), py::arg("seats"), py::arg("takers"), py::arg("in_order"));
  m.def("knapsack", &ep::knapsack, py::arg("room"), py::arg("values"));
  py::class_<ep::Reach>(m, "Reach")
      .def(py::init([](Sums forward, Sums gradient, Sums weight, Sums fixed, Sums held, Pairs tied, std::int64_t room) {
             return ep::Reach({std::move(forward), std::move(gradient), std::move(weight)},
                              {std::move(fixed), std::move(held), std::move(tied)}, room);
           }),
           py::arg("forward"), py::arg("gradient"), py::arg("weight"), py::arg("fixed"), py::arg("held"),
           py::arg("tied"), py::arg("room"))
      .def("least", &ep::Reach::least, py::arg("first"), py::arg("end"), py::arg("count"), py::arg("held"))
      .def("room", &ep::Reach::room, py::arg("first"), py::arg("end"))
      .def("cuts", &ep::Reach::cuts, py::arg("count"), py::arg("deadline"))
      .def("late_cuts", &ep::Reach::late_cuts, py::arg("count"), py::arg("deadline"))
      .def("pipelines", &ep::Reach::pipelines, py::arg("cells"), py::arg("total"), py::arg("deadline"))
      .def("least_deadline", &ep::Reach::least_deadline, py::arg("cells"), py::arg("total"), py::arg("quantum"),
           py::arg("low"), py::arg("limit"));
  py::class_<ep::Partition>(m, "Partition")
      .def(py::init([](Sums work, Sums fixed, Sums held, Pairs tied, Sums moved) {
             return ep::Partition(std::move(work), {std::move(fixed), std::move(held), std::move(tied)},
                                  std::move(moved));
           }),
           py::arg("work"), py::arg("fixed"), py::arg("held"), py::arg("tied"), py::arg("moved"))
      .def(
          "cut",
          [](const ep::Partition& self, const std::vector<SeatTuple>& seats, ep::Time transfer) {
            return self.cut(made<ep::Seat>(seats), transfer);
          },
          py::arg("seats"), py::arg("transfer"))
      .def(
          "nearest",
          [](const ep::Partition& self, const std::vector<SeatTuple>& seats, ep::Time time,
             const std::vector<Pairs>& holds) { return self.nearest(made<ep::Seat>(seats), time, holds); },
          py::arg("seats"), py::arg("time"), py::arg("holds"));
}
