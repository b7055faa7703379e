#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "settings.h"

namespace sim {
namespace {

constexpr size_t kRound = 512;

bool all_reached(const std::vector<PointPtr>& points) {
  return std::all_of(points.begin(), points.end(), [](auto& point) { return point->is_reached(); });
}

}  // namespace

DeviceMemory& device_memory() {
  static auto* made = new DeviceMemory;
  return *made;
}

c10::DataPtr DeviceMemory::allocate(size_t num_bytes) {
  c10::Device device(kSim, current_device());
  void* data = take(num_bytes);
  return {data, data, &free_block, device};
}

c10::DeleterFnPtr DeviceMemory::raw_deleter() const { return &free_block; }

void DeviceMemory::copy_data(void* to, const void* from, std::size_t num_bytes) const {
  memcpy(to, from, num_bytes);
}

void DeviceMemory::free_block(void* data) { device_memory().give(data); }

void DeviceMemory::collect() {
  for (size_t i = 0; i < pending_.size();) {
    auto& [block, points] = pending_[i];
    if (!all_reached(points)) {
      i++;
      continue;
    }
    races().forget(block.data, block.size);
    free_[{block.device, block.stream}].emplace(block.size, block);
    pending_.erase(pending_.begin() + i);
  }
}

void* DeviceMemory::take(size_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  int device = current_device();
  int64_t stream = current_stream_id(device);
  stream_of(device, stream);  // refuses a forked process
  size_t size = (num_bytes + kRound - 1) / kRound * kRound;
  std::unique_lock<std::mutex> lock(mutex_);
  collect();
  auto& stats = stats_[device];
  auto& list = free_[{device, stream}];
  auto found = list.lower_bound(size);
  Block block{nullptr, size, device, stream, {}};
  if (found != list.end() && found->first <= size + std::max<size_t>(size / 8, 1 << 20)) {
    block = found->second;
    block.users.clear();
    list.erase(found);
  } else {
    if (stats.reserved + int64_t(size) > settings().memory) {
      stats.retries++;
      lock.unlock();
      empty_cache(device);
      lock.lock();
    }
    if (stats.reserved + int64_t(size) > settings().memory) {
      stats.out_of_memory++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size,
                       " bytes. GPU ", device, " has a total capacity of ", settings().memory,
                       " of which ", settings().memory - stats.reserved, " is free.");
    }
    TORCH_CHECK(posix_memalign(&block.data, kRound, size) == 0, "the host has no memory left");
    if (settings().poison) memset(block.data, kPoison, size);
    stats.reserved += size;
    stats.reserved_peak = std::max(stats.reserved_peak, stats.reserved);
  }
  stats.allocated += block.size;
  stats.allocated_peak = std::max(stats.allocated_peak, stats.allocated);
  live_[block.data] = block;
  return block.data;
}

void DeviceMemory::give(void* data) {
  if (!data || is_forked()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(data);
  if (found == live_.end()) return;
  Block block = found->second;
  live_.erase(found);
  stats_[block.device].allocated -= block.size;
  if (block.users.empty()) {
    // Its own stream may have it again at once; poison is written where that stream is by then.
    if (settings().poison) {
      stream_of(block.device, block.stream).poison(block.data, block.size);
    }
    free_[{block.device, block.stream}].emplace(block.size, block);
    return;
  }
  std::vector<PointPtr> points;
  for (auto id : block.users) points.push_back(stream_of(block.device, id).record());
  pending_.emplace_back(block, points);
}

void DeviceMemory::empty_cache(int device) {
  if (is_forked()) return;
  for (auto* stream : streams_on(device)) stream->record()->wait();
  std::lock_guard<std::mutex> lock(mutex_);
  collect();
  for (auto& [key, list] : free_) {
    if (key.first != device) continue;
    for (auto& [size, block] : list) {
      stats_[device].reserved -= size;
      races().forget(block.data, block.size);
      free(block.data);
    }
    list.clear();
  }
}

void DeviceMemory::record_stream(void* data, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(data);
  if (found != live_.end() && found->second.stream != stream) found->second.users.insert(stream);
}

MemoryStats DeviceMemory::stats(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_[device];
}

void DeviceMemory::reset_peak(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& stats = stats_[device];
  stats.allocated_peak = stats.allocated;
  stats.reserved_peak = stats.reserved;
}

}  // namespace sim
