#include "device.hpp"

#include "context.hpp"

#include <pthread.h>

#include <cstdlib>
#include <stdexcept>

namespace standin {
namespace {

struct Settings {
  int devices = 4;
  std::size_t capacity = std::size_t(1) << 32;
  std::atomic<int> own{-1};
  std::array<std::atomic<Device*>, kMaxDevices> made{};
  std::mutex mutex;
};

Settings& settings() {
  static Settings* const found = new Settings;  // outlives the threads
  return *found;
}

std::atomic<bool> used{false}, forked{false};

// At the first use, since a launcher forks its workers from a process that has loaded this library, and tells each its
// rank afterwards.
void begin() {
  const char *wanted = getenv("STANDIN_OWN"), *rank = getenv("LOCAL_RANK");
  if (wanted && std::string(wanted) == "local") settings().own = (rank ? atoi(rank) : 0) % settings().devices;
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  used = true;
}

thread_local int current = 0;
thread_local std::array<int, kMaxDevices> current_streams{};

}  // namespace

Device::Device(int index, std::size_t capacity) : index_(index), memory_(index, capacity) {
  for (int id = 0; id < kStreams; ++id) streams_[static_cast<std::size_t>(id)] = std::make_unique<Stream>(*this, id);
}

Stream& Device::stream(int id) { return *streams_.at(static_cast<std::size_t>(id)); }

Stream& Device::next_stream() { return stream(1 + next_++ % (kStreams - 1)); }

void Device::synchronize() {
  for (const auto& stream : streams_) {
    const std::uint64_t position = stream->issued();
    if (position) stream->wait(position);
  }
}

void Device::fail(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failed_) error_ = error;
  failed_ = true;
}

void Device::check() const {
  if (!failed_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  throw std::runtime_error("standin:" + std::to_string(index_) + ": a kernel failed earlier: " + error_);
}

void configure(int devices, std::size_t capacity) {
  if (used) throw std::runtime_error("the stand-in devices are in use already");
  if (devices < 0 || devices > kMaxDevices || capacity > kSpan)
    throw std::runtime_error("at most " + std::to_string(kMaxDevices) + " stand-in devices of " + std::to_string(kSpan) +
                             " bytes");
  settings().devices = devices;
  settings().capacity = capacity;
}

bool has_context(int index) {
  return index >= 0 && index < kMaxDevices && settings().made[static_cast<std::size_t>(index)] != nullptr;
}

int device_count() { return settings().devices; }

Device& device(int index) {
  Settings& all = settings();
  static std::once_flag once;
  std::call_once(once, begin);
  if (index < 0 || index >= all.devices)
    throw std::runtime_error("there is no device standin:" + std::to_string(index) + ": there are " +
                             std::to_string(all.devices));
  if (all.own >= 0 && index != all.own)
    throw std::runtime_error("this process works on standin:" + std::to_string(all.own) + " alone, not on standin:" +
                             std::to_string(index) + " (is the current device set in each thread?)");
  auto& place = all.made[static_cast<std::size_t>(index)];
  if (Device* found = place) return *found;
  std::lock_guard<std::mutex> lock(all.mutex);
  if (!place) place = new Device(index, all.capacity);
  return *place;
}

void own(int index) { settings().own = index; }

int current_device() { return current; }

void set_current_device(int index) {
  if (index < 0 || index >= device_count())
    throw std::runtime_error("there is no device standin:" + std::to_string(index) + ": there are " +
                             std::to_string(device_count()));
  current = index;
}

Stream& current_stream(int index) { return device(index).stream(current_streams[static_cast<std::size_t>(index)]); }

Stream& exchange_stream(Stream& stream) {
  const int index = stream.device().index();
  Stream& before = current_stream(index);
  current_streams[static_cast<std::size_t>(index)] = stream.id();
  return before;
}

void check_fork() {
  if (forked)
    throw std::runtime_error("a stand-in device was used before this process was forked: use it first in the child");
}

}  // namespace standin

extern "C" {
int standin_used() { return standin::used && !standin::forked; }
int standin_forked() { return standin::forked; }
}
