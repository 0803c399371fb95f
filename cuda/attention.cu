// Launches of attention over the paged cache: decode steps, prefill, and the portable kernel where neither fits.
#include "attention.h"
#include "parts.h"
#include "exl3/attend.h"

namespace exl3 {

constexpr int64_t kAttentionCounters = 65536;

// rows: positions of a tile; columns: query rows of a block; threads that copy a tile.
static AttentionParams make_params(const exl3_attention_args* a, int rows, int columns, int threads) {
  AttentionParams p{};
  p.a = *a;
  p.ones = 0x3c003c00u;
  if (!(p.a.cache.compand > 0.f && p.a.cache.compand < 1.f)) p.a.cache.compand = 0.f;
  p.side[0] = make_side(a->cache.head_dim, a->cache.k_bits, rows, threads);
  p.side[1] = make_side(a->cache.head_dim, a->cache.v_bits, rows, threads);
  p.group = a->heads / a->cache.kv_heads;
  p.chunks = (p.group + columns - 1) / columns;
  p.tokens_a_tile = p.chunks > 1 ? 1 : columns / p.group;
  return p;
}
static bool quantized(const exl3_attention_args* a) { return a->cache.k_bits != 16 || a->cache.v_bits != 16; }

// ------------------------------------------------------------------------------------------------ decode
static int decode_shared(const AttentionParams& p) {
  const int warps = decode_warps(p.a.cache.head_dim), ring = warps * p.stages * (p.side[0].bytes + p.side[1].bytes);
  const int merge = warps * kColumns * (p.a.cache.head_dim + 4) * 4;
  return decode_ring(p.a.cache.head_dim) + (ring > merge ? ring : merge);
}
constexpr int kReserved = 1024;  // bytes of shared memory the system takes for each block

// Splits and depth of the rings: by shapes and card alone, and for many tokens by their number, so that workspaces stay small.
static void plan_decode(AttentionParams& p, const Device& device) {
  const int tiles = p.a.cache.kv_heads * p.chunks, blocks = 2, unit = decode_warps(p.a.cache.head_dim) * decode_run(quantized(&p.a));
  int most = p.a.cache.head_dim <= 128 ? device.sms / tiles : (2 * device.sms + tiles - 1) / tiles;  // of eight warps, one a multiprocessor
  p.least = 256 / unit;
  for (int tokens = 16; tokens < p.a.tokens; tokens *= 2) {  // many tokens fill the card by themselves
    most = most / 2;
    p.least = 1024 / unit;
  }
  if (most > kMostSplits) most = kMostSplits;
  int units = p.a.table_stride * (EXL3_PAGE / unit);  // that a row can have in sight
  if (p.a.window > 0 && units > p.a.window / unit + 2) units = p.a.window / unit + 2;
  if (most > (units - 1) / p.least + 1) most = (units - 1) / p.least + 1;
  p.splits = most < 1 ? 1 : most;
  if ((int64_t)p.a.tokens * tiles * 4 > kAttentionCounters) p.splits = 1;
  // as deep as the blocks that share a multiprocessor allow
  int resident = (int)(((int64_t)p.a.tokens * tiles * p.splits + device.sms - 1) / device.sms);
  if (resident > blocks) resident = blocks;
  for (; resident; resident--) {
    p.stages = 3;  // with a fourth, codes of 4 bits took longer (docs/cuda.md)
    while (p.stages > 1 && (decode_shared(p) + kReserved) * resident > device.shared_bytes + kReserved) p.stages--;
    if ((decode_shared(p) + kReserved) * resident <= device.shared_bytes + kReserved) break;
  }
  if (decode_shared(p) > device.shared_bytes) p.stages = 1;
}
static int64_t partial_bytes(const AttentionParams& p) {
  return p.splits > 1 ? (int64_t)p.a.tokens * p.a.heads * p.splits * (p.a.cache.head_dim + 4) * 4 : 0;
}

// ------------------------------------------------------------------------------------------------ entry points
constexpr int kMostDecodeTokens = 64;  // of a recorded step

static AttentionKind kind_of(const exl3_attention_args* a) {
  const exl3_cache_layer& c = a->cache;
  if (!quantized(a)) return kHalves;
  if (c.k_bits != c.v_bits || (c.compand > 0.f && c.compand < 1.f)) return kAnyCodes;
  return c.k_bits == 4 ? kFourBits : c.k_bits == 8 ? kEightBits : kAnyCodes;
}
static AttentionKernels kernels_for(const exl3_attention_args* a, const Device& device) {
  if (device.code >= 80) switch (a->cache.head_dim) {
#define X(dim) \
  case dim: return attention_kernels_##dim(kind_of(a));
      EXL3_HEAD_DIMS(X)
#undef X
    }
  return {nullptr, nullptr, 0};
}

int64_t attention_workspace(const exl3_attention_args* a) {
  const Device* device = current_device();
  if (!device || portable::checked_attention(a) != EXL3_OK) return 0;
  AttentionParams p = make_params(a, decode_run(quantized(a)), kColumns, 32);
  plan_decode(p, *device);
  return kAttentionCounters + partial_bytes(p);
}

// Whether the decode kernel can take it, and with what.
static bool plan_on_tensor_cores(const exl3_attention_args* a, const Device& device, const AttentionKernels& kernels, AttentionParams& p) {
  if (!kernels.decode) return false;
  p = make_params(a, decode_run(quantized(a)), kColumns, 32);
  plan_decode(p, device);
  return decode_shared(p) <= device.shared_bytes;
}
static int launch_decode(const void* kernel, AttentionParams& p, void* stream) {
  const exl3_attention_args& a = p.a;
  if (a.workspace_bytes < kAttentionCounters + partial_bytes(p)) return refuse(EXL3_BAD_ARGUMENT, "attention: the workspace is too small");
  p.counters = (int32_t*)a.workspace;
  p.partial = (float*)((uint8_t*)a.workspace + kAttentionCounters);
  p.stats = p.partial + (int64_t)a.tokens * a.heads * p.splits * a.cache.head_dim;
  return launch(kernel, dim3(a.tokens, a.cache.kv_heads * p.chunks, p.splits), decode_warps(a.cache.head_dim) * 32, decode_shared(p), 1, (const void*)&p,
                (cudaStream_t)stream, "attention");
}

int attention(const exl3_attention_args* a, void* stream) {
  const Device* device = current_device();
  if (!device) return EXL3_UNSUPPORTED;
  if (const int status = portable::checked_attention(a)) return status;
  if (a->tokens <= 0) return EXL3_OK;
  const AttentionKernels kernels = kernels_for(a, *device);
  if (a->tokens > kMostDecodeTokens) {
    AttentionParams p = make_params(a, kPositions, kPrefillRows, kernels.prefill_threads);
    auto need = [&](int stages) { return prefill_shared(a->cache.head_dim, p.side, quantized(a), stages); };
    p.stages = need(2) <= device->shared_bytes ? 2 : 1;
    const int shared_bytes = need(p.stages);
    if (kernels.prefill && shared_bytes <= device->shared_bytes)
      return launch(kernels.prefill, dim3((a->tokens + p.tokens_a_tile - 1) / p.tokens_a_tile, a->cache.kv_heads * p.chunks),
                    kernels.prefill_threads, shared_bytes, 1, (const void*)&p, (cudaStream_t)stream, "attention");
  }
  AttentionParams p;
  return plan_on_tensor_cores(a, *device, kernels, p) ? launch_decode(kernels.decode, p, stream) : portable::plain_attention(a, stream);
}

int attend(const exl3_attend_args* t, void* stream) {
  const exl3_attention_args* a = &t->attention;
  const Device* device = current_device();
  if (!device) return EXL3_UNSUPPORTED;
  if (const int status = portable::checked_attention(a)) return status;
  if (a->tokens <= 0) return EXL3_OK;
  AttentionParams p;
  const AttentionKernels kernels = kernels_for(a, *device);
  if (a->tokens > kMostDecodeTokens || !plan_on_tensor_cores(a, *device, kernels, p))
    return attend_in_three(t, stream, rotary, cache_append, attention);
  if (t->rotary_dim > a->cache.head_dim) return refuse(EXL3_BAD_ARGUMENT, "attend: rotary_dim %d is above head_dim %d", t->rotary_dim, a->cache.head_dim);
  p.fresh = {t->k, t->v, t->k_stride, t->v_stride, t->cos, t->sin, t->q_norm, t->k_norm, t->rotary_dim, t->interleaved, t->eps};
  return launch_decode(kernels.decode, p, stream);
}

}  // namespace exl3
