// hexpert info: what this machine is and which backends run on it.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.hpp"
#include "hexpert/moe.hpp"
#include "machine.hpp"

namespace hexpert::tools {
namespace {

constexpr const char* kFooter =
    "Shows the processor, memory, and every backend, best first, with the reason where one cannot\n"
    "run here. A layer uses the first available one unless --backend names another.\n"
    "\n"
    "Examples:\n"
    "  hexpert info\n"
    "  hexpert info --json | jq '.backends[] | select(.available) | .name'";

int run_info(bool json) {
  const Machine machine = describe_machine();
  const std::vector<BackendInfo> backends = list_backends();
  if (json) {
    nlohmann::json document = machine_json(machine);
    for (const BackendInfo& backend : backends) {
      document["backends"].push_back(
          {{"name", backend.name}, {"available", backend.available}, {"reason", backend.reason}});
    }
    fmt::print("{}\n", document.dump(2));
    return kExitOk;
  }
  fmt::print("hexpert     {}\n", machine.version);
  fmt::print("processor   {}\n", machine.cpu);
  fmt::print("features    {}\n", machine.features);
  fmt::print("cores       {} ({} OpenMP threads)\n", machine.cores, machine.omp_threads);
  fmt::print("memory      {:.1f} GB, {:.1f} GB available\n",
             static_cast<double>(machine.memory_bytes) * 1e-9,
             static_cast<double>(machine.available_bytes) * 1e-9);
  fmt::print("huge pages  {}\n", machine.huge_pages);
  fmt::print("compiler    {}\n", machine.compiler);
  fmt::print("backends, best first:\n");
  for (const BackendInfo& backend : backends) {
    fmt::print("  {:<16} {}\n",
               backend.name,
               backend.available ? "available" : "not available: " + backend.reason);
  }
  return kExitOk;
}

}  // namespace

void add_info(CLI::App& parent, int* exit_code) {
  CLI::App* command = parent.add_subcommand("info", "Machine, backends, and why one cannot run");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "Print JSON instead of text");
  command->footer(kFooter);
  command->callback([json, exit_code] { *exit_code = run_info(*json); });
}

}  // namespace hexpert::tools
