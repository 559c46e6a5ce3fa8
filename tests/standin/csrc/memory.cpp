#include "memory.hpp"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "device.hpp"
#include "stream.hpp"

namespace standin {
namespace {

constexpr std::size_t kGrain = 512;  // CUDA's allocator rounds to the same
constexpr std::size_t kRange = kSpan * kMaxDevices;

char* reserve(int access) {
  void* range = mmap(nullptr, kRange, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) throw std::runtime_error("the stand-in device cannot reserve addresses");
  return static_cast<char*>(range);
}

char* device_range() {
  static char* const range = reserve(PROT_NONE);
  return range;
}

char* backing_range() {
  static char* const range = reserve(PROT_READ | PROT_WRITE);
  return range;
}

std::size_t rounded(std::size_t size) { return (size + kGrain - 1) / kGrain * kGrain; }

struct sigaction previous;

void on_fault(int number, siginfo_t* info, void* context) {
  const int device = device_of(info->si_addr);
  if (device >= 0) {
    char line[160];
    const int length = snprintf(line, sizeof line, "standin: the host touched memory of device %d at %p\n", device,
                                info->si_addr);
    if (write(STDERR_FILENO, line, static_cast<std::size_t>(length)) < 0) _exit(128 + number);
    void* frames[24];
    backtrace_symbols_fd(frames, backtrace(frames, 24), STDERR_FILENO);
  }
  if ((previous.sa_flags & SA_SIGINFO) && previous.sa_sigaction) return previous.sa_sigaction(number, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(number);
  signal(number, SIG_DFL);  // the access is repeated and ends the process
}

}  // namespace

void* backing(const void* address) {
  return backing_range() + (static_cast<const char*>(address) - device_range());
}

int device_of(const void* address) {
  const std::ptrdiff_t offset = static_cast<const char*>(address) - device_range();
  return offset < 0 || static_cast<std::size_t>(offset) >= kRange ? -1 : static_cast<int>(offset / std::ptrdiff_t(kSpan));
}

void explain_faults() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous);
}

Memory::Memory(int device, std::size_t capacity)
    : device_(device), capacity_(capacity), base_(device_range() + kSpan * static_cast<std::size_t>(device)) {
  space_[0] = capacity;
}

void* Memory::take(std::size_t asked, Stream& stream) {
  const std::size_t size = rounded(asked);
  void* address = nullptr;
  bool fresh = false;
  for (int attempt = 0; attempt < 2 && !address; ++attempt) {
    if (attempt) release_cached();
    std::lock_guard<std::mutex> lock(mutex_);
    auto bin = cached_.find({&stream, size});
    if (bin != cached_.end() && !bin->second.empty()) {
      address = bin->second.back();
      bin->second.pop_back();
    } else {
      address = take_from_space(size);
      fresh = address != nullptr;
    }
    if (!address) continue;
    blocks_[address] = Block{size, &stream, {}};
    used_ += size;
    peak_ = std::max(peak_, used_);
  }
  if (!address)
    throw OutOfMemory("standin out of memory: device " + std::to_string(device_) + " has " + std::to_string(capacity_) +
                      " bytes, " + std::to_string(used_) + " in use, asked for " + std::to_string(asked));
  if (fresh) stream.push([bytes = backing(address), size] { memset(bytes, 0xFF, size); });
  return address;
}

void Memory::give(void* address) {
  Block block;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = blocks_.find(address);
    block = std::move(found->second);
    blocks_.erase(found);
    used_ -= block.size;
  }
  for (Stream* other : block.others) block.stream->push_wait(*other, other->issued());
  block.stream->push([bytes = backing(address), size = block.size] { memset(bytes, 0xFF, size); });
  std::lock_guard<std::mutex> lock(mutex_);
  cached_[{block.stream, block.size}].push_back(address);
}

void Memory::used_by(void* address, Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.find(address);
  if (found != blocks_.end() && found->second.stream != &stream) found->second.others.insert(&stream);
}

void Memory::release_cached() {
  device(device_).synchronize();
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [key, addresses] : cached_)
    for (void* address : addresses)
      return_to_space(static_cast<std::size_t>(static_cast<char*>(address) - base_), key.second);
  cached_.clear();
}

void* Memory::take_from_space(std::size_t size) {
  for (auto hole = space_.begin(); hole != space_.end(); ++hole) {
    if (hole->second < size) continue;
    const std::size_t offset = hole->first, left = hole->second - size;
    space_.erase(hole);
    if (left) space_[offset + size] = left;
    return base_ + offset;
  }
  return nullptr;
}

void Memory::return_to_space(std::size_t offset, std::size_t size) {
  auto after = space_.lower_bound(offset);
  if (after != space_.end() && offset + size == after->first) {
    size += after->second;
    after = space_.erase(after);
  }
  if (after != space_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  space_[offset] = size;
}

Usage Memory::usage() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::size_t cached = 0;
  for (const auto& [key, addresses] : cached_) cached += key.second * addresses.size();
  return {capacity_, used_, used_ + cached, peak_};
}

void Memory::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  peak_ = used_;
}

}  // namespace standin
