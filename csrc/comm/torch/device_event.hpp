// A point in the work of a device's stream.
//
// torch's own events keep the interpreter's lock in each call. A call waits while the queue of the device is full, and
// if the operation at its head waits for a lost rank, only another thread can end that one. So the lock is given up
// here.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace elastic::comm {

class DeviceEvent {
 public:
  DeviceEvent(const c10::Device& device, bool timing)
      : device_(device),
        event_(device.type(), timing ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT) {}

  // In the present thread's stream of the device.
  void record();
  // Have that stream wait for it.
  void block() const;
  bool query() const { return event_.query(); }
  void synchronize() const { event_.synchronize(); }
  // Milliseconds until `end`. Both have been reached and have `timing`.
  double elapsed_time(const DeviceEvent& end) const { return event_.elapsedTime(end.event_); }

 private:
  c10::Stream stream() const;

  c10::Device device_;
  c10::Event event_;
};

}  // namespace elastic::comm
