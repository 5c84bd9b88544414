// The engine's doors, and what is the same for every instruction set: memory, threads, the choice.
#include "engine.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "parallel.h"

#define TGDU_DECLARE(name) \
  namespace name {         \
  extern const tgdu_level level; \
  }
TGDU_DECLARE(tgdu_base)
#ifdef TGDU_X86
TGDU_DECLARE(tgdu_avx2)
TGDU_DECLARE(tgdu_avx512)
#endif

namespace {

const tgdu_level* const levels[] = {
    &tgdu_base::level,
#ifdef TGDU_X86
    &tgdu_avx2::level,
    &tgdu_avx512::level,
#endif
};
constexpr int64_t count = sizeof levels / sizeof *levels;

bool usable(const tgdu_problem& p) {
  return tgdu_level_supported(p.level) && p.threads >= 1 && p.steps >= 1 && p.batch >= 1 &&
         p.inputs >= 1 && p.units >= 1 && p.cell >= TGDU_SRN && p.cell <= TGDU_GDU &&
         (p.dtype == TGDU_FLOAT32 || p.dtype == TGDU_FLOAT64) && p.checkpoint >= 0;
}

// Fresh memory costs more than what is written to it when it comes in small pages.
void prefer_large_pages(void* buffer, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 1 << 21;
  const uintptr_t at = reinterpret_cast<uintptr_t>(buffer);
  const uintptr_t from = (at + page - 1) / page * page, to = (at + uintptr_t(bytes)) / page * page;
  if (buffer && from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)buffer, (void)bytes;
#endif
}

}  // namespace

void* tgdu_allocate(int64_t bytes) {
  return std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64));
}
void tgdu_free(void* block) { std::free(block); }

void tgdu_parallel(int64_t threads, void* context, void (*work)(void*, int64_t)) {
  std::vector<std::thread> others;
  int64_t started = 1;
  try {
    others.reserve(static_cast<size_t>(threads));
    for (; started < threads; ++started) others.emplace_back(work, context, started);
  } catch (const std::exception&) {
    // No more threads to be had: this one does their share.
  }
  work(context, 0);
  for (int64_t i = started; i < threads; ++i) work(context, i);
  for (std::thread& other : others) other.join();
}

int64_t tgdu_version(void) { return TGDU_VERSION; }
int64_t tgdu_levels(void) { return count; }
const char* tgdu_level_name(int64_t level) {
  return level >= 0 && level < count ? levels[level]->name : nullptr;
}
int64_t tgdu_level_supported(int64_t level) {
  if (level == 0) return 1;
#ifdef TGDU_X86
  if (level == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (level == 2)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("fma");
#endif
  return 0;
}
int64_t tgdu_saved(const tgdu_problem* problem) {
  return usable(*problem) ? levels[problem->level]->saved(*problem) : -1;
}
int64_t tgdu_forward(const tgdu_problem* problem) {
  if (!usable(*problem)) return TGDU_BAD;
  if (problem->saved) prefer_large_pages(problem->saved, tgdu_saved(problem));
  return levels[problem->level]->run(*problem, false);
}
int64_t tgdu_backward(const tgdu_problem* problem) {
  return usable(*problem) ? levels[problem->level]->run(*problem, true) : int64_t(TGDU_BAD);
}

double tgdu_peak(int64_t level, int64_t dtype, int64_t threads, double milliseconds) {
  struct Work {
    const tgdu_level* level;
    int64_t dtype;
    double seconds;
    std::atomic<double> total{0};
  } work{levels[level], dtype, milliseconds / 1000};
  tgdu_parallel(threads, &work, [](void* context, int64_t) {
    Work& work = *static_cast<Work*>(context);
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    double operations = 0, seconds = 0;
    while (seconds < work.seconds) {
      operations += work.level->spin(work.dtype, 100000);
      seconds = std::chrono::duration<double>(Clock::now() - start).count();
    }
    double seen = work.total;
    while (!work.total.compare_exchange_weak(seen, seen + operations / seconds)) {
    }
  });
  return work.total / 1e9;
}
