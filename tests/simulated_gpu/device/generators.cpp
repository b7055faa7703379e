#include "generators.h"

#include <ATen/CPUGeneratorImpl.h>

#include <map>
#include <mutex>

#include "streams.h"

namespace sim {
namespace {

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(int device) {
    device_ = c10::Device(kSim, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
}

at::Generator& default_generator(int device) {
  static auto* all = new std::map<int, at::Generator>;
  static auto* mutex = new std::mutex;
  if (device < 0) device = current_device();
  std::lock_guard<std::mutex> lock(*mutex);
  auto& found = (*all)[device];
  if (!found.defined()) found = new_generator(device);
  return found;
}

at::Generator for_one_kernel(const at::Generator& generator) {
  auto* impl = static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(impl->mutex_);
  return at::detail::createCPUGenerator(impl->random64());
}

}  // namespace sim
