// Python module megatron.elastic._state: addresses and sizes in, no torch headers.
//
// The caller (megatron/elastic/state/adam.py) checks dtype, contiguity and length
// of the tensors whose addresses it passes. The GIL is released while computing.

#include <pybind11/pybind11.h>

#include <cmath>

#include "fixed_point.hpp"
#include "intake.hpp"
#include "update.hpp"

namespace py = pybind11;
namespace es = elastic::state;

namespace {

template <typename T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Scalars are combined in fp64 and rounded once to fp32, as torch does.
es::AdamScalars adam_scalars(double grad_multiplier, double lr, double beta1, double beta2, double eps,
                             double weight_decay, double bias_correction1, double bias_correction2, bool decoupled) {
  es::AdamScalars s;
  s.grad_multiplier = static_cast<float>(grad_multiplier);
  s.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  s.beta2 = static_cast<float>(beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  s.eps = static_cast<float>(eps);
  s.decay = static_cast<float>(decoupled ? 1.0 - lr * weight_decay : weight_decay);
  s.step_size = static_cast<float>(lr / bias_correction1);
  s.sqrt_correction2 = static_cast<float>(std::sqrt(bias_correction2));
  s.decoupled = decoupled;
  return s;
}

es::Rows rows_at(std::uintptr_t master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq) {
  return {at<float>(master), at<float>(exp_avg), at<float>(exp_avg_sq)};
}

void adam(std::uintptr_t master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t grad,
          std::size_t count, const es::AdamScalars& scalars) {
  es::adam_update(rows_at(master, exp_avg, exp_avg_sq), at<const float>(grad), count, scalars);
}

void adam_twice(std::uintptr_t master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t grad,
                std::uintptr_t next, std::size_t count, const es::AdamScalars& scalars,
                const es::AdamScalars& scalars_of_next) {
  if (scalars.decoupled != scalars_of_next.decoupled) throw py::value_error("both steps must be decoupled, or neither");
  es::adam_update_twice(rows_at(master, exp_avg, exp_avg_sq), at<const float>(grad), at<const float>(next), count,
                        scalars, scalars_of_next);
}

void lion(std::uintptr_t master, std::uintptr_t exp_avg, std::uintptr_t grad, std::size_t count, double grad_multiplier,
          double lr, double beta1, double beta2, double weight_decay) {
  const es::LionScalars s{static_cast<float>(grad_multiplier), static_cast<float>(lr), static_cast<float>(1.0 - beta1),
                          static_cast<float>(1.0 - beta2), static_cast<float>(1.0 - lr * weight_decay)};
  es::lion_update(at<float>(master), at<float>(exp_avg), at<const float>(grad), count, s);
}

void sgd(std::uintptr_t master, std::uintptr_t buffer, std::uintptr_t grad, std::size_t count, double grad_multiplier,
         double lr, double momentum, double weight_decay) {
  const es::SgdScalars s{static_cast<float>(grad_multiplier), static_cast<float>(lr), static_cast<float>(momentum),
                         static_cast<float>(weight_decay)};
  es::sgd_update(at<float>(master), at<float>(buffer), at<const float>(grad), count, s);
}

void bf16(std::uintptr_t source, std::uintptr_t target, std::size_t count) {
  es::round_to_bf16(at<const float>(source), at<std::uint16_t>(target), count);
}

double squares(std::uintptr_t values, std::size_t count) {
  return es::sum_of_squares(at<const float>(values), count);
}

void check_length(std::size_t count) {
  if (count < es::kFewest) throw py::value_error("a short input has another hash");
}

// As the library's digest(): the high word first, each with its highest byte first.
py::bytes digest(const es::Hash128& hash) {
  char bytes[16];
  for (int i = 0; i < 8; ++i) {
    bytes[i] = static_cast<char>(hash.high >> (56 - 8 * i));
    bytes[8 + i] = static_cast<char>(hash.low >> (56 - 8 * i));
  }
  return py::bytes(bytes, sizeof bytes);
}

py::tuple take_in(std::uintptr_t from, std::uintptr_t to, std::size_t count) {
  check_length(count);
  es::Intake intake{};
  {
    const py::gil_scoped_release without_gil;
    intake = es::take_in(at<const float>(from), at<float>(to), count);
  }
  return py::make_tuple(digest(intake.hash), intake.squares);
}

py::bytes hash_of(std::uintptr_t values, std::size_t count) {
  check_length(count);
  es::Hash128 hash{};
  {
    const py::gil_scoped_release without_gil;
    hash = es::hash_of(at<const float>(values), count);
  }
  return digest(hash);
}

unsigned fold(std::uintptr_t grad, std::uintptr_t sum, std::size_t count, double scale, double limit, bool first) {
  if (!(limit <= es::kLargestContribution)) throw py::value_error("limit must be at most 2^51");
  return es::fold(at<const float>(grad), at<std::int64_t>(sum), count, scale, limit, first);
}

void unfold(std::uintptr_t sum, std::uintptr_t out, std::size_t count, double scale) {
  es::unfold(at<const std::int64_t>(sum), at<float>(out), count, scale);
}

}  // namespace

PYBIND11_MODULE(_state, m) {
  m.doc() = "Optimizer updates, norms and hashes with bits fixed by their inputs (see csrc/state/update.hpp)";
  const auto free_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<es::AdamScalars>(m, "AdamScalars")
      .def(py::init(&adam_scalars), py::arg("grad_multiplier"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"), py::arg("bias_correction1"), py::arg("bias_correction2"),
           py::arg("decoupled"));
  m.def("adam", &adam, free_gil, py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("grad"),
        py::arg("count"), py::arg("scalars"));
  m.def("adam_twice", &adam_twice, free_gil, py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
        py::arg("grad"), py::arg("next"), py::arg("count"), py::arg("scalars"), py::arg("scalars_of_next"));
  m.def("lion", &lion, free_gil, py::arg("master"), py::arg("exp_avg"), py::arg("grad"), py::arg("count"),
        py::arg("grad_multiplier"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("weight_decay"));
  m.def("sgd", &sgd, free_gil, py::arg("master"), py::arg("buffer"), py::arg("grad"), py::arg("count"),
        py::arg("grad_multiplier"), py::arg("lr"), py::arg("momentum"), py::arg("weight_decay"));
  m.def("round_to_bf16", &bf16, free_gil, py::arg("source"), py::arg("target"), py::arg("count"));
  m.def("sum_of_squares", &squares, free_gil, py::arg("values"), py::arg("count"));
  m.attr("FEWEST_TAKEN_IN") = es::kFewest;
  m.def("take_in", &take_in, py::arg("source"), py::arg("target"), py::arg("count"));
  m.def("hash_of", &hash_of, py::arg("values"), py::arg("count"));
  m.def("fold", &fold, free_gil, py::arg("grad"), py::arg("sum"), py::arg("count"), py::arg("scale"), py::arg("limit"),
        py::arg("first"));
  m.def("unfold", &unfold, free_gil, py::arg("sum"), py::arg("out"), py::arg("count"), py::arg("scale"));
}
