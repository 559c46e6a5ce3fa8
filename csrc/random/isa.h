// Instruction sets a kernel exists for; the widest one the processor has is used.
#pragma once

namespace megatron_elastic::random {

enum class Isa { kGeneric = 0, kAvx2 = 1, kAvx512 = 2 };

#if defined(__x86_64__) && defined(__GNUC__)
#define MEGATRON_ELASTIC_X86 1
#define MEGATRON_ELASTIC_AVX2 __attribute__((target("avx2,f16c")))
#define MEGATRON_ELASTIC_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c")))
#else
#define MEGATRON_ELASTIC_X86 0
#endif

inline Isa widest_isa() {
#if MEGATRON_ELASTIC_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

}  // namespace megatron_elastic::random
