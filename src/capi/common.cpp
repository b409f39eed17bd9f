// Versions, errors and backends of the C ABI, and its arguments.
#include "capi/call.hpp"

#include <vector>

#include "hexpert/format.hpp"

namespace hexpert::capi {
namespace {

#define HX_SAME_CODE(c_name, cpp_name) \
  static_assert(static_cast<int>(HX_##c_name) == static_cast<int>(ErrorCode::k##cpp_name))
HX_SAME_CODE(OK, Ok);
HX_SAME_CODE(INVALID_SHAPE, InvalidShape);
HX_SAME_CODE(INVALID_DTYPE, InvalidDtype);
HX_SAME_CODE(NOT_CONTIGUOUS, NotContiguous);
HX_SAME_CODE(SHAPE_MISMATCH, ShapeMismatch);
HX_SAME_CODE(METADATA_MISMATCH, MetadataMismatch);
HX_SAME_CODE(DEVICE_MISMATCH, DeviceMismatch);
HX_SAME_CODE(NON_FINITE_WEIGHTS, NonFiniteWeights);
HX_SAME_CODE(INVALID_ARGUMENT, InvalidArgument);
HX_SAME_CODE(ACTIVATION_MISMATCH, ActivationMismatch);
HX_SAME_CODE(UNSUPPORTED, Unsupported);
HX_SAME_CODE(INVALID_OUTPUT, InvalidOutput);
HX_SAME_CODE(NULL_POINTER, NullPointer);
HX_SAME_CODE(MISALIGNED, Misaligned);
HX_SAME_CODE(TOO_LARGE, TooLarge);
HX_SAME_CODE(WORKSPACE_TOO_SMALL, WorkspaceTooSmall);
HX_SAME_CODE(UNSUPPORTED_DEVICE, UnsupportedDevice);
HX_SAME_CODE(DEVICE_ERROR, DeviceError);
HX_SAME_CODE(OUT_OF_MEMORY, OutOfMemory);
HX_SAME_CODE(IO_ERROR, IoError);
HX_SAME_CODE(INVALID_FILE, InvalidFile);
HX_SAME_CODE(NOT_FOUND, NotFound);
#undef HX_SAME_CODE
static_assert(HX_VERSION_MAJOR == HEXPERT_VERSION_MAJOR &&
                  HX_VERSION_MINOR == HEXPERT_VERSION_MINOR &&
                  HX_VERSION_PATCH == HEXPERT_VERSION_PATCH,
              "hexpert.h and CMakeLists.txt state different versions");
static_assert(HX_SWIGLU_OAI == static_cast<int>(hexpert::ActivationType::kSwiGluOai) &&
              HX_SITU == static_cast<int>(hexpert::ActivationType::kSiTu));
static_assert(HX_SCALES_8X4 == static_cast<int>(hexpert::ScaleLayout::k8x4));
static_assert(HX_WORKSPACE_ALIGNMENT == kWorkspaceAlignment);
static_assert(HX_DOWN == static_cast<int>(hexpert::ExpertWeights::Projection::kDown));

// A text that needs no memory when there is none.
struct LastError {
  std::string text;
  const char* shown = "";
};
thread_local LastError last_error;

Status check_elements(const char* name,
                      const DLTensor& tensor,
                      const TensorView& view,
                      int64_t count) {
  if (view.num_elements() != count) {
    return {ErrorCode::kShapeMismatch,
            fmt::format("{}: expected {} elements, got {}", name, count, describe(tensor))};
  }
  if (count > 0 && view.data == nullptr) {
    return {ErrorCode::kNullPointer,
            fmt::format("{}: expected {} elements, got null data", name, count)};
  }
  return {};
}

// Names and reasons that live as long as the library.
const std::vector<BackendInfo>& backend_infos() {
  static const std::vector<BackendInfo> infos = list_backends();
  return infos;
}

}  // namespace

void set_last_error(const Status& status) {
  last_error.text = status.to_string();
  last_error.shown = last_error.text.c_str();
}

void set_last_error_out_of_memory() noexcept {
  last_error.shown = "out of memory";
}

Result<TensorView> packed(const char* name,
                          const char* wanted,
                          const DLTensor* tensor,
                          std::initializer_list<DType> accepted,
                          const Device& device) {
  const Result<TensorView> view = view_of(name, wanted, tensor);
  if (!view.ok()) return view;
  bool fits = false;
  for (const DType dtype : accepted)
    fits = fits || view->dtype == dtype;
  if (!fits) {
    return Status(ErrorCode::kInvalidDtype,
                  fmt::format("{}: expected {}, got {}", name, wanted, describe(*tensor)));
  }
  if (!view->is_contiguous()) {
    return Status(
        ErrorCode::kNotContiguous,
        fmt::format("{}: expected a packed tensor, got {} with gaps", name, describe(*tensor)));
  }
  if (view->device != device) {
    return Status(
        ErrorCode::kDeviceMismatch,
        fmt::format(
            "{}: expected memory of {}, got {}", name, to_string(device), to_string(view->device)));
  }
  return view;
}

Result<uint8_t*> bytes(
    const char* name, const DLTensor* tensor, int64_t count, bool scales, const Device& device) {
  const Result<TensorView> view =
      scales ? packed(name, "u8 or e4m3", tensor, {DType::kU8, DType::kE4M3}, device)
             : packed(name, "u8", tensor, {DType::kU8}, device);
  if (!view.ok()) return view.status();
  HX_RETURN_IF_ERROR(check_elements(name, *tensor, *view, count));
  return view->as<uint8_t>();
}

Result<float*> floats(const char* name,
                      const DLTensor* tensor,
                      int64_t count,
                      const Device& device) {
  const Result<TensorView> view = packed(name, "f32", tensor, {DType::kF32}, device);
  if (!view.ok()) return view.status();
  HX_RETURN_IF_ERROR(check_elements(name, *tensor, *view, count));
  return view->as<float>();
}

}  // namespace hexpert::capi

using hexpert::DeviceType;
using hexpert::ErrorCode;
using hexpert::Status;
namespace capi = hexpert::capi;

int32_t hx_version(void) {
  return HX_VERSION;
}
const char* hx_version_string(void) {
  return HEXPERT_VERSION_STRING;
}
const char* hx_status_name(hx_status status) {
  return to_string(static_cast<ErrorCode>(status)).data();  // literals
}
const char* hx_last_error(void) {
  return capi::last_error.shown;
}

int32_t hx_num_backends(void) {
  int32_t count = 0;
  capi::call([&]() -> Status {
    count = static_cast<int32_t>(capi::backend_infos().size());
    return {};
  });
  return count;
}

hx_status hx_get_backend(int32_t index, hx_backend_info* info) {
  return capi::call([&]() -> Status {
    const auto given = capi::read("info", info);
    if (!given.ok()) return given.status();
    const auto& infos = capi::backend_infos();
    if (index < 0 || index >= static_cast<int32_t>(infos.size())) {
      return {ErrorCode::kInvalidArgument,
              fmt::format("index: expected 0..{}, got {}", infos.size() - 1, index)};
    }
    const hexpert::BackendInfo& found = infos[static_cast<size_t>(index)];
    info->name = found.name.data();  // a literal
    info->device_type = found.device == DeviceType::kCpu ? kDLCPU : kDLCUDA;
    info->available = found.available ? 1 : 0;
    info->reason = found.reason.c_str();
    return {};
  });
}

hx_status hx_query_backend(DLDevice device, const char** name) {
  return capi::call([&]() -> Status {
    HX_RETURN_IF_ERROR(capi::require("name", name));
    const auto where = hexpert::device_of("device", device);
    if (!where.ok()) return where.status();
    const auto best = hexpert::query_backend(*where);
    if (!best.ok()) return best.status();
    for (const hexpert::BackendInfo& info : capi::backend_infos()) {
      if (info.name == *best) *name = info.name.data();
    }
    return {};
  });
}
