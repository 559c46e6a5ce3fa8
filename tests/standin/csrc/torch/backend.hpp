// What torch needs to know of the stand-in devices: allocator, device guard, generator, hooks.
#pragma once

#ifndef NDEBUG
#error "torch is compiled with NDEBUG, and classes of its headers have other members without it"
#endif

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "../device.hpp"

namespace standin {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

at::Allocator* allocator();
bool is_pinned(const void* address);

// torch's errors and the standard ones are different types; `body` throws torch's.
template <typename Body>
auto guarded(Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  } catch (const std::runtime_error& error) {
    if (dynamic_cast<const c10::Error*>(static_cast<const std::exception*>(&error))) throw;
    TORCH_CHECK(false, error.what());
  }
}

c10::Stream torch_stream(const Stream& stream);
Stream& stream_of(const c10::Stream& stream);

// A generator is a seed and the number of draws so far, as CUDA's: the host advances it at the call, and the kernel,
// which runs later, draws from a CPU generator that is made from both.
const at::Generator& default_generator(int device);
at::Generator draw(const at::Generator& generator);

}  // namespace standin
