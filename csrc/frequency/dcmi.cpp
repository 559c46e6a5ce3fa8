// Ascend NPUs: working levels of the device, each with an AI Core frequency.
//
// Source: Ascend DCMI API reference: dcmi_set_device_info with main command LP,
// sub-command SET_WORK_TOPS; that is the only public call that changes an AI Core's
// clock. Devices without working levels answer "not supported": the frequency axis
// is then off on them. Levels are set for this power cycle only, never in flash.
#include <algorithm>
#include <cstdio>

#include "driver.h"
#include "library.h"
#include "symbols.h"

namespace megatron_elastic::frequency {
namespace {

constexpr int kOk = 0;
constexpr int kErrorPermission = -8002;
constexpr int kErrorContainer = -8013;
constexpr int kErrorNotSupported = -8255;
constexpr int kMainLowPower = 8;
constexpr unsigned kSubLevels = 6, kSubSetLevel = 7, kSubGetLevel = 8;
constexpr int kFrequencyAiCore = 7;
constexpr int kMaxCards = 64;
constexpr int kMaxLevels = 10;

// Layouts of the DCMI API reference.
struct Level {
  unsigned work_tops;  // its number
  unsigned aic_tops;
  unsigned aic_freq;  // MHz
  unsigned aic_vol;
  unsigned cpu_freq;
  unsigned cpu_vol;
  unsigned char reserve[32];
};
struct Levels {
  unsigned count;
  Level each[kMaxLevels];
};
struct SetLevel {
  unsigned work_tops;
  unsigned is_in_flash;
  unsigned char reserve[32];
};
struct CurrentLevel {
  unsigned work_tops;
  unsigned count;
};
static_assert(sizeof(Level) == 56 && sizeof(SetLevel) == 40 && sizeof(CurrentLevel) == 8, "DCMI layout");

struct Api {
  int (*init)();
  int (*cards)(int*, int*, int);
  int (*devices)(int, int*, int*, int*);
  int (*frequency)(int, int, int, unsigned*);
  int (*get_info)(int, int, int, unsigned, void*, unsigned*);
  int (*set_info)(int, int, int, unsigned, const void*, unsigned);
  int (*power)(int, int, int*);
};

class Dcmi final : public Driver {
 public:
  Dcmi(const std::string& device, const std::string& path)
      : library_(path,
                 {"libdcmi.so", "/usr/local/dcmi/libdcmi.so", "/usr/local/Ascend/driver/lib64/driver/libdcmi.so"}) {
    library_.bind(api_.init, kDcmiSymbols[0]);
    library_.bind(api_.cards, kDcmiSymbols[1]);
    library_.bind(api_.devices, kDcmiSymbols[2]);
    library_.bind(api_.frequency, kDcmiSymbols[3]);
    library_.bind(api_.get_info, kDcmiSymbols[4]);
    library_.bind(api_.set_info, kDcmiSymbols[5]);
    library_.bind(api_.power, kDcmiSymbols[6]);
    check(api_.init(), "dcmi_init");
    find(device);
  }

  std::string describe() const override {
    return "DCMI, card " + std::to_string(card_) + " device " + std::to_string(device_);
  }

  Limits limits() override {
    Limits limits{};
    for (const Level& level : levels()) limits.steps_khz.push_back(int64_t{level.aic_freq} * 1000);
    std::sort(limits.steps_khz.begin(), limits.steps_khz.end());
    limits.steps_khz.erase(std::unique(limits.steps_khz.begin(), limits.steps_khz.end()), limits.steps_khz.end());
    limits.min_khz = limits.steps_khz.front();
    limits.max_khz = limits.steps_khz.back();
    return limits;
  }

  int64_t current_khz() override {
    unsigned mhz = 0;
    check(api_.frequency(card_, device_, kFrequencyAiCore, &mhz), "dcmi_get_device_frequency");
    return int64_t{mhz} * 1000;
  }

  Applied set(int64_t khz) override {
    const std::vector<Level> all = levels();
    const int64_t step = choose_step(limits().steps_khz, khz);
    // Several levels may share a clock: the one with the most compute is wanted.
    const Level* best = nullptr;
    for (const Level& level : all)
      if (int64_t{level.aic_freq} * 1000 == step && (!best || level.aic_tops > best->aic_tops)) best = &level;
    set_level(best->work_tops);
    return {khz, step, current_khz(), level_now() == best->work_tops};
  }

  std::string snapshot() override { return std::to_string(level_now()); }

  void restore(const std::string& snapshot) override { set_level(static_cast<unsigned>(std::stoul(snapshot))); }

  int64_t power_mw() override {
    int tenths_of_watt = 0;
    const int code = api_.power(card_, device_, &tenths_of_watt);
    if (code == kErrorNotSupported) return kUnknown;
    check(code, "dcmi_get_device_power_info");
    return int64_t{tenths_of_watt} * 100;
  }

 private:
  static void check(int code, const char* call) {
    if (code == kOk) return;
    const std::string text = std::string(call) + ": error " + std::to_string(code);
    if (code == kErrorPermission) throw NotPermitted(text + " (operation not permitted)");
    if (code == kErrorContainer) throw NotPermitted(text + " (not supported in a container)");
    if (code == kErrorNotSupported) throw Unavailable(text + " (not supported by this device)");
    throw Unavailable(text);
  }

  // `device`: "card:device", or the n-th NPU over all cards.
  void find(const std::string& device) {
    int count = 0, cards[kMaxCards] = {};
    check(api_.cards(&count, cards, kMaxCards), "dcmi_get_card_num_list");
    int wanted_card = -1, wanted_device = -1, index = -1, used = 0;
    const bool pair = std::sscanf(device.c_str(), "%d:%d%n", &wanted_card, &wanted_device, &used) == 2 &&
                      used == static_cast<int>(device.size());
    const bool single = !pair && std::sscanf(device.c_str(), "%d%n", &index, &used) == 1 && index >= 0 &&
                        used == static_cast<int>(device.size());
    if (!pair && !single) throw std::invalid_argument("NPU '" + device + "' is neither an index nor card:device");
    for (int i = 0, n = 0; i < count && i < kMaxCards; ++i) {
      int devices = 0, mcu = 0, cpu = 0;
      check(api_.devices(cards[i], &devices, &mcu, &cpu), "dcmi_get_device_id_in_card");
      for (int d = 0; d < devices; ++d, ++n) {
        if (pair ? cards[i] != wanted_card || d != wanted_device : n != index) continue;
        card_ = cards[i];
        device_ = d;
        return;
      }
    }
    throw Unavailable("no NPU '" + device + "'");
  }

  std::vector<Level> levels() {
    Levels levels{};
    unsigned size = sizeof(levels);
    check(api_.get_info(card_, device_, kMainLowPower, kSubLevels, &levels, &size), "dcmi_get_device_info(LP, levels)");
    if (levels.count == 0 || levels.count > kMaxLevels) throw Unavailable("this NPU lists no working levels");
    return {levels.each, levels.each + levels.count};
  }

  unsigned level_now() {
    CurrentLevel now{};
    unsigned size = sizeof(now);
    check(api_.get_info(card_, device_, kMainLowPower, kSubGetLevel, &now, &size), "dcmi_get_device_info(LP, level)");
    return now.work_tops;
  }

  void set_level(unsigned level) {
    SetLevel wanted{};
    wanted.work_tops = level;
    wanted.is_in_flash = 0;
    check(api_.set_info(card_, device_, kMainLowPower, kSubSetLevel, &wanted, sizeof(wanted)),
          "dcmi_set_device_info(LP, level)");
  }

  Library library_;
  Api api_{};
  int card_ = 0;
  int device_ = 0;
};

}  // namespace

std::unique_ptr<Driver> open_dcmi(const std::string& device, const std::string& path) {
  return std::make_unique<Dcmi>(device, path);
}

}  // namespace megatron_elastic::frequency
