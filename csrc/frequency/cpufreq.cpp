// Linux cpufreq: minimum and maximum of the policies that cover a set of CPUs.
//
// Source: Linux kernel documentation, admin-guide/pm/cpufreq; power from the
// powercap (RAPL) energy counters where they are readable.
//
// A policy may cover CPUs outside the set (a shared clock domain); it is then set
// for all of them, and `describe` says so.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "driver.h"

namespace megatron_elastic::frequency {
namespace {

namespace fs = std::filesystem;

std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  if (!file) throw Unavailable("cannot read " + path.string() + ": " + std::strerror(errno));
  std::string text;
  std::getline(file, text);
  return text;
}

int64_t read_number(const fs::path& path) {
  const std::string text = read_text(path);
  try {
    return std::stoll(text);
  } catch (const std::logic_error&) {
    throw Unavailable(path.string() + " holds '" + text + "', not a number");
  }
}

// One write(2): sysfs takes a value as a whole or refuses it.
void write_number(const fs::path& path, int64_t value) {
  const std::string text = std::to_string(value);
  const int file = open(path.c_str(), O_WRONLY | O_CLOEXEC | O_TRUNC);
  const bool written = file >= 0 && write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  const int why = errno;
  if (file >= 0) close(file);
  if (written) return;
  const std::string line = "cannot write " + path.string() + ": " + std::strerror(why);
  if (why == EACCES || why == EPERM || why == EROFS) throw NotPermitted(line);
  throw Unavailable(line);
}

// "0-3,8" or "0 1 2" → numbers.
std::set<int> parse_cpus(const std::string& text) {
  std::set<int> cpus;
  std::string spaced = text;
  std::replace(spaced.begin(), spaced.end(), ',', ' ');
  std::istringstream parts(spaced);
  for (std::string part; parts >> part;) {
    try {
      const size_t dash = part.find('-');
      const int first = std::stoi(part.substr(0, dash));
      const int last = dash == std::string::npos ? first : std::stoi(part.substr(dash + 1));
      for (int cpu = first; cpu <= last; ++cpu) cpus.insert(cpu);
    } catch (const std::logic_error&) {
      throw std::invalid_argument("CPU list '" + text + "' is not like 0-3,8");
    }
  }
  if (cpus.empty()) throw std::invalid_argument("CPU list '" + text + "' names no CPU");
  return cpus;
}

class Cpufreq final : public Driver {
 public:
  Cpufreq(const std::string& cpus, const std::string& root)
      : root_(root.empty() ? "/sys" : root), cpus_(parse_cpus(cpus)) {
    const fs::path base = root_ / "devices/system/cpu/cpufreq";
    if (!fs::is_directory(base))
      throw Unavailable("no " + base.string() + ": this machine's CPUs have no frequency control");
    for (const auto& entry : fs::directory_iterator(base)) {
      if (entry.path().filename().string().rfind("policy", 0) != 0) continue;
      const std::string affected = read_text(entry.path() / "affected_cpus");
      if (affected.empty()) continue;  // all of its CPUs are offline
      const std::set<int> covered = parse_cpus(affected);
      if (std::any_of(covered.begin(), covered.end(), [this](int cpu) { return cpus_.count(cpu) > 0; })) {
        policies_.push_back(entry.path());
        covered_.insert(covered.begin(), covered.end());
      }
    }
    std::sort(policies_.begin(), policies_.end());
    if (policies_.empty()) throw Unavailable("no cpufreq policy covers CPUs " + cpus);
  }

  std::string describe() const override {
    const size_t others =
        covered_.size() - static_cast<size_t>(std::count_if(covered_.begin(), covered_.end(),
                                                            [this](int cpu) { return cpus_.count(cpu) > 0; }));
    std::string text =
        "cpufreq, " + std::to_string(policies_.size()) + " policies, " + std::to_string(covered_.size()) + " CPUs";
    if (others) text += " (" + std::to_string(others) + " of them shared with others)";
    return text;
  }

  Limits limits() override {
    Limits limits{0, INT64_MAX, {}};
    bool listed = true;
    std::set<int64_t> common;
    for (const fs::path& policy : policies_) {
      limits.min_khz = std::max(limits.min_khz, read_number(policy / "cpuinfo_min_freq"));
      limits.max_khz = std::min(limits.max_khz, read_number(policy / "cpuinfo_max_freq"));
      listed = listed && fs::exists(policy / "scaling_available_frequencies");
      if (!listed) continue;
      std::istringstream words(read_text(policy / "scaling_available_frequencies"));
      std::set<int64_t> steps;
      for (int64_t khz; words >> khz;) steps.insert(khz);
      if (&policy == &policies_.front()) {
        common = steps;
      } else {
        for (auto it = common.begin(); it != common.end();) it = steps.count(*it) ? std::next(it) : common.erase(it);
      }
    }
    if (limits.min_khz > limits.max_khz || (listed && common.empty()))
      throw Unavailable("the cpufreq policies of these CPUs have no frequency in common");
    if (listed) limits.steps_khz.assign(common.begin(), common.end());
    return limits;
  }

  int64_t current_khz() override {  // the slowest of the policies: work waits for it
    int64_t slowest = INT64_MAX;
    for (const fs::path& policy : policies_) slowest = std::min(slowest, read_number(policy / "scaling_cur_freq"));
    return slowest;
  }

  Applied set(int64_t khz) override {
    const Limits bounds = limits();
    const int64_t step =
        bounds.steps_khz.empty() ? std::clamp(khz, bounds.min_khz, bounds.max_khz) : choose_step(bounds.steps_khz, khz);
    bool verified = true;
    for (const fs::path& policy : policies_) {
      write_range(policy, step, step);
      verified = verified && read_number(policy / "scaling_min_freq") == step &&
                 read_number(policy / "scaling_max_freq") == step;
    }
    return {khz, step, current_khz(), verified};
  }

  // "policy0 800000 3000000;policy1 ..."
  std::string snapshot() override {
    std::string text;
    for (const fs::path& policy : policies_)
      text += policy.filename().string() + " " + std::to_string(read_number(policy / "scaling_min_freq")) + " " +
              std::to_string(read_number(policy / "scaling_max_freq")) + ";";
    return text;
  }

  // A policy whose CPUs went offline is no reason to leave the others as they are.
  void restore(const std::string& snapshot) override {
    std::exception_ptr failed;
    std::istringstream entries(snapshot);
    for (std::string entry; std::getline(entries, entry, ';');) {
      std::istringstream words(entry);
      std::string name;
      int64_t low = 0, high = 0;
      if (!(words >> name >> low >> high)) throw std::invalid_argument("bad snapshot '" + snapshot + "'");
      try {
        write_range(root_ / "devices/system/cpu/cpufreq" / name, low, high);
      } catch (const std::runtime_error&) {
        if (!failed) failed = std::current_exception();
      }
    }
    if (failed) std::rethrow_exception(failed);
  }

  void claim() override {
    for (const fs::path& policy : policies_) {
      const int folder = open(policy.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
      if (folder >= 0) claimed_.push_back(folder);
      if (folder < 0 || flock(folder, LOCK_EX | LOCK_NB) != 0) {
        const int why = errno;
        release();
        if (why == EWOULDBLOCK) throw Unavailable(policy.filename().string() + " is being set by another process");
        throw Unavailable("cannot lock " + policy.string() + ": " + std::strerror(why));
      }
    }
  }

  ~Cpufreq() override { release(); }

  int64_t power_mw() override {
    const auto now = std::chrono::steady_clock::now();
    const std::map<std::string, std::pair<int64_t, int64_t>> energy = read_energy();
    const auto before = std::exchange(energy_, energy);
    const auto since =
        std::chrono::duration_cast<std::chrono::microseconds>(now - std::exchange(energy_at_, now)).count();
    if (energy.empty() || before.size() != energy.size() || since <= 0) return kUnknown;
    int64_t microjoules = 0;
    for (const auto& [name, reading] : energy) {
      const auto& [value, range] = reading;
      const int64_t spent = value - before.at(name).first;
      microjoules += spent < 0 ? spent + range : spent;  // the counter wraps
    }
    return microjoules * 1000 / since;
  }

 private:
  void release() {
    for (const int folder : claimed_) close(folder);
    claimed_.clear();
  }

  // The kernel refuses min > max at any moment: widen first, then narrow.
  static void write_range(const fs::path& policy, int64_t low, int64_t high) {
    if (high >= read_number(policy / "scaling_min_freq")) {
      write_number(policy / "scaling_max_freq", high);
      write_number(policy / "scaling_min_freq", low);
    } else {
      write_number(policy / "scaling_min_freq", low);
      write_number(policy / "scaling_max_freq", high);
    }
  }

  // Package → (energy, where it wraps), microjoules; none where unreadable (needs root on recent kernels).
  std::map<std::string, std::pair<int64_t, int64_t>> read_energy() const {
    std::map<std::string, std::pair<int64_t, int64_t>> found;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(root_ / "class/powercap", none)) {
      const std::string name = entry.path().filename().string();
      if (std::count(name.begin(), name.end(), ':') != 1) continue;  // packages, not their parts
      try {
        found[name] = {read_number(entry.path() / "energy_uj"), read_number(entry.path() / "max_energy_range_uj")};
      } catch (const Unavailable&) {
        return {};
      }
    }
    return found;
  }

  fs::path root_;
  std::set<int> cpus_, covered_;
  std::vector<fs::path> policies_;
  std::vector<int> claimed_;  // folders of policies, locked
  std::map<std::string, std::pair<int64_t, int64_t>> energy_;
  std::chrono::steady_clock::time_point energy_at_;
};

}  // namespace

std::unique_ptr<Driver> open_cpufreq(const std::string& cpus, const std::string& root) {
  return std::make_unique<Cpufreq>(cpus, root);
}

}  // namespace megatron_elastic::frequency
