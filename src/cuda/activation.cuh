// Activations in FP32, with relative error below 2^-20; a subnormal gate costs more.
#pragma once

#include <cstdint>

namespace hexpert::cuda {

__device__ __forceinline__ float squared_relu(float z) {
  const float r = z < 0 ? 0.0F : z;  // NaN stays
  return __fmul_rn(r, r);
}

// g sigmoid(g) u from z = exp(-|g|): g / (1 + z), or g z / (1 + z) for a negative g.
__device__ __forceinline__ float swiglu(float g, float u) {
  // Below -200 the result is zero for every finite u. From -709.78 on the definition's sigmoid, in FP64,
  // is zero, and an infinite u gives NaN: so does a gate with z = 0.
  const float least = g <= -709.782715F ? -2000.0F : -200.0F;
  float gate;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(gate) : "f"(g), "f"(least));
  // Far below zero z nears the smallest FP32 numbers while a large u may lift the product: it is taken
  // as the square of 2^-24 times an ordinary number.
  const bool far = gate < -80.0F;
  const float x = far ? __fmul_rn(-0.5F, gate) : fminf(fabsf(gate), 200.0F);
  constexpr float kLog2e = 1.44269502F;
  constexpr float kLog2eRest = 1.92596303e-8F;
  const float exponent = __fmul_rn(x, -kLog2e);
  const float rest = __fmaf_rn(x, -kLog2eRest, __fmaf_rn(x, -kLog2e, -exponent));
  float z;
  asm("ex2.approx.f32 %0, %1;" : "=f"(z) : "f"(far ? __fadd_rn(exponent, 24.0F) : exponent));
  z = __fmaf_rn(z, __fmul_rn(rest, 0.693147182F), z);
  const float denominator = __fadd_rn(1.0F, z);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(denominator));
  inverse = __fmaf_rn(inverse, __fmaf_rn(-denominator, inverse, 1.0F), inverse);
  const float numerator = gate < 0 ? __fmul_rn(gate, z) : gate;
  // Where z is scaled the denominator is 1.
  const float first = far ? __fmul_rn(u, 0x1p-48F) : inverse;
  const float second = far ? z : u;
  return __fmul_rn(__fmul_rn(numerator, first), second);
}

}  // namespace hexpert::cuda
