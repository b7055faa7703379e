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
#include <set>
#include <sstream>
#include <thread>

#include "settings.h"
#include "trace.h"

namespace sim {
namespace {

using SteadyClock = std::chrono::steady_clock;

double now_ms() {
  auto now = SteadyClock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

double seconds_since(SteadyTime begin, SteadyTime now) {
  return std::chrono::duration<double>(now - begin).count();
}

// A thread that gets no signals: they are for those of Python's.
template <typename Run>
void start_thread(Run run) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(run).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// A host that waits for a device.
struct HostWait {
  SitePtr site;
  PointPtr point;
  SteadyTime begun;
};

// Of all streams. Never destroyed: their threads run until the process is gone.
struct Registry {
  std::mutex mutex;
  pid_t owner = 0;
  std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> streams;
  std::vector<Stream*> numbered;
  std::map<std::pair<int, bool>, int64_t> handed_out;
  std::set<const HostWait*> host_waits;
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
thread_local bool runs_a_stream = false;

std::string behind(const Point& point) {
  std::string place = "where it was begun";
  if (point.behind) place = point.behind->line();
  return stream_name(point.stream) + " to get behind " + place;
}

// Say once of each stall what stands still.
void watch_for_stalls() {
  bool has_said = false;
  while (true) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    auto text = stalls(settings().stall_s);
    if (!text.empty() && !has_said) {
      std::string whole = "the simulated GPU of process " + std::to_string(getpid()) +
                          " stands still:\n" + text;
      fputs(whole.c_str(), stderr);
      fflush(stderr);
    }
    has_said = !text.empty();
  }
}

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

Stream::Stream(int device, int64_t id, size_t number)
    : name((id ? "stream " + std::to_string(id) : std::string("the default stream")) +
           " of device " + std::to_string(device)),
      device_(device), id_(id), number_(number) {
  seed(settings().seed);
  start_thread([this] { run(); });
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

void Stream::launch(Work work, std::function<void()> kernel) {
  counts().kernels++;
  SitePtr site;
  if (knows_order()) {
    site = here(work.name);
    races().launch(number_, clock_, site, work.accesses);
    tracer().launch(name, work, *site);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last_ = site;
  }
  auto& accesses = work.accesses;
  auto most = settings().most_bytes;
  if (most && num_bytes(accesses.read) + num_bytes(accesses.written) > most) kernel = [] {};
  put({std::move(kernel), std::move(site), nullptr, true});
}

void Stream::poison(void* data, size_t num_bytes, SitePtr ended) {
  if (ended) races().launch_quietly(number_, clock_, ended, Accesses().writes(data, num_bytes));
  then([=] { memset(data, kPoison, num_bytes); });
}

void Stream::then(std::function<void()> work) { put({std::move(work), nullptr, nullptr, false}); }

PointPtr Stream::record() {
  std::unique_lock<std::mutex> lock(mutex_);
  auto last = last_;
  lock.unlock();
  auto point = std::make_shared<Point>(number_, races().copy_of(clock_), last);
  tracer().record(name, point.get());
  then([point] { point->reach(); });
  return point;
}

void Stream::wait(PointPtr point) {
  races().follow(clock_, point->clock);
  SitePtr site;
  if (knows_order()) site = here("wait");
  tracer().wait(name, point.get());
  put({[point] { point->wait(); }, site, point, false});
}

bool Stream::is_idle() {
  auto clock = races().copy_of(clock_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!tasks_.empty() || is_busy_) return false;
  races().host_follows(clock);
  return true;
}

std::string Stream::stalled(SteadyTime now, double for_s) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_busy_ || seconds_since(begun_, now) < for_s) return "";
  std::ostringstream out;
  out << "  " << name << " ";
  std::string site = current_.site ? current_.site->line() : "work of the simulator's own";
  if (current_.waits_for) out << "waits for " << behind(*current_.waits_for) << "; asked for: ";
  else out << "runs ";
  out << site << "; " << tasks_.size() << " tasks behind it\n";
  return out.str();
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
  runs_a_stream = true;
  at::set_num_threads(1);
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      is_busy_ = false;
      current_ = {};
      filled_.wait(lock, [this] { return !tasks_.empty() && !registry().is_stopped; });
      is_busy_ = true;
      begun_ = SteadyClock::now();
      current_ = std::move(tasks_.front());
      tasks_.pop_front();
    }
    if (current_.is_kernel) delay();
    try {
      current_.run();
    } catch (const std::exception& error) {
      note_failure((current_.site ? current_.site->line() + ": " : "") + error.what());
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
  if (!found) {
    if (all.numbered.empty()) start_thread(&watch_for_stalls);
    found = std::make_unique<Stream>(device, id, all.numbered.size());
    all.numbered.push_back(found.get());
  }
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

std::string stream_name(size_t number) {
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.numbered[number]->name;
}

bool is_stream_thread() { return runs_a_stream; }

std::string stalls(double for_s) {
  auto& all = registry();
  std::vector<Stream*> streams;
  std::vector<HostWait> waits;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    streams = all.numbered;
    for (auto* wait : all.host_waits) waits.push_back(*wait);
  }
  auto now = SteadyClock::now();
  std::string text;
  for (auto& wait : waits) {
    if (seconds_since(wait.begun, now) < for_s) continue;
    text += "  the host waits for " + behind(*wait.point) + "; by " + wait.site->text(3) + "\n";
  }
  for (auto* stream : streams) text += stream->stalled(now, for_s);
  return text;
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
  HostWait wait{here("a wait of the host"), point, SteadyClock::now()};
  tracer().host_wait(point.get());
  auto& all = registry();
  {
    WithoutGil released;
    std::unique_lock<std::mutex> lock(all.mutex);
    all.host_waits.insert(&wait);
    lock.unlock();
    point->wait();
    lock.lock();
    all.host_waits.erase(&wait);
  }
  races().host_follows(point->clock);
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
