// What torch.standin calls: plain functions, by ctypes. An error's text is left for `standin_error`.
#include <torch/csrc/python_headers.h>

#include <torch/csrc/Generator.h>

#include "backend.hpp"
#include "operators.hpp"

namespace {

thread_local std::string error;
std::string names;

template <typename Body>
int status(Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& caught) {
    error = caught.what();
    return -1;
  }
}

}  // namespace

extern "C" {

const char* standin_error() { return error.c_str(); }

int standin_configure(int devices, std::size_t capacity) {
  return status([&] { standin::configure(devices, capacity); });
}
int standin_own(int index) {
  return status([&] { standin::own(index); });
}
// Nanoseconds between call and execution; negative: as late as is allowed.
void standin_lateness(std::int64_t time) { standin::set_lateness(std::chrono::nanoseconds(time)); }
void standin_explain_faults() { standin::explain_faults(); }

int standin_device_count() { return standin::device_count(); }
int standin_current_device() { return standin::current_device(); }
int standin_set_device(int index) {
  return status([&] { standin::set_current_device(index); });
}
int standin_synchronize(int index) {
  return status([&] {
    standin::device(index).synchronize();
    standin::device(index).check();
  });
}
// total, used, reserved, peak bytes
int standin_memory(int index, std::size_t* figures) {
  return status([&] {
    const standin::Usage usage = standin::device(index).memory().usage();
    figures[0] = usage.total, figures[1] = usage.used, figures[2] = usage.reserved, figures[3] = usage.peak;
  });
}
int standin_reset_peak(int index) {
  return status([&] { standin::device(index).memory().reset_peak(); });
}
int standin_empty_cache(int index) {
  return status([&] { standin::device(index).memory().release_cached(); });
}
// Occupy the current stream of the current device for so long.
int standin_sleep(std::int64_t nanoseconds) {
  return status([&] {
    standin::current_stream(standin::current_device()).push([nanoseconds] {
      std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds));
    });
  });
}
std::int64_t standin_unpinned_asynchronous_copies() { return standin::unpinned_asynchronous_copies(); }
const char* standin_waiting_operators() {
  names = standin::waiting_operators();
  return names.c_str();
}
// For the stand-ins of vendors' libraries: where the bytes of a device address lie, and a place in a stream's order.
void* standin_backing(const void* address) { return standin::backing(address); }
int standin_device_of(const void* address) { return standin::device_of(address); }
int standin_enqueue(void* stream, void (*job)(void*), void* argument) {
  return status([&] { static_cast<standin::Stream*>(stream)->push([job, argument] { job(argument); }); });
}
// The same for work that other processes wait for: a stream that holds work back runs up to it.
int standin_enqueue_awaited(void* stream, void (*job)(void*), void* argument) {
  return status([&] {
    auto* queue = static_cast<standin::Stream*>(stream);
    queue->done(queue->push([job, argument] { job(argument); }));
  });
}
void* standin_stream(int index) { return &standin::current_stream(index); }

// With the interpreter's lock (ctypes.PyDLL).
PyObject* standin_generator(int index) { return THPGenerator_Wrap(standin::default_generator(index)); }
}
