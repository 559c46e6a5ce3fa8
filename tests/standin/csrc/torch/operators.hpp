// Counters of the operators.
#pragma once

#include <cstdint>
#include <string>

namespace standin {

// Copies called asynchronous that named pageable memory of the host.
std::int64_t unpinned_asynchronous_copies();

// Names of the operators that made the host wait for a shape.
std::string waiting_operators();

}  // namespace standin
