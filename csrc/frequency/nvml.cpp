// NVIDIA GPUs: locked graphics clocks.
//
// Source: NVML API reference (nvmlDeviceSetGpuLockedClocks and related calls).
// NVML cannot be asked which lock was in force, so restoring means unlocking: the
// driver's default.
#include <algorithm>
#include <cctype>
#include <chrono>
#include <thread>

#include "driver.h"
#include "library.h"
#include "symbols.h"

namespace megatron_elastic::frequency {
namespace {

using Device = struct nvmlDevice_st*;
using Code = int;  // nvmlReturn_t

constexpr Code kSuccess = 0;
constexpr Code kNotSupported = 3;
constexpr Code kNoPermission = 4;
constexpr Code kInsufficientSize = 7;
constexpr int kClockSm = 1;
constexpr auto kSettle = std::chrono::milliseconds(200);  // a clock change takes tens of milliseconds
constexpr unsigned kToleranceMhz = 30;                    // reported clocks come in steps of 15

struct Api {
  Code (*init)();
  Code (*shutdown)();
  const char* (*error_string)(Code);
  Code (*by_index)(unsigned, Device*);
  Code (*by_pci_bus_id)(const char*, Device*);
  Code (*by_uuid)(const char*, Device*);
  Code (*name)(Device, char*, unsigned);
  Code (*memory_clocks)(Device, unsigned*, unsigned*);
  Code (*graphics_clocks)(Device, unsigned, unsigned*, unsigned*);
  Code (*clock)(Device, int, unsigned*);
  Code (*lock)(Device, unsigned, unsigned);
  Code (*unlock)(Device);
  Code (*power)(Device, unsigned*);
};

class Nvml final : public Driver {
 public:
  Nvml(const std::string& device, const std::string& path) : library_(path, {"libnvidia-ml.so.1"}) {
    bind();
    check(api_.init(), "nvmlInit_v2");
    try {
      device_ = find(device);
    } catch (...) {
      api_.shutdown();
      throw;
    }
  }

  ~Nvml() override { api_.shutdown(); }

  std::string describe() const override {
    char name[96] = "";  // NVML_DEVICE_NAME_V2_BUFFER_SIZE
    check(api_.name(device_, name, sizeof(name)), "nvmlDeviceGetName");
    return std::string("NVML, ") + name;
  }

  Limits limits() override {
    // Graphics clocks are listed per memory clock; the highest memory clock is the one training runs at.
    const std::vector<unsigned> memory =
        list([this](unsigned* n, unsigned* v) { return api_.memory_clocks(device_, n, v); },
             "nvmlDeviceGetSupportedMemoryClocks");
    if (memory.empty()) throw Unavailable("this GPU lists no memory clocks");
    const unsigned highest = *std::max_element(memory.begin(), memory.end());
    const std::vector<unsigned> graphics =
        list([this, highest](unsigned* n, unsigned* v) { return api_.graphics_clocks(device_, highest, n, v); },
             "nvmlDeviceGetSupportedGraphicsClocks");
    if (graphics.empty()) throw Unavailable("this GPU lists no graphics clocks");
    Limits limits{};
    for (const unsigned mhz : graphics) limits.steps_khz.push_back(int64_t{mhz} * 1000);
    std::sort(limits.steps_khz.begin(), limits.steps_khz.end());
    limits.min_khz = limits.steps_khz.front();
    limits.max_khz = limits.steps_khz.back();
    return limits;
  }

  int64_t current_khz() override { return int64_t{clock_mhz()} * 1000; }

  Applied set(int64_t khz) override {
    const int64_t step = choose_step(limits().steps_khz, khz);
    const auto mhz = static_cast<unsigned>(step / 1000);
    check(api_.lock(device_, mhz, mhz), "nvmlDeviceSetGpuLockedClocks");
    const auto until = std::chrono::steady_clock::now() + kSettle;
    unsigned seen = clock_mhz();
    while (!near(seen, mhz) && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      seen = clock_mhz();
    }
    return {khz, step, int64_t{seen} * 1000, near(seen, mhz)};
  }

  std::string snapshot() override { return "unlocked"; }

  void restore(const std::string&) override { check(api_.unlock(device_), "nvmlDeviceResetGpuLockedClocks"); }

  int64_t power_mw() override {
    unsigned milliwatts = 0;
    const Code code = api_.power(device_, &milliwatts);
    if (code == kNotSupported) return kUnknown;
    check(code, "nvmlDeviceGetPowerUsage");
    return milliwatts;
  }

 private:
  static bool near(unsigned a, unsigned b) { return (a > b ? a - b : b - a) <= kToleranceMhz; }

  void bind() {
    library_.bind(api_.init, kNvmlSymbols[0]);
    library_.bind(api_.shutdown, kNvmlSymbols[1]);
    library_.bind(api_.error_string, kNvmlSymbols[2]);
    library_.bind(api_.by_index, kNvmlSymbols[3]);
    library_.bind(api_.by_pci_bus_id, kNvmlSymbols[4]);
    library_.bind(api_.by_uuid, kNvmlSymbols[5]);
    library_.bind(api_.name, kNvmlSymbols[6]);
    library_.bind(api_.memory_clocks, kNvmlSymbols[7]);
    library_.bind(api_.graphics_clocks, kNvmlSymbols[8]);
    library_.bind(api_.clock, kNvmlSymbols[9]);
    library_.bind(api_.lock, kNvmlSymbols[10]);
    library_.bind(api_.unlock, kNvmlSymbols[11]);
    library_.bind(api_.power, kNvmlSymbols[12]);
  }

  void check(Code code, const char* call) const {
    if (code == kSuccess) return;
    const std::string text = std::string(call) + ": " + api_.error_string(code);
    if (code == kNoPermission) throw NotPermitted(text);
    throw Unavailable(text);
  }

  Device find(const std::string& device) {
    Device found = nullptr;
    if (device.rfind("GPU-", 0) == 0) {
      check(api_.by_uuid(device.c_str(), &found), "nvmlDeviceGetHandleByUUID");
    } else if (device.find(':') != std::string::npos) {
      check(api_.by_pci_bus_id(device.c_str(), &found), "nvmlDeviceGetHandleByPciBusId_v2");
    } else if (!device.empty() &&
               std::all_of(device.begin(), device.end(), [](unsigned char c) { return isdigit(c); })) {
      check(api_.by_index(static_cast<unsigned>(std::stoul(device)), &found), "nvmlDeviceGetHandleByIndex_v2");
    } else {
      throw std::invalid_argument("GPU '" + device + "' is not an index, PCI bus id or UUID");
    }
    return found;
  }

  template <class Call>
  std::vector<unsigned> list(Call call, const char* name) {
    unsigned count = 0;
    const Code code = call(&count, nullptr);
    if (code != kInsufficientSize) check(code, name);
    std::vector<unsigned> values(count);
    if (count) check(call(&count, values.data()), name);
    values.resize(count);
    return values;
  }

  unsigned clock_mhz() {
    unsigned mhz = 0;
    check(api_.clock(device_, kClockSm, &mhz), "nvmlDeviceGetClockInfo");
    return mhz;
  }

  Library library_;
  Api api_{};
  Device device_ = nullptr;
};

}  // namespace

std::unique_ptr<Driver> open_nvml(const std::string& device, const std::string& path) {
  return std::make_unique<Nvml>(device, path);
}

}  // namespace megatron_elastic::frequency
