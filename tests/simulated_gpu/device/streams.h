// Streams, which are threads, and events, which are places in them.
//
// The host puts tasks into a stream and goes on. Its thread runs them one after the other, each
// after a random delay, so that whatever nobody waits for is not there yet. Threads start with a
// stream's first task: a process that has only imported torch can fork.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "order.h"
#include "races.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::CUDA;
constexpr int kPoison = 0xFF;  // of freed memory: NaN in every floating format
constexpr int kPool = 32;  // streams of a device that are handed out in turn, of each priority

using SteadyTime = std::chrono::steady_clock::time_point;

// A place in a stream: reached, or not yet.
class Point {
 public:
  Point(size_t stream, Clock clock, SitePtr behind)
      : stream(stream), clock(std::move(clock)), behind(std::move(behind)) {}

  void reach();
  void wait();
  bool is_reached();
  double time_ms();  // when it was reached

  const size_t stream;   // its number
  const Clock clock;     // what comes before it
  const SitePtr behind;  // the kernel that was launched last before it; none: there was none

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  bool is_reached_ = false;
  double time_ms_ = 0;
};
using PointPtr = std::shared_ptr<Point>;

// What a kernel does, as far as others may want to know.
struct Work {
  std::string name;
  Accesses accesses;
  const char* link = "device";  // that it is limited by: "device", "up" or "down" to the host
  double flops = 0;             // of its products of matrices
};

class Stream {
 public:
  Stream(int device, int64_t id, size_t number);

  // Queue a kernel, which may be delayed. Raises where it is a race.
  void launch(Work work, std::function<void()> kernel);
  // Queue the poison of freed memory, by which it is written: whoever else reads it is a race.
  void poison(void* data, size_t num_bytes, SitePtr ended);
  // Queue work of the simulator's own, which is no access.
  void then(std::function<void()> work);
  // Return the place after all that was queued.
  PointPtr record();
  // What is queued from now on comes after `point`.
  void wait(PointPtr point);
  bool is_idle();
  void seed(uint64_t seed);
  // What it does, if it has done so for as long; "" if it has not.
  std::string stalled(SteadyTime now, double for_s);

  const std::string name;

 private:
  struct Task {
    std::function<void()> run;
    SitePtr site;        // of a kernel, and of a wait
    PointPtr waits_for;  // none: it is no wait
    bool is_kernel;
  };

  void put(Task task);
  void run();
  void delay();

  const int device_;
  const int64_t id_;
  const size_t number_;
  Clock clock_;  // under the lock of races
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<Task> tasks_;
  Task current_;
  SteadyTime begun_;
  SitePtr last_;  // kernel that was launched
  bool is_busy_ = false;
  std::mt19937_64 random_;
};

// The stream of a device with this number, which is made if there is none.
Stream& stream_of(int device, int64_t id);
// All streams of a device that were ever used.
std::vector<Stream*> streams_on(int device);
// The name of the stream that was made as this one of all.
std::string stream_name(size_t number);
// Whether this thread is a stream's.
bool is_stream_thread();
// What streams do, and hosts wait for, that have done so for as long; "" where nothing has.
std::string stalls(double for_s);
// Draw delays from another seed.
void seed_streams(uint64_t seed);
// Run nothing more: the process ends.
void stop_streams();

int current_device();
void set_current_device(int device);
int64_t current_stream_id(int device);
void set_current_stream_id(int device, int64_t id);
Stream& current_stream(int device);
// The number of the next stream of the pool.
int64_t next_stream_id(int device, bool is_high_priority);

// Whether the streams of this process are those of the process that it was forked from.
bool is_forked();

// What a host does that waits for a device. `why` says which operation: it is refused or warned of
// in torch's sync debug mode.
void note_host_wait(const char* why);
// Wait with Python's lock released, then raise what a kernel has raised.
void host_wait(const PointPtr& point);
void host_wait_for_stream(int device, const char* why);
void host_wait_for_device(int device);
// Raise what a kernel has raised since the last time.
void raise_failure();

}  // namespace sim
