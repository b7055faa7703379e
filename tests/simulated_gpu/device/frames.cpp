#include "frames.h"

// torch lets go of Python's lock before it calls an operator. Nobody else changes the frames of a
// thread that is within a call of C, so they are read as they are; public functions want the lock.
#include <Python.h>
#if PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030c0000
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#define SIM_READS_FRAMES 1
#else
#define SIM_READS_FRAMES 0
#endif

#include <mutex>
#include <unordered_map>

namespace sim {

struct Code {
  PyCodeObject* object;
  std::string file, name;
  bool is_ours;
};

namespace {

constexpr size_t kFrames = 48;

// Holds Python's lock, which waits where another thread has it.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Functions are kept for good: what names them may outlive their module.
const Code* kept(PyCodeObject* object) {
  static auto* mutex = new std::mutex;
  static auto* all = new std::unordered_map<PyCodeObject*, Code>;
  {
    std::lock_guard<std::mutex> lock(*mutex);
    auto found = all->find(object);
    if (found != all->end()) return &found->second;
  }
  Gil held;
  Py_INCREF(object);
  Code code{object, PyUnicode_AsUTF8(object->co_filename), PyUnicode_AsUTF8(object->co_name), true};
  for (auto part : {"/torch/", "/simulated_gpu/simulated_gpu/", "<frozen ", "/contextlib.py",
                    "/runpy.py", "/threading.py"}) {
    if (code.file.find(part) != std::string::npos) code.is_ours = false;
  }
  std::lock_guard<std::mutex> lock(*mutex);
  return &all->emplace(object, std::move(code)).first->second;
}

}  // namespace

std::string Frame::place() const {
  auto line = PyCode_Addr2Line(code->object, instruction);
  return code->file + ":" + std::to_string(line) + " in " + code->name;
}

bool Frame::is_ours() const { return code->is_ours; }

#if SIM_READS_FRAMES

std::vector<Frame> python_frames() {
  std::vector<Frame> found;
  auto* thread = Py_IsInitialized() ? PyGILState_GetThisThreadState() : nullptr;
  auto* frame = thread && thread->cframe ? thread->cframe->current_frame : nullptr;
  for (; frame && found.size() < kFrames; frame = frame->previous) {
    int instruction = _PyInterpreterFrame_LASTI(frame) * int(sizeof(_Py_CODEUNIT));
    found.push_back({kept(frame->f_code), instruction});
  }
  return found;
}

#else

std::vector<Frame> python_frames() {
  std::vector<Frame> found;
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return found;
  Gil held;
  auto* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && found.size() < kFrames) {
    auto* object = PyFrame_GetCode(frame);
    found.push_back({kept(object), PyFrame_GetLasti(frame)});
    Py_DECREF(object);
    auto* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return found;
}

#endif

}  // namespace sim
