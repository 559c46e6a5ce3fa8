// Chooses a driver by name.
#include "driver.h"

#include <algorithm>

#include "symbols.h"

namespace megatron_elastic::frequency {

std::unique_ptr<Driver> open_driver(const std::string& kind, const std::string& device, const std::string& path) {
  if (kind == "dcmi") return open_dcmi(device, path);
  if (kind == "cpufreq") return open_cpufreq(device, path);
  throw std::invalid_argument("unknown frequency driver '" + kind + "'");
}

std::vector<std::string> symbols() {
  return {std::begin(kDcmiSymbols), std::end(kDcmiSymbols)};
}

int64_t choose_step(const std::vector<int64_t>& steps, int64_t khz) {
  const auto at = std::lower_bound(steps.begin(), steps.end(), khz);
  return at == steps.end() ? steps.back() : *at;
}

}  // namespace megatron_elastic::frequency
