// The trellis search of the encoder on RDNA (quantizer spec 7; QTIP, arXiv 2406.11235), the same steps as codec.encode_reference: round the
// seam with a free start to find the node there, then round the ring with that node fixed at both ends. One block a tile.
#pragma once
#include "gpu/decode.h"

#include "rdna.h"

namespace rdna {

constexpr int kEncodeThreads = 256, kSharedNodes = 4096;

struct EncodeArgs {
  const float* tiles;  // [count][256] of this launch
  uint16_t* states;
  float* values;       // or null
  uint8_t* history;    // [count][256][nodes]: high bits of the best state into each node
  float* costs;        // [count][2][nodes], used where a rate has more than kSharedNodes nodes
  int32_t k2, codebook, seam_window, nodes;
  uint32_t multiplier;
};

struct Node {
  float cost;
  int index;
};
// The cheapest over the block, the lowest index among equals; in every thread.
GPU_FN Node cheapest(Node v, float* costs, int* indices) {
  for (int m = 16; m; m >>= 1) {
    const Node o = {lane_xor(v.cost, m), lane_xor(v.index, m)};
    if (o.cost < v.cost || (o.cost == v.cost && o.index < v.index)) v = o;
  }
  block_sync();
  if (lane_id() == 0) {
    costs[warp_id()] = v.cost;
    indices[warp_id()] = v.index;
  }
  block_sync();
  v = {costs[0], indices[0]};
  for (int w = 1; w < kEncodeThreads / 32; w++)
    if (costs[w] < v.cost || (costs[w] == v.cost && indices[w] < v.index)) v = {costs[w], indices[w]};
  return v;
}

// The codebook's value of a hash, as code_value of its state.
template <bool MUL1>
GPU_FN float hash_value(uint32_t p) {
  if (MUL1) return half_to_float(float_to_half((float)add_bytes(p, 1024u) * exl3::kMul1Scale + exl3::kMul1Shift));
  p = (p & 0x8FFF8FFFu) ^ 0x3B603B60u;
  return half_to_float(float_to_half(half_to_float((uint16_t)p) + half_to_float((uint16_t)(p >> 16))));
}
// From the costs before position i to those behind it. A thread takes NODES neighbouring nodes: they are reached from the same nodes, and
// their hashes lie one multiplier apart.
template <int NODES, bool MUL1>
GPU_FN void search_nodes(const EncodeArgs& a, const float* from, float* to, uint8_t* history, int fresh_bits, int next, float target) {
  const int nodes = 1 << (16 - next);
  for (int o = thread_id() * NODES; o < nodes; o += kEncodeThreads * NODES) {
    float best[NODES];
    int chosen[NODES];
#pragma unroll
    for (int j = 0; j < NODES; j++) best[j] = 3.4e38f, chosen[j] = 0;
#pragma unroll 2
    for (int c = 0; c < 1 << next; c++) {
      const uint32_t state = (uint32_t)c << (16 - next) | (uint32_t)o;
      const float cost = from[state >> fresh_bits];
      uint32_t p = state * a.multiplier + (a.codebook == EXL3_3INST ? exl3::k3instAddend : 0u);
#pragma unroll
      for (int j = 0; j < NODES; j++, p += a.multiplier) {
        const float d = hash_value<MUL1>(p) - target, sum = cost + d * d;
        chosen[j] = sum < best[j] ? c : chosen[j];
        best[j] = sum < best[j] ? sum : best[j];
      }
    }
#pragma unroll
    for (int j = 0; j < NODES; j++) {
      to[o + j] = best[j];
      history[o + j] = (uint8_t)chosen[j];
    }
  }
}
template <bool MUL1>
GPU_FN void search_step(const EncodeArgs& a, const float* from, float* to, uint8_t* history, int i, float target) {
  const int fresh_bits = exl3::fresh_bits(a.k2, i), next = exl3::fresh_bits(a.k2, (i + 1) & 255);
  if (fresh_bits == 1)
    search_nodes<2, MUL1>(a, from, to, history, fresh_bits, next, target);
  else if (fresh_bits == 2)
    search_nodes<4, MUL1>(a, from, to, history, fresh_bits, next, target);
  else
    search_nodes<8, MUL1>(a, from, to, history, fresh_bits, next, target);
  block_sync();
}
GPU_FN uint32_t step_back(const EncodeArgs& a, const uint8_t* history, int node, int i) {  // the state at position i on the best way into `node`
  return (uint32_t)history[(int64_t)i * a.nodes + node] << (16 - exl3::fresh_bits(a.k2, (i + 1) & 255)) | (uint32_t)node;
}

GPU_FN void encode(const EncodeArgs& a) {
  GPU_SHARED(float, shared_costs, 2 * kSharedNodes);
  GPU_SHARED(float, targets, 256);
  GPU_SHARED(float, space, kEncodeThreads / 32);
  GPU_SHARED(int, space_ids, kEncodeThreads / 32);
  GPU_SHARED(int, found, 1);
  begin_kernel();
  const int t = thread_id();
  const int64_t tile = block_x();
  uint8_t* history = a.history + tile * 256 * a.nodes;
  float* costs = a.nodes <= kSharedNodes ? shared_costs : a.costs + tile * 2 * a.nodes;
  const int half = a.seam_window / 2;
  targets[t] = a.tiles[tile * 256 + t];
  for (int pass = 0; pass < 2; pass++) {
    const int start = pass ? 0 : 256 - half, steps = pass ? 256 : 2 * half, seam = pass ? *found : -1;
    float* now = costs;
    float* then = costs + a.nodes;
    for (int n = t; n < a.nodes; n += kEncodeThreads) now[n] = seam < 0 || n == seam ? 0.f : 1e30f;
    block_sync();
    for (int s = 0; s < steps; s++) {
      const int i = (start + s) & 255;
      uint8_t* chosen = history + (int64_t)i * a.nodes;
      if (a.codebook == EXL3_MUL1)
        search_step<true>(a, now, then, chosen, i, targets[i]);
      else
        search_step<false>(a, now, then, chosen, i, targets[i]);
      float* swap = now;
      now = then;
      then = swap;
    }
    const int after = (start + steps) & 255, nodes = 1 << (16 - exl3::fresh_bits(a.k2, after));
    Node top = {3.4e38f, 0};
    for (int n = t; n < nodes; n += kEncodeThreads)
      if (now[n] < top.cost) top = {now[n], n};
    top = cheapest(top, space, space_ids);
    block_sync();
    if (t == 0) {
      int node = pass ? seam : top.index;
      for (int s = steps - 1; s >= (pass ? 0 : half); s--) {
        const int i = (start + s) & 255;
        const uint32_t state = step_back(a, history, node, i);
        if (pass) a.states[tile * 256 + i] = (uint16_t)state;
        node = (int)(state >> exl3::fresh_bits(a.k2, i));
      }
      *found = node;
    }
    block_sync();
  }
  if (a.values) a.values[tile * 256 + t] = code_value(a.states[tile * 256 + t], a.codebook, a.multiplier);
}

}  // namespace rdna
