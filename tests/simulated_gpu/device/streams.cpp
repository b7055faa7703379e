#include "streams.h"

#include <Python.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <thread>

#include "settings.h"

namespace sim {
namespace {

using SteadyClock = std::chrono::steady_clock;

double now_ms() {
  auto now = SteadyClock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

// Of all streams. Never destroyed: their threads run until the process is gone.
struct Registry {
  std::mutex mutex;
  pid_t owner = 0;
  std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> streams;
  std::map<std::pair<int, bool>, int64_t> handed_out;
  std::atomic<bool> is_stopped{false};
  std::string failure;
};

Registry& registry() {
  static auto* made = new Registry;
  return *made;
}

void note_failure(const std::string& text) {
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.failure.empty()) all.failure = text;
}

// Release Python's lock, if this thread has it, for as long as this lives.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) saved_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (saved_) PyEval_RestoreThread(saved_);
  }

 private:
  PyThreadState* saved_ = nullptr;
};

thread_local int device_of_thread = 0;
thread_local std::map<int, int64_t> streams_of_thread;

}  // namespace

// Points

void Point::reach() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_reached_ = true;
  time_ms_ = now_ms();
  reached_.notify_all();
}

void Point::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  reached_.wait(lock, [this] { return is_reached_; });
}

bool Point::is_reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_reached_;
}

double Point::time_ms() {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_ms_;
}

// Streams

Stream::Stream(int device, int64_t id) : device_(device), id_(id) {
  seed(settings().seed);
  // Signals are for threads of Python's.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([this] { run(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Stream::seed(uint64_t seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  random_.seed(seed * 1000003 + device_ * 1009 + id_);
}

void Stream::put(Task task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  filled_.notify_one();
}

void Stream::launch(std::string name, std::function<void()> kernel) {
  counts().kernels++;
  put({std::move(name), std::move(kernel), true});
}

void Stream::then(std::function<void()> work) { put({"", std::move(work), false}); }

PointPtr Stream::record() {
  auto point = std::make_shared<Point>();
  then([point] { point->reach(); });
  return point;
}

void Stream::wait(PointPtr point) {
  then([point] { point->wait(); });
}

bool Stream::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !is_busy_;
}

void Stream::delay() {
  double longest = settings().delay_us;
  if (longest <= 0) return;
  double duration = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::uniform_real_distribution<double> draw(0, 1);
    if (draw(random_) < settings().delay_share) duration = draw(random_) * longest;
  }
  if (duration > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(duration));
  }
}

void Stream::run() {
  at::set_num_threads(1);
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      is_busy_ = false;
      filled_.wait(lock, [this] { return !tasks_.empty() && !registry().is_stopped; });
      is_busy_ = true;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    if (task.is_kernel) delay();
    try {
      task.run();
    } catch (const std::exception& error) {
      note_failure(task.name + ": " + error.what());
    }
  }
}

Stream& stream_of(int device, int64_t id) {
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.owner == 0) all.owner = getpid();
  TORCH_CHECK(all.owner == getpid(),
              "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
              "you must use the 'spawn' start method");
  TORCH_CHECK(0 <= device && device < settings().devices, "CUDA error: invalid device ordinal");
  auto& found = all.streams[{device, id}];
  if (!found) found = std::make_unique<Stream>(device, id);
  return *found;
}

std::vector<Stream*> streams_on(int device) {
  auto& all = registry();
  std::vector<Stream*> found;
  std::lock_guard<std::mutex> lock(all.mutex);
  for (auto& [key, stream] : all.streams) {
    if (key.first == device) found.push_back(stream.get());
  }
  return found;
}

void seed_streams(uint64_t seed) {
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.owner != getpid()) return;
  for (auto& [key, stream] : all.streams) stream->seed(seed);
}

void stop_streams() { registry().is_stopped = true; }

bool is_forked() {
  pid_t owner = registry().owner;
  return owner != 0 && owner != getpid();
}

int current_device() { return device_of_thread; }

void set_current_device(int device) {
  TORCH_CHECK(0 <= device && device < settings().devices, "CUDA error: invalid device ordinal");
  device_of_thread = device;
}

int64_t current_stream_id(int device) {
  auto found = streams_of_thread.find(device);
  return found == streams_of_thread.end() ? 0 : found->second;
}

void set_current_stream_id(int device, int64_t id) { streams_of_thread[device] = id; }

Stream& current_stream(int device) { return stream_of(device, current_stream_id(device)); }

int64_t next_stream_id(int device, bool is_high_priority) {
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  int64_t number = all.handed_out[{device, is_high_priority}]++ % kPool;
  return is_high_priority ? kPool + 1 + number : 1 + number;
}

// The host waits

void note_host_wait(const char* why) {
  counts().host_waits++;
  int mode = settings().sync_debug;
  TORCH_CHECK(mode != 2, "called a synchronizing CUDA operation (", why, ")");
  if (mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", why, ")");
}

void host_wait(const PointPtr& point) {
  {
    WithoutGil released;
    point->wait();
  }
  raise_failure();
}

void host_wait_for_stream(int device, const char* why) {
  note_host_wait(why);
  host_wait(current_stream(device).record());
}

void host_wait_for_device(int device) {
  std::vector<PointPtr> points;
  for (auto* stream : streams_on(device)) points.push_back(stream->record());
  for (auto& point : points) host_wait(point);
}

void raise_failure() {
  auto& all = registry();
  std::string text;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    text.swap(all.failure);
  }
  TORCH_CHECK(text.empty(), "CUDA error: ", text);
}

}  // namespace sim
