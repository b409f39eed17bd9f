// Bytes and bits are defined with subnormals kept and rounding to nearest. A caller's thread (or an
// OpenMP thread that a framework configured) may flush them, so every worker sets its own state.
#pragma once

#include <xmmintrin.h>

namespace hexpert::cpu {

class FloatEnvironment {
 public:
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  static constexpr unsigned kDefault =
      0x1F80;  // all exceptions masked, nearest even, no FTZ, no DAZ
  unsigned saved_;
};

}  // namespace hexpert::cpu
