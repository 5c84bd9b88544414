/* What the instruction sets' code asks of the one part that is compiled for every processor. */
#ifndef TORCHGDU_PARALLEL_H
#define TORCHGDU_PARALLEL_H

#include "engine.h"

/* Bytes aligned to a cache line, or null. */
void* tgdu_allocate(int64_t bytes);
void tgdu_free(void* block);

/* Calls work(context, i) for i < threads, each in a thread of its own, and waits for all. The
 * threads live for this call: none waits between calls, or is missing after a fork. */
void tgdu_parallel(int64_t threads, void* context, void (*work)(void*, int64_t));

/* The engine compiled for one instruction set. */
struct tgdu_level {
  const char* name;
  int64_t (*saved)(const tgdu_problem&);
  int64_t (*run)(const tgdu_problem&, bool backward);
  /* Multiply-adds in registers, `rounds` times; returns how many operations that were. */
  double (*spin)(int64_t dtype, int64_t rounds);
};

#endif
