#include "machine.hpp"

#include <fmt/core.h>
#include <omp.h>

#include <charconv>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

namespace hexpert::tools {
namespace {

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// The value of the first line "key : value" of a file of /proc, or empty.
std::string proc_value(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon != std::string::npos && trim(std::string_view(line).substr(0, colon)) == key) {
      return std::string(trim(std::string_view(line).substr(colon + 1)));
    }
  }
  return {};
}

int64_t meminfo_bytes(std::string_view key) {
  const std::string text = proc_value("/proc/meminfo", key);
  int64_t kib = 0;
  std::from_chars(text.data(), text.data() + text.size(), kib);
  return kib * 1024;
}

// Of the flags of Linux, the few that decide about backends.
std::string relevant_features() {
  std::istringstream flags(proc_value("/proc/cpuinfo", "flags"));
  std::string result;
  for (std::string flag; flags >> flag;) {
    for (std::string_view wanted : {"avx2",
                                    "fma",
                                    "f16c",
                                    "avx_vnni",
                                    "avx512f",
                                    "avx512bw",
                                    "avx512dq",
                                    "avx512vl",
                                    "avx512vbmi",
                                    "avx512_vnni",
                                    "avx512_bf16",
                                    "avx512_fp16",
                                    "amx_tile",
                                    "amx_bf16",
                                    "amx_int8"}) {
      if (flag == wanted) result += (result.empty() ? "" : " ") + flag;
    }
  }
  return result;
}

// "always [madvise] never" -> "madvise".
std::string huge_page_setting() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(file, line);
  const size_t open = line.find('[');
  const size_t close = line.find(']');
  if (open == std::string::npos || close == std::string::npos) return "unknown";
  return line.substr(open + 1, close - open - 1);
}

}  // namespace

Machine describe_machine() {
  Machine machine;
  machine.version = HEXPERT_VERSION;
#ifdef __clang__
  machine.compiler = fmt::format("clang {}", __clang_version__);
#else
  machine.compiler = fmt::format("gcc {}", __VERSION__);
#endif
  machine.cpu = proc_value("/proc/cpuinfo", "model name");
  machine.features = relevant_features();
  machine.cores = omp_get_num_procs();
  machine.omp_threads = omp_get_max_threads();
  machine.memory_bytes = meminfo_bytes("MemTotal");
  machine.available_bytes = meminfo_bytes("MemAvailable");
  machine.huge_pages = huge_page_setting();
  return machine;
}

nlohmann::json machine_json(const Machine& machine) {
  return {{"version", machine.version},
          {"compiler", machine.compiler},
          {"cpu", machine.cpu},
          {"features", machine.features},
          {"cores", machine.cores},
          {"omp_threads", machine.omp_threads},
          {"memory_bytes", machine.memory_bytes},
          {"available_bytes", machine.available_bytes},
          {"huge_pages", machine.huge_pages}};
}

}  // namespace hexpert::tools
