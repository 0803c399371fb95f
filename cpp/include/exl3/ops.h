// Every native operation of exl3, declared once: a plain argument block (pointers, true sizes, flags) per operation, and
// the table of functions that a backend library (libexl3_cpu, libexl3_cuda, libexl3_rocm) exports.
//
// Contract of every operation (docs/architecture.md, "native operations"):
//  - knows neither torch nor Python; allocates nothing, never synchronises, throws nothing;
//  - returns 0, or an exl3_status with a text behind last_error() of this thread;
//  - `stream`: a CUDA/HIP stream; on the CPU the number of threads, as an integer in the pointer;
//  - index arrays are int32 and live on the device; whatever changes from step to step is read from them, so that a
//    recorded call can be replayed with new contents;
//  - strides and counts are in elements unless a name says bytes.
#pragma once
#include <stdint.h>

#define EXL3_ABI 1
#define EXL3_MAX_GROUP 4
#define EXL3_PAGE 256 /* tokens in a cache page */

#if defined(_WIN32)
#define EXL3_EXPORT extern "C" __declspec(dllexport)
#else
#define EXL3_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { EXL3_OK = 0, EXL3_BAD_ARGUMENT = 1, EXL3_UNSUPPORTED = 2, EXL3_DEVICE_FAULT = 3 } exl3_status;
typedef enum { EXL3_F32 = 0, EXL3_F16 = 1, EXL3_BF16 = 2 } exl3_dtype;
typedef enum { EXL3_3INST = 0, EXL3_MCG = 1, EXL3_MUL1 = 2 } exl3_codebook;
typedef enum {
  EXL3_ACT_NONE = 0, EXL3_ACT_SILU = 1, EXL3_ACT_GELU = 2, EXL3_ACT_GELU_TANH = 3, EXL3_ACT_RELU2 = 4, EXL3_ACT_XIELU = 5, EXL3_ACT_RELU = 6
} exl3_activation;

// One EXL3 matrix, y = svh * ((x * suh) H . W . H) + bias (spec 4.3).
typedef struct exl3_weight {
  const void* trellis;            // layout 0: as on disk, [in_padded/16, out_padded/16, 8*k2] int16; 1: the backend's own, made by repack
  const void* suh;                // fp16 [in_padded]
  const void* svh;                // fp16 [out_padded]
  const float* bias;              // fp32 [out_features] or null
  int32_t in_features, out_features;
  int32_t in_padded, out_padded;  // multiples of 128
  int32_t k2;                     // twice K, so that half rates are whole: 2, 3, 4 ... 16
  int32_t codebook;               // exl3_codebook
  uint32_t multiplier;            // 89226354 for 3inst, the stored marker otherwise
  int32_t layout;
} exl3_weight;

// y[i] = epilogue(norm(x) @ W[i] + bias[i]) for up to four matrices that share the input.
//  norm: when norm_weight is set the input row is RMS-normalised and scaled first (weights fp32, any "+1" already in them).
//  activation != NONE: exactly two matrices (gate, up) of one shape; y[0] = act(gate) * up, y[1] unused.
//  accumulate: y += result (residual add); y is then fp32.
typedef struct exl3_linear_args {
  const void* x;
  const float* norm_weight;       // [in_features] or null
  const exl3_weight* weights[EXL3_MAX_GROUP];
  void* y[EXL3_MAX_GROUP];
  int64_t x_stride;
  int64_t y_stride[EXL3_MAX_GROUP];
  void* workspace;                // linear_workspace() bytes, zero when new, for linear alone; its first 64 KiB are zero after each call
  int64_t workspace_bytes;
  float norm_eps;
  int32_t rows, count;
  int32_t x_dtype, y_dtype;
  int32_t planes;                 // operands: 2 two int8 planes (fp16-grade), 1 one int8 plane, 0 floating point
  int32_t shared_suh;             // all suh equal: one rotation serves all
  int32_t activation;
  int32_t accumulate;
} exl3_linear_args;

// y = x @ W^T + bias for an unquantized weight, [out, in] as in Hugging Face files.
typedef struct exl3_dense_args {
  const void* x; const void* weight; const float* bias; void* y;
  int64_t x_stride, y_stride;
  int32_t rows, in_features, out_features;
  int32_t x_dtype, weight_dtype, y_dtype;
  int32_t accumulate;
} exl3_dense_args;

// The layout a backend wants for `linear`, from the layout on disk. `out` has repack_bytes(weight) bytes.
typedef struct exl3_repack_args { const exl3_weight* weight; void* out; } exl3_repack_args;

// W in fp16 or fp32, row-major [in_padded, out_padded] in the rotated basis, or, with original_basis, [in_features, out_features] with
// both rotations and scales applied.
typedef struct exl3_reconstruct_args { const exl3_weight* weight; void* out; int32_t out_dtype; int32_t original_basis; } exl3_reconstruct_args;

// y = post * H128(pre * x) block by block; n is extended with zeros to n_padded on the way in. pre and post: fp32 or null.
typedef struct exl3_rotate_args {
  const void* x; void* y; const float* pre; const float* post;
  int64_t x_stride, y_stride;
  int32_t rows, n, n_padded; int32_t x_dtype, y_dtype;
} exl3_rotate_args;

// residual (if set, fp32): residual += x, then y = norm(residual); else y = norm(x). accumulate: y += norm(...), y fp32.
typedef struct exl3_rms_norm_args {
  const void* x; float* residual; const float* weight; void* y;   // weight fp32 [n] or null
  int64_t x_stride, residual_stride, y_stride;
  int32_t rows, n; int32_t x_dtype, y_dtype;
  float eps;
  int32_t subtract_mean;          // LayerNorm without bias (Cohere)
  int32_t accumulate;
} exl3_rms_norm_args;

// cos and sin of positions, [tokens, half] fp32, once a step; every layer of the same kind reads them.
// With inv_freq_long set, tokens whose row's length is above `threshold` use it (longrope).
typedef struct exl3_rotary_table_args {
  const int32_t* positions; const int32_t* token_row; const int32_t* lengths;
  const float* inv_freq; const float* inv_freq_long;
  float* cos; float* sin;
  int32_t tokens, half, threshold; float scale, scale_long;
} exl3_rotary_table_args;

// q and k in place: optional per-head RMSNorm, then rotation of the first rotary_dim values of each head.
typedef struct exl3_rotary_args {
  void* q; void* k;               // [tokens, heads, head_dim]; k may be null
  const float* cos; const float* sin;          // [tokens, rotary_dim/2] or null: norms only
  const float* q_norm; const float* k_norm;    // fp32 [head_dim] or null
  int64_t q_stride, k_stride;     // from token to token
  int32_t tokens, q_heads, k_heads, head_dim, rotary_dim;
  int32_t dtype, interleaved; float eps;
} exl3_rotary_args;

// One layer of the paged cache: k and v are [pages, 256, kv_heads, head_dim] fp16 where bits is 16, else int32 codes
// [pages, 256, kv_heads*head_dim/32*bits] with fp16 scales [pages, 256, kv_heads*head_dim/32] (spec 5).
typedef struct exl3_cache_layer {
  void* k; void* v; void* k_scale; void* v_scale;
  int32_t pages, kv_heads, head_dim, k_bits, v_bits; float compand;
} exl3_cache_layer;

// Token t belongs to row token_row[t] (-1: padding, skipped) and stands at positions[t] of it, page block_table[row, position/256].
typedef struct exl3_cache_append_args {
  exl3_cache_layer cache;
  const void* k; const void* v; int64_t k_stride, v_stride;      // [tokens, kv_heads, head_dim]
  const int32_t* positions; const int32_t* token_row; const int32_t* block_table;
  int32_t tokens, table_stride, dtype;
} exl3_cache_append_args;

// Causal attention of packed tokens over the paged cache (already appended): token t sees positions max(0, p-window+1) .. p of its row.
typedef struct exl3_attention_args {
  exl3_cache_layer cache;
  const void* q; void* y; int64_t q_stride, y_stride;            // [tokens, heads, head_dim]
  const int32_t* positions; const int32_t* token_row; const int32_t* block_table;
  const float* sinks;             // [heads] or null
  void* workspace; int64_t workspace_bytes;
  int32_t tokens, heads, table_stride, dtype;
  float scale, softcap;           // softcap 0: none
  int32_t window;                 // 0: none
} exl3_attention_args;

// What lies between a layer's projections, in one call: `rotary` of q and k, `cache_append` of k and v, `attention` of q. q and k may be
// overwritten. cos null: no rotation; a norm null: none.
typedef struct exl3_attend_args {
  exl3_attention_args attention;
  void* k; const void* v; int64_t k_stride, v_stride;            // [tokens, kv_heads, head_dim]
  const float* cos; const float* sin; const float* q_norm; const float* k_norm;  // as in exl3_rotary_args
  int32_t rotary_dim, interleaved; float eps;
} exl3_attend_args;

// Cache positions start .. start+count-1 of one row, decoded to fp16/fp32 [count, kv_heads, head_dim] each.
typedef struct exl3_cache_read_args {
  exl3_cache_layer cache; void* k; void* v; const int32_t* block_table; int32_t start, count, dtype;
} exl3_cache_read_args;

// y = act(gate) * up, or act(gate) where up is null. params: xIELU's alpha_p, alpha_n, beta, eps.
typedef struct exl3_act_mul_args {
  const void* gate; const void* up; void* y; int64_t gate_stride, up_stride, y_stride;
  int32_t rows, n; int32_t dtype, activation; float params[4];
} exl3_act_mul_args;

// y[i] = scale * table[ids[i]]; trellis_bits > 0: a ring-quantized table (spec 4.8), signs fp16 [groups, 256]. An id outside [0, vocab) gives zeros.
typedef struct exl3_embedding_args {
  const int32_t* ids; const void* table; const void* signs; void* y; int64_t y_stride;
  int32_t tokens, n, vocab; int32_t table_dtype, y_dtype, trellis_bits; float scale;
} exl3_embedding_args;

// y += scale * x, flat; y fp32.
typedef struct exl3_add_args { const void* x; float* y; int64_t n; int32_t x_dtype; float scale; } exl3_add_args;
// x = cap * tanh(scale * x / cap) in place, fp32; cap 0: x *= scale.
typedef struct exl3_softcap_args { float* x; int64_t n; float scale, cap; } exl3_softcap_args;

// Per row of a batch, read on the device. temperature 0: greedy. top_k 0, top_p 1, min_p 0, penalties 1/0/0: off.
typedef struct exl3_sample_params {
  float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  int32_t top_k, temperature_last;
  uint64_t seed, counter;         // the draw is a counter-based function of (seed, counter): independent of the batch
} exl3_sample_params;

typedef struct exl3_sample_args {
  const float* logits; int64_t logits_stride;    // [rows, vocab]
  const exl3_sample_params* params;              // [rows]
  const int32_t* history; int64_t history_stride; const int32_t* history_len;  // tokens the penalties look at, or null
  int32_t* ids; float* probs;                    // [rows]; probs of the drawn ids, or null. A row with a NaN gets id -1
  void* workspace; int64_t workspace_bytes;
  int32_t rows, vocab;
} exl3_sample_args;

// Tail-biting trellis search (spec quantizer 7): tiles fp32 [tiles, 256] in stream order -> states uint16, decoded values fp32.
typedef struct exl3_encode_args {
  const float* tiles; uint16_t* states; float* values;           // values may be null
  void* workspace; int64_t workspace_bytes;
  int32_t tiles_count, k2, codebook; uint32_t multiplier;
  int32_t seam_window;            // positions of the first pass round the seam; 0: all 256
} exl3_encode_args;

// X(name): int name(const exl3_<name>_args*, void* stream)
#define EXL3_OPS(X) \
  X(linear) X(dense) X(repack) X(reconstruct) X(rotate) X(rms_norm) X(rotary_table) X(rotary) X(cache_append) X(attention) X(cache_read) \
  X(act_mul) X(embedding) X(add) X(softcap) X(sample) X(encode) X(attend)

typedef struct exl3_backend {
  int32_t abi, bytes;             // EXL3_ABI, raised when a block changes: a stale library refuses by name. sizeof(exl3_backend) as the library
                                  // knows it: operations are added at the end, and what lies beyond is not there
  const char* name;               // "cpu", "cuda", "rocm"
  const char* build;              // compiler, architectures inside
  const char* (*last_error)(void);
  const char* (*describe)(int device);                             // tier or card, one line; null with last_error() when the device can't be used
  int64_t (*repack_bytes)(const exl3_weight*);                     // 0: the layout on disk is used as it is
  int64_t (*linear_workspace)(const exl3_linear_args*);
  int64_t (*attention_workspace)(const exl3_attention_args*);
  int64_t (*sample_workspace)(const exl3_sample_args*);
  int64_t (*encode_workspace)(const exl3_encode_args*);
#define EXL3_OP_POINTER(name) int (*name)(const exl3_##name##_args*, void* stream);
  EXL3_OPS(EXL3_OP_POINTER)     // a backend that lacks one has null there
#undef EXL3_OP_POINTER
} exl3_backend;

// the one exported symbol
typedef const exl3_backend* (*exl3_get_backend_fn)(void);  // each library defines: EXL3_EXPORT const exl3_backend* exl3_get_backend(void)

#ifdef __cplusplus
}
#endif
