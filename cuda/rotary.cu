// Rotation of q and k, and their way into an fp16 cache, for many tokens: sixteen bytes a thread at a time. Everything else, few tokens
// among it, goes to the portable kernels.
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

static bool even(const void* p, int64_t stride) { return ((uintptr_t)p & 15) == 0 && stride % kEight == 0; }

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

}  // namespace exl3
