// The encoder's argument blocks, shared by host and device code. See encode.cuh for how it works.
#pragma once
#include <cuda_runtime.h>

#include "exl3/codec.h"
#include "exl3/ops.h"

namespace exl3 {

struct EncodeParams {
  const float* tiles;   // [count][256] of this wave
  uint16_t* states;     // [count][256]
  float* values;        // or null
  uint16_t* history;    // [count][boundaries][nodes] fp16 costs
  int32_t* seam;        // [count] node between positions 255 and 0
  int32_t* end;         // [count] cheapest node behind the first pass
  int64_t tile_history; // elements
  int32_t count, window, codebook;
  uint32_t multiplier;
  int32_t depth;        // cost vectors in flight of the traceback
  int32_t pass;         // 0: round the seam, free start; 1: the ring, seam fixed at both ends
};

constexpr int kSearchThreads = 512;

// Steps between stored cost vectors: the traceback tries every way through as many steps.
inline constexpr __host__ __device__ int stride_of(int k2) { return k2 == 2 ? 8 : k2 <= 4 ? 4 : k2 <= 8 ? 2 : 1; }
inline constexpr __host__ __device__ int most_nodes(int k2) { return 1 << (16 - k2 / 2); }
inline constexpr __host__ __device__ int boundaries_of(int k2) { return 256 / stride_of(k2); }

struct EncodeEntry {
  void (*forward[2])(EncodeParams);  // mul1; 3inst and mcg
  void (*trace)(EncodeParams);
  int trace_threads;
  int tiles;                         // a block searches at a time
  int forward_shared;                // bytes
  void (*small[2])(EncodeParams);    // one tile at a time, for few tiles and for cards with little shared memory
  int small_shared;
};

}  // namespace exl3
