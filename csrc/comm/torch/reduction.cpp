#include "reduction.hpp"

#include <torch/csrc/api/include/torch/version.h>

#include "../errors.hpp"

namespace elastic::comm {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#else
using c10d::PreMulSumSupplement;
#endif

double factor_of(const c10d::ReduceOp& op) {
  const auto* supplement = static_cast<const PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) throw CommError("PREMUL_SUM needs its factor: ReduceOp.PREMUL_SUM(factor)");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

}  // namespace

void Reduction::check(const at::Tensor& t) const {
  if (factor && !at::isFloatingType(t.scalar_type())) {
    throw CommError(std::string("PREMUL_SUM multiplies floating-point tensors only, not ") +
                    at::toString(t.scalar_type()));
  }
}

Reduction reduction_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return {ReduceOp::Sum, {}};
    case c10d::ReduceOp::PREMUL_SUM:
      return {ReduceOp::Sum, factor_of(op)};
    case c10d::ReduceOp::AVG:
      return {ReduceOp::Avg, {}};
    case c10d::ReduceOp::PRODUCT:
      return {ReduceOp::Product, {}};
    case c10d::ReduceOp::MIN:
      return {ReduceOp::Min, {}};
    case c10d::ReduceOp::MAX:
      return {ReduceOp::Max, {}};
    case c10d::ReduceOp::BAND:
      return {ReduceOp::Band, {}};
    case c10d::ReduceOp::BOR:
      return {ReduceOp::Bor, {}};
    case c10d::ReduceOp::BXOR:
      return {ReduceOp::Bxor, {}};
    default:
      throw CommError("c10d reduction " + std::to_string(int(op.op_)) + " is not known");
  }
}

}  // namespace elastic::comm
