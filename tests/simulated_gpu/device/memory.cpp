#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <sstream>
#include <string>

#include "settings.h"

namespace sim {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kRound = 512;
constexpr size_t kSmall = kMiB;             // sizes up to this come from the small pool
constexpr size_t kSmallSegment = 2 * kMiB;
constexpr size_t kLargeSegment = 20 * kMiB;
constexpr size_t kOwnSegment = 10 * kMiB;   // sizes from this on get a segment of their own
constexpr size_t kOwnRound = 2 * kMiB;

size_t rounded(size_t size, size_t step) { return (size + step - 1) / step * step; }

bool all_reached(const std::vector<PointPtr>& points) {
  return std::all_of(points.begin(), points.end(), [](auto& point) { return point->is_reached(); });
}

std::string in_words(int64_t size) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  if (size <= 1 << 10) text << size << " bytes";
  else if (size <= 1 << 20) text << size / 1024.0 << " KiB";
  else if (size <= 1 << 30) text << size / double(1 << 20) << " MiB";
  else text << size / double(1 << 30) << " GiB";
  return text.str();
}

// What PYTORCH_ALLOC_CONF says, or as it was called before; read when memory is first given out.
struct Configuration {
  bool is_expandable = false;

  Configuration() {
    const char* given = nullptr;
    for (auto name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
      if (!given) given = getenv(name);
    }
    if (!given) return;
    std::string left_out;
    for (auto& each : options(given)) {
      auto colon = each.find(':');
      auto name = each.substr(0, colon);
      auto value = colon == std::string::npos ? "" : each.substr(colon + 1);
      if (name == "expandable_segments") {
        TORCH_CHECK(value == "True" || value == "False",
                    "Expected 'True' or 'False' for expandable_segments, but got: ", value);
        is_expandable = value == "True";
      } else if (each != "backend:native") {
        left_out += (left_out.empty() ? "" : ", ") + name;
      }
    }
    if (!left_out.empty()) TORCH_WARN("the simulated GPU's allocator does without ", left_out);
  }

  // Split at commas that are in no brackets.
  static std::vector<std::string> options(const std::string& text) {
    std::vector<std::string> found(1);
    int depth = 0;
    for (char each : text) {
      depth += (each == '[') - (each == ']');
      if (each == ',' && depth == 0) found.emplace_back();
      else if (each != ' ') found.back() += each;
    }
    std::erase(found, "");
    return found;
  }
};

const Configuration& configuration() {
  static Configuration made;
  return made;
}

}  // namespace

// Counts

void Stat::add(int64_t amount) {
  current += amount;
  peak = std::max(peak, current);
  if (amount > 0) allocated += amount;
  else freed -= amount;
}

void MemoryStats::add(Counted what, bool is_small, int64_t amount) {
  counted[what][0].add(amount);
  counted[what][is_small ? 1 : 2].add(amount);
}

MemoryStats& DeviceMemory::stats_of(const Block* block) {
  return devices_[block->segment->device].stats;
}

MemoryStats DeviceMemory::stats(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  return devices_[device].stats;
}

void DeviceMemory::reset_peak(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& of_pools : devices_[device].stats.counted) {
    for (auto& stat : of_pools) stat.peak = stat.current;
  }
}

void DeviceMemory::reset_accumulated(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& stats = devices_[device].stats;
  MemoryStats fresh;
  for (size_t i = 0; i < kNumCounted; i++) {
    for (size_t j = 0; j < kPoolNames.size(); j++) {
      fresh.counted[i][j].current = stats.counted[i][j].current;
      fresh.counted[i][j].peak = stats.counted[i][j].peak;
    }
  }
  stats = fresh;
}

// What torch asks for

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

void* DeviceMemory::take(size_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  int device = current_device();
  int64_t stream = current_stream_id(device);
  stream_of(device, stream);  // refuses a forked process
  size_t size = rounded(num_bytes, kRound);
  std::unique_lock<std::mutex> lock(mutex_);
  collect();
  auto& stats = devices_[device].stats;
  auto& pool = size <= kSmall ? devices_[device].small : devices_[device].large;
  Block* block = find(pool, stream, size);
  if (!block) block = grow(pool, device, stream, size);
  if (!block) {
    lock.unlock();
    empty_cache(device);
    lock.lock();
    stats.num_alloc_retries++;
    block = grow(pool, device, stream, size);
  }
  if (!block) refuse(device, size);

  bool was_split = block->is_split(), is_counted = !block->segment->is_expandable;
  size_t rest_size = block->size - size;
  bool keeps_rest = pool.is_small || configuration().is_expandable;
  if (keeps_rest ? rest_size >= kRound : rest_size > kSmall) {
    auto* rest = new Block{block->segment, &pool, block->data + size, rest_size};
    block->size = size;
    insert_after(block, rest);
    pool.add(rest);
    if (is_counted) {
      if (!was_split) stats.add(kInactiveSplit, pool.is_small, 1);
      stats.add(kInactiveSplitBytes, pool.is_small, was_split ? -int64_t(size) : rest_size);
    }
  } else if (was_split && is_counted) {
    stats.add(kInactiveSplit, pool.is_small, -1);
    stats.add(kInactiveSplitBytes, pool.is_small, -int64_t(block->size));
  }
  block->is_in_use = true;
  block->requested = num_bytes;
  // Blocks are cut off the beginning of free ones: what nobody has had lies at the end.
  char*& fresh = block->segment->fresh;
  if (block->end() > fresh) {
    if (settings().poison) memset(fresh, kPoison, block->end() - fresh);
    fresh = block->end();
  }
  stats.add(kAllocation, pool.is_small, 1);
  stats.add(kActive, pool.is_small, 1);
  stats.add(kAllocatedBytes, pool.is_small, block->size);
  stats.add(kActiveBytes, pool.is_small, block->size);
  stats.add(kRequestedBytes, pool.is_small, num_bytes);
  live_[block->data] = block;
  return block->data;
}

void DeviceMemory::give(void* data) {
  if (!data || is_forked()) return;
  SitePtr site;
  if (knows_order()) site = here("the end of memory");  // may want Python's lock: before ours
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(data);
  if (found == live_.end()) return;
  Block* block = found->second;
  block->ended = site;
  live_.erase(found);
  auto& stats = stats_of(block);
  stats.add(kAllocation, block->pool->is_small, -1);
  stats.add(kAllocatedBytes, block->pool->is_small, -int64_t(block->size));
  if (block->users.empty()) {
    make_free(block);
    return;
  }
  std::vector<PointPtr> points;
  for (auto id : block->users) points.push_back(stream_of(block->segment->device, id).record());
  block->users.clear();
  pending_.push_back({block, std::move(points)});
}

void DeviceMemory::record_stream(void* data, int64_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(data);
  if (found == live_.end() || found->second->segment->stream == stream) return;
  found->second->users.insert(stream);
}

void DeviceMemory::empty_cache(int device) {
  if (is_forked()) return;
  host_wait_for_device(device);
  std::lock_guard<std::mutex> lock(mutex_);
  auto& of_device = devices_[device];
  of_device.stats.num_sync_all_streams++;
  collect();
  release(of_device.large);
  release(of_device.small);
}

void DeviceMemory::refuse(int device, size_t size) {
  auto& stats = devices_[device].stats;
  stats.num_ooms++;
  size_t asked = size < kOwnSegment ? kLargeSegment : rounded(size, kOwnRound);
  if (size <= kSmall) asked = kSmallSegment;
  int64_t reserved = stats.now(kReservedBytes), allocated = stats.now(kAllocatedBytes);
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", in_words(asked), ". GPU ",
      device, " has a total capacity of ", in_words(settings().memory), " of which ",
      in_words(settings().memory - reserved), " is free. Including non-PyTorch memory, this ",
      "process has ", in_words(reserved), " memory in use. Of the allocated memory ",
      in_words(allocated), " is allocated by PyTorch, and ", in_words(reserved - allocated),
      " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try ",
      "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See ",
      "documentation for Memory Management  ",
      "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)");
}

// Freeing

void DeviceMemory::poison(Block* block) {
  // Its own stream may have it again at once; poison is written where that stream is by then.
  if (!settings().poison) return;
  stream_of(block->segment->device, block->segment->stream)
      .poison(block->data, block->size, block->ended);
}

void DeviceMemory::collect() {
  for (size_t i = 0; i < pending_.size();) {
    if (!all_reached(pending_[i].points)) {
      i++;
      continue;
    }
    Block* block = pending_[i].block;
    pending_.erase(pending_.begin() + i);
    races().forget(block->data, block->size);  // its users are through
    make_free(block);
  }
}

void DeviceMemory::make_free(Block* block) {
  poison(block);
  auto& pool = *block->pool;
  auto& stats = stats_of(block);
  stats.add(kActive, pool.is_small, -1);
  stats.add(kActiveBytes, pool.is_small, -int64_t(block->size));
  stats.add(kRequestedBytes, pool.is_small, -int64_t(block->requested));
  block->is_in_use = false;
  int64_t splits = 0, split_bytes = 0;
  for (auto* neighbour : {block->before, block->after}) {
    if (size_t merged = merge(block, neighbour)) {
      splits--;
      split_bytes -= merged;
    }
  }
  if (block->is_split()) {
    splits++;
    split_bytes += block->size;
  }
  if (!block->segment->is_expandable) {
    stats.add(kInactiveSplit, pool.is_small, splits);
    stats.add(kInactiveSplitBytes, pool.is_small, split_bytes);
  }
  pool.add(block);
}

// Blocks

void DeviceMemory::Pool::add(Block* block) {
  int64_t stream = block->segment->stream;
  if (block->is_mapped) free[{stream, block->size, block->data}] = block;
  else unmapped[{stream, block->data}] = block;
}

void DeviceMemory::Pool::remove(Block* block) {
  int64_t stream = block->segment->stream;
  if (block->is_mapped) free.erase({stream, block->size, block->data});
  else unmapped.erase({stream, block->data});
}

size_t DeviceMemory::Pool::page() const { return is_small ? kSmallSegment : kLargeSegment; }

void DeviceMemory::insert_after(Block* block, Block* added) {
  added->before = block;
  added->after = block->after;
  if (added->after) added->after->before = added;
  block->after = added;
}

// Extend a block, which is in no pool, by a free neighbour; return the bytes of it.
size_t DeviceMemory::merge(Block* block, Block* neighbour) {
  if (!neighbour || neighbour->is_in_use || neighbour->is_mapped != block->is_mapped) return 0;
  neighbour->pool->remove(neighbour);
  if (neighbour == block->before) {
    block->data = neighbour->data;
    block->before = neighbour->before;
    if (block->before) block->before->after = block;
  } else {
    block->after = neighbour->after;
    if (block->after) block->after->before = block;
  }
  size_t size = neighbour->size;
  block->size += size;
  delete neighbour;
  return size;
}

// Return the free block to take, which is in its pool no more.
DeviceMemory::Block* DeviceMemory::find(Pool& pool, int64_t stream, size_t size) {
  auto found = pool.free.lower_bound({stream, size, nullptr});
  auto is_there = [&](auto place) {
    return place != pool.free.end() && std::get<0>(place->first) == stream;
  };
  if (!is_there(found)) return nullptr;
  if (configuration().is_expandable) {
    // A block that can still grow counts as large as it can become.
    auto reach = [](Block* block) {
      bool grows = block->after && !block->after->is_mapped;
      return block->size + (grows ? block->after->size : 0);
    };
    for (auto next = std::next(found);
         is_there(next) && reach(next->second) < reach(found->second); ++next) {
      found = next;
    }
  }
  Block* block = found->second;
  pool.free.erase(found);
  return block;
}

// Segments

DeviceMemory::Segment* DeviceMemory::new_segment(int device, int64_t stream, bool is_expandable,
                                                 size_t size) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* start = mmap(next_address_, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  TORCH_CHECK(start != MAP_FAILED, "the host has no memory left: ", strerror(errno));
  madvise(start, size, MADV_NOHUGEPAGE);  // a small tensor takes a page, not 2 MiB
  next_address_ += rounded(size, kOwnRound) + kOwnRound;
  char* data = static_cast<char*>(start);
  return new Segment{device, stream, is_expandable, data, size, data};
}

// Return a free block of memory that is taken from the device; none if it has too little.
DeviceMemory::Block* DeviceMemory::grow(Pool& pool, int device, int64_t stream, size_t size) {
  if (configuration().is_expandable) return grow_expandable(pool, device, stream, size);
  size_t taken = kLargeSegment;
  if (pool.is_small) taken = kSmallSegment;
  else if (size >= kOwnSegment) taken = rounded(size, kOwnRound);
  auto& stats = devices_[device].stats;
  if (stats.now(kReservedBytes) + int64_t(taken) > settings().memory) return nullptr;
  auto* segment = new_segment(device, stream, false, taken);
  stats.add(kSegment, pool.is_small, 1);
  stats.add(kReservedBytes, pool.is_small, taken);
  stats.num_device_alloc++;
  return new Block{segment, &pool, segment->start, taken};
}

DeviceMemory::Block* DeviceMemory::grow_expandable(Pool& pool, int device, int64_t stream,
                                                   size_t size) {
  Block* block = room_to_grow(pool, device, stream, size);
  if (!block->is_mapped && !map(block, std::min(block->size, size))) return nullptr;
  while (block->size < size) {  // it is free, and behind it are addresses without memory
    Block* next = block->after;
    if (!map(next, std::min(size - block->size, next->size))) return nullptr;
    block = next;
  }
  pool.remove(block);
  return block;
}

// Return the first block of those, free or without memory, that lie side by side and hold `size`.
DeviceMemory::Block* DeviceMemory::room_to_grow(Pool& pool, int device, int64_t stream,
                                                size_t size) {
  auto is_free = [](Block* block) { return block && !block->is_in_use; };
  for (auto place = pool.unmapped.lower_bound({stream, nullptr});
       place != pool.unmapped.end() && place->first.first == stream; ++place) {
    Block* first = place->second;
    if (is_free(first->before)) first = first->before;
    size_t room = 0;
    for (Block* each = first; room < size && is_free(each); each = each->after) room += each->size;
    if (room >= size) return first;
  }
  size_t space = rounded(settings().memory + settings().memory / 8, pool.page());
  auto* segment = new_segment(device, stream, true, std::max(space, rounded(size, pool.page())));
  auto* block = new Block{segment, &pool, segment->start, segment->size};
  block->is_mapped = false;
  pool.add(block);
  return block;
}

// Put memory at the first addresses of a block that has none, and free it.
bool DeviceMemory::map(Block* block, size_t size) {
  auto& pool = *block->pool;
  auto& stats = stats_of(block);
  size = rounded(size, pool.page());
  if (stats.now(kReservedBytes) + int64_t(size) > settings().memory) return false;
  pool.remove(block);
  block->is_mapped = true;
  if (size < block->size) {
    auto* rest = new Block{block->segment, &pool, block->data + size, block->size - size};
    rest->is_mapped = false;
    block->size = size;
    insert_after(block, rest);
    pool.add(rest);
  }
  if (block->data < block->segment->fresh) {  // there was memory before, and it was taken away
    poison(block);
    block->segment->fresh = std::max(block->segment->fresh, block->end());
  }
  merge(block, block->before);
  merge(block, block->after);
  pool.add(block);
  stats.add(kReservedBytes, pool.is_small, size);
  stats.num_device_alloc++;
  return true;
}

// Take the whole pages of a free block away from it.
void DeviceMemory::unmap(Block* block) {
  auto& pool = *block->pool;
  auto* segment = block->segment;
  char* begin = segment->start + rounded(block->data - segment->start, pool.page());
  char* end = segment->start + (block->end() - segment->start) / pool.page() * pool.page();
  if (begin >= end) return;
  size_t size = end - begin;
  pool.remove(block);
  if (end < block->end()) {
    auto* rest = new Block{segment, &pool, end, size_t(block->end() - end)};
    insert_after(block, rest);
    pool.add(rest);
  }
  if (begin > block->data) {
    auto* rest = new Block{segment, &pool, block->data, size_t(begin - block->data)};
    rest->before = block->before;
    if (rest->before) rest->before->after = rest;
    rest->after = block;
    block->before = rest;
    pool.add(rest);
  }
  block->data = begin;
  block->size = size;
  block->is_mapped = false;
  merge(block, block->before);
  merge(block, block->after);
  pool.add(block);
  auto& stats = stats_of(block);
  stats.add(kReservedBytes, pool.is_small, -int64_t(size));
  stats.num_device_free++;
  races().forget(begin, size);
  // After the poison that its stream may have yet to write there.
  stream_of(segment->device, segment->stream).then([begin, size] {
    madvise(begin, size, MADV_DONTNEED);
  });
}

void DeviceMemory::release(Pool& pool) {
  std::vector<Block*> blocks;
  for (auto& [key, block] : pool.free) blocks.push_back(block);
  for (auto* block : blocks) {
    auto& stats = stats_of(block);
    if (block->segment->is_expandable) {
      unmap(block);
      if (!block->is_split()) drop_segment(block);
    } else if (!block->is_split()) {
      stats.add(kSegment, pool.is_small, -1);
      stats.add(kReservedBytes, pool.is_small, -int64_t(block->size));
      stats.num_device_free++;
      drop_segment(block);
    }
  }
}

// Give the addresses of a segment, which is one block, back to the host.
void DeviceMemory::drop_segment(Block* block) {
  auto* segment = block->segment;
  block->pool->remove(block);
  races().forget(segment->start, segment->size);
  stream_of(segment->device, segment->stream).then([start = segment->start, size = segment->size] {
    munmap(start, size);
  });
  delete segment;
  delete block;
}

}  // namespace sim
