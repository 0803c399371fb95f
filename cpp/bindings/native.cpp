// exl3._native: opens the backend libraries by path, calls their operations with argument blocks made in Python, records steps.
// It includes no torch header; a block is the bytes of an exl3_<op>_args and carries device addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include "exl3/ops.h"

namespace py = pybind11;

namespace {

[[noreturn]] void raise(const char* type, const std::string& message) {
  py::object error = py::module_::import("exl3.errors").attr(type);
  PyErr_SetString(error.ptr(), message.c_str());
  throw py::error_already_set();
}

// One entry for each operation of the X-macro: its name, its block's size, its place in the table, and a call through it.
struct OpInfo {
  const char* name;
  size_t bytes, place;
  int (*call)(const exl3_backend*, const void* block, void* stream);
  bool (*present)(const exl3_backend*);
};

const OpInfo kOps[] = {
#define EXL3_OP_INFO(op)                                                                                                   \
  {#op, sizeof(exl3_##op##_args), offsetof(exl3_backend, op),                                                              \
   [](const exl3_backend* b, const void* block, void* stream) { return b->op(static_cast<const exl3_##op##_args*>(block), stream); }, \
   [](const exl3_backend* b) { return b->op != nullptr; }},
    EXL3_OPS(EXL3_OP_INFO)
#undef EXL3_OP_INFO
};

void check(int status, const exl3_backend* backend, const OpInfo& op, const char* where = "") {
  if (status == EXL3_OK) return;
  const char* text = backend->last_error();
  const std::string message = std::string(op.name) + " on " + backend->name + where + ": " + (text && *text ? text : "failed without a text");
  raise(status == EXL3_BAD_ARGUMENT ? "ArgumentError" : status == EXL3_UNSUPPORTED ? "UnsupportedError" : "BackendError", message);
}

// The calls of one step. Blocks lie in one buffer, 8-byte aligned; addresses are taken at replay, when it no longer grows.
class Tape {
 public:
  void begin();
  void end();
  void clear() { calls_.clear(); blocks_.clear(); }
  size_t size() const { return calls_.size(); }

  void add(const exl3_backend* backend, const OpInfo* op, const void* block) {
    const size_t words = (op->bytes + 7) / 8, at = blocks_.size();
    blocks_.resize(at + words);
    std::memcpy(&blocks_[at], block, op->bytes);
    calls_.push_back({backend, op, at});
  }

  void replay(uintptr_t stream) const {
    int status = EXL3_OK;
    size_t i = 0;
    {
      py::gil_scoped_release nogil;
      for (; i < calls_.size(); i++) {
        const Call& c = calls_[i];
        status = c.op->call(c.backend, &blocks_[c.at], reinterpret_cast<void*>(stream));
        if (status != EXL3_OK) break;
      }
    }
    if (status != EXL3_OK) check(status, calls_[i].backend, *calls_[i].op, (", call " + std::to_string(i) + " of a recorded step").c_str());
  }

  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const Call& c : calls_) out.emplace_back(c.op->name);
    return out;
  }

 private:
  struct Call {
    const exl3_backend* backend;
    const OpInfo* op;
    size_t at;  // of its block, in words
  };
  std::vector<Call> calls_;
  std::vector<uint64_t> blocks_;
};

thread_local Tape* recording = nullptr;

void Tape::begin() {
  if (recording) raise("ArgumentError", "another tape is recording on this thread");
  clear();
  recording = this;
}
void Tape::end() {
  if (recording == this) recording = nullptr;
}

// A block from Python, copied to aligned memory (bytes objects promise no alignment).
template <class Args>
Args block_of(const py::bytes& bytes) {
  char* data;
  Py_ssize_t n;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &n) || n != static_cast<Py_ssize_t>(sizeof(Args)))
    raise("BackendError", "an argument block has the wrong size: exl3's Python files and native module differ; reinstall exl3");
  Args args;
  std::memcpy(&args, data, sizeof args);
  return args;
}

py::cpp_function bind(const exl3_backend* backend, const OpInfo* op) {
  return py::cpp_function(
      [backend, op](const py::bytes& bytes, uintptr_t stream) {
        char* data;
        Py_ssize_t n;
        if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &n) || static_cast<size_t>(n) != op->bytes)
          raise("BackendError", std::string(op->name) + ": an argument block has the wrong size: reinstall exl3");
        alignas(16) char block[512];
        std::memcpy(block, data, op->bytes);
        if (recording) recording->add(backend, op, block);
        int status;
        {
          py::gil_scoped_release nogil;
          status = op->call(backend, block, reinterpret_cast<void*>(stream));
        }
        check(status, backend, *op);
      },
      py::name(op->name), py::arg("block"), py::arg("stream"));
}

// An opened library. Never closed: recorded steps and device contexts may refer to it until the process ends.
struct Library {
  const exl3_backend* table;
  py::dict ops;

  explicit Library(const std::string& path) {
#if defined(_WIN32)
    HMODULE handle = LoadLibraryA(path.c_str());
    if (!handle) raise("BackendError", "cannot load " + path + " (Windows error " + std::to_string(GetLastError()) + "): reinstall exl3");
    auto get = reinterpret_cast<exl3_get_backend_fn>(GetProcAddress(handle, "exl3_get_backend"));
#else
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) raise("BackendError", "cannot load " + path + ": " + dlerror());
    auto get = reinterpret_cast<exl3_get_backend_fn>(dlsym(handle, "exl3_get_backend"));
#endif
    if (!get) raise("BackendError", path + " is not an exl3 kernel library: reinstall exl3");
    table = get();
    // a table may end before our last operations, or hold more than we know
    if (!table || table->abi != EXL3_ABI || table->bytes < static_cast<int32_t>(offsetof(exl3_backend, linear)))
      raise("BackendError", path + " is stale (interface " + std::to_string(table ? table->abi : 0) + ", this exl3 needs " +
                                std::to_string(EXL3_ABI) + "): rebuild or reinstall exl3");
    for (const OpInfo& op : kOps)
      if (op.place < static_cast<size_t>(table->bytes) && op.present(table)) ops[op.name] = bind(table, &op);
  }

  std::string describe(int device) const {
    const char* text = table->describe(device);
    if (!text) raise("BackendError", std::string(table->name) + " device " + std::to_string(device) + " cannot be used: " + table->last_error());
    return text;
  }

  int64_t repack_bytes(uintptr_t weight) const {
    return table->repack_bytes ? table->repack_bytes(reinterpret_cast<const exl3_weight*>(weight)) : 0;
  }

  int64_t workspace(const std::string& op, const py::bytes& block) const {
    int64_t bytes = 0;
#define EXL3_QUERY(name)                                                       \
  if (op == #name && table->name##_workspace) {                                \
    const auto args = block_of<exl3_##name##_args>(block);                     \
    bytes = table->name##_workspace(&args);                                    \
  }
    EXL3_QUERY(linear) EXL3_QUERY(attention) EXL3_QUERY(sample) EXL3_QUERY(encode)
#undef EXL3_QUERY
    if (bytes < 0) raise("ArgumentError", op + " on " + table->name + ": " + table->last_error());
    return bytes;
  }
};

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernel libraries of exl3 and recorded steps. Use exl3.ops.";
  py::class_<Library>(m, "Library")
      .def_property_readonly("name", [](const Library& l) { return std::string(l.table->name); })
      .def_property_readonly("build", [](const Library& l) { return std::string(l.table->build ? l.table->build : ""); })
      .def_readonly("ops", &Library::ops)
      .def("describe", &Library::describe)
      .def("repack_bytes", &Library::repack_bytes)
      .def("workspace", &Library::workspace);
  py::class_<Tape>(m, "Tape")
      .def(py::init<>())
      .def("begin", &Tape::begin)
      .def("end", &Tape::end)
      .def("clear", &Tape::clear)
      .def("replay", &Tape::replay)
      .def("names", &Tape::names)
      .def("__len__", &Tape::size);
  m.def("open", [](const std::string& path) { return Library(path); });
  m.def("block_bytes", [] {
    py::dict sizes;
    for (const OpInfo& op : kOps) sizes[op.name] = op.bytes;
    sizes["weight"] = sizeof(exl3_weight);
    return sizes;
  });
}
