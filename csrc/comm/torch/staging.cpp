#include "staging.hpp"

namespace elastic::comm {
namespace {

bool plain(const at::Tensor& t) {
  return t.is_cpu() && t.is_contiguous() && !t.is_conj() && !t.is_neg();
}

}  // namespace

DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return DType::F32;
    case at::kDouble:
      return DType::F64;
    case at::kBFloat16:
      return DType::BF16;
    case at::kHalf:
      return DType::F16;
    case at::kChar:
      return DType::I8;
    case at::kShort:
      return DType::I16;
    case at::kInt:
      return DType::I32;
    case at::kLong:
      return DType::I64;
    case at::kByte:
      return DType::U8;
    case at::kBool:
      return DType::Bool;
    default:
      throw CommError(std::string("no reduction for tensors of type ") + at::toString(t.scalar_type()));
  }
}

at::Tensor readable(const at::Tensor& t) {
  if (plain(t)) return t;
  return t.detach().resolve_conj().resolve_neg().cpu().contiguous();
}

Written writable(const at::Tensor& t, bool load) {
  if (plain(t)) return {t, t};
  const at::Tensor target = t.detach();
  if (!load) return {target, at::empty(t.sizes(), t.options().device(at::kCPU).requires_grad(false))};
  at::Tensor flat = readable(target);
  // resolve_* and cpu() may hand back the tensor itself; it must be one of our own.
  return {target, flat.is_same(target) ? flat.clone() : flat};
}

}  // namespace elastic::comm
