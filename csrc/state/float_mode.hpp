// Default IEEE mode for the lifetime of one scope: round to nearest, denormals kept.
//
// A host program may have set flush-to-zero on its threads
// (torch.set_flush_denormal); owner and mirror must agree whatever mode it set.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace elastic::state {

class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr((saved_ & ~kModeBits) | kMaskAll); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kModeBits = 0xe040u;  // flush-to-zero, rounding control, denormals-are-zero
  static constexpr unsigned kMaskAll = 0x1f80u;   // exceptions masked
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~DefaultFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  std::uint64_t saved_ = 0;
#else
#error "no rule to set the IEEE default mode on this architecture"
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
};

}  // namespace elastic::state
