// Python face of csrc/random: module megatron.elastic._random.
//
// Tensors come as addresses with their byte counts, so that this module needs no
// torch headers; the sizes are checked here against the layout.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "dropout.h"

namespace py = pybind11;
namespace er = megatron_elastic::random;

namespace {

er::Isa isa_of(int wanted) {
  const auto widest = er::widest_isa();
  if (wanted < 0) return widest;
  if (wanted > static_cast<int>(widest)) throw std::invalid_argument("this processor lacks that instruction set");
  return static_cast<er::Isa>(wanted);
}

er::Block philox(const er::Block& counter, const er::Key& key) {
  return er::philox4x32_10(counter, key);
}

void dropout(uintptr_t dst, uintptr_t src, uintptr_t residual, size_t bytes, int dtype,
             const std::vector<int64_t>& sizes, int64_t sample_dim, const std::vector<int64_t>& extent,
             const std::vector<int64_t>& offset, uint64_t seed, uint64_t step, uint32_t unit, uint32_t site,
             const std::vector<uint64_t>& samples, uint32_t drop_below, double scale, int isa) {
  if (dtype < 0 || dtype > static_cast<int>(er::Dtype::kFloat64)) throw std::invalid_argument("unknown dtype");
  const er::Layout layout{sizes, sample_dim, extent, offset};
  er::check_layout(layout, samples.size());
  size_t elements = 1;
  for (const int64_t size : sizes) elements *= static_cast<size_t>(size);
  if (elements * er::item_size(static_cast<er::Dtype>(dtype)) != bytes)
    throw std::invalid_argument("sizes, dtype and byte count disagree");
  if (elements == 0) return;
  const er::Isa use = isa_of(isa);
  py::gil_scoped_release release;
  er::dropout(use, static_cast<er::Dtype>(dtype), layout, {seed, step, unit, site}, samples, drop_below, scale,
              reinterpret_cast<const void*>(src), reinterpret_cast<const void*>(residual),
              reinterpret_cast<void*>(dst));
}

}  // namespace

PYBIND11_MODULE(_random, m) {
  m.doc() = "Counter-based dropout (Philox4x32-10).";
  m.def("philox", &philox, py::arg("counter"), py::arg("key"), "One Philox4x32-10 block.");
  m.def("widest_isa", [] { return static_cast<int>(er::widest_isa()); }, "0 generic, 1 AVX2, 2 AVX-512.");
  m.def("dropout", &dropout, py::arg("dst"), py::arg("src"), py::arg("residual"), py::arg("bytes"), py::arg("dtype"),
        py::arg("sizes"), py::arg("sample_dim"), py::arg("extent"), py::arg("offset"), py::arg("seed"), py::arg("step"),
        py::arg("unit"), py::arg("site"), py::arg("samples"), py::arg("drop_below"), py::arg("scale"),
        py::arg("isa") = -1,
        "dst = dropout(src) (+ residual, when its address is not 0); all contiguous, of the same dtype and shape.");
}
