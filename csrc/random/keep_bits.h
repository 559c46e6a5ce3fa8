// Which elements a stream keeps, 64 coordinates at a time.
//
// Group g covers coordinates 64g ... 64g+63 of a sample. Coordinate 64g + 16w + i
// is word w of Philox block 16g + i, so that one vector register of blocks gives
// neighbouring elements without a transpose. Bit j of a group's mask says whether
// coordinate 64g + j is kept: its word is >= the drop threshold.
//
// Invariant: every instruction set gives the same bits (tests compare them all).
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"
#include "philox.h"

namespace megatron_elastic::random {

// Fill out[0, count) with the masks of groups first ... first + count - 1.
// `drop_below`: an element is dropped when its 32-bit word is below it.
void keep_bits(Isa isa, const Stream& stream, uint64_t first, size_t count, uint32_t drop_below, uint64_t* out);

}  // namespace megatron_elastic::random
