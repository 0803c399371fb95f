// Parallel loops on the OpenMP pool that torch brought into the process, with any compiler and without -fopenmp. A second, spinning pool
// beside torch's would cost 200 to 600 us each time the two take turns. Without an OpenMP runtime in the process, loops run serially.
#pragma once
#include <stdint.h>
#if !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace exl3::cpu {

struct OpenMP {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread)() = nullptr;
  int (*threads)() = nullptr;
  int (*max_threads)() = nullptr;
  OpenMP() {
#if !defined(_WIN32)
    parallel = (decltype(parallel))dlsym(RTLD_DEFAULT, "GOMP_parallel");
    thread = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    threads = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    max_threads = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    if (!thread || !threads || !max_threads) parallel = nullptr;
#endif
  }
};

inline const OpenMP& openmp() {
  static const OpenMP pool;  // looked up on the first parallel loop: torch is loaded by then
  return pool;
}

// On the CPU an operation's stream argument is its number of threads.
inline int thread_count(void* stream) {
  const int64_t n = (int64_t)(intptr_t)stream;
  return n < 1 ? 1 : n > 1024 ? 1024 : (int)n;
}

// f(part, parts) on up to `threads` threads; parts may be fewer than asked for. f must not throw.
template <class F> void parallel(int threads, F&& f) {
  if (threads < 2 || !openmp().parallel) {
    f(0, 1);
    return;
  }
  struct Call { F* f; } call{&f};
  openmp().parallel([](void* c) { (*((Call*)c)->f)(openmp().thread(), openmp().threads()); }, &call, (unsigned)threads, 0);
}

// f(i) for i in [0, n), each part a contiguous share.
template <class F> void parallel_for(int threads, int64_t n, F&& f) {
  if (threads > n) threads = (int)n;
  parallel(threads, [&](int part, int parts) {
    for (int64_t i = n * part / parts, end = n * (part + 1) / parts; i < end; i++) f(i);
  });
}

}  // namespace exl3::cpu
