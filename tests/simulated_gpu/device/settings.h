// What a process may set, and what it may count.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace sim {

struct Settings {
  int devices = 2;
  double delay_us = 0;          // the longest delay before a kernel
  double delay_share = 0.5;     // of the kernels that are delayed
  uint64_t seed = 1;            // of the delays
  bool poison = true;           // freed memory is filled with NaN
  int64_t memory = 80LL << 30;  // bytes of a device
  int sync_debug = 0;           // 1: warn, 2: raise where the host waits for a device
  int64_t most_bytes = 0;       // of a kernel that is run: larger ones do nothing; 0: all are run
  int races = 2;                // 0: nobody looks for them, 1: they are noted, 2: an error
  double stall_s = 20;          // after which a stream or host that stands still is told of
  bool strict_register = true;  // a copy may not go beyond the range that was registered
};
Settings& settings();

struct Counts {
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> host_waits{0};
  std::mutex mutex;
  std::map<std::string, int64_t> blocking;  // operators that made the host wait for their shapes
};
Counts& counts();

}  // namespace sim
