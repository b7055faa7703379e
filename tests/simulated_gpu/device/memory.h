// Memory of devices: given out as torch's allocator does (c10/cuda/CUDACachingAllocator.cpp), in
// the order of streams, and poisoned when it is freed.
//
// Segments are address space of the host, of which only pages that are written to take memory. They
// lie at rising addresses, so that the same program finds the same blocks in each run. A segment
// belongs to one stream and one of two pools, and so do the blocks that it is cut into.
#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "streams.h"

namespace sim {

// A number that torch tells of: now, at most since it was reset, and what it rose and fell by.
struct Stat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;

  void add(int64_t amount);
};

enum Counted {
  kAllocation,
  kSegment,
  kActive,  // in use, or used by other streams when it was freed
  kInactiveSplit,
  kAllocatedBytes,
  kReservedBytes,
  kActiveBytes,
  kInactiveSplitBytes,
  kRequestedBytes,
  kNumCounted,
};
constexpr std::array<const char*, kNumCounted> kCountedNames = {
    "allocation", "segment", "active", "inactive_split", "allocated_bytes",
    "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
};
constexpr std::array<const char*, 3> kPoolNames = {"all", "small_pool", "large_pool"};

struct MemoryStats {
  std::array<std::array<Stat, kPoolNames.size()>, kNumCounted> counted;
  int64_t num_alloc_retries = 0, num_ooms = 0, num_sync_all_streams = 0;
  int64_t num_device_alloc = 0, num_device_free = 0;

  void add(Counted what, bool is_small, int64_t amount);
  int64_t now(Counted what) const { return counted[what][0].current; }
};

class DeviceMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override;

  // `stream` uses what lies at `data`: whoever frees it waits for that.
  void record_stream(void* data, int64_t stream);
  // Give back to the device the segments, and pages of those that grow, that are wholly free.
  void empty_cache(int device);
  MemoryStats stats(int device);
  void reset_peak(int device);
  void reset_accumulated(int device);

 private:
  struct Segment {
    int device;
    int64_t stream;
    bool is_expandable;
    char* start;
    size_t size;
    char* fresh;  // from here on nobody has had it
  };

  struct Block;

  struct Pool {
    bool is_small;
    std::map<std::tuple<int64_t, size_t, char*>, Block*> free;  // by stream, size, address
    std::map<std::pair<int64_t, char*>, Block*> unmapped;       // addresses without memory

    void add(Block* block);
    void remove(Block* block);
    size_t page() const;
  };

  struct Block {
    Segment* segment;
    Pool* pool;
    char* data;
    size_t size;
    size_t requested = 0;
    bool is_in_use = false;  // or was, and other streams have not reached the end of it
    bool is_mapped = true;
    Block* before = nullptr;
    Block* after = nullptr;
    std::set<int64_t> users;  // streams of record_stream
    SitePtr ended;            // where the program let go of it

    bool is_split() const { return before || after; }
    char* end() const { return data + size; }
  };

  struct Device {
    Pool small{true, {}, {}}, large{false, {}, {}};
    MemoryStats stats;
  };

  struct Pending {
    Block* block;
    std::vector<PointPtr> points;
  };

  static void free_block(void* data);
  void* take(size_t num_bytes);
  void give(void* data);

  // What the own stream of a block writes to it when it is freed.
  void poison(Block* block);
  // Free the blocks whose other users have been reached.
  void collect();
  void make_free(Block* block);

  Block* find(Pool& pool, int64_t stream, size_t size);
  Block* grow(Pool& pool, int device, int64_t stream, size_t size);
  Block* grow_expandable(Pool& pool, int device, int64_t stream, size_t size);
  Block* room_to_grow(Pool& pool, int device, int64_t stream, size_t size);
  bool map(Block* block, size_t size);
  void unmap(Block* block);
  void release(Pool& pool);
  void drop_segment(Block* block);
  [[noreturn]] void refuse(int device, size_t size);

  Segment* new_segment(int device, int64_t stream, bool is_expandable, size_t size);
  static void insert_after(Block* block, Block* added);
  static size_t merge(Block* block, Block* neighbour);
  MemoryStats& stats_of(const Block* block);

  std::mutex mutex_;
  std::map<int, Device> devices_;
  std::map<void*, Block*> live_;
  std::vector<Pending> pending_;
  char* next_address_ = reinterpret_cast<char*>(0x200000000000);
};
DeviceMemory& device_memory();

}  // namespace sim
