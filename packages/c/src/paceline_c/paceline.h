/* SPDX-License-Identifier: Apache-2.0 */
/* paceline for training tools in C, and in all that calls C.

   A tool hands over the arrays of its parameters, and calls pl_step() after each of its own steps:

       void *arrays[] = {weights, bias};
       int64_t sizes[] = {rows * columns, rows};
       int dtypes[] = {PL_FLOAT32, PL_FLOAT32};
       if (pl_attach(2, arrays, sizes, dtypes, "cpu", "bmuf(period=16)") < 0) return fail(pl_error());
       while (pl_next_range(samples, batch, &begin, &end) == PL_MORE) {
         train(begin, end);
         if (pl_step() < 0) return fail(pl_error());
       }
       pl_close();

   Every function returns a status and never ends the process: below 0 something is wrong, and pl_error() says what.
   A process has one run at a time. Any thread may call; calls wait for each other. The tool's other threads go on
   while a call waits for other workers. Strings are UTF-8, and may be freed after the call; arrays belong to the tool
   and must stay where they are until pl_close() or pl_abandon(). */
#ifndef PACELINE_H
#define PACELINE_H

#include <stdint.h>

#if defined(__GNUC__)
#define PL_API __attribute__((visibility("default")))
#else
#define PL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum pl_status {
  PL_OK = 0,
  PL_MORE = 1,        /* there is a range (pl_next_range), or a checkpoint was restored (pl_resume) */
  PL_INVALID = -1,    /* an argument is wrong: a null pointer, a negative size, an unknown dtype */
  PL_STATE = -2,      /* not now: before pl_attach, after pl_close, or attached already */
  PL_REFUSED = -3,    /* the rule, a setting, the device or the numbers cannot be served */
  PL_MISMATCH = -4,   /* the workers differ: in sizes, rules or calls; all of them get this status */
  PL_LOST = -5,       /* another worker is gone, or this one was given up */
  PL_FILE = -6,       /* a checkpoint or another file cannot be read or written */
  PL_PYTHON = -7,     /* there is no Python that has paceline */
  PL_INTERNAL = -8,   /* a mistake of paceline's own; the traceback is on stderr */
  PL_OVER = -9        /* pl_attach: all workers have finished already; exit with 0 */
};

enum pl_dtype { PL_FLOAT32 = 1, PL_FLOAT64 = 2, PL_FLOAT16 = 3, PL_BFLOAT16 = 4 };

/* -- before the run ---------------------------------------------------------------------------------------------- */

/* Give pl_attach a setting that Python's attach_arrays has: "seed", "timeout_s", "checkpoint", "every_blocks", "log",
   "guard", or one of the rule's, such as "period". The value is text: pl_set("period", "16"). */
PL_API int pl_set(const char *name, const char *value);

/* Name arrays that block rules average and do not train, such as running means. */
PL_API int pl_buffers(int count, void *const *arrays, const int64_t *sizes, const int *dtypes);

/* Name the tool's momentum: an array for each array of pl_attach, in its size and dtype. `decay` is the factor by which
   the tool multiplies it in each step. Block rules then restart or average it; else each worker keeps its own. */
PL_API int pl_momentum(int count, void *const *arrays, double decay);

/* Attach: all workers start from rank 0's numbers. One worker exchanges nothing.
   count    number of arrays of parameters.
   arrays   `count` pointers.
   sizes    elements of each array.
   dtypes   PL_FLOAT32, ... of each array.
   device   where they lie: "cpu" or NULL, "cuda:0", ...
   rule     such as "bmuf(period=16)"; NULL takes that of `paceline run`. */
PL_API int pl_attach(int count, void *const *arrays, const int64_t *sizes, const int *dtypes, const char *device,
                     const char *rule);

/* -- the loop ---------------------------------------------------------------------------------------------------- */

/* Replace the gradients by their mean over the workers, in place, if the rule exchanges gradients; before the tool's
   own step. `gradients` has a pointer for each array of pl_attach, in the same order, sizes and dtypes. */
PL_API int pl_mean(void *const *gradients);

/* Call it after each step of the tool; exchanges change the arrays in place. */
PL_API int pl_step(void);

/* The next samples of this worker: `begin` up to but not `end`, of `total` samples that all workers see in one order, at
   most `batch` at a time. Every sample of an epoch goes to exactly one worker. Make one step (pl_step) for each range.
   Returns PL_MORE, and PL_OK at the end of the epoch; the call after that begins the next epoch. */
PL_API int pl_next_range(int64_t total, int64_t batch, int64_t *begin, int64_t *end);

/* Be done with this epoch before its end; the next range is of the next epoch. On all workers. */
PL_API int pl_done(void);

/* Merge the work of all workers now, as at the end of an epoch; on all workers. */
PL_API int pl_merge(void);

/* 1: the arrays hold the global model, to evaluate or write it; 0: they hold this worker's numbers again. */
PL_API int pl_global_model(int inside);

/* -- settings and the log ------------------------------------------------------------------------------------------ */

/* The present value of a setting that the tool applies itself ("lr", "momentum", "weight_decay", "eps"): `preset` until
   pl_tune or `paceline tune` changes it, on all workers at the same block. Call it in each step. */
PL_API int pl_tuned(const char *name, double preset, double *value);

/* Change a setting on all workers at the same block; one worker calls it. "lr_factor" multiplies the rate. */
PL_API int pl_tune(const char *name, double value);

/* Write a value to the event log, such as pl_log("loss", loss). */
PL_API int pl_log(const char *name, double value);

/* -- checkpoints --------------------------------------------------------------------------------------------------- */

/* Write a checkpoint into a directory; on all workers. */
PL_API int pl_save(const char *path);

/* Restore a checkpoint, before the loop; NULL takes the newest of pl_set("checkpoint", DIR). On all workers. Returns
   PL_MORE, or PL_OK if there is none to take. The loop continues at pl_epoch(), in the middle of that epoch. */
PL_API int pl_resume(const char *path);

/* -- where this worker is ------------------------------------------------------------------------------------------ */

/* Each returns a number, or a status below 0. */
PL_API int pl_rank(void);            /* of this worker, from 0; also after pl_close */
PL_API int pl_size(void);            /* workers; also after pl_close */
PL_API int pl_epoch(void);           /* of pl_next_range: under way, or next */
PL_API int64_t pl_minibatches(void); /* steps of this worker, those before a resume included */

/* -- the end ------------------------------------------------------------------------------------------------------- */

/* End the run together with all workers; the arrays hold the global model afterwards. May be called again. A tool that
   returns 0 without it closes the run at its exit. */
PL_API int pl_close(void);

/* Leave at once after an error of the tool; the other workers are told. */
PL_API int pl_abandon(void);

/* The sentence of the calling thread's last error; "" if there was none. Valid until its next call. */
PL_API const char *pl_error(void);

#ifdef __cplusplus
}
#endif

#endif
