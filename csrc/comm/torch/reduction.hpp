// c10d's reductions in the core's terms.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "../dtype.hpp"

namespace elastic::comm {

// PREMUL_SUM is the core's sum of inputs that each member multiplies by its `factor` first; FSDP2 divides so.
struct Reduction {
  ReduceOp op;
  std::optional<double> factor;

  // Throws CommError for types that have no products by a fraction.
  void check(const at::Tensor& t) const;
  // `t`, or memory of its size for the products.
  at::Tensor room(const at::Tensor& t) const { return factor ? at::empty_like(t) : t; }
  // Writes the products of `t` to `out`, which may be `t`; nothing where there is no factor.
  void multiply(const at::Tensor& t, at::Tensor out) const {
    if (factor) at::mul_out(out, t, at::scalar_tensor(*factor, at::kDouble));
  }
};

// Throws CommError for a reduction that the core does not have.
Reduction reduction_of(const c10d::ReduceOp& op);

}  // namespace elastic::comm
