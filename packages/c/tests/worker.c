/* SPDX-License-Identifier: Apache-2.0 */
/* One of several workers: what a tool does in a cluster, one run after another; each line is for the test. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "paceline.h"

enum { ROWS = 6, COLUMNS = 3, STEPS = 13 };
static double weights[ROWS], bias[COLUMNS], gradient_w[ROWS], gradient_b[COLUMNS];
static void *arrays[] = {weights, bias}, *gradients[] = {gradient_w, gradient_b};
static const int64_t sizes[] = {ROWS, COLUMNS};
static const int dtypes[] = {PL_FLOAT64, PL_FLOAT64};

static void must(int status) {
  if (status >= 0) return;
  fprintf(stderr, "%d: %s\n", status, pl_error());
  exit(9);
}

static double target(int rank, int step, int place) { return (7 * rank + 3 * step + 5 * place) % 11 / 4.0; }

static void attach(const char *rule) {
  for (int k = 0; k < ROWS; ++k) weights[k] = 1;
  for (int k = 0; k < COLUMNS; ++k) bias[k] = 0;
  must(pl_attach(2, arrays, sizes, dtypes, "cpu", rule));
}

static void step(int rank, int number) {
  for (int k = 0; k < ROWS; ++k) gradient_w[k] = weights[k] - target(rank, number, k);
  for (int k = 0; k < COLUMNS; ++k) gradient_b[k] = bias[k] - target(rank, number, k);
  must(pl_mean(gradients));
  for (int k = 0; k < ROWS; ++k) weights[k] -= 0.125 * gradient_w[k];
  for (int k = 0; k < COLUMNS; ++k) bias[k] -= 0.125 * gradient_b[k];
  must(pl_step());
}

static void train(const char *rule) {
  attach(rule);
  for (int number = 0; number < STEPS; ++number) step(pl_rank(), number);
  must(pl_close());
  printf("trained");
  for (int k = 0; k < ROWS; ++k) printf(" %a", weights[k]);
  for (int k = 0; k < COLUMNS; ++k) printf(" %a", bias[k]);
  printf("\n");
}

static void ranges(void) {
  int64_t begin, end;
  int status;
  attach("averaging(period=2)");
  while ((status = pl_next_range(25, 4, &begin, &end)) == PL_MORE) {
    printf("range %lld %lld\n", (long long)begin, (long long)end);
    step(pl_rank(), 0);
  }
  must(status);
  must(pl_close());
}

static void different_sizes(void) {
  const int64_t mine[] = {ROWS - pl_rank(), COLUMNS};
  const int status = pl_attach(2, arrays, mine, dtypes, "cpu", "averaging");
  printf("status %d: %s\n", status, pl_error());
}

/* Worker 1 exits with 3, and the other one learns of it. */
static void one_leaves(void) {
  int status = 0;
  attach("averaging(period=2)");
  step(pl_rank(), 0);
  if (pl_rank() == 1) exit(3);
  for (int number = 1; number < 1000 && status >= 0; ++number) {
    weights[0] += 1;
    status = pl_step();
  }
  printf("status %d: %s\n", status, pl_error());
  must(pl_abandon());
}

int main(void) {
  train("bmuf(period=4)");
  train("sync(reproducible=True)");
  ranges();
  different_sizes();
  one_leaves();
  return 0;
}
