// Kernels with planted faults: what the emulator must find. usage: faults NAME; prints the result where it goes through.
#include "rdna.h"

static float out[64];

GPU_KERNEL(64) k_barrier_missing() {  // every thread reads what its neighbour has not written yet
  GPU_SHARED(float, space, 64);
  space[thread_id()] = 1.f;
  out[thread_id()] = space[(thread_id() + 1) % 64];
}
GPU_KERNEL(64) k_barrier_right() {
  GPU_SHARED(float, space, 64);
  space[thread_id()] = 1.f;
  block_sync();
  out[thread_id()] = space[(thread_id() + 1) % 64];
}
GPU_KERNEL(64) k_barrier_divergent() {
  if (thread_id() < 40) block_sync();
}
GPU_KERNEL(64) k_exchange_divergent() {
  float v = 1.f;
  if (lane_id() < 20) v = lane_xor(v, 1);
  out[thread_id()] = v;
}
GPU_KERNEL(32) k_product_halves_differ() {  // layout 11 wants lanes 16 to 31 to hold what 0 to 15 hold
  Fragment a{}, b{};
  Sums c{};
  a.v[0] = (uint32_t)lane_id();
  wave_product(a, b, c);
}
// A = row number in its first column, B = 1 in its first row: C[r][c] = r. With `twist` the rows are told apart by the wrong rule.
static void product(bool twist) {
  Fragment a{}, b{};
  Sums c{};
  const bool first = GPU_WMMA == 11 || lane_id() < 16;  // holds k = 0
  if (first) a.v[0] = float_to_half((float)(lane_id() & 15)), b.v[0] = float_to_half(1.f);
  wave_product(a, b, c);
  for (int i = 0; i < 8; i++) {
    const int row = twist ? (GPU_WMMA == 11 ? (lane_id() >> 4) * 8 + i : 2 * i + (lane_id() >> 4)) : fragment_row(i);
    if (c.v[i] != (float)row) out[0] = 1.f;
  }
}
GPU_KERNEL(32) k_product_right() { product(false); }
GPU_KERNEL(32) k_product_rows_wrong() { product(true); }

int main(int, char** argument) {
  struct {
    const char* name;
    int threads;
    void (*run)();
  } kernels[] = {{"barrier_missing", 64, k_barrier_missing},       {"barrier_right", 64, k_barrier_right},
                 {"barrier_divergent", 64, k_barrier_divergent},   {"exchange_divergent", 64, k_exchange_divergent},
                 {"product_halves_differ", 32, k_product_halves_differ}, {"product_right", 32, k_product_right},
                 {"product_rows_wrong", 32, k_product_rows_wrong}};
  for (auto& k : kernels)
    if (!strcmp(k.name, argument[1])) exl3::emulator::launch(1, 1, k.threads, k.run);
  float sum = 0.f;
  for (float v : out) sum += v;
  printf("%g\n", sum);
}
