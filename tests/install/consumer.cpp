#include <hexpert/hexpert.h>
#include <hexpert/checkpoint.hpp>
#include <hexpert/moe.hpp>

#include <cstdio>

int main() {
  const auto best = hexpert::query_backend(hexpert::Device::cpu());
  if (!best.ok()) return 1;
  const char* name = nullptr;
  if (hx_query_backend({kDLCPU, 0}, &name) != HX_OK || *best != name) return 2;
  if (hx_version() != HX_VERSION) return 3;
  std::printf("hexpert %s, %s\n", hx_version_string(), name);
  return 0;
}
