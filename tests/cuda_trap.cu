#include "cuda_trap.hpp"

namespace hexpert::test {
namespace {

__global__ void trap() {
  __trap();
}

}  // namespace

void launch_trap() {
  trap<<<1, 1>>>();
}

}  // namespace hexpert::test
