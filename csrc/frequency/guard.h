// Restores a device's clocks when the process that set them is gone.
#pragma once

#include <string>

namespace megatron_elastic::frequency {

// Run in a process of its own. Opens the driver, claims its clocks and finds them
// still as in `snapshot`; writes "ready\n" to standard output, or why not, and then
// returns false. Waits on two descriptors: `owner` (a pidfd; readable when the owner
// is dead) and standard input (any byte: the owner has restored by itself). Returns
// true when it restored. Throws what restoring throws.
bool guard(int owner, const std::string& kind, const std::string& device, const std::string& path,
           const std::string& snapshot);

}  // namespace megatron_elastic::frequency
