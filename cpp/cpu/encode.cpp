// encode: the tail-biting search over tiles (encode.h). Two passes as in the spec: the first, round the seam with a free start, finds the
// node at the seam; the second goes round the ring from that node back to it. Costs forget where they started: as soon as the
// second pass reproduces the costs the first one left at a position, everything up to where that pass ended is known already, and is not
// computed again. The result is the same; the work is 1.1 to 1.5 passes instead of 2.
#include <math.h>
#include <string.h>

#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "cpu/backend.h"
#include "cpu/encode.h"
#include "cpu/isa.h"
#include "cpu/threads.h"
#include "exl3/codec.h"

namespace exl3::cpu {

namespace {

void scalar_step(const StepTable& t, Step* steps, int count) {
  const int groups = kStates >> (t.fresh + t.next_fresh);
  for (Step* s = steps; s < steps + count; s++) {
    uint32_t least = 65535;
    s->same = true;
    for (int o = 0; o < t.next_nodes(); o++) {
      uint32_t best = 65535;
      for (int c = 0; c < 1 << t.next_fresh; c++) {
        const uint32_t cost = s->from[c * groups + (o >> t.fresh)] + squared_error(t.value[c << (16 - t.next_fresh) | o], s->target, t);
        if (cost < best) best = cost;
      }
      best = best - s->least > kCostLimit ? kCostLimit : best - s->least;
      if (best < least) least = best;
      if (s->to[o] != best) s->same = false;
      s->to[o] = (uint16_t)best;
    }
    s->least = (uint16_t)least;
  }
}

const EncodeTier& tier() {
#if EXL3_X86
  return isa() == Isa::avx512 ? avx512_encode() : isa() == Isa::avx2 ? avx2_encode() : scalar_encode();
#else
  return scalar_encode();
#endif
}

struct alignas(64) Line { int16_t v[32]; };

// What one rate and codebook needs, made once and kept.
struct Tables {
  int k2, codebook;
  uint32_t multiplier;
  float scale, lowest, highest;     // fixed point per unit; targets are cut to lowest .. highest
  std::vector<float> decoded;       // [65536]
  std::vector<int16_t> value;       // [65536]
  std::vector<Line> ordered[2], candidates[2];
  StepTable step[2];                // even and odd positions
};

void order(const StepTable& t, int lanes, int16_t* out) {
  const int x_count = 1 << t.fresh, c_count = 1 << t.next_fresh, groups = kStates >> (t.fresh + t.next_fresh);
  const auto put = [&](int c, int g, int x) { *out++ = t.value[c << (16 - t.next_fresh) | g << t.fresh | x]; };
  if (lanes_over_groups(lanes, t.fresh, t.next_fresh)) {
    const int block = x_count < 4 ? x_count : 4;
    for (int g = 0; g < groups; g += lanes)
      for (int x = 0; x < x_count; x += block)
        for (int c = 0; c < c_count; c++)
          for (int j = 0; j < block; j++)
            for (int lane = 0; lane < lanes; lane++) put(c, g + lane, x + j);
  } else {
    const int width = x_count / lanes < 4 ? x_count : 4 * lanes;
    for (int g = 0; g < groups; g++)
      for (int x = 0; x < x_count; x += width)
        for (int c = 0; c < c_count; c++)
          for (int j = 0; j < width; j++) put(c, g, x + j);
  }
}

std::shared_ptr<const Tables> make_tables(int k2, int codebook, uint32_t multiplier) {
  auto t = std::make_shared<Tables>();
  t->k2 = k2, t->codebook = codebook, t->multiplier = multiplier;
  t->decoded.resize(kStates), t->value.resize(kStates);
  double square = 0;
  t->lowest = t->highest = 0;
  for (int s = 0; s < kStates; s++) {
    const float v = t->decoded[(size_t)s] = codebook_value((uint32_t)s, codebook, multiplier);
    square += (double)v * v;
    t->lowest = v < t->lowest ? v : t->lowest, t->highest = v > t->highest ? v : t->highest;
  }
  const bool clamped = k2 >= 9;
  const float rms = sqrtf((float)(square / kStates));
  // coarse: all values fit 16 bits. fine: squares go to 24 times the usual error 2^-K
  t->scale = clamped ? (float)kClamp / 24 * (float)(1 << k2 / 2) / (rms > 0.01f ? rms : 0.01f) : 8192.0f;
  const float fits = 32767 / (t->highest > -t->lowest ? t->highest : -t->lowest);
  if (t->scale > fits) t->scale = fits;
  // the farthest two values can be apart costs about 6000 beyond the square
  const int far = (int)(12000 / ((t->highest - t->lowest) * t->scale));
  if (!clamped) t->highest = 32767 / t->scale, t->lowest = -t->highest;
  for (int s = 0; s < kStates; s++) t->value[(size_t)s] = (int16_t)lrintf(t->decoded[(size_t)s] * t->scale);
  for (int odd = 0; odd < 2; odd++) {
    StepTable& step = t->step[odd];
    step = {fresh_bits(k2, odd), fresh_bits(k2, odd + 1), clamped, far, t->value.data(), nullptr, nullptr};
    if (odd && k2 % 2 == 0) {
      step = t->step[0];
      break;
    }
    const int lanes = tier().lanes;
    if (lanes > 1) {
      t->ordered[odd].resize(kStates / 32);
      order(step, lanes, t->ordered[odd][0].v);
      step.ordered = t->ordered[odd][0].v;
    }
    t->candidates[odd].resize(kStates / 32);
    int16_t* to = t->candidates[odd][0].v;
    step.candidates = to;
    for (int o = 0; o < step.next_nodes(); o++)
      for (int c = 0; c < 1 << step.next_fresh; c++) *to++ = t->value[(size_t)(c << (16 - step.next_fresh) | o)];
  }
  return t;
}

std::shared_ptr<const Tables> tables(int k2, int codebook, uint32_t multiplier) {
  static std::mutex lock;
  static std::vector<std::shared_ptr<const Tables>> kept;
  const std::lock_guard<std::mutex> guard(lock);
  for (const auto& t : kept)
    if (t->k2 == k2 && t->codebook == codebook && t->multiplier == multiplier) return t;
  if (kept.size() >= 16) kept.erase(kept.begin());
  kept.push_back(make_tables(k2, codebook, multiplier));
  return kept.back();
}

constexpr int kRing = kTileWeights;

// One ring on its way through both passes. The costs before every position lie in `history`, `stride` numbers apart.
class Search {
 public:
  void start(const Tables& t, const float* tile, uint16_t* history, int64_t stride, int window) {
    tables_ = &t, history_ = history, stride_ = stride, half_ = window / 2;
    for (int i = 0; i < kRing; i++) {
      const float cut = tile[i] < t.lowest ? t.lowest : tile[i] > t.highest ? t.highest : tile[i];
      target_[i] = (int16_t)lrintf(cut * t.scale);
    }
    second_ = false;
    position_ = (kRing - half_) % kRing;
    left_ = 2 * half_;
    memset(before(position_), 0, (size_t)t.step[position_ & 1].nodes() * 2);
    least_[position_] = 0;
  }
  bool active() const { return left_ > 0; }
  int odd() const { return position_ & 1; }

  Step next() const {
    const int to = position_ + 1;
    // equality lasts once it is there, so asking now and then is enough
    const bool known = second_ && to % 8 == 0 && (to <= half_ || to > kRing - half_);
    return {before(position_), before(to % kRing), target_[position_], least_[position_], known, false};
  }

  // Takes the step's result in; true when the ring is finished.
  bool advance(const Step& done) {
    position_++, left_--;
    least_[position_ % kRing] = done.least;
    if (!second_) {
      position_ %= kRing;
      if (!left_) begin_second();
      return false;
    }
    if (done.compare && done.same) {
      // the first pass went on from the same costs: to position half_, or to the end
      const int to = position_ <= half_ ? half_ : kRing - 1;
      left_ -= to - position_;
      position_ = to;
    }
    return left_ <= 0;
  }

  // States from the end back to the start.
  void states(uint16_t* out) const {
    int node = seam_;
    for (int i = kRing - 1; i >= 0; i--) {
      out[i] = choose(i, node);
      node = out[i] >> tables_->step[i & 1].fresh;
    }
    if (node == seam_) return;
    // kCostLimit cut off every way from the seam (targets far outside the codebook): close the ring by its bits
    uint32_t state = 0;
    for (int i = 0; i < 2 * kRing; i++) {
      const int fresh = tables_->step[i & 1].fresh;
      state = (state << fresh | (out[i % kRing] & ((1u << fresh) - 1))) & 0xFFFF;
      if (i >= kRing) out[i % kRing] = (uint16_t)state;
    }
  }

 private:
  uint16_t* before(int position) const { return history_ + position * stride_; }

  void begin_second() {
    // the first pass ended before position half_: its best node, and the way back to the seam
    const uint16_t* end = before(half_ % kRing);
    int node = 0;
    for (int i = 0; i < tables_->step[half_ & 1].nodes(); i++)
      if (end[i] < end[node]) node = i;
    for (int i = half_ - 1; i >= 0; i--) node = choose(i, node) >> tables_->step[i & 1].fresh;
    seam_ = node;
    second_ = true, position_ = 0, left_ = kRing - 1;   // the last step's costs are not needed: its node is given
    uint16_t* pinned = before(0);
    const int nodes = tables_->step[0].nodes();
    for (int i = 0; i < nodes; i++) pinned[i] = kCostLimit;
    pinned[seam_] = 0;
    least_[0] = 0;
  }

  // The best state at a position for a node behind it.
  uint16_t choose(int position, int node) const {
    const StepTable& t = tables_->step[position & 1];
    return (uint16_t)(tier().choose(t, before(position) + (node >> t.fresh), node, target_[position]) << (16 - t.next_fresh) | node);
  }

  const Tables* tables_ = nullptr;
  uint16_t* history_ = nullptr;
  int64_t stride_ = 0;
  int half_ = 0, position_ = 0, left_ = 0, seam_ = 0;
  bool second_ = false;
  int16_t target_[kRing];
  uint16_t least_[kRing];
};

int64_t stride_of(int k2) { return (kStates >> (k2 / 2)) + 64; }   // numbers between positions; off a power of two, for the caches
int64_t thread_bytes(int k2) { return 2 * (int64_t)kRing * stride_of(k2) * 2 + 128; }

// Encodes tiles first, first + apart ...: two at a time, so that every value loaded serves two rings.
void encode_share(const exl3_encode_args& a, const Tables& t, int first, int apart, char* memory) {
  uint16_t* history = (uint16_t*)(((uintptr_t)memory + 63) / 64 * 64);
  const int64_t stride = stride_of(a.k2);
  Search search[2];
  int tile[2];
  int next = first;
  const auto refill = [&](int slot) {
    if (next >= a.tiles_count) return;
    tile[slot] = next;
    search[slot].start(t, a.tiles + (int64_t)next * kRing, history + slot * kRing * stride, stride, a.seam_window ? a.seam_window : kRing);
    next += apart;
  };
  refill(0), refill(1);
  while (search[0].active() || search[1].active()) {
    Step steps[2];
    int slots[2], count = 0;
    for (int slot = 0; slot < 2; slot++)
      if (search[slot].active() && (!count || search[slot].odd() == search[slots[0]].odd())) {
        steps[count] = search[slot].next();
        slots[count++] = slot;
      }
    tier().step(t.step[search[slots[0]].odd()], steps, count);
    for (int i = 0; i < count; i++) {
      const int slot = slots[i];
      if (!search[slot].advance(steps[i])) continue;
      uint16_t* states = a.states + (int64_t)tile[slot] * kRing;
      search[slot].states(states);
      if (a.values)
        for (int j = 0; j < kRing; j++) a.values[(int64_t)tile[slot] * kRing + j] = t.decoded[states[j]];
      refill(slot);
    }
  }
}

}  // namespace

int choose_scalar(const StepTable& t, const uint16_t* from, int node, int16_t target) {
  const int count = 1 << t.next_fresh, groups = kStates >> (t.fresh + t.next_fresh);
  const int16_t* value = t.candidates + (int64_t)node * count;
  uint32_t best = ~0u;
  int chosen = 0;
  for (int c = 0; c < count; c++) {
    const uint32_t cost = from[c * groups] + squared_error(value[c], target, t);
    if (cost < best) best = cost, chosen = c;
  }
  return chosen;
}

const EncodeTier& scalar_encode() {
  static const EncodeTier t = {1, scalar_step, choose_scalar};
  return t;
}

int64_t encode_workspace(const exl3_encode_args* a) {
  int threads = openmp().parallel ? openmp().max_threads() : 1;
  const int pairs = (a->tiles_count + 1) / 2;
  if (threads > pairs) threads = pairs;
  return thread_bytes(a->k2) * (threads < 1 ? 1 : threads);
}

int encode(const exl3_encode_args* a, void* stream) {
  if (!valid_k2(a->k2)) return fail(EXL3_BAD_ARGUMENT, "encode: no valid rate (k2 = %d)", a->k2);
  if (a->codebook < EXL3_3INST || a->codebook > EXL3_MUL1) return fail(EXL3_BAD_ARGUMENT, "encode: unknown codebook %d", a->codebook);
  if (a->seam_window < 0 || a->seam_window > kRing || a->seam_window % 2)
    return fail(EXL3_BAD_ARGUMENT, "encode: seam_window %d is not an even number from 0 to %d", a->seam_window, kRing);
  for (int64_t i = 0; i < (int64_t)a->tiles_count * kRing; i++)
    if (!(fabsf(a->tiles[i]) <= 3.4e38f))
      return fail(EXL3_BAD_ARGUMENT, "encode: tile %lld holds NaN or Inf; look for them in the weights or the Hessian", (long long)(i / kRing));
  const int64_t each = thread_bytes(a->k2);
  int threads = thread_count(stream);
  if (threads > a->workspace_bytes / each) threads = (int)(a->workspace_bytes / each);
  if (threads > (a->tiles_count + 1) / 2) threads = (a->tiles_count + 1) / 2;
  if (!a->tiles_count) return EXL3_OK;
  if (threads < 1) return fail(EXL3_BAD_ARGUMENT, "encode: workspace of %lld bytes is too small, one thread needs %lld", (long long)a->workspace_bytes, (long long)each);
  const auto t = tables(a->k2, a->codebook, a->multiplier);
  parallel(threads, [&](int part, int parts) { encode_share(*a, *t, part, parts, (char*)a->workspace + part * each); });
  return EXL3_OK;
}

}  // namespace exl3::cpu
