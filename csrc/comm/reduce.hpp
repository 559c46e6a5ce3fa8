// Element-wise reduction of n sources in the order given: ((s0 + s1) + s2) + …
//
// bf16 and fp16 are accumulated in fp32 and rounded once, to nearest even; the
// average divides once, after the sum, and for integers truncates towards zero.
// Min and max propagate NaN. One pass over memory for any n: a strip of the
// accumulator stays in the first-level cache. Bits do not depend on which
// instruction set the kernel was compiled for (no contraction, no reassociation).
#pragma once

#include <cstddef>

#include "dtype.hpp"

namespace elastic::comm {

// Throws CommError for bit operators on floating point and averages of bool: before a collective begins, since one that
// fails half-way breaks its group.
void expect_defined(DType type, ReduceOp op);

// out[i] = reduce over k of sources[k][i], i < count. `out` may be one of the sources.
// Throws as expect_defined() does.
void reduce(DType type, ReduceOp op, void* out, const void* const* sources, size_t n, size_t count);

// Name of the instruction set in use: "avx512", "avx2" or "baseline".
const char* reduce_instruction_set();

namespace detail {
using ReduceFn = void (*)(void* out, const void* const* sources, size_t n, size_t count);
ReduceFn kernel_baseline(DType type, ReduceOp op);
ReduceFn kernel_avx2(DType type, ReduceOp op);
ReduceFn kernel_avx512(DType type, ReduceOp op);
}  // namespace detail

}  // namespace elastic::comm
