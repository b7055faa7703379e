// Memory of devices: given out in the order of streams, and poisoned when it is freed.
#pragma once

#include <c10/core/Allocator.h>

#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "streams.h"

namespace sim {

struct MemoryStats {
  int64_t allocated = 0, allocated_peak = 0;
  int64_t reserved = 0, reserved_peak = 0;
  int64_t retries = 0, out_of_memory = 0;
};

class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override;

  // `stream` uses what lies at `data`: whoever frees it waits for that.
  void record_stream(void* data, int64_t stream);
  // Give back to the host what is free.
  void empty_cache(int device);
  MemoryStats stats(int device);
  void reset_peak(int device);

 private:
  struct Block {
    void* data;
    size_t size;
    int device;
    int64_t stream;
    std::set<int64_t> users;  // streams of record_stream
  };

  static void free_block(void* data);
  void* take(size_t num_bytes);
  void give(void* data);
  void collect();

  std::mutex mutex_;
  std::map<void*, Block> live_;
  std::map<std::pair<int, int64_t>, std::multimap<size_t, Block>> free_;
  std::vector<std::pair<Block, std::vector<PointPtr>>> pending_;
  std::map<int, MemoryStats> stats_;
};
DeviceMemory& device_memory();

}  // namespace sim
