// What torch asks of a kind of device.
#pragma once

#include <c10/core/Stream.h>

#include "streams.h"

namespace sim {

inline int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

inline c10::Stream as_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

}  // namespace sim
