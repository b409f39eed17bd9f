// The machine, for people and for the records of benchmarks.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace hexpert::tools {

struct Machine {
  std::string version;   // of hexpert
  std::string compiler;  // that built hexpert
  std::string cpu;
  std::string features;  // those that matter here, separated by spaces
  int cores = 0;         // that this process may use
  int omp_threads = 0;
  int64_t memory_bytes = 0;
  int64_t available_bytes = 0;
  std::string huge_pages;  // setting of transparent huge pages
};

Machine describe_machine();
nlohmann::json machine_json(const Machine& machine);

}  // namespace hexpert::tools
