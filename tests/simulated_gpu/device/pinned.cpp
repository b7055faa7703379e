#include "pinned.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "settings.h"

namespace sim {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

PinnedMemory& pinned_memory() {
  static auto* made = new PinnedMemory;
  return *made;
}

c10::DataPtr PinnedMemory::allocate(size_t num_bytes) {
  c10::Device cpu(c10::kCPU);
  if (num_bytes == 0) return {nullptr, nullptr, &free_piece, cpu};
  size_t size = kPage;
  while (size < num_bytes) size *= 2;  // as torch's
  std::lock_guard<std::mutex> lock(mutex_);
  auto [first, last] = spare_.equal_range(size);
  for (auto it = first; it != last; ++it) {
    auto& [data, users] = it->second;
    bool is_free = std::all_of(users.begin(), users.end(),
                               [](auto& point) { return point->is_reached(); });
    if (!is_free) continue;
    char* found = data;
    races().forget(found, size);
    spare_.erase(it);
    live_[found] = {size, {}};
    return {found, found, &free_piece, cpu};
  }
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, kPage, size) == 0, "the host has no memory left");
  live_[static_cast<char*>(data)] = {size, {}};
  return {data, data, &free_piece, cpu};
}

c10::DeleterFnPtr PinnedMemory::raw_deleter() const { return &free_piece; }

void PinnedMemory::copy_data(void* to, const void* from, std::size_t num_bytes) const {
  memcpy(to, from, num_bytes);
}

void PinnedMemory::free_piece(void* data) { pinned_memory().give(data); }

void PinnedMemory::give(void* data) {
  if (!data || is_forked()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = live_.find(static_cast<char*>(data));
  if (found == live_.end()) return;
  auto& piece = found->second;
  spare_.emplace(piece.size, std::make_pair(found->first, std::move(piece.users)));
  live_.erase(found);
}

std::map<char*, PinnedMemory::Piece>::iterator PinnedMemory::piece_of(const void* data) {
  auto* at = static_cast<char*>(const_cast<void*>(data));
  auto found = live_.upper_bound(at);
  if (found == live_.begin()) return live_.end();
  --found;
  return at < found->first + found->second.size ? found : live_.end();
}

bool PinnedMemory::is_pinned(const void* data, size_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (piece_of(data) != live_.end()) return true;
  auto* at = static_cast<char*>(const_cast<void*>(data));
  auto found = registered_.upper_bound(at);
  if (found == registered_.begin()) return false;
  --found;
  char* end = found->first + found->second;
  bool begins = at < end, ends = at + num_bytes <= end;
  TORCH_CHECK(!begins || ends || !settings().strict_register,
              "CUDA error: invalid argument (a copy goes ", at + num_bytes - end,
              " bytes beyond the range of host memory that was registered)");
  return begins;
}

bool PinnedMemory::is_known(const void* data) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (piece_of(data) != live_.end()) return true;
  auto* at = static_cast<char*>(const_cast<void*>(data));
  auto found = registered_.upper_bound(at);
  if (found == registered_.begin()) return false;
  --found;
  return at < found->first + found->second;
}

void PinnedMemory::register_range(char* begin, size_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  registered_[begin] = num_bytes;
}

void PinnedMemory::unregister_range(char* begin) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = registered_.find(begin);
  if (found == registered_.end()) return;
  races().forget(begin, found->second);
  registered_.erase(found);
}

bool PinnedMemory::record_event(void* data, void*, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = piece_of(data);
  if (found == live_.end()) return false;
  found->second.users.push_back(stream_of(stream.device_index(), stream.id()).record());
  return true;
}

}  // namespace sim
