// One body, compiled for several vector widths and picked at load time: the
// operations are element-wise and individually rounded, so all give the same bits.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ELASTIC_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ELASTIC_CLONES
#endif

// A part of such a body. Left to itself the compiler may call it, and then it has one version, for the oldest
// processor.
#define ELASTIC_INLINE __attribute__((always_inline)) inline
