#include "arrays.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "backend/backend.hpp"
#include "capi/dlpack_view.hpp"

namespace hexpert::python {
namespace {

PyObject* unsupported_error = nullptr;

PyObject* exception_type(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidDtype:
      return PyExc_TypeError;
    case ErrorCode::kUnsupported:
    case ErrorCode::kUnsupportedDevice:
      return unsupported_error;
    case ErrorCode::kOutOfMemory:
      return PyExc_MemoryError;
    case ErrorCode::kIoError:
      return PyExc_OSError;
    case ErrorCode::kDeviceError:
      return PyExc_RuntimeError;
    default:
      return PyExc_ValueError;
  }
}

// The module if somebody has imported it already.
nb::handle loaded_module(const char* name) {
  return PyDict_GetItemString(PyImport_GetModuleDict(), name);  // borrowed
}

bool is_instance(nb::handle object, const char* module, const char* type) {
  const nb::handle loaded = loaded_module(module);
  if (!loaded.is_valid() || !nb::hasattr(loaded, type)) return false;
  return nb::isinstance(object, loaded.attr(type));
}

std::string name_of_type(nb::handle object) {
  return text_of(nb::handle(object.type()).attr("__name__"));
}

std::string shape_text(nb::handle shape) {
  std::string text = "[";
  for (nb::handle extent : nb::iter(shape))
    text += (text.size() > 1 ? ", " : "") + text_of(nb::borrow(extent));
  return text + "]";
}

std::optional<DType> dtype_by_name(std::string_view name) {
  constexpr std::pair<std::string_view, DType> kNames[] = {{"uint8", DType::kU8},
                                                           {"float8_e4m3fn", DType::kE4M3},
                                                           {"bfloat16", DType::kBF16},
                                                           {"float16", DType::kF16},
                                                           {"float32", DType::kF32},
                                                           {"int32", DType::kI32},
                                                           {"int64", DType::kI64}};
  for (const auto& [known, dtype] : kNames) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

// torch's dtype objects, which live as long as torch. Guarded by the interpreter lock. Filled by an assignment: an
// initializer would hold the guard of the variable while torch runs Python code, which lets other threads run.
std::optional<DType> torch_dtype(nb::handle torch, nb::handle dtype) {
  static std::vector<std::pair<PyObject*, DType>> known;
  if (known.empty()) {
    std::vector<std::pair<PyObject*, DType>> pairs;
    for (const char* name :
         {"bfloat16", "int64", "int32", "float32", "uint8", "float16", "float8_e4m3fn"}) {
      if (!nb::hasattr(torch, name)) continue;
      pairs.emplace_back(nb::object(torch.attr(name)).release().ptr(), *dtype_by_name(name));
    }
    known = std::move(pairs);
  }
  for (const auto& [object, value] : known) {
    if (dtype.ptr() == object) return value;
  }
  return std::nullopt;
}

// An element type of numpy, which cupy and jax share.
struct NumpyDtype {
  nb::handle object;
  std::optional<DType> dtype;
  bool is_u16 = false;
};

// Its name takes numpy microseconds, so those that are accepted are remembered, and kept alive: none is taken for
// another. Guarded by the interpreter lock.
NumpyDtype numpy_dtype(nb::handle dtype) {
  constexpr size_t kMostTypes = 32;
  static std::vector<NumpyDtype> known;
  for (const NumpyDtype& one : known) {
    if (one.object.is(dtype)) return one;
  }
  NumpyDtype found{dtype, std::nullopt};
  if (!nb::cast<bool>(dtype.attr("isnative"))) return found;
  const std::string name = text_of(dtype.attr("name"));
  found.dtype = dtype_by_name(name);
  found.is_u16 = name == "uint16";
  if ((found.dtype || found.is_u16) && known.size() < kMostTypes) {
    dtype.inc_ref();
    known.push_back(found);
  }
  return found;
}

// What is known of a Python type.
struct TypeInfo {
  nb::handle type;
  Framework framework = Framework::kOther;
  bool is_array = true;
  const DLPackExchangeAPI* exchange = nullptr;  // of torch 2.10 and newer
};

const DLPackExchangeAPI* exchange_of(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return nullptr;
  const auto* api = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  const bool known = api->header.version.major == DLPACK_MAJOR_VERSION;
  return known && api->dltensor_from_py_object_no_sync != nullptr ? api : nullptr;
}

TypeInfo look_at(nb::handle object) {
  TypeInfo info;
  info.type = object.type();
  if (is_instance(object, "torch", "Tensor")) {
    info.framework = Framework::kTorch;
    info.exchange = exchange_of(object.type());
  } else if (is_instance(object, "numpy", "ndarray")) {
    info.framework = Framework::kNumpy;
  } else {
    info.is_array = !nb::isinstance<nb::type_object>(object) && nb::hasattr(object, "__dlpack__") &&
                    nb::hasattr(object, "__dlpack_device__");
    if (is_instance(object, "cupy", "ndarray")) info.framework = Framework::kCupy;
  }
  return info;
}

// The frameworks' own types are looked up once, and kept alive: none is taken for another. A type of the program
// would keep alive what it refers to, the globals of its module too. Guarded by the interpreter lock.
TypeInfo info_of(nb::handle object) {
  static std::vector<TypeInfo> known;
  for (const TypeInfo& info : known) {
    if (info.type.is(object.type())) return info;
  }
  const TypeInfo info = look_at(object);
  if (info.framework == Framework::kOther) return info;
  const std::string name = type_text(info.type);
  if (name.starts_with("torch.") || name.starts_with("numpy.") || name.starts_with("cupy.")) {
    info.type.inc_ref();
    known.push_back(info);
  }
  return info;
}

template <typename Managed>
void release_managed(void* managed) {
  auto* tensor = static_cast<Managed*>(managed);
  if (tensor->deleter != nullptr) tensor->deleter(tensor);
}

}  // namespace

void raise(const Status& failure) {
  const std::string text = failure.to_string();  // may hold the bytes of a path
  const auto message = nb::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
  if (message.is_valid()) PyErr_SetObject(exception_type(failure.code()), message.ptr());
  throw nb::python_error();
}

void bind_exceptions(nb::module_& m) {
  unsupported_error = PyErr_NewExceptionWithDoc(
      "hexpert.UnsupportedError",
      "Valid, but not something that this build can do on this machine; the text says why.",
      PyExc_RuntimeError,
      nullptr);
  m.attr("UnsupportedError") = nb::handle(unsupported_error);
}

Array::Array(nb::handle object, const char* name, const char* wanted, Stream consumer)
    : object_(object), name_(name), wanted_(wanted) {
  const TypeInfo info = info_of(object);
  framework_ = info.framework;
  if (framework_ == Framework::kTorch) {
    if (info.exchange == nullptr || !take_exchange(*info.exchange)) take_torch();
  } else if (framework_ == Framework::kNumpy) {
    take_numpy();
  } else if (framework_ == Framework::kCupy) {
    take_cupy();
  } else if (info.is_array) {
    take_dlpack(consumer);
  } else {
    throw nb::type_error(fmt::format("{}: expected an array of {} (numpy, torch, or any with "
                                     "__dlpack__), got {}",
                                     name,
                                     wanted,
                                     object.is_none() ? "None" : name_of_type(object))
                             .c_str());
  }
  check_dtype();
}

// `wanted` is a list in words.
void Array::check_dtype() const {
  const std::string_view wanted(wanted_);
  const std::string_view given = to_string(view_.dtype);
  const size_t at = wanted.find(given);
  const bool accepted = at != std::string_view::npos && (at == 0 || wanted[at - 1] == ' ');
  if (!accepted) wrong_dtype(describe(view_));
}

// torch's own view of a tensor, in nanoseconds. False: it has none, and why is said by take_torch().
bool Array::take_exchange(const DLPackExchangeAPI& exchange) {
  DLTensor tensor;
  if (exchange.dltensor_from_py_object_no_sync(object_.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  exchange_ = &exchange;
  view_ = check(view_of(name_, wanted_, &tensor));
  return true;
}

const TensorView& Array::writable() const {
  if (read_only_) {
    raise({ErrorCode::kInvalidOutput,
           fmt::format("{}: expected memory that may be written, got a read-only array", name_)});
  }
  return view_;
}

void Array::wrong_dtype(const std::string& given) const {
  raise({ErrorCode::kInvalidDtype, fmt::format("{}: expected {}, got {}", name_, wanted_, given)});
}

// numpy's array interface in C, in a capsule.
struct NumpyInterface {
  static constexpr int kWriteable = 0x400;
  int two;
  int rank;
  char kind;
  int item_bytes;
  int flags;
  const Py_ssize_t* shape;
  const Py_ssize_t* strides;  // bytes
  void* data;
};

void Array::take_numpy() {
  const nb::object capsule = object_.attr("__array_struct__");
  const auto* array =
      static_cast<const NumpyInterface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (array == nullptr) throw nb::python_error();
  view_.data = array->data;
  read_only_ = (array->flags & NumpyInterface::kWriteable) == 0;
  take_dtype();
  take_rank(array->rank);
  for (int i = 0; i < array->rank; ++i)
    take_extent(i, array->shape[i], array->strides[i]);
  pack_if_empty(view_);
}

// cupy's DLPack has no BF16 and needs several calls.
void Array::take_cupy() {
  const nb::object memory = object_.attr("data");
  view_.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(memory.attr("ptr")));
  view_.device = Device::cuda(nb::cast<int>(memory.attr("device_id")));
  take_dtype();
  const nb::tuple shape = object_.attr("shape");
  const nb::tuple strides = object_.attr("strides");
  take_rank(static_cast<int64_t>(nb::len(shape)));
  for (int i = 0; i < view_.rank; ++i) {
    const auto at = static_cast<size_t>(i);
    take_extent(i, nb::cast<int64_t>(shape[at]), nb::cast<int64_t>(strides[at]));
  }
  pack_if_empty(view_);
}

void Array::take_dtype() {
  const nb::object dtype = object_.attr("dtype");
  const NumpyDtype known = numpy_dtype(dtype);
  // numpy has no BF16: without ml_dtypes its bits travel as uint16.
  if (known.is_u16 && std::strstr(wanted_, "bf16") != nullptr) {
    view_.dtype = DType::kBF16;
  } else if (known.dtype) {
    view_.dtype = *known.dtype;
  } else {
    const bool native = nb::cast<bool>(dtype.attr("isnative"));
    wrong_dtype(fmt::format("{} {}{}",
                            shape_text(object_.attr("shape")),
                            text_of(dtype.attr("name")),
                            native ? "" : " in big-endian byte order"));
  }
}

void Array::take_rank(int64_t rank) {
  if (rank > kMaxRank) {
    raise({ErrorCode::kInvalidShape,
           fmt::format("{}: expected rank 0..{}, got {}", name_, kMaxRank, rank)});
  }
  view_.rank = static_cast<int>(rank);
}

void Array::take_extent(int i, int64_t extent, int64_t stride_bytes) {
  view_.shape[i] = extent;
  if (stride_bytes % size_of(view_.dtype) != 0) {
    raise(
        {ErrorCode::kNotContiguous,
         fmt::format("{}: expected strides in whole elements, got {} bytes", name_, stride_bytes)});
  }
  view_.strides[i] = stride_bytes / size_of(view_.dtype);
}

void Array::take_torch() {
  const nb::handle torch = loaded_module("torch");
  const nb::object dtype = object_.attr("dtype");
  const nb::object shape = object_.attr("shape");
  const std::optional<DType> known = torch_dtype(torch, dtype);
  if (!known) {
    auto name = text_of(dtype);
    wrong_dtype(shape_text(shape) + " " + name.substr(name.find('.') + 1));
  }
  if (!object_.attr("layout").is(torch.attr("strided"))) {
    raise({ErrorCode::kNotContiguous,
           fmt::format("{}: expected a dense tensor, got layout {}",
                       name_,
                       text_of(object_.attr("layout")))});
  }
  if (nb::cast<bool>(object_.attr("is_cuda"))) {
    view_.device = Device::cuda(nb::cast<int>(object_.attr("get_device")()));
  } else if (!nb::cast<bool>(object_.attr("is_cpu"))) {
    raise({ErrorCode::kDeviceMismatch,
           fmt::format("{}: expected memory of cpu or cuda, got {}",
                       name_,
                       text_of(object_.attr("device")))});
  }
  const nb::object strides = object_.attr("stride")();
  view_.dtype = *known;
  const size_t rank = nb::len(shape);
  if (rank > static_cast<size_t>(kMaxRank)) {
    raise({ErrorCode::kInvalidShape,
           fmt::format("{}: expected rank 0..{}, got {}", name_, kMaxRank, rank)});
  }
  view_.rank = static_cast<int>(rank);
  for (size_t i = 0; i < rank; ++i) {
    view_.shape[i] = nb::cast<int64_t>(shape[i]);
    view_.strides[i] = nb::cast<int64_t>(strides[i]);
  }
  view_.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(object_.attr("data_ptr")()));
}

// What an exporter returns. These exceptions are how one says no; others, KeyboardInterrupt among them, are raised.
template <typename Call>
nb::object Array::ask_exporter(const Call& call) const {
  try {
    return call();
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_BufferError) && !error.matches(PyExc_TypeError) &&
        !error.matches(PyExc_ValueError)) {
      throw;
    }
    wrong_dtype(fmt::format("{} that has no DLPack form: {}: {}",
                            name_of_type(object_),
                            text_of(error.type().attr("__name__")),
                            text_of(error.value())));
  }
}

// Exporters from before DLPack 1 do not know max_version.
nb::object Array::export_capsule(const nb::dict& arguments) const {
  nb::dict versioned;
  for (auto [key, value] : arguments)
    versioned[key] = value;
  versioned["max_version"] = nb::make_tuple(DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION);
  return ask_exporter([&]() -> nb::object {
    const nb::object method = object_.attr("__dlpack__");
    try {
      return method(**versioned);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
    }
    return method(**arguments);
  });
}

void Array::take_dlpack(Stream consumer) {
  const nb::object device =
      ask_exporter([&] { return nb::object(object_.attr("__dlpack_device__")()); });
  int type = 0;
  if (!nb::isinstance<nb::tuple>(device) || nb::len(device) != 2 ||
      !nb::try_cast<int>(device[0], type)) {
    wrong_dtype(
        fmt::format("{} whose __dlpack_device__ is no pair of integers", name_of_type(object_)));
  }
  nb::dict arguments;
  if (type == kDLCUDA) {
    const auto stream = reinterpret_cast<uintptr_t>(consumer.handle);
    arguments["stream"] = stream == 0 ? 1 : stream;  // DLPack spells the default stream 1
  }
  const nb::object capsule = export_capsule(arguments);
  const DLTensor* tensor = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    auto* managed = static_cast<DLManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    managed_ = {managed, release_managed<DLManagedTensorVersioned>};
    if (managed->version.major != DLPACK_MAJOR_VERSION) {
      wrong_dtype(fmt::format("DLPack version {}", managed->version.major));
    }
    read_only_ = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
    tensor = &managed->dl_tensor;
  } else {
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0) {
      wrong_dtype(fmt::format("{} whose __dlpack__ gives no DLPack capsule, or one that was used",
                              name_of_type(object_)));
    }
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    managed_ = {managed, release_managed<DLManagedTensor>};
    tensor = &managed->dl_tensor;
  }
  // jax arrays never change; not every version marks them.
  read_only_ = read_only_ || is_instance(object_, "jax", "Array");
  view_ = check(view_of(name_, wanted_, tensor));
}

Device parse_device(nb::handle device) {
  const std::string text = text_of(device);  // a torch.device says "cuda:1"
  if (text == "cpu") return Device::cpu();
  if (text == "cuda") return Device::cuda(0);
  if (text.rfind("cuda:", 0) == 0 && text.size() > 5 && text.size() < 10 &&
      text.find_first_not_of("0123456789", 5) == std::string::npos) {
    return Device::cuda(std::stoi(text.substr(5)));
  }
  const char* wanted = "\"cpu\", \"cuda\" or \"cuda:N\" with N in 0..9999";
  if (nb::isinstance<nb::str>(device)) wrong_value("device", wanted, device);
  wrong_type("device", wanted, device);
}

Stream stream_given(nb::handle stream) {
  if (stream.is_none()) return {};
  const char* wanted = "a cudaStream_t as int >= 0";
  uintptr_t handle = 0;
  if (!nb::try_cast(index_argument(stream, "stream", wanted), handle)) {
    wrong_value("stream", wanted, stream);
  }
  return {reinterpret_cast<void*>(handle)};
}

Stream stream_of(const Array& array, nb::handle given, const Device& device) {
  if (!given.is_none()) return stream_given(given);
  if (device.type != DeviceType::kCuda) return {};
  if (array.exchange() != nullptr) {
    void* current = nullptr;
    if (array.exchange()->current_work_stream(kDLCUDA, device.index, &current) != 0) {
      throw nb::python_error();
    }
    return {current};
  }
  nb::object stream;
  if (array.framework() == Framework::kTorch) {
    const nb::handle torch = loaded_module("torch");
    stream = torch.attr("cuda").attr("current_stream")(device.index).attr("cuda_stream");
  } else if (array.framework() == Framework::kCupy) {
    stream = loaded_module("cupy").attr("cuda").attr("get_current_stream")().attr("ptr");
  } else {
    return {};
  }
  return {reinterpret_cast<void*>(nb::cast<uintptr_t>(stream))};
}

Status wait_if_needed(std::initializer_list<const Array*> arrays,
                      Stream stream,
                      const Device& device) {
  if (std::none_of(arrays.begin(), arrays.end(), [](const Array* a) { return a->must_wait(); }))
    return Status::success();
  const Result<const Backend*> backend = find_backend("", device);
  if (!backend.ok()) return backend.status();
  return (*backend)->synchronize(stream, device);
}

namespace {

// A function of _arrays.py, looked up once and kept alive: that costs as much as calling it. The lookup may let another
// thread run, which then finds the same function. An initializer of `kept` would make that thread wait for this one
// with the interpreter lock in hand.
nb::handle function_of_arrays(const char* name, PyObject*& kept) {
  if (kept == nullptr) {
    kept = nb::object(nb::module_::import_("hexpert._arrays").attr(name)).release().ptr();
  }
  return kept;
}

nb::tuple tuple_of(std::initializer_list<int64_t> shape) {
  nb::list extents;
  for (const int64_t extent : shape)
    extents.append(extent);
  return nb::tuple(extents);
}

}  // namespace

nb::object new_array(nb::handle beside, std::initializer_list<int64_t> shape, const char* dtype) {
  static PyObject* function = nullptr;
  return function_of_arrays("new", function)(beside, tuple_of(shape), dtype);
}

nb::object host_array(nb::handle like, std::initializer_list<int64_t> shape, const char* dtype) {
  static PyObject* function = nullptr;
  return function_of_arrays("host", function)(like, tuple_of(shape), dtype);
}

nb::object matrix_like(nb::handle array, int64_t rows, int64_t cols, bool zeroed) {
  static PyObject* function = nullptr;
  return function_of_arrays("like", function)(array, nb::make_tuple(rows, cols), zeroed);
}

nb::object finish(nb::handle beside, const nb::object& array) {
  static PyObject* function = nullptr;
  return function_of_arrays("finish", function)(beside, array);
}

}  // namespace hexpert::python
