// Launches of the encoder: tiles in waves whose cost history fits the workspace; two passes, each forward and back.
#include "encode.h"

#include "parts.h"

namespace exl3 {

#define EXL3_RATES(X) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(10) X(12) X(14) X(16)
#define X(k2) EncodeEntry encode_entry_##k2();
EXL3_RATES(X)
#undef X

static bool find_entry(int k2, EncodeEntry& entry) {
  switch (k2) {
#define X(k2) \
  case k2: entry = encode_entry_##k2(); return true;
    EXL3_RATES(X)
#undef X
  }
  return false;
}

constexpr int64_t kMostHistory = 640ll << 20;
constexpr int64_t kNodeBytes = 65536;  // seam and end of up to 8192 tiles

static int64_t history_of_tile(int k2) { return (int64_t)boundaries_of(k2) * most_nodes(k2); }

// Tiles searched at a time: a whole number for each multiprocessor where there are enough.
static int wave_of(const exl3_encode_args* a, const Device& device) {
  int64_t fit = kMostHistory / (history_of_tile(a->k2) * 2);
  if (fit > 4096) fit = 4096;
  if (fit > device.sms) fit -= fit % device.sms;
  return (int)(a->tiles_count < fit ? a->tiles_count : fit);
}

int64_t encode_workspace(const exl3_encode_args* a) {
  const Device* device = current_device();
  EncodeEntry entry;
  if (!device || !find_entry(a->k2, entry) || a->tiles_count <= 0) return 0;
  return kNodeBytes + (int64_t)wave_of(a, *device) * history_of_tile(a->k2) * 2;
}

int encode(const exl3_encode_args* a, void* stream) {
  const Device* device = current_device();
  if (!device) return EXL3_UNSUPPORTED;
  EncodeEntry entry;
  if (!find_entry(a->k2, entry) || (a->k2 % 2 && a->codebook != EXL3_MUL1))
    return refuse(EXL3_UNSUPPORTED, "encode: rate K = %g does not exist for this codebook", a->k2 / 2.0);
  if (device->code < 80)
    return refuse(EXL3_UNSUPPORTED, "encode: needs compute capability 8.0, this card has %d.%d", device->major, device->minor);
  if (a->seam_window < 0 || a->seam_window > 256 || a->seam_window % 2)
    return refuse(EXL3_BAD_ARGUMENT, "encode: seam_window %d must be even, 0 to 256", a->seam_window);
  if (a->tiles_count <= 0) return EXL3_OK;
  if (a->workspace_bytes < encode_workspace(a)) return refuse(EXL3_BAD_ARGUMENT, "encode: the workspace is too small");
  const bool roomy = entry.forward_shared + 8192 <= device->shared_bytes;
  const int kind = a->codebook == EXL3_MUL1 ? 0 : 1;
  const int wave = wave_of(a, *device);
  EncodeParams p{};
  p.seam = (int32_t*)a->workspace;
  p.end = p.seam + kNodeBytes / 8;
  p.history = (uint16_t*)((uint8_t*)a->workspace + kNodeBytes);
  p.tile_history = history_of_tile(a->k2);
  p.window = a->seam_window ? a->seam_window : 256;
  const int vector_bytes = most_nodes(a->k2) * 2, fit = (device->shared_bytes - 8192) / vector_bytes;
  p.depth = fit > 4 ? 4 : fit;
  p.codebook = a->codebook;
  p.multiplier = a->multiplier;
  for (int first = 0; first < a->tiles_count; first += wave) {
    p.count = a->tiles_count - first < wave ? a->tiles_count - first : wave;
    p.tiles = a->tiles + (int64_t)first * 256;
    p.states = a->states + (int64_t)first * 256;
    p.values = a->values ? a->values + (int64_t)first * 256 : nullptr;
    for (p.pass = 0; p.pass < 2; p.pass++) {
      // several tiles a block where there are enough for all multiprocessors
      const bool several = roomy && (entry.tiles == 1 || p.count > device->sms);
      const int units = several ? (p.count + entry.tiles - 1) / entry.tiles : p.count;
      const dim3 grid(units < device->sms ? units : device->sms);
      int status = launch((several ? entry.forward : entry.small)[kind], grid, kSearchThreads,
                          several ? entry.forward_shared : entry.small_shared, 1, p, stream, "encode: search");
      if (!status) status = launch(entry.trace, dim3(p.count), entry.trace_threads, p.depth * vector_bytes, 1, p, stream, "encode: traceback");
      if (status) return status;
    }
  }
  return EXL3_OK;
}

}  // namespace exl3
