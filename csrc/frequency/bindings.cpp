// Python face of csrc/frequency: module megatron.elastic._frequency.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "driver.h"

namespace py = pybind11;
namespace ef = megatron_elastic::frequency;
using Released = py::call_guard<py::gil_scoped_release>;

PYBIND11_MODULE(_frequency, m) {
  m.doc() = "Clocks of NPUs (DCMI) and CPUs (cpufreq).";
  py::register_exception<ef::Unavailable>(m, "Unavailable", PyExc_RuntimeError);
  py::register_exception<ef::NotPermitted>(m, "NotPermitted", PyExc_PermissionError);

  py::class_<ef::Limits>(m, "Limits")
      .def_readonly("min_khz", &ef::Limits::min_khz)
      .def_readonly("max_khz", &ef::Limits::max_khz)
      .def_readonly("steps_khz", &ef::Limits::steps_khz);
  py::class_<ef::Applied>(m, "Applied")
      .def_readonly("asked_khz", &ef::Applied::asked_khz)
      .def_readonly("set_khz", &ef::Applied::set_khz)
      .def_readonly("observed_khz", &ef::Applied::observed_khz)
      .def_readonly("verified", &ef::Applied::verified);
  py::class_<ef::Driver>(m, "Driver")
      .def(py::init(&ef::open_driver), py::arg("kind"), py::arg("device"), py::arg("path") = "")
      .def("describe", &ef::Driver::describe)
      .def("limits", &ef::Driver::limits)
      .def("current_khz", &ef::Driver::current_khz)
      .def("set", &ef::Driver::set, py::arg("khz"), Released())
      .def(
          "raise_power", [](ef::Driver&) {}, "Nothing: neither NPUs nor CPUs have a power limit that is set here.")
      .def("snapshot", &ef::Driver::snapshot)
      .def("restore", &ef::Driver::restore, py::arg("snapshot"), Released())
      .def("claim", &ef::Driver::claim)
      .def("power_mw", &ef::Driver::power_mw, "Milliwatts, -1 where the platform does not say.");
  m.def("symbols", &ef::symbols, "Names looked up in libdcmi.so.");
}
