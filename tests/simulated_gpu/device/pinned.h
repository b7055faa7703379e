// Memory of the host that copies read and write beside the host: allocated so, or registered.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <map>
#include <mutex>
#include <vector>

#include "streams.h"

namespace sim {

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override;
  // `stream` uses what lies at `data` until it gets where it is now.
  bool record_event(void* data, void* context, c10::Stream stream) override;
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  // Whether copies of this range need not block the host. Raises where it goes beyond what was
  // registered, as CUDA does.
  bool is_pinned(const void* data, size_t num_bytes = 1);
  // Whether any of it was registered or allocated here.
  bool is_known(const void* data);
  void register_range(char* begin, size_t num_bytes);
  void unregister_range(char* begin);

 private:
  struct Piece {
    size_t size;
    std::vector<PointPtr> users;
  };

  static void free_piece(void* data);
  void give(void* data);
  std::map<char*, Piece>::iterator piece_of(const void* data);

  std::mutex mutex_;
  std::map<char*, Piece> live_;
  std::multimap<size_t, std::pair<char*, std::vector<PointPtr>>> spare_;
  std::map<char*, size_t> registered_;
};
PinnedMemory& pinned_memory();

}  // namespace sim
