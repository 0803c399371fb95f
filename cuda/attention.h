// Attention over the paged cache: what its kernels and their launches share.
#pragma once
#include <stdint.h>

#include "exl3/ops.h"

// Cards with 227 KiB of shared memory a block: a ring of two stages always fits.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define EXL3_MUCH_SHARED 1
#else
#define EXL3_MUCH_SHARED 0
#endif

namespace exl3 {

// Decode: a block of eight warps (four of large heads) takes one key/value head, up to eight query rows that share it (its heads times
// consecutive tokens of one row of the batch) and every `active`-th unit of positions; each warp has a run of each unit: 16 positions of fp16,
// 32 of codes.
constexpr int kColumns = 8, kMostSplits = 64;
__host__ __device__ constexpr int decode_warps(int head_dim) { return head_dim <= 128 ? 8 : 4; }
__host__ __device__ constexpr int decode_run(bool codes) { return codes ? 32 : 16; }

// A head's keys or values of one position as the cache holds them, and in shared memory.
struct AttentionSide {
  int32_t bits, row_bytes;              // 16, or the bits of a code; bytes without scales
  int32_t piece, pieces;                // bytes of a copy, copies of a row
  int32_t pass_rows;                    // rows that all threads copy at once
  int32_t pitch, scales, bytes;         // bytes between rows; where the scales of a tile start; bytes of a tile
};

// Bytes of a head's scales of one position in shared memory: whole words, one more where a row may start at an odd half.
__host__ __device__ constexpr int scale_pitch(int head_dim) {
  return head_dim % 64 ? (head_dim / 32 * 2 + 2 + 3) / 4 * 4 : head_dim / 32 * 2;
}
// Halves between rows of queries or of fp16 keys and values in shared memory: ldmatrix without bank conflicts.
__host__ __device__ constexpr int half_pitch(int head_dim) { return head_dim + 8; }

// Tiles of `rows` positions, copied by `threads`.
__host__ __device__ constexpr AttentionSide make_side(int head_dim, int bits, int rows, int threads) {
  AttentionSide s{};
  s.bits = bits;
  s.row_bytes = head_dim * bits / 8;
  s.piece = s.row_bytes & -s.row_bytes;
  if (s.piece > 16) s.piece = 16;
  s.pieces = s.row_bytes / s.piece;
  s.pass_rows = threads / s.pieces;
  s.pitch = bits == 16 ? half_pitch(head_dim) * 2 : ((s.row_bytes + 15) / 16 | 1) * 16;  // an odd number of 16 bytes: no bank conflicts
  s.scales = rows * s.pitch;
  s.bytes = s.scales + (bits == 16 ? 0 : rows * scale_pitch(head_dim));
  return s;
}

// The step's own keys and values where the kernel appends them itself (fields of exl3_attend_args); k null: they lie in the cache already.
struct AttentionFresh {
  const void *k, *v;
  int64_t k_stride, v_stride;
  const float *cos, *sin, *q_norm, *k_norm;
  int32_t rotary_dim, interleaved;
  float eps;
};

struct AttentionParams {
  exl3_attention_args a;
  AttentionFresh fresh;
  AttentionSide side[2];                // keys, values
  float* partial;                       // [token][head][split][head_dim]: sums not divided yet
  float* stats;                         // [token][head][split][4]: highest score (times log2 e), sum of weights, and two that stay zero
  int32_t* counters;                    // [token][kv head * chunk], zero before and after
  uint32_t ones;                        // 0x3c003c00; see attention_codes.cuh
  int32_t splits, group, chunks, tokens_a_tile, stages, least;  // most splits; heads of a kv head, in chunks of at most kColumns
};

// Shared memory of the decode kernel: queries, the sums of their groups, a head of floats for each warp, the rings.
__host__ __device__ constexpr int decode_heads(int head_dim) { return kColumns * (half_pitch(head_dim) * 2 + head_dim / 32 * 4); }
__host__ __device__ constexpr int decode_ring(int head_dim) { return decode_heads(head_dim) + decode_warps(head_dim) * head_dim * 4; }

// ------------------------------------------------------------------------------------------------ prefill
constexpr int kPrefillRows = 128, kPositions = 64;  // query rows of a block, positions of a tile

// Bytes of shared memory: queries; then two stages of keys and values (one where there is no room), as stored; before them a decoded pair.
inline int prefill_shared(int head_dim, const AttentionSide (&s)[2], bool codes, int stages) {
  const int side = kPositions * half_pitch(head_dim) * 2, query = kPrefillRows * half_pitch(head_dim) * 2;
  return query + (codes ? 2 * side : 0) + stages * (codes ? s[0].bytes + s[1].bytes : 2 * side);
}

// Kernels of a head size: for fp16, for codes of any bits, and for decode of codes with 4 or 8 bits on both sides, not companded.
enum AttentionKind { kHalves = 16, kAnyCodes = 0, kFourBits = 4, kEightBits = 8 };
struct AttentionKernels {
  const void *decode, *prefill;
  int prefill_threads;
};
// The head sizes that have kernels; attention_dim.cu is compiled once for each.
#define EXL3_HEAD_DIMS(X) X(64) X(96) X(128) X(192) X(256)
#define X(dim) AttentionKernels attention_kernels_##dim(AttentionKind kind);
EXL3_HEAD_DIMS(X)
#undef X

}  // namespace exl3
