// Python face of csrc/process: module megatron.elastic._process.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "deathwatch.hpp"

namespace py = pybind11;
namespace ep = elastic::process;

namespace {

void* memory_of(const py::buffer& buffer) {
  const py::buffer_info info = buffer.request(/*writable=*/true);
  const auto address = reinterpret_cast<std::uintptr_t>(info.ptr);
  if (std::size_t(info.size * info.itemsize) < ep::kLockBytes || address % 8 != 0)
    throw py::value_error("a lock takes LOCK_BYTES bytes of aligned memory");
  return info.ptr;
}

}  // namespace

PYBIND11_MODULE(_process, m) {
  m.doc() = "What Linux offers about the ends of processes.";
  m.attr("LOCK_BYTES") = ep::kLockBytes;
  m.def(
      "hold",
      [](const py::buffer& lock) {
        // The thread's list of locks leads there for as long as it lives: the memory is never let go.
        new py::buffer_info(lock.request(true));
        ep::hold(memory_of(lock));
      },
      py::arg("lock"), "The calling thread holds the lock in this shared memory until it ends. Raises RuntimeError.");
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<ep::Deathwatch>(m, "Deathwatch")
      .def(py::init<>())
      .def("fileno", &ep::Deathwatch::descriptor)
      .def(
          "watch",
          [](ep::Deathwatch& self, std::uint64_t number, const py::buffer& lock) {
            return self.watch(number, memory_of(lock));
          },
          py::arg("number"), py::arg("lock"))
      .def("forget", &ep::Deathwatch::forget, py::arg("number"), released)
      .def("take", &ep::Deathwatch::take, released);
}
