// Element types and reduction operators of the communicator.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elastic::comm {

enum class DType : uint8_t { F32, F64, BF16, F16, I8, I16, I32, I64, U8, Bool };

// Bool reduces logically: sum, max and bor are "or"; product, min and band are "and".
enum class ReduceOp : uint8_t { Sum, Avg, Product, Min, Max, Band, Bor, Bxor };

constexpr size_t size_of(DType t) {
  switch (t) {
    case DType::F64:
    case DType::I64:
      return 8;
    case DType::F32:
    case DType::I32:
      return 4;
    case DType::BF16:
    case DType::F16:
    case DType::I16:
      return 2;
    default:
      return 1;
  }
}

}  // namespace elastic::comm
