// Tensors as the core sees them: contiguous bytes in host memory.
//
// Contiguous CPU tensors are used where they lie. Others are copied, outputs
// back at the end, by the thread that runs the operation.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "../dtype.hpp"
#include "../operation.hpp"

namespace elastic::comm {

DType dtype_of(const at::Tensor& tensor);  // throws for types that have no reduction

inline size_t bytes_of(const at::Tensor& t) {
  return size_t(t.numel()) * size_t(t.element_size());
}

inline Span span_of(const at::Tensor& flat) {
  return {static_cast<char*>(flat.data_ptr()), bytes_of(flat)};
}

// Raises ValueError with `what` unless `condition` holds.
inline void expect(bool condition, const char* what) {
  TORCH_CHECK_VALUE(condition, "elastic: ", what);
}

// The one tensor that an operation of c10d gets in a list.
inline const at::Tensor& single(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "elastic: expected one tensor, got ", tensors.size());
  return tensors[0];
}

// The input: `t` itself or a contiguous copy in host memory.
at::Tensor readable(const at::Tensor& t);

// The output: `flat` now, `target` when store() is called.
struct Written {
  at::Tensor target;
  at::Tensor flat;
  void store() const {
    if (!flat.is_same(target)) target.copy_(flat);
  }
};
// With `load`, `flat` starts with the target's values.
Written writable(const at::Tensor& t, bool load);

}  // namespace elastic::comm
