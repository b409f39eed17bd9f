// Arrays of numpy, torch and every framework that speaks DLPack, as views without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "hexpert/dlpack.h"
#include "hexpert/status.hpp"
#include "hexpert/tensor.hpp"

namespace hexpert::python {

namespace nb = nanobind;

// Raises the Python exception that fits a failure.
[[noreturn]] void raise(const Status& failure);
inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}
template <typename T>
T check(Result<T> result) {
  check(result.status());
  return *std::move(result);
}
// Makes hexpert.UnsupportedError.
void bind_exceptions(nb::module_& m);

// The frameworks that are looked at in a way of their own.
enum class Framework : uint8_t { kNumpy, kTorch, kCupy, kOther };

// What a DLPack exporter handed over: its memory may be gone once this is given back. Destroyed with the interpreter
// lock.
using DlpackExport = std::unique_ptr<void, void (*)(void*)>;

// An array argument, borrowed for one call.
class Array {
 public:
  // `name` is the argument's, `wanted` its accepted element types: "bf16", "i32 or i64". Raises
  // TypeError for what is no array or has another element type, ValueError for an unknown device.
  // uint16 of numpy and cupy is taken as the bits of BF16 where `wanted` says bf16. An exporter of DLPack
  // makes the memory ready for `consumer`, the stream it will be used on; without one for the default
  // stream.
  Array(nb::handle object, const char* name, const char* wanted, Stream consumer = {});

  const char* name() const { return name_; }
  const TensorView& view() const { return view_; }
  // The view of an argument that will be written: ValueError for read-only memory.
  const TensorView& writable() const;
  Framework framework() const { return framework_; }
  // Does its framework not know that a stream still works on its memory? Then a call waits.
  bool must_wait() const {
    return framework_ == Framework::kOther && view_.device.type == DeviceType::kCuda;
  }
  // torch's DLPack functions, or null.
  const DLPackExchangeAPI* exchange() const { return exchange_; }
  nb::handle object() const { return object_; }
  // For who uses the memory after the call, and keeps object() as well.
  DlpackExport take_export() { return std::move(managed_); }

 private:
  void take_numpy();
  void take_cupy();
  void take_dtype();
  void take_rank(int64_t rank);
  void take_extent(int i, int64_t extent, int64_t stride_bytes);
  bool take_exchange(const DLPackExchangeAPI& exchange);
  void take_torch();
  void take_dlpack(Stream consumer);
  template <typename Call>
  nb::object ask_exporter(const Call& call) const;
  nb::object export_capsule(const nb::dict& arguments) const;
  void check_dtype() const;
  [[noreturn]] void wrong_dtype(const std::string& given) const;

  nb::handle object_;
  const char* name_;
  const char* wanted_;
  TensorView view_;
  bool read_only_ = false;
  Framework framework_ = Framework::kOther;
  const DLPackExchangeAPI* exchange_ = nullptr;
  DlpackExport managed_{nullptr, nullptr};
};

// "cpu", "cuda", "cuda:1" or a torch.device.
Device parse_device(nb::handle device);

// A cudaStream_t as int; the default stream for None.
Stream stream_given(nb::handle stream);
// The stream that work on `device` belongs to: `given` if not None, else the current one of the
// framework that owns the array. Null on the CPU.
Stream stream_of(const Array& array, nb::handle given, const Device& device);
inline Stream stream_of(const Array& array, nb::handle given) {
  return stream_of(array, given, array.view().device);
}
// Waits until a GPU has done what was enqueued, when one of the arrays asks for that. Without the
// interpreter lock.
Status wait_if_needed(std::initializer_list<const Array*> arrays,
                      Stream stream,
                      const Device& device);

// A new array of the framework and device of `beside`; `dtype` is "uint8" or "float32".
nb::object new_array(nb::handle beside, std::initializer_list<int64_t> shape, const char* dtype);
// The same in host memory: a torch tensor if `like` is one, else a numpy array.
nb::object host_array(nb::handle like, std::initializer_list<int64_t> shape, const char* dtype);
// Beside `array`, of its element type too, and of its shape: [rows, cols].
nb::object matrix_like(nb::handle array, int64_t rows, int64_t cols, bool zeroed);
// What the caller gets for an array that was made beside another.
nb::object finish(nb::handle beside, const nb::object& array);

// Runs `function`, which returns a Status or a Result, without the interpreter lock, and raises what
// it reports.
template <typename Function>
auto without_gil(const Function& function) {
  auto result = [&] {
    const nb::gil_scoped_release released;
    return function();
  }();
  return check(std::move(result));
}

}  // namespace hexpert::python
