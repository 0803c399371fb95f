// Many positions of a quantized cache as fp16, in the original basis: a thread a group of 32 values. What prefill stages (ops/staging.py).
#include "attention_codes.cuh"
#include "parts.h"

#include "../cpp/gpu/numbers.h"

namespace exl3 {

constexpr int kReadThreads = 128, kFewPositions = 64;

// A group's values less its scale and 1 / sqrt(32), in fp32.
template <int BITS>
__device__ __forceinline__ void levels_of(const uint32_t* words, float compand, uint32_t ones, float (&v)[32]) {
  uint32_t pair[16];
  group_codes<BITS>(words, ones, pair);
#pragma unroll
  for (int i = 0; i < 16; i++) {  // codes i and i + 16
    const uint32_t level = code_level<BITS>(pair[i], 0.f);
    const float2 t = __half22float2(*(const __half2*)&level);
    v[i] = compand > 0.f ? t.x * (compand + (1.f - compand) * t.x * t.x) : t.x;
    v[i + 16] = compand > 0.f ? t.y * (compand + (1.f - compand) * t.y * t.y) : t.y;
  }
#pragma unroll
  for (int m = 1; m < 32; m <<= 1)
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (!(i & m)) {
        const float a = v[i], b = v[i | m];
        v[i] = a + b;
        v[i | m] = a - b;
      }
}

struct ReadParams {
  exl3_cache_read_args a;
  uint32_t ones;  // see attention_codes.cuh
};

__global__ void __launch_bounds__(kReadThreads) read_many(const __grid_constant__ ReadParams p) {
  ptx::launch_dependents();
  ptx::wait_for_previous();
  const exl3_cache_read_args& a = p.a;
  const exl3_cache_layer& c = a.cache;
  const int groups = c.kv_heads * c.head_dim / 32, side = blockIdx.y, bits = side ? c.v_bits : c.k_bits;
  const int64_t unit = (int64_t)blockIdx.x * kReadThreads + threadIdx.x, n = unit / groups;
  if (n >= a.count) return;
  const int group = (int)(unit - n * groups), position = a.start + (int)n;
  const int64_t place = ((int64_t)a.block_table[position / EXL3_PAGE] * EXL3_PAGE + position % EXL3_PAGE) * groups + group;
  const void* data = side ? c.v : c.k;
  uint4* out = (uint4*)((uint16_t*)(side ? a.v : a.k) + unit * 32);
  if (bits == 16) {
    const uint4* from = (const uint4*)((const uint16_t*)data + place * 32);
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = from[i];
    return;
  }
  const float factor = half_to_float(((const uint16_t*)(side ? c.v_scale : c.k_scale))[place]) * 0.17677669529663688f;
  const uint32_t* words = (const uint32_t*)data + place * bits;
  float v[32];
#define EXL3_CALL(BITS) levels_of<BITS>(words, c.compand, p.ones, v)
  EXL3_BY_BITS(bits, EXL3_CALL)
#undef EXL3_CALL
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t h[4];
#pragma unroll
    for (int e = 0; e < 4; e++) h[e] = ptx::pack(v[8 * i + 2 * e] * factor, v[8 * i + 2 * e + 1] * factor);
    out[i] = make_uint4(h[0], h[1], h[2], h[3]);
  }
}

int cache_read(const exl3_cache_read_args* a, void* stream) {
  const exl3_cache_layer& c = a->cache;
  const bool here = a->count > kFewPositions && a->dtype == EXL3_F16 && (((uintptr_t)a->k | (uintptr_t)a->v | (uintptr_t)c.k | (uintptr_t)c.v) & 15) == 0;
  if (!here) return portable::few_cache_read(a, stream);
  if (const int status = portable::checked_cache("cache_read", c)) return status;
  ReadParams p{*a, 0x3c003c00u};
  if (!(c.compand > 0.f && c.compand < 1.f)) p.a.cache.compand = 0.f;
  const int64_t units = (int64_t)a->count * (c.kv_heads * c.head_dim / 32);
  return launch(read_many, dim3((unsigned)((units + kReadThreads - 1) / kReadThreads), 2), kReadThreads, 0, 1, p, stream, "cache_read");
}

}  // namespace exl3
