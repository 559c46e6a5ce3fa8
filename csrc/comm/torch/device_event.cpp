#include "device_event.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace elastic::comm {

c10::Stream DeviceEvent::stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void DeviceEvent::record() {
  event_.record(stream());
}

void DeviceEvent::block() const {
  event_.block(stream());
}

}  // namespace elastic::comm
