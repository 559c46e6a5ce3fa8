// One clock domain (an NPU, a set of CPUs) whose frequency can be set.
//
// Drivers: Ascend DCMI (the vendor's library, loaded with dlopen so that nothing is
// needed where it is not), Linux cpufreq (sysfs). GPUs: platform/nvml.py.
//
// Invariant: `snapshot` taken before the first `set` is all that `restore` needs,
// in this process or in another (the guard, when this one dies).
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace megatron_elastic::frequency {

// The platform has no such control: library, device or feature missing.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The control is there, this user may not use it.
struct NotPermitted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int64_t kUnknown = -1;

struct Limits {
  int64_t min_khz;
  int64_t max_khz;
  std::vector<int64_t> steps_khz;  // ascending; empty: any value between the two
};

struct Applied {
  int64_t asked_khz;
  int64_t set_khz;       // the step that was chosen
  int64_t observed_khz;  // what the device ran at when last read
  bool verified;         // the setting was read back
};

class Driver {
 public:
  virtual ~Driver() = default;
  virtual std::string describe() const = 0;
  virtual Limits limits() = 0;
  virtual int64_t current_khz() = 0;
  // Chooses the lowest step that is not below `khz` (the highest, if all are below).
  virtual Applied set(int64_t khz) = 0;
  virtual std::string snapshot() = 0;
  // Restores all it can, then throws what kept it from the rest.
  virtual void restore(const std::string& snapshot) = 0;
  // Keeps other processes that ask likewise from the clocks until this driver goes. Throws Unavailable when one has
  // them: what is found then is that one's setting, and the last one to restore would restore it. Devices of one rank:
  // nothing.
  virtual void claim() {}
  // Milliwatts, kUnknown where the platform does not say.
  virtual int64_t power_mw() = 0;
};

// kind: "dcmi" or "cpufreq".
// device: dcmi: index or "card:device"; cpufreq: CPU list ("0-3,8").
// path: the vendor's library, or the root of sysfs; empty for the usual place.
std::unique_ptr<Driver> open_driver(const std::string& kind, const std::string& device, const std::string& path);

// Names looked up in libdcmi.so.
std::vector<std::string> symbols();

std::unique_ptr<Driver> open_dcmi(const std::string& device, const std::string& path);
std::unique_ptr<Driver> open_cpufreq(const std::string& cpus, const std::string& root);

// Lowest step >= khz, else the highest. `steps` ascending and not empty.
int64_t choose_step(const std::vector<int64_t>& steps, int64_t khz);

}  // namespace megatron_elastic::frequency
