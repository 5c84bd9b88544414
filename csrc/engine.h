/* The contract between the engine and whoever calls it: plain C, no Python, no Torch, no globals.
 *
 * One struct describes one layer and direction along a whole sequence. `tgdu_forward` runs it,
 * `tgdu_backward` returns its gradients. Nothing is kept between calls, so calls may run at the
 * same time from any threads, and in forked processes.
 *
 * Sizes: T steps, B sequences, I inputs, H units, G gates and candidates of the cell
 * (SRN, CWRNN 1; GDU, UGRNN, MGU 2; GRU 3; LSTM 4), N symbols (T·B, or the sum of batch_sizes).
 * Every buffer belongs to the caller, holds elements of `dtype` where nothing else is said, and is
 * contiguous and aligned to its element where no strides are given. No two buffers overlap.
 * The caller has checked all sizes; only what can fail while running is reported.
 *
 * Every field has 8 bytes.
 */
#ifndef TORCHGDU_ENGINE_H
#define TORCHGDU_ENGINE_H

#include <stdint.h>

#if defined(__GNUC__)
#define TGDU_API __attribute__((visibility("default")))
#else
#define TGDU_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever this file changes its meaning. */
#define TGDU_VERSION 1

enum {
  TGDU_SRN, TGDU_LSTM, TGDU_GRU, TGDU_GRU_AFTER, TGDU_UGRNN, TGDU_MGU, TGDU_MGU_BETA, TGDU_CWRNN,
  TGDU_GDU
};                                            /* cell */
enum { TGDU_FLOAT32, TGDU_FLOAT64 };          /* dtype */
enum { TGDU_OK, TGDU_NO_MEMORY, TGDU_BAD };   /* results */

typedef struct tgdu_problem {
  int64_t cell;
  int64_t dtype;
  int64_t level;      /* instruction set: 0 to tgdu_levels() − 1, supported here */
  int64_t threads;    /* at most so many; at least 1 */
  int64_t reverse;    /* 1: from each sequence's last symbol to its first */
  int64_t steps;      /* T, at least 1 */
  int64_t batch;      /* B, at least 1 */
  int64_t inputs;     /* I, at least 1 */
  int64_t units;      /* H, at least 1 */
  int64_t parts;      /* length of partition */
  int64_t checkpoint; /* 0: gates are kept in `saved`; k: recomputed in stretches of k steps */
  int64_t x_step;     /* elements between steps of x; unused where batch_sizes is given */
  int64_t x_row;      /* elements between sequences of x, or between symbols of packed x */
  int64_t grad_step;  /* the same for grad_output */
  int64_t grad_row;

  /* read by forward and backward */
  const int64_t *batch_sizes; /* [T], falling from B, how many sequences still run; null: all do */
  const int64_t *partition;   /* GDU: size of each group; CWRNN: period of each group; else null */
  const void *x;              /* [T, B, I] by its strides, or packed [N, I]; innermost contiguous */
  const void *h0;             /* [B, H] */
  const void *c0;             /* [B, H], LSTM */
  const int64_t *clock;       /* [B], CWRNN: symbols that each sequence has had */
  const void *weight_ih;      /* [G·H, I] */
  const void *weight_hh;      /* [G·H, H] */
  const void *bias;           /* [G·H] or null */
  const void *bias_hn;        /* [H] or null, GRU_AFTER */
  const void *scale;          /* [H], GDU: α = scale·d + base */
  const void *base;           /* [H], GDU */

  /* written by forward; output and saved are read by backward */
  void *output;               /* [T, B, H] or packed [N, H] */
  void *h_n;                  /* [B, H] */
  void *c_n;                  /* [B, H], LSTM */
  void *saved;                /* tgdu_saved() bytes aligned to 64, or null: no backward will follow */

  /* read by backward; each may be null: zero */
  const void *grad_output;    /* like output, by its strides; innermost contiguous */
  const void *grad_h_n;       /* [B, H] */
  const void *grad_c_n;       /* [B, H] */

  /* written by backward; each may be null: not wanted */
  void *grad_x;               /* [T, B, I] or packed [N, I], contiguous */
  void *grad_h0;              /* [B, H] */
  void *grad_c0;              /* [B, H] */
  void *grad_weight_ih;       /* as the weights */
  void *grad_weight_hh;
  void *grad_bias;
  void *grad_bias_hn;
  void *grad_scale;           /* [H] */
  void *grad_base;            /* [H] */
} tgdu_problem;

TGDU_API int64_t tgdu_version(void); /* TGDU_VERSION of the library */
TGDU_API int64_t tgdu_levels(void);  /* how many instruction sets it was built for */
/* "x86-64", "avx2", "avx512", "neon" or "generic"; null beyond the last */
TGDU_API const char *tgdu_level_name(int64_t level);
/* 1 where this processor has it; 0 always is */
TGDU_API int64_t tgdu_level_supported(int64_t level);
/* Bytes of `saved` that backward needs: so many for each symbol, or, with a checkpoint, for each
 * sequence and begun stretch. They do not depend on `threads`. */
TGDU_API int64_t tgdu_saved(const tgdu_problem *problem);
TGDU_API int64_t tgdu_forward(const tgdu_problem *problem);
TGDU_API int64_t tgdu_backward(const tgdu_problem *problem);
/* What multiply-adds in registers alone reach, in about so many milliseconds: 10^9 operations a
 * second, over all threads. */
TGDU_API double tgdu_peak(int64_t level, int64_t dtype, int64_t threads, double milliseconds);

#ifdef __cplusplus
}
#endif
#endif
