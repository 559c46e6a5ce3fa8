#include "backend.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>

#include <cstring>

#include "../context.hpp"

namespace standin {
namespace {

// ---- memory

void release(void* address) {
  try {
    device(device_of(address)).memory().give(address);
  } catch (const std::exception&) {
    // In a child of the process that took it: the memory is the parent's.
  }
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    const int index = current_device();
    const c10::Device place(kType, static_cast<c10::DeviceIndex>(index));
    if (size == 0) return {nullptr, nullptr, &release_nothing, place};
    return guarded([&]() -> at::DataPtr {
      void* address = device(index).memory().take(size, current_stream(index));
      return {address, address, &release, place};
    });
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    guarded([&] {
      current_stream(device_of(to)).push([to = backing(to), from = backing(from), size] { memcpy(to, from, size); });
    });
  }
  static void release_nothing(void*) {}
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

// Page-locked memory: the only memory of the host that an asynchronous copy may name.
struct PinnedAllocator final : at::Allocator {
  static PinnedAllocator& get() {
    static auto* const found = new PinnedAllocator;
    return *found;
  }
  at::DataPtr allocate(size_t size) override {
    char* address = new char[size + 1];
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[address] = size;
    return {address, address, &free, c10::Device(c10::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
  bool holds(const void* address) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(static_cast<const char*>(address));
    if (after == blocks_.begin()) return false;
    --after;
    return static_cast<const char*>(address) < after->first + std::max<std::size_t>(after->second, 1);
  }

 private:
  static void free(void* address) {
    {
      std::lock_guard<std::mutex> lock(get().mutex_);
      get().blocks_.erase(static_cast<char*>(address));
    }
    delete[] static_cast<char*>(address);
  }
  mutable std::mutex mutex_;
  std::map<const char*, std::size_t> blocks_;
};

// ---- device, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device to) const override {
    guarded([&] { set_current_device(to.index()); });
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { set_current_device(to.index()); }
  c10::Stream getStream(c10::Device of) const override {
    const int index = of.has_index() ? of.index() : current_device();
    return guarded([&] { return torch_stream(current_stream(index)); });
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return c10::Stream(c10::Stream::DEFAULT, of); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    const int index = of.has_index() ? of.index() : current_device();
    return guarded([&] { return torch_stream(device(index).next_stream()); });
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return guarded([&] { return torch_stream(exchange_stream(stream_of(to))); });
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  // An event is used on a thread that has a device of this process: CUDA begins on the current one where it has not
  // been used before, and on Ascend a thread without one fails.
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    const auto* found = static_cast<Event*>(event);
    try {
      device(current_device());
    } catch (const std::exception& error) {
      if (Stream* stream = found->stream()) stream->device().fail(std::string("an event was freed: ") + error.what());
    }
    delete found;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    guarded([&] { static_cast<Event*>(*event)->record(stream_of(stream)); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) guarded([&] { static_cast<Event*>(event)->block(stream_of(stream)); });
  }
  bool queryEvent(void* event) const override {
    return !event || guarded([&] {
      device(current_device());
      return static_cast<Event*>(event)->query();
    });
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    guarded([&] {
      device(current_device());
      static_cast<Event*>(event)->synchronize();
      if (Stream* stream = static_cast<Event*>(event)->stream()) stream->device().check();
    });
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "both events must have been recorded");
    return guarded([&] {
      return static_cast<double>(static_cast<Event*>(end)->reached() - static_cast<Event*>(begin)->reached()) / 1e6;
    });
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  bool queryStream(const c10::Stream& stream) const override {
    Stream& found = stream_of(stream);
    return found.done(found.issued());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    guarded([&] {
      Stream& found = stream_of(stream);
      found.wait(found.issued());
      found.device().check();
    });
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    guarded([&] {
      device(index).synchronize();
      device(index).check();
    });
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get()) device(device_of(data.get())).memory().used_by(data.get(), stream_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "a stand-in generator's state has 16 bytes");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

uint64_t mixed(uint64_t word) {  // SplitMix64's finaliser (Steele, Lea, Flood 2014)
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  return word ^ (word >> 31);
}

// ---- hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return has_context(index); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    guarded([&] { set_current_device(index); });
  }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {kType, static_cast<c10::DeviceIndex>(device_of(data))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index == -1 ? current_device() : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index == -1 ? getCurrentDevice() : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::Device before = c10::Device(kType, exchangeDevice(storage.device().index()));
    at::DataPtr data = allocator()->allocate(size);
    const std::size_t common = std::min(size, storage.nbytes());
    if (common) device_allocator.copy_data(data.get(), storage.data(), common);
    setCurrentDevice(before.index());
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

at::Allocator* allocator() { return &device_allocator; }

bool is_pinned(const void* address) { return PinnedAllocator::get().holds(address); }

c10::Stream torch_stream(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(stream.device().index())),
                     stream.id());
}

Stream& stream_of(const c10::Stream& stream) {
  return guarded([&]() -> Stream& { return device(stream.device_index()).stream(static_cast<int>(stream.id())); });
}

const at::Generator& default_generator(int index) {
  static auto* const made = [] {
    auto* all = new std::array<at::Generator, kMaxDevices>;
    for (int i = 0; i < kMaxDevices; ++i)
      (*all)[static_cast<std::size_t>(i)] = at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i));
    return all;
  }();
  return made->at(static_cast<std::size_t>(index));
}

at::Generator draw(const at::Generator& generator) {
  auto* from = generator.get<Generator>();
  std::lock_guard<std::mutex> lock(from->mutex_);
  const uint64_t word = mixed(mixed(from->current_seed()) + from->get_offset());
  from->set_offset(from->get_offset() + 1);
  return at::make_generator<at::CPUGeneratorImpl>(word);
}

}  // namespace standin
