/* The C ABI of hexpert, for C11 and C++: routed NVFP4 mixture-of-experts layers.
 *
 * Tensors are DLPack: `const DLTensor*` that the call borrows. Strides may be NULL (packed). Memory is of
 * kDLCPU or kDLCUDAHost; of kDLCUDA and kDLCUDAManaged where a backend for CUDA is built in. `stream` is a
 * cudaStream_t, ignored on the CPU, where every call has finished when it returns.
 *
 * Every struct starts with its size, so that old programs run with a newer library: begin from its
 * ..._INIT. Functions return HX_OK or a code; hx_last_error() then names the argument, what it must be and
 * what it was. Nothing is written by a call that refuses its arguments. No function throws, prints or aborts.
 *
 * docs/c.md has a complete program. What each operation computes is said in the C++ header of the same
 * name: quantize.hpp, weights.hpp, moe.hpp, checkpoint.hpp.
 */
#ifndef HEXPERT_HEXPERT_H_
#define HEXPERT_HEXPERT_H_

#include <float.h>
#include <stddef.h>
#include <stdint.h>

#include "hexpert/dlpack.h"

#define HX_VERSION_MAJOR 0
#define HX_VERSION_MINOR 1
#define HX_VERSION_PATCH 0
#define HX_MAKE_VERSION(major, minor, patch) (((major)*100 + (minor)) * 100 + (patch))
#define HX_VERSION HX_MAKE_VERSION(HX_VERSION_MAJOR, HX_VERSION_MINOR, HX_VERSION_PATCH)

#if defined(__GNUC__)
#define HX_API __attribute__((visibility("default")))
#else
#define HX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ---- */

/* The same values as hexpert::ErrorCode. New ones are appended. */
typedef enum hx_status {
  HX_OK = 0,
  HX_INVALID_SHAPE = 1,        /* wrong rank, or a dimension of 0 */
  HX_INVALID_DTYPE = 2,        /* element type not accepted */
  HX_NOT_CONTIGUOUS = 3,       /* last dimension strided, or rows not packed */
  HX_SHAPE_MISMATCH = 4,       /* two arguments disagree */
  HX_METADATA_MISMATCH = 5,    /* the weights were prepared for other sizes */
  HX_DEVICE_MISMATCH = 6,      /* arguments on different devices */
  HX_NON_FINITE_WEIGHTS = 7,   /* NaN or infinity in an expert */
  HX_INVALID_ARGUMENT = 8,     /* a scalar argument out of range, or a struct of unknown size */
  HX_ACTIVATION_MISMATCH = 9,  /* gated weights with a non-gated activation, or the reverse */
  HX_UNSUPPORTED = 10,         /* valid, but not implemented */
  HX_INVALID_OUTPUT = 11,      /* out: shape, dtype, layout; any memory that is written: overlap */
  HX_NULL_POINTER = 12,        /* a null argument, or null data with a non-zero size */
  HX_MISALIGNED = 13,          /* base address alignment */
  HX_TOO_LARGE = 14,           /* more tokens than planned, or an index past int32 */
  HX_WORKSPACE_TOO_SMALL = 15, /* needed and given bytes are in the message */
  HX_UNSUPPORTED_DEVICE = 16,  /* no backend for this device */
  HX_DEVICE_ERROR = 17,        /* the device reported an error after a launch */
  HX_OUT_OF_MEMORY = 18,
  HX_IO_ERROR = 19,     /* the operating system refused a file operation */
  HX_INVALID_FILE = 20, /* a file is malformed, truncated or inconsistent */
  HX_NOT_FOUND = 21     /* a tensor, expert, shard, layer or backend name does not exist */
} hx_status;

/* HX_VERSION of the library that is loaded. */
HX_API int32_t hx_version(void);
/* "0.1.0" */
HX_API const char* hx_version_string(void);
/* "shape mismatch"; never NULL. */
HX_API const char* hx_status_name(hx_status status);
/* Text of the last call of this thread that failed: "shape mismatch: fc2_weight: expected ...". "" if none
 * did. Valid until the next failure on this thread. */
HX_API const char* hx_last_error(void);

/* ---- Backends ---- */

typedef struct hx_backend_info {
  size_t size;
  const char* name;    /* "cpu-amx" */
  int32_t device_type; /* kDLCPU or kDLCUDA */
  int32_t available;   /* 1: runs here; a GPU backend: on cuda:0 */
  const char* reason;  /* "" when available, else the first unmet condition */
} hx_backend_info;
#define HX_BACKEND_INFO_INIT \
  { sizeof(hx_backend_info), NULL, 0, 0, NULL }

/* Backends of this build, best first, "reference" last. */
HX_API int32_t hx_num_backends(void);
/* Fills `info`, whose strings live as long as the library. HX_INVALID_ARGUMENT: index. */
HX_API hx_status hx_get_backend(int32_t index, hx_backend_info* info);
/* Name of the best backend of a device, which lives as long as the library; HX_UNSUPPORTED_DEVICE and the
 * reasons if there is none. */
HX_API hx_status hx_query_backend(DLDevice device, const char** name);

/* ---- Quantization ---- */

typedef enum hx_scale_layout {
  HX_SCALES_LINEAR = 0, /* [rows, cols / 16] */
  HX_SCALES_128X4 = 1,  /* tiles of 128 rows x 4 scale columns */
  HX_SCALES_8X4 = 2     /* tiles of 8 rows x 4 scale columns */
} hx_scale_layout;

/* Bytes of a block-scale buffer, padding included; -1 for negative sizes or cols % 16 != 0. */
HX_API int64_t hx_block_scale_bytes(hx_scale_layout layout, int64_t rows, int64_t cols);

/* A quantized matrix: value(r, c) = e2m1(codes[r, c]) * e4m3(block_scales[r, c / 16]) * outer[r or 0] */
typedef struct hx_nvfp4 {
  size_t size;
  const DLTensor* codes; /* [rows, cols / 2] u8, packed; element 2j in the low nibble of byte j */
  const DLTensor* block_scales; /* u8 or float8_e4m3fn, packed, hx_block_scale_bytes() of them */
  const DLTensor* outer;        /* f32 decode scales: [rows] with per_row, else [1] */
  int32_t per_row;
  int32_t scale_layout; /* hx_scale_layout */
} hx_nvfp4;
#define HX_NVFP4_INIT \
  { sizeof(hx_nvfp4), NULL, NULL, NULL, 1, HX_SCALES_LINEAR }

typedef enum hx_four_over_six {
  HX_FOUR_OVER_SIX_OFF = 0,
  HX_FOUR_OVER_SIX_MAE = 1,
  HX_FOUR_OVER_SIX_MSE = 2
} hx_four_over_six;

typedef struct hx_quantize_options {
  size_t size;
  int32_t four_over_six; /* hx_four_over_six */
  float e4m3_max;        /* with four_over_six: 448 or 256 */
  int32_t num_threads;   /* 0: the OpenMP default */
} hx_quantize_options;
#define HX_QUANTIZE_OPTIONS_INIT \
  { sizeof(hx_quantize_options), HX_FOUR_OVER_SIX_OFF, 448.0F, 0 }

/* Quantizes activations, one scale per token.
 *
 * hidden_states        [tokens, hidden_size] bf16, in memory of the cpu or of a GPU that a backend serves;
 *                      rows may be strided, columns not.
 * padded_hidden_size   >= hidden_size, a multiple of 16; the columns between are zero.
 * out                  tokens rows, padded_hidden_size columns, per_row 1; in memory of the same device.
 *                      Its three parts lie apart from each other and from hidden_states.
 * options              NULL: defaults.
 * returns              HX_INVALID_SHAPE, _INVALID_DTYPE, _NOT_CONTIGUOUS, _INVALID_ARGUMENT, _NULL_POINTER,
 *                      _MISALIGNED, _DEVICE_MISMATCH, _INVALID_OUTPUT (overlap) */
HX_API hx_status hx_quantize_tokens(const DLTensor* hidden_states,
                                    int64_t padded_hidden_size,
                                    const hx_nvfp4* out,
                                    const hx_quantize_options* options,
                                    void* stream);
/* Quantizes one weight matrix [rows, cols] bf16, cols % 16 == 0, with one scale; out has per_row 0. In host
 * memory; otherwise as hx_quantize_tokens(). */
HX_API hx_status hx_quantize_matrix(const DLTensor* matrix,
                                    const hx_nvfp4* out,
                                    const hx_quantize_options* options,
                                    void* stream);
/* Expands to out, [rows, cols] f32 or bf16 (rounded to nearest even), packed, overlapping no part of in. All
 * in host memory. HX_INVALID_OUTPUT: overlap. */
HX_API hx_status hx_dequantize(const hx_nvfp4* in, const DLTensor* out, void* stream);

/* ---- Weights ---- */

/* NVFP4 experts of one layer. Reference counted: a plan made with hx_moe_create() keeps them alive, so
 * handles may be freed in any order. Reads may be concurrent; a change must be ordered against every other
 * use by the caller. */
typedef struct hx_weights hx_weights;

typedef struct hx_expert_shape {
  size_t size;
  int64_t num_local_experts;
  int64_t hidden_size;
  int64_t intermediate_size;
  int32_t gated; /* 1: FC1 holds gate and up */
} hx_expert_shape;
#define HX_EXPERT_SHAPE_INIT \
  { sizeof(hx_expert_shape), 0, 0, 0, 0 }

typedef struct hx_prepare_options {
  size_t size;
  const char* backend;      /* NULL or "": the best */
  int32_t refuse_nonfinite; /* 1: HX_NON_FINITE_WEIGHTS names an expert with NaN or infinity */
  int32_t num_threads;      /* 0: the OpenMP default */
  int32_t device_type;      /* where the weights live: kDLCPU, kDLCUDA; 0: where the stacks are */
  int32_t device_id;
} hx_prepare_options;
#define HX_PREPARE_OPTIONS_INIT \
  { sizeof(hx_prepare_options), NULL, 0, 0, 0, 0 }

/* Quantizes BF16 stacks.
 *
 * fc1_weight  [L, I, H] bf16, or [L, 2 I, H] (gated): rows 0..I-1 gate, I..2I-1 up. Packed.
 * fc2_weight  [L, H, I] bf16, packed.
 * options     NULL: defaults.
 * weights     set on success; to be given to hx_weights_free().
 * returns     HX_INVALID_SHAPE, _INVALID_DTYPE, _NOT_CONTIGUOUS, _SHAPE_MISMATCH, _NULL_POINTER,
 *             _MISALIGNED, _DEVICE_MISMATCH, _NON_FINITE_WEIGHTS, _UNSUPPORTED_DEVICE, _NOT_FOUND,
 *             _OUT_OF_MEMORY */
HX_API hx_status hx_weights_prepare(const DLTensor* fc1_weight,
                                    const DLTensor* fc2_weight,
                                    const hx_prepare_options* options,
                                    void* stream,
                                    hx_weights** weights);
/* Zero experts, to be filled. */
HX_API hx_status hx_weights_allocate(const hx_expert_shape* shape,
                                     const hx_prepare_options* options,
                                     hx_weights** weights);
/* Experts [first_expert, first_expert + num_experts) of the layer `prefix` of a safetensors checkpoint (a
 * file, a directory or an index), num_experts -1: all. HX_NOT_FOUND, _IO_ERROR, _INVALID_FILE,
 * _UNSUPPORTED, _INVALID_ARGUMENT, _NON_FINITE_WEIGHTS, _OUT_OF_MEMORY. */
HX_API hx_status hx_weights_load(const char* path,
                                 const char* prefix,
                                 int64_t first_expert,
                                 int64_t num_experts,
                                 const hx_prepare_options* options,
                                 hx_weights** weights);
/* Drops one reference. NULL is ignored. */
HX_API void hx_weights_free(hx_weights* weights);

/* Quantizes both stacks again, in place: no address changes. HX_METADATA_MISMATCH for other sizes. */
HX_API hx_status hx_weights_refresh(hx_weights* weights,
                                    const DLTensor* fc1_weight,
                                    const DLTensor* fc2_weight,
                                    void* stream);
/* Quantizes one expert in place: [I or 2 I, H] and [H, I] bf16, packed. */
HX_API hx_status hx_weights_set_expert(hx_weights* weights,
                                       int64_t expert,
                                       const DLTensor* fc1_weight,
                                       const DLTensor* fc2_weight,
                                       void* stream);

/* One projection in checkpoint order. */
typedef struct hx_projection {
  size_t size;
  const DLTensor* codes;        /* [rows, ceil(cols / 16) * 8] u8, packed */
  const DLTensor* block_scales; /* [rows, ceil(cols / 16)] u8 or float8_e4m3fn, packed, linear */
  float alpha;                  /* decode scale */
} hx_projection;
#define HX_PROJECTION_INIT \
  { sizeof(hx_projection), NULL, NULL, 1.0F }

typedef enum hx_projection_kind { HX_GATE = 0, HX_UP = 1, HX_DOWN = 2 } hx_projection_kind;

/* Takes one expert that is NVFP4 already; gate is NULL when not gated. */
HX_API hx_status hx_weights_set_quantized_expert(hx_weights* weights,
                                                 int64_t expert,
                                                 const hx_projection* gate,
                                                 const hx_projection* up,
                                                 const hx_projection* down,
                                                 void* stream);
/* Writes one projection into the tensors of `out`, which lie apart, and its alpha. */
HX_API hx_status hx_weights_export_projection(const hx_weights* weights,
                                              int64_t expert,
                                              hx_projection_kind projection,
                                              hx_projection* out,
                                              void* stream);

/* The canonical arrangement: docs/format.md section 5. Hp, Ip: the sizes rounded up to 256; N1 = Ip, or
 * 2 Ip when gated. All packed; scales u8 or float8_e4m3fn of any shape with that many elements. */
typedef struct hx_canonical_weights {
  size_t size;
  const DLTensor* fc1_data;           /* [L, N1, Hp / 2] u8 */
  const DLTensor* fc1_scale_swizzled; /* L * N1 * Hp / 16 */
  const DLTensor* fc1_alpha;          /* [L] f32; when gated, of the up rows */
  const DLTensor* fc1_gate_alpha;     /* [L] f32 of the gate rows, or NULL: as fc1_alpha */
  const DLTensor* fc2_data;           /* [L, Hp, Ip / 2] u8 */
  const DLTensor* fc2_scale_swizzled; /* L * Hp * Ip / 16 */
  const DLTensor* fc2_alpha;          /* [L] f32 */
} hx_canonical_weights;
#define HX_CANONICAL_WEIGHTS_INIT \
  { sizeof(hx_canonical_weights), NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/* Takes canonical bytes. */
HX_API hx_status hx_weights_import_canonical(hx_weights* weights,
                                             const hx_canonical_weights* source,
                                             void* stream);
/* Writes canonical bytes; a NULL member is skipped, the others lie apart: HX_INVALID_OUTPUT. */
HX_API hx_status hx_weights_export_canonical(const hx_weights* weights,
                                             const hx_canonical_weights* out,
                                             void* stream);

HX_API hx_status hx_weights_get_shape(const hx_weights* weights, hx_expert_shape* shape);
HX_API hx_status hx_weights_get_device(const hx_weights* weights, DLDevice* device);
/* Bytes held; 0 for NULL. */
HX_API int64_t hx_weights_size_bytes(const hx_weights* weights);

/* ---- The layer ---- */

typedef enum hx_activation_type {
  HX_SQUARED_RELU = 0, /* max(z, 0)^2, not gated */
  HX_SWIGLU = 1,       /* g sigmoid(g) u */
  HX_SWIGLU_OAI = 2,   /* min(g, limit) sigmoid(alpha g') (clamp(u, -limit, limit) + beta) */
  HX_GEGLU_TANH = 3,   /* gelu_tanh(g) u */
  HX_SITU = 4          /* b tanh(g / b) sigmoid(g) c tanh(u / c), or u in place of c tanh(u / c) */
} hx_activation_type;

/* Sizes and rules that are fixed when a layer is planned. */
typedef struct hx_moe_problem {
  size_t size;
  int64_t max_tokens;          /* largest number of rows a forward will be given */
  int64_t top_k;               /* width of routing_map */
  int64_t num_experts;         /* of the whole layer, over all devices */
  int64_t local_expert_offset; /* the weights are experts [offset, offset + L) */
  int32_t activation;          /* hx_activation_type */
  float alpha, beta, limit;    /* HX_SWIGLU_OAI */
  float situ_b, situ_c;        /* HX_SITU: finite and > 0; situ_c 0: not given */
} hx_moe_problem;
#define HX_MOE_PROBLEM_INIT \
  { sizeof(hx_moe_problem), 0, 0, 0, 0, HX_SWIGLU, 1.0F, 0.0F, FLT_MAX, 0.0F, 0.0F }

typedef struct hx_moe_options {
  size_t size;
  const char* backend;     /* NULL or "": the best */
  int32_t num_threads;     /* CPU; 0: the OpenMP default. No result depends on it. */
  int32_t batch_invariant; /* 1: a token's output does not depend on the others, bit for bit */
  void* workspace;         /* of the caller, aligned to HX_WORKSPACE_ALIGNMENT; NULL: one is made */
  int64_t
      workspace_bytes; /* at least hx_moe_workspace_bytes_for(), the layer's during a forward; */
                       /* layers may share them when no two run at a time */
} hx_moe_options;
#define HX_WORKSPACE_ALIGNMENT 256
#define HX_MOE_OPTIONS_INIT \
  { sizeof(hx_moe_options), NULL, 0, 0, NULL, 0 }

typedef struct hx_moe_inputs {
  size_t size;
  const DLTensor* hidden_states; /* [T, H] bf16, packed */
  const DLTensor* routing_map;   /* [T, top_k] i32 or i64, packed; global ids, others are ignored */
  const DLTensor* probabilities; /* [T, top_k] f32, packed */
  int64_t
      token_capacity; /* with has_token_capacity and use_bounded_rows: rows [0, capacity) live */
  int32_t has_token_capacity;
  int32_t use_bounded_rows;
} hx_moe_inputs;
#define HX_MOE_INPUTS_INIT \
  { sizeof(hx_moe_inputs), NULL, NULL, NULL, 0, 0, 0 }

/* One planned layer. One forward at a time per handle. */
typedef struct hx_moe hx_moe;

/* Plans a layer and allocates its workspace. Keeps `weights` alive. HX_INVALID_ARGUMENT,
 * _ACTIVATION_MISMATCH, _UNSUPPORTED, _UNSUPPORTED_DEVICE, _TOO_LARGE, _NOT_FOUND, _OUT_OF_MEMORY,
 * and of the caller's workspace: _WORKSPACE_TOO_SMALL, _MISALIGNED, _NULL_POINTER. */
HX_API hx_status hx_moe_create(const hx_moe_problem* problem,
                               const hx_weights* weights,
                               const hx_moe_options* options,
                               hx_moe** moe);
/* Bytes that a workspace of the caller must have for that layer. Fails as hx_moe_create() does. */
HX_API hx_status hx_moe_workspace_bytes_for(const hx_moe_problem* problem,
                                            const hx_weights* weights,
                                            const hx_moe_options* options,
                                            int64_t* bytes);
/* NULL is ignored. */
HX_API void hx_moe_free(hx_moe* moe);

/* Runs the layer:
 *
 *   out[i] = sum over slots s of probabilities[i, s] * expert(routing_map[i, s], hidden_states[i])
 *
 * out      [T, H] bf16 (rounded once) or f32 (the unrounded sum), packed. Rows [0, R) are overwritten,
 *          R = min(T, token_capacity) under use_bounded_rows and T otherwise.
 *          Inputs, out and the workspace of the options lie apart; inputs may share memory with each other.
 * returns  HX_SHAPE_MISMATCH, _INVALID_SHAPE, _INVALID_DTYPE, _NOT_CONTIGUOUS, _INVALID_OUTPUT,
 *          _INVALID_ARGUMENT, _DEVICE_MISMATCH, _NULL_POINTER, _MISALIGNED, _TOO_LARGE, _DEVICE_ERROR */
HX_API hx_status hx_moe_forward(hx_moe* moe,
                                const hx_moe_inputs* inputs,
                                const DLTensor* out,
                                void* stream);

/* One line: backend, tiles, threads, workspace. Lives as long as `moe`. "" for NULL. */
HX_API const char* hx_moe_plan(const hx_moe* moe);
/* "cpu-amx". "" for NULL. */
HX_API const char* hx_moe_backend(const hx_moe* moe);
/* 0 for NULL. */
HX_API int64_t hx_moe_workspace_bytes(const hx_moe* moe);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* HEXPERT_HEXPERT_H_ */
