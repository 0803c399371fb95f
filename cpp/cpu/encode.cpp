// encode: the tail-biting search over tiles (encode.h). Two passes as in the spec: the first, round the seam with a free start, finds the
// node at the seam; the second goes round the ring from that node back to it. Costs forget where they started: as soon as the
// second pass reproduces the costs the first one left at a position, everything up to where that pass ended is known already, and is not
// computed again. The result is the same; the work is 1.1 to 1.5 passes instead of 2.
#include <math.h>
#include <string.h>

#include <atomic>
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

template <class Cost, class Value> void scalar_step(const StepTable& t, Step& s) {
  const Cost* from = (const Cost*)s.from;
  Cost* to = (Cost*)s.to;
  const Value* value = (const Value*)t.value;
  const int groups = kStates >> (t.fresh + t.next_fresh);
  float least = INFINITY;
  s.same = s.compare;
  for (int o = 0; o < t.next_nodes(); o++) {
    auto best = edge_cost(from[o >> t.fresh], value[o], s.target);
    for (int c = 1; c < 1 << t.next_fresh; c++) {
      const auto cost = edge_cost(from[c * groups + (o >> t.fresh)], value[c << (16 - t.next_fresh) | o], s.target);
      if (cost < best) best = cost;
    }
    best -= (decltype(best))s.least;
    if (!t.fp32 && best > kCostLimit) best = kCostLimit;
    if ((float)best < least) least = (float)best;
    if (to[o] != (Cost)best) s.same = false;
    to[o] = (Cost)best;
  }
  s.least = least;
}

void scalar_steps(const StepTable& t, Step* steps, int count) {
  for (int i = 0; i < count; i++) t.fp32 ? scalar_step<float, float>(t, steps[i]) : scalar_step<uint16_t, int16_t>(t, steps[i]);
}

template <class Cost, class Value> int choose_of(const StepTable& t, const Cost* from, int node, float target) {
  const int count = 1 << t.next_fresh, groups = kStates >> (t.fresh + t.next_fresh);
  const Value* value = (const Value*)t.candidates + (int64_t)node * count;
  auto best = edge_cost(from[0], value[0], target);
  int chosen = 0;
  for (int c = 1; c < count; c++) {
    const auto cost = edge_cost(from[c * groups], value[c], target);
    if (cost < best) best = cost, chosen = c;
  }
  return chosen;
}

int scalar_choose(const StepTable& t, const void* from, int node, float target) {
  return t.fp32 ? choose_of<float, float>(t, (const float*)from, node, target) : choose_of<uint16_t, int16_t>(t, (const uint16_t*)from, node, target);
}

const EncodeTier& tier() {
#if EXL3_X86
  return isa() == Isa::avx512 ? avx512_encode() : isa() == Isa::avx2 ? avx2_encode() : scalar_encode();
#else
  return scalar_encode();
#endif
}

struct alignas(64) Line { char bytes[64]; };
constexpr int kHighRate = 10;       // k2 from which costs are fp32
// Every codebook's values fit 16 bits with it. Below 2 bits errors are large, and paths from one node to all others long: finer costs
// would reach kCostLimit.
float scale_of(int k2) { return k2 < 4 ? 4096 : 8192; }

// What one rate and codebook needs, made once and kept.
struct Tables {
  int k2, codebook;
  uint32_t multiplier;
  float scale;                      // of fixed point
  float limit;                      // largest target, in fixed point
  std::vector<float> decoded;       // [65536]
  std::vector<Line> value, ordered[2], candidates[2];
  StepTable step[2];                // even and odd positions
};

template <class Value> void order(const StepTable& t, int lanes, Value* out) {
  const int x_count = 1 << t.fresh, c_count = 1 << t.next_fresh, groups = kStates >> (t.fresh + t.next_fresh);
  const auto put = [&](int c, int g, int x) { *out++ = ((const Value*)t.value)[c << (16 - t.next_fresh) | g << t.fresh | x]; };
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

template <class Value> void fill(Tables& t) {
  const size_t lines = kStates * sizeof(Value) / sizeof(Line);
  t.value.resize(lines);
  for (int s = 0; s < kStates; s++) ((Value*)t.value.data())[s] = (Value)lrintf(t.decoded[(size_t)s] * t.scale);
  for (int odd = 0; odd < 2; odd++) {
    StepTable& step = t.step[odd];
    if (odd && t.k2 % 2 == 0) {
      step = t.step[0];
      break;
    }
    step = {fresh_bits(t.k2, odd), fresh_bits(t.k2, odd + 1), t.k2 >= kHighRate, t.value.data(), nullptr, nullptr};
    if (tier().bytes) {
      t.ordered[odd].resize(lines);
      order(step, tier().lanes(step.fp32), (Value*)t.ordered[odd].data());
      step.ordered = t.ordered[odd].data();
    }
    t.candidates[odd].resize(lines);
    step.candidates = t.candidates[odd].data();
    Value* to = (Value*)t.candidates[odd].data();
    for (int o = 0; o < step.next_nodes(); o++)
      for (int c = 0; c < 1 << step.next_fresh; c++) *to++ = ((const Value*)t.value.data())[c << (16 - step.next_fresh) | o];
  }
}

std::shared_ptr<const Tables> make_tables(int k2, int codebook, uint32_t multiplier) {
  auto t = std::make_shared<Tables>();
  t->k2 = k2, t->codebook = codebook, t->multiplier = multiplier;
  t->scale = scale_of(k2);
  t->limit = k2 >= kHighRate ? 64 * t->scale : 32767;
  t->decoded.resize(kStates);
  for (int s = 0; s < kStates; s++) t->decoded[(size_t)s] = codebook_value((uint32_t)s, codebook, multiplier);
  k2 >= kHighRate ? fill<float>(*t) : fill<int16_t>(*t);
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

// One ring on its way through both passes. The costs before every position lie in `history`, `stride` bytes apart.
class Search {
 public:
  void start(const Tables& t, const float* tile, char* history, int64_t stride, int window) {
    tables_ = &t, history_ = history, stride_ = stride, half_ = window / 2;
    for (int i = 0; i < kRing; i++) {
      const float v = tile[i] * t.scale;
      target_[i] = nearbyintf(v < -t.limit ? -t.limit : v > t.limit ? t.limit : v);
    }
    second_ = false;
    position_ = (kRing - half_) % kRing;
    left_ = 2 * half_;
    set(position_, 0);
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
  char* before(int position) const { return history_ + position * stride_; }

  // All costs before a position.
  void set(int position, float cost) {
    const StepTable& t = tables_->step[position & 1];
    least_[position] = cost;
    for (int i = 0; i < t.nodes(); i++)
      if (t.fp32) ((float*)before(position))[i] = cost;
      else ((uint16_t*)before(position))[i] = (uint16_t)cost;
  }

  template <class Cost> int cheapest(int position) const {
    const Cost* cost = (const Cost*)before(position);
    int node = 0;
    for (int i = 0; i < tables_->step[position & 1].nodes(); i++)
      if (cost[i] < cost[node]) node = i;
    return node;
  }

  void begin_second() {
    // the first pass ended before position half_: its best node, and the way back to the seam
    const bool fp32 = tables_->step[0].fp32;
    int node = fp32 ? cheapest<float>(half_) : cheapest<uint16_t>(half_);
    for (int i = half_ - 1; i >= 0; i--) node = choose(i, node) >> tables_->step[i & 1].fresh;
    seam_ = node;
    second_ = true, position_ = 0, left_ = kRing - 1;   // the last step's costs are not needed: its node is given
    set(0, fp32 ? 1e30f : kCostLimit);
    least_[0] = 0;
    if (fp32) ((float*)before(0))[seam_] = 0;
    else ((uint16_t*)before(0))[seam_] = 0;
  }

  // The best state at a position for a node behind it.
  uint16_t choose(int position, int node) const {
    const StepTable& t = tables_->step[position & 1];
    const char* from = before(position) + (int64_t)(node >> t.fresh) * (t.fp32 ? 4 : 2);
    return (uint16_t)(tier().choose(t, from, node, target_[position]) << (16 - t.next_fresh) | node);
  }

  const Tables* tables_ = nullptr;
  char* history_ = nullptr;
  int64_t stride_ = 0;
  int half_ = 0, position_ = 0, left_ = 0, seam_ = 0;
  bool second_ = false;
  float target_[kRing], least_[kRing];
};

// Bytes between positions, off a power of two for the caches.
int64_t stride_of(int k2) { return (int64_t)(kStates >> (k2 / 2)) * (k2 >= kHighRate ? 4 : 2) + 128; }
int64_t thread_bytes(int k2) { return 2 * kRing * stride_of(k2) + 128; }

// Encodes tiles as long as there are some: two at a time, so that every value loaded serves two rings. `next` is shared by all threads.
void encode_share(const exl3_encode_args& a, const Tables& t, std::atomic<int>& next, char* memory) {
  char* history = (char*)(((uintptr_t)memory + 63) / 64 * 64);
  const int64_t stride = stride_of(a.k2);
  Search search[2];
  int tile[2];
  const auto refill = [&](int slot) {
    tile[slot] = next.fetch_add(1, std::memory_order_relaxed);
    if (tile[slot] >= a.tiles_count) return;
    search[slot].start(t, a.tiles + (int64_t)tile[slot] * kRing, history + slot * kRing * stride, stride, a.seam_window ? a.seam_window : kRing);
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

const EncodeTier& scalar_encode() {
  static const EncodeTier t = {0, scalar_steps, scalar_choose};
  return t;
}

int64_t encode_workspace(const exl3_encode_args* a) {
  int threads = openmp().parallel ? openmp().max_threads() : 1;
  const int pairs = (a->tiles_count + 1) / 2;
  if (threads > pairs) threads = pairs;
  const int64_t each = thread_bytes(a->k2), most = (1ll << 30) / each;   // 17 MB a thread at 2 bits: no more than 1 GiB in all
  return each * (threads < 1 ? 1 : threads > most ? most : threads);
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
  std::atomic<int> next{0};
  parallel(threads, [&](int part, int) { encode_share(*a, *t, next, (char*)a->workspace + part * each); });
  return EXL3_OK;
}

}  // namespace exl3::cpu
