// The CPU backends: one driver, one kernel table each.
#pragma once

#include "backend/backend.hpp"

namespace hexpert::cpu {

extern const Backend cpu_amx_backend;
extern const Backend cpu_avx512_vnni_backend;
extern const Backend cpu_avx2_backend;
extern const Backend cpu_scalar_backend;

}  // namespace hexpert::cpu
