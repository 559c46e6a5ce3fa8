#include "shared_memory.hpp"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "errors.hpp"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace elastic::comm {
namespace {

std::string reason(const char* what) {
  return std::string(what) + ": " + std::strerror(errno);
}

// First number in a file, or `fallback` where it holds none ("max").
uint64_t number_in(const std::string& path, uint64_t fallback) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : fallback;
}

uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("MemAvailable:", 0) == 0) {
      std::istringstream words(line.substr(13));
      uint64_t kib = 0;
      words >> kib;
      return kib << 10;
    }
  }
  return UINT64_MAX;
}

// The unified cgroup of this process, as a path below /sys/fs/cgroup.
std::string cgroup_path() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("0::", 0) == 0) return "/sys/fs/cgroup" + line.substr(3);
  }
  return "/sys/fs/cgroup";
}

}  // namespace

size_t shared_memory_headroom() {
  const std::string cgroup = cgroup_path();
  const uint64_t limit = number_in(cgroup + "/memory.max", UINT64_MAX);
  const uint64_t used = number_in(cgroup + "/memory.current", 0);
  const uint64_t in_cgroup = limit == UINT64_MAX ? UINT64_MAX : (limit > used ? limit - used : 0);
  return size_t(std::min(available_memory(), in_cgroup));
}

size_t lent_bytes() {
  // A limit on files or addresses is meant for what is used, and a signal ends who goes beyond the first one.
  for (const auto resource : {RLIMIT_FSIZE, RLIMIT_AS}) {
    rlimit limit{};
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return 0;
  }
  constexpr uint64_t kMost = uint64_t(64) << 30;  // of some hundred ranks on a host, within 47 bits
  const auto machine = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
  return size_t(std::min(machine / 2, kMost)) & ~size_t(4095);
}

SharedMemory::~SharedMemory() {
  close_fd();
  if (base_ != nullptr) munmap(base_, size_);
}

SharedMemory::SharedMemory(SharedMemory&& o) noexcept {
  *this = std::move(o);
}

SharedMemory& SharedMemory::operator=(SharedMemory&& o) noexcept {
  std::swap(base_, o.base_);
  std::swap(size_, o.size_);
  std::swap(fd_, o.fd_);
  return *this;
}

void SharedMemory::close_fd() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

bool SharedMemory::allocate(size_t offset, size_t bytes) {
  int rc;
  do {
    rc = posix_fallocate(fd_, off_t(offset), off_t(bytes));
  } while (rc == EINTR);
  errno = rc;
  return rc == 0;
}

SharedMemory SharedMemory::create(const std::string& label, size_t size, size_t allocated) {
  SharedMemory m;
  m.fd_ = int(syscall(SYS_memfd_create, label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (m.fd_ < 0) throw CommError(reason("memfd_create"));
  if (ftruncate(m.fd_, off_t(size)) != 0 || !m.allocate(allocated)) throw CommError(reason("shared memory"));
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, m.fd_, 0);
  if (base == MAP_FAILED) throw CommError(reason("mmap"));
  m.base_ = base;
  m.size_ = size;
  if (fcntl(m.fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) throw CommError(reason("sealing"));
  // From Linux 5.1 on; without it peers are only trusted not to map writably.
  fcntl(m.fd_, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  fcntl(m.fd_, F_ADD_SEALS, F_SEAL_SEAL);
  return m;
}

SharedMemory SharedMemory::open(int fd, size_t minimum) {
  SharedMemory m;
  m.fd_ = fd;
  struct stat info{};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) throw CommError("peer's segment is not sealed");
  if (fstat(fd, &info) != 0 || size_t(info.st_size) < minimum) throw CommError("peer's segment is too small");
  void* base = mmap(nullptr, size_t(info.st_size), PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw CommError(reason("mmap of a peer's segment"));
  m.base_ = base;
  m.size_ = size_t(info.st_size);
  m.close_fd();
  return m;
}

}  // namespace elastic::comm
