// RMSNorm of the stream, rotation of q and k, their way into an fp16 cache and the MLP's activation for many tokens: sixteen bytes a thread
// at a time. Everything else, few tokens among it, goes to the portable kernels.
#include "parts.h"
#include "ptx.cuh"

#include "../cpp/gpu/numbers.h"

namespace exl3 {

constexpr int kFewTokens = 64, kRotaryThreads = 128, kEight = 8;

struct alignas(16) Halves {
  uint16_t v[kEight];
};
struct alignas(16) Floats {
  float v[kEight];
};

// One block a row of fp32, held in registers between its sum of squares and the result.
constexpr int kNormThreads = 256, kNormHeld = 8, kMostNormed = kNormThreads * 4 * kNormHeld;
__global__ void __launch_bounds__(kNormThreads) norm_many(const __grid_constant__ exl3_rms_norm_args a) {
  __shared__ float space[kNormThreads / 32];
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const float* x = (const float*)a.x + blockIdx.x * a.x_stride;
  uint16_t* y = (uint16_t*)a.y + blockIdx.x * a.y_stride;
  float4 v[kNormHeld];
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < kNormHeld; n++) {
    const int i = (n * kNormThreads + threadIdx.x) * 4;
    v[n] = i < a.n ? *(const float4*)(x + i) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
#pragma unroll
  for (int n = 0; n < kNormHeld; n++) sum += v[n].x * v[n].x + v[n].y * v[n].y + v[n].z * v[n].z + v[n].w * v[n].w;
  const float scale = rsqrtf(block_sum<kNormThreads>(sum, space) / (float)a.n + a.eps);
#pragma unroll
  for (int n = 0; n < kNormHeld; n++) {
    const int i = (n * kNormThreads + threadIdx.x) * 4;
    if (i >= a.n) break;
    const float4 w = a.weight ? *(const float4*)(a.weight + i) : make_float4(1.f, 1.f, 1.f, 1.f);
    *(uint2*)(y + i) = {ptx::pack(v[n].x * scale * w.x, v[n].y * scale * w.y), ptx::pack(v[n].z * scale * w.z, v[n].w * scale * w.w)};
  }
}

// One block a token; a thread takes eight pairs (i, i + half) of every so many heads, their cosines and sines in registers.
__global__ void __launch_bounds__(kRotaryThreads) rotary_many(const __grid_constant__ exl3_rotary_args a) {
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const int half = a.rotary_dim / 2, slices = half / kEight, at = threadIdx.x % slices * kEight, together = kRotaryThreads / slices;
  const int heads = a.q_heads + (a.k ? a.k_heads : 0);
  const int64_t token = blockIdx.x;
  const Floats cos = *(const Floats*)(a.cos + token * half + at), sin = *(const Floats*)(a.sin + token * half + at);
  if (threadIdx.x >= together * slices) return;
  for (int h = threadIdx.x / slices; h < heads; h += together) {
    const bool is_q = h < a.q_heads;
    uint16_t* x = is_q ? (uint16_t*)a.q + token * a.q_stride + (int64_t)h * a.head_dim + at
                       : (uint16_t*)a.k + token * a.k_stride + (int64_t)(h - a.q_heads) * a.head_dim + at;
    const Halves first = *(const Halves*)x, second = *(const Halves*)(x + half);
    Halves one, two;
#pragma unroll
    for (int e = 0; e < kEight; e++) {
      const float v = half_to_float(first.v[e]), w = half_to_float(second.v[e]);
      one.v[e] = float_to_half(v * cos.v[e] - w * sin.v[e]);
      two.v[e] = float_to_half(w * cos.v[e] + v * sin.v[e]);
    }
    *(Halves*)x = one;
    *(Halves*)(x + half) = two;
  }
}

// With norms: as many threads as there are slices hold a whole head.
__global__ void __launch_bounds__(kRotaryThreads) norm_rotary_many(const __grid_constant__ exl3_rotary_args a) {
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const int half = a.rotary_dim / 2, slices = half / kEight, at = threadIdx.x % slices * kEight, together = kRotaryThreads / slices;
  const int heads = a.q_heads + (a.k ? a.k_heads : 0);
  const int64_t token = blockIdx.x;
  const Floats cos = *(const Floats*)(a.cos + token * half + at), sin = *(const Floats*)(a.sin + token * half + at);
  for (int h0 = 0; h0 < heads; h0 += together) {
    const int mine = h0 + threadIdx.x / slices, h = min(mine, heads - 1);  // all lanes take part in the sums
    const bool is_q = h < a.q_heads;
    uint16_t* x = is_q ? (uint16_t*)a.q + token * a.q_stride + (int64_t)h * a.head_dim + at
                       : (uint16_t*)a.k + token * a.k_stride + (int64_t)(h - a.q_heads) * a.head_dim + at;
    const float* weight = is_q ? a.q_norm : a.k_norm;
    const Halves first = *(const Halves*)x, second = *(const Halves*)(x + half);
    float v[kEight], w[kEight], sum = 0.f;
#pragma unroll
    for (int e = 0; e < kEight; e++) {
      v[e] = half_to_float(first.v[e]);
      w[e] = half_to_float(second.v[e]);
      sum = fmaf(v[e], v[e], fmaf(w[e], w[e], sum));
    }
    for (int m = 1; m < slices; m <<= 1) sum += __shfl_xor_sync(~0u, sum, m);
    if (weight) {
      const Floats low = *(const Floats*)(weight + at), high = *(const Floats*)(weight + half + at);
      const float scale = rsqrtf(sum / (float)a.head_dim + a.eps);
#pragma unroll
      for (int e = 0; e < kEight; e++) {
        v[e] *= scale * low.v[e];
        w[e] *= scale * high.v[e];
      }
    }
    Halves one, two;
#pragma unroll
    for (int e = 0; e < kEight; e++) {
      one.v[e] = float_to_half(v[e] * cos.v[e] - w[e] * sin.v[e]);
      two.v[e] = float_to_half(w[e] * cos.v[e] + v[e] * sin.v[e]);
    }
    if (mine < heads) {
      *(Halves*)x = one;
      *(Halves*)(x + half) = two;
    }
  }
}

// One thread eight values of a token's keys or values.
__global__ void __launch_bounds__(256) append_many(const __grid_constant__ exl3_cache_append_args a) {
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const int pieces = a.cache.kv_heads * a.cache.head_dim / kEight, i = blockIdx.x * 256 + threadIdx.x, token = blockIdx.y;
  const int row = a.token_row[token];
  if (i >= 2 * pieces || row < 0) return;
  const int side = i / pieces, piece = i - side * pieces, position = a.positions[token];
  const int64_t place = (int64_t)a.block_table[(int64_t)row * a.table_stride + position / EXL3_PAGE] * EXL3_PAGE + position % EXL3_PAGE;
  const uint16_t* from = side ? (const uint16_t*)a.v + token * a.v_stride : (const uint16_t*)a.k + token * a.k_stride;
  *(Halves*)((uint16_t*)(side ? a.cache.v : a.cache.k) + (place * pieces + piece) * kEight) = *(const Halves*)(from + piece * kEight);
}

// act(gate) * up: a thread takes eight values of each of four rows.
constexpr int kActThreads = 256, kActRows = 4;
template <int ACT>
__global__ void __launch_bounds__(kActThreads) act_mul_many(const __grid_constant__ exl3_act_mul_args a) {
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const int i = (blockIdx.x * kActThreads + threadIdx.x) * kEight;
  const int64_t row = (int64_t)blockIdx.y * kActRows;
  const int rows = min(kActRows, a.rows - (int)row);
  if (i >= a.n) return;
  Halves gate[kActRows], up[kActRows];
#pragma unroll
  for (int r = 0; r < kActRows; r++) {
    const int64_t from = row + min(r, rows - 1);
    gate[r] = *(const Halves*)((const uint16_t*)a.gate + from * a.gate_stride + i);
    up[r] = *(const Halves*)((const uint16_t*)a.up + from * a.up_stride + i);
  }
#pragma unroll
  for (int r = 0; r < kActRows; r++) {
#pragma unroll
    for (int e = 0; e < kEight; e++)
      gate[r].v[e] = float_to_half(activate(half_to_float(gate[r].v[e]), ACT, a.params) * half_to_float(up[r].v[e]));
    if (r < rows) *(Halves*)((uint16_t*)a.y + (row + r) * a.y_stride + i) = gate[r];
  }
}

static bool even(const void* p, int64_t stride) { return ((uintptr_t)p & 15) == 0 && stride % kEight == 0; }

int rms_norm(const exl3_rms_norm_args* a, void* stream) {
  const bool here = a->rows > kFewTokens && a->n % 4 == 0 && a->n <= kMostNormed && a->x_dtype == EXL3_F32 && a->y_dtype == EXL3_F16 && !a->residual &&
                    !a->subtract_mean && !a->accumulate && even(a->x, 0) && a->x_stride % 4 == 0 && even(a->y, 0) && a->y_stride % 4 == 0 && even(a->weight, 0);
  if (!here) return portable::few_rms_norm(a, stream);
  return launch(norm_many, dim3(a->rows), kNormThreads, 0, 1, *a, stream, "rms_norm");
}

int rotary(const exl3_rotary_args* a, void* stream) {
  const int half = a->rotary_dim / 2, slices = half / kEight;
  const bool here = a->tokens > kFewTokens && a->tokens <= 1 << 30 && a->dtype == EXL3_F16 && a->cos && !a->interleaved && half > 0 &&
                    half % kEight == 0 && a->rotary_dim <= a->head_dim && a->head_dim % kEight == 0 && slices <= kRotaryThreads &&
                    even(a->q, a->q_stride) && (!a->k || even(a->k, a->k_stride)) && even(a->cos, 0) && even(a->sin, 0);
  const bool norms = a->q_norm || a->k_norm;
  const bool whole = a->rotary_dim == a->head_dim && slices <= 32 && (slices & (slices - 1)) == 0 && even(a->q_norm, 0) && even(a->k_norm, 0);
  if (!here || (norms && !whole)) return portable::few_rotary(a, stream);
  return launch(norms ? norm_rotary_many : rotary_many, dim3(a->tokens), kRotaryThreads, 0, 1, *a, stream, "rotary");
}

int cache_append(const exl3_cache_append_args* a, void* stream) {
  const exl3_cache_layer& c = a->cache;
  const bool here = a->tokens > kFewTokens && a->tokens <= 65535 && a->dtype == EXL3_F16 && c.k_bits == 16 && c.v_bits == 16 &&
                    even(a->k, a->k_stride) && even(a->v, a->v_stride) && even(c.k, 0) && even(c.v, 0);
  if (!here) return portable::few_cache_append(a, stream);
  if (const int status = portable::checked_cache("cache_append", c)) return status;
  return launch(append_many, dim3((c.kv_heads * c.head_dim / 4 + 255) / 256, a->tokens), 256, 0, 1, *a, stream, "cache_append");
}

int act_mul(const exl3_act_mul_args* a, void* stream) {
  void (*const kernels[])(exl3_act_mul_args) = {act_mul_many<EXL3_ACT_SILU>, act_mul_many<EXL3_ACT_GELU>, act_mul_many<EXL3_ACT_GELU_TANH>,
                                                act_mul_many<EXL3_ACT_RELU2>, nullptr, act_mul_many<EXL3_ACT_RELU>};
  const int which = a->activation - EXL3_ACT_SILU;
  const bool here = a->rows > kFewTokens && a->rows <= 65535 && a->dtype == EXL3_F16 && a->up && a->n % kEight == 0 && which >= 0 && which < 6 &&
                    kernels[which] && even(a->gate, a->gate_stride) && even(a->up, a->up_stride) && even(a->y, a->y_stride);
  if (!here) return portable::few_act_mul(a, stream);
  return launch(kernels[which], dim3((a->n / kEight + kActThreads - 1) / kActThreads, (a->rows + kActRows - 1) / kActRows), kActThreads, 0, 1, *a,
                stream, "act_mul");
}

}  // namespace exl3
