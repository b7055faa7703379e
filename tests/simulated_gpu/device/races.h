// Races: two accesses of the same bytes, one of which writes, and nothing has ordered them.
//
// They are found where the second one is launched, whatever the delays are: what comes before what
// follows from the streams, events and waits that the host has asked for. Each stream has a clock,
// each place in it (`Point`) a copy of that, and the host one for all of its threads: a wait of any
// thread counts for all of them, so that no race is named that is none.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "order.h"

namespace sim {

struct Range {
  uintptr_t begin, end;
};

// The bytes that one task reads, and those that it writes.
class Accesses {
 public:
  Accesses& reads(const at::Tensor& tensor);
  Accesses& writes(const at::Tensor& tensor);
  Accesses& reads(const void* data, size_t num_bytes);
  Accesses& writes(const void* data, size_t num_bytes);

  std::vector<Range> read, written;
};
int64_t num_bytes(const std::vector<Range>& ranges);

enum class OnRace { kIgnore, kNote, kRaise };

class Races {
 public:
  // A stream is given a task. Raises where that is a race, or was one elsewhere, if it shall.
  void launch(size_t stream, Clock& clock, const SitePtr& site, const Accesses& accesses);
  // The same where nothing may be raised.
  void launch_quietly(size_t stream, Clock& clock, const SitePtr& site, const Accesses& accesses);
  // The host reads or writes, on whichever thread.
  void by_host(const SitePtr& site, const Accesses& accesses);
  // What is there now is other memory, or nobody's.
  void forget(const void* data, size_t num_bytes);

  Clock copy_of(const Clock& clock);
  // What comes before `point` comes before what is queued from now on.
  void follow(Clock& clock, const Clock& point);
  // The host has waited for a point, or has seen that it is reached.
  void host_follows(const Clock& point);

  std::vector<std::string> found();
  void clear();

 private:
  struct Access {
    size_t stream;
    uint64_t count;
    SitePtr site;
  };
  struct Segment {
    uintptr_t end;
    Access write;               // without a site: nobody has written
    std::vector<Access> reads;  // since then, the last of each stream
  };
  using Segments = std::map<uintptr_t, Segment>;

  Segments::iterator cut_at(uintptr_t address);
  void read(const Range& range, const Access& access, const Clock& clock);
  void write(const Range& range, const Access& access, const Clock& clock);
  void check(const Access& before, const char* did, const Access& now, const char* does,
             const Clock& clock, const Range& range);
  void record(size_t stream, Clock& clock, const SitePtr& site, const Accesses& accesses);
  void raise();

  std::mutex mutex_;
  Clock host_;
  Segments segments_;
  std::vector<std::string> found_;
  size_t raised_ = 0;
};
Races& races();

// Whether anybody asks: else kernels are launched without their places.
bool knows_order();
// On this thread, waits and questions order nothing: it only watches.
void observe_only();
// Have operators of the CPU that touch memory which copies use come by `Races::by_host`.
void watch_host_operators();

}  // namespace sim
