// A trace: what the host has asked of streams, in the order in which it did.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "order.h"

namespace sim {

class Accesses;
class Point;
struct Work;

// A kernel, a place that was recorded, a wait for one, or what a program says itself: a mark.
struct Traced {
  std::string kind;    // "kernel", "record", "wait", "host wait", "host kernel", or a mark's
  std::string stream;  // its name; "" of the host
  std::string name;    // of a kernel
  std::string line;    // that launched it
  std::string link;    // that it is limited by
  double flops = 0;
  int64_t read = 0;     // bytes
  int64_t written = 0;
  int64_t point = -1;   // the number of what is recorded, or waited for; of a mark what it says
  int64_t thread = 0;   // of the host
};

class Tracer {
 public:
  void begin();
  std::vector<Traced> end();
  bool is_on() const { return is_on_; }

  void launch(const std::string& stream, const Work& work, const Site& site);
  void record(const std::string& stream, const Point* point);
  void wait(const std::string& stream, const Point* point);
  void host_wait(const Point* point);
  void by_host(const Site& site, const Accesses& accesses);
  void mark(const std::string& kind, int64_t number);

 private:
  void add(Traced traced, const Point* point);

  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  std::vector<Traced> all_;
  std::map<const Point*, int64_t> points_;
};
Tracer& tracer();

}  // namespace sim
