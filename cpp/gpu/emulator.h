// Runs the portable kernels on a CPU, one block at a time, one fiber a thread: for tests where there is no GPU.
//
// Barriers and lane exchanges are the only places where a fiber gives way, and from barrier to barrier one warp runs after the other, in turn
// the first or the last one first: so a missing barrier shows (shared memory starts as NaNs). A barrier or an exchange that not all threads
// reach ends the program with the block's place.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <memory>
#include <vector>

namespace exl3::emulator {

enum class State { Ready, Exchange, Barrier, Done };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int thread = 0;
  State state = State::Ready;
  int value = 0, source = 0, received = 0;
  const void* shown = nullptr;
};

inline Fiber* current = nullptr;
inline int block[2] = {0, 0};
inline ucontext_t scheduler;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<std::vector<char>> arrays;  // shared memory of the block that runs
inline const std::function<void()>* body = nullptr;

inline void give_way(State why) {
  current->state = why;
  swapcontext(&current->context, &scheduler);
}
inline void barrier() { give_way(State::Barrier); }
inline int exchange(int value, int source) {
  current->value = value;
  current->source = source & 31;
  give_way(State::Exchange);
  return current->received;
}
inline void fail(const char* what) {
  fprintf(stderr, "emulator: %s in block (%d, %d)\n", what, block[0], block[1]);
  abort();
}
// Shows `mine` to the other lanes of the warp while f(peer) runs; peer(lane) is what that lane shows.
template <class F>
void with_peers(const void* mine, F f) {
  current->shown = mine;
  exchange(0, 0);
  f([](int lane) { return fibers[(current->thread & ~31) + lane]->shown; });
  exchange(0, 0);
}
template <class T>
T* shared(int id, int count) {
  if ((int)arrays.size() <= id) arrays.resize(id + 1);
  if (arrays[id].empty()) arrays[id].assign(sizeof(T) * count, (char)0xff);
  return (T*)arrays[id].data();
}
inline void entry() {
  (*body)();
  give_way(State::Done);
}

// All lanes of a warp stand at an exchange (true), or none does (false).
inline bool exchange_warp(int first, int threads) {
  const int end = first + 32 < threads ? first + 32 : threads;
  int waiting = 0;
  for (int t = first; t < end; t++) waiting += fibers[t]->state == State::Exchange;
  if (!waiting) return false;
  if (waiting != end - first) fail("a lane exchange that not all lanes of the warp reach");
  for (int t = first; t < end; t++) fibers[t]->received = fibers[first + fibers[t]->source]->value;
  for (int t = first; t < end; t++) fibers[t]->state = State::Ready;
  return true;
}

// Runs the warp until all its lanes stand at a barrier or are done.
inline void run_warp(int first, int threads) {
  do {
    for (int t = first; t < first + 32 && t < threads; t++)
      while (fibers[t]->state == State::Ready) {
        current = fibers[t].get();
        swapcontext(&scheduler, &current->context);
      }
  } while (exchange_warp(first, threads));
}

inline void run_block(int threads, const std::function<void()>& f) {
  constexpr int kStack = 256 * 1024;
  body = &f;
  arrays.clear();
  while ((int)fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  for (int t = 0; t < threads; t++) {
    Fiber& b = *fibers[t];
    if (!b.stack) b.stack = std::make_unique<char[]>(kStack);
    b.thread = t;
    b.state = State::Ready;
    getcontext(&b.context);
    b.context.uc_stack.ss_sp = b.stack.get();
    b.context.uc_stack.ss_size = kStack;
    b.context.uc_link = nullptr;
    makecontext(&b.context, entry, 0);
  }
  const int warps = (threads + 31) / 32;
  for (int phase = 0;; phase++) {
    for (int i = 0; i < warps; i++) run_warp((phase & 1 ? warps - 1 - i : i) * 32, threads);
    int waiting = 0, done = 0;
    for (int t = 0; t < threads; t++) {
      waiting += fibers[t]->state == State::Barrier;
      done += fibers[t]->state == State::Done;
    }
    if (done == threads) return;
    if (waiting != threads) fail("a barrier that not all threads reach");
    for (int t = 0; t < threads; t++) fibers[t]->state = State::Ready;
  }
}

inline void launch(unsigned grid_x, unsigned grid_y, int threads, const std::function<void()>& f) {
  for (block[1] = 0; block[1] < (int)grid_y; block[1]++)
    for (block[0] = 0; block[0] < (int)grid_x; block[0]++) run_block(threads, f);
}

}  // namespace exl3::emulator
