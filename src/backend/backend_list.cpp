// The ordered list of backends: the one place that knows them all.
#include <fmt/format.h>

#include <array>
#include <new>

#include "backend/backend.hpp"
#include "cpu/cpu_backend.hpp"
#include "cuda/cuda_backend.hpp"
#include "moe/reference.hpp"

namespace hexpert {
namespace {

constexpr std::array kBackends = {
    &cuda::cuda_sm90a_backend,
    &cpu::cpu_amx_backend,
    &cpu::cpu_avx512_vnni_backend,
    &cpu::cpu_avx2_backend,
    &cpu::cpu_scalar_backend,
    &reference_backend,
};

std::string names() {
  std::string all;
  for (const Backend* backend : kBackends) {
    all += fmt::format("{}{}", all.empty() ? "" : ", ", backend->name);
  }
  return all;
}

// Can `backend` run on `device`?
Support can_run(const Backend& backend, const Device& device) {
  if (backend.device == device.type) return backend.available(device);
  return Support::no(fmt::format("runs on {}, not on {}",
                                 backend.device == DeviceType::kCpu ? "cpu" : "cuda",
                                 to_string(device)));
}

}  // namespace

std::span<const Backend* const> backends() {
  return kBackends;
}

Result<const Backend*> find_backend(std::string_view name, const Device& device) {
  std::string reasons;
  for (const Backend* backend : kBackends) {
    if (!name.empty() && backend->name != name) continue;
    const Support support = can_run(*backend, device);
    if (support) return backend;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", backend->name, support.reason);
  }
  if (reasons.empty()) {
    return Status(ErrorCode::kNotFound,
                  fmt::format("backend: expected one of {}, got {}", names(), name));
  }
  return Status(ErrorCode::kUnsupportedDevice, fmt::format("backend: {}", reasons));
}

std::vector<BackendInfo> list_backends() {
  std::vector<BackendInfo> infos;
  for (const Backend* backend : kBackends) {
    Support support = backend->available({backend->device, 0});
    infos.push_back({backend->name, backend->device, support.ok, std::move(support.reason)});
  }
  return infos;
}

Result<std::string> query_backend(const Device& device) {
  try {
    const Result<const Backend*> backend = find_backend("", device);
    if (!backend.ok()) return backend.status();
    return std::string((*backend)->name);
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::kOutOfMemory, "query_backend");
  }
}

}  // namespace hexpert
