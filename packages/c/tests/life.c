/* SPDX-License-Identifier: Apache-2.0 */
/* A tool by itself: wrong calls before it attaches, threads while it trains, and an end without pl_close. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "paceline.h"

enum { THREADS = 4, CALLS = 25 };
static float *weights;
static int wrong = 0;

static void expect(const char *what, long long got, long long wanted) {
  if (got == wanted) return;
  fprintf(stderr, "%s: %lld, not %lld: %s\n", what, got, wanted, pl_error());
  wrong = 1;
}

static void before(void) {
  int64_t begin, end, sizes[] = {3};
  int dtypes[] = {PL_FLOAT32};
  void *arrays[] = {NULL};
  double value;
  expect("step", pl_step(), PL_STATE);
  expect("attach", pl_attach(1, NULL, NULL, NULL, NULL, NULL), PL_INVALID);
  expect("null array", pl_attach(1, arrays, sizes, dtypes, "cpu", "bmuf"), PL_INVALID);
  sizes[0] = -1;
  expect("negative size", pl_attach(1, arrays, sizes, dtypes, "cpu", "bmuf"), PL_INVALID);
  dtypes[0] = 77;
  expect("dtype", pl_attach(1, arrays, sizes, dtypes, "cpu", "bmuf"), PL_INVALID);
  expect("range", pl_next_range(10, 2, &begin, &end), PL_STATE);
  expect("no place", pl_next_range(10, 2, NULL, &end), PL_INVALID);
  expect("tuned", pl_tuned("lr", 0.5, &value), PL_STATE);
  expect("preset", value == 0.5, 1);
  expect("save", pl_save("nowhere"), PL_STATE);
  expect("sentence", strlen(pl_error()) > 10, 1);
}

static void *call_often(void *nothing) {
  for (int k = 0; k < CALLS; ++k) {
    double value;
    expect("log", pl_log("loss", k), PL_OK);
    expect("tuned", pl_tuned("lr", 0.5, &value), PL_OK);
  }
  expect("wrong", pl_log(NULL, 1), PL_INVALID);
  return nothing;
}

static void train(int steps) {
  for (int k = 0; k < steps; ++k) {
    weights[k % 3] *= 0.5f;
    expect("step", pl_step(), PL_OK);
  }
}

int main(void) {
  int64_t sizes[] = {3};
  int dtypes[] = {PL_FLOAT32};
  pthread_t threads[THREADS];
  weights = calloc(3, sizeof *weights);
  void *arrays[] = {weights};
  weights[0] = weights[1] = weights[2] = 1;
  before();
  expect("attach", pl_attach(1, arrays, sizes, dtypes, NULL, "bmuf(period=4)"), PL_OK);
  if (wrong) return 1;
  expect("again", pl_attach(1, arrays, sizes, dtypes, NULL, "bmuf(period=4)"), PL_STATE);
  for (int k = 0; k < THREADS; ++k) pthread_create(&threads[k], NULL, call_often, NULL);
  train(30);
  for (int k = 0; k < THREADS; ++k) pthread_join(threads[k], NULL);
  expect("minibatches", pl_minibatches(), 30);
  expect("value", weights[0] == 1.0f / 1024, 1);
  printf("%s\n", wrong ? "wrong" : "as expected");
  return wrong; /* the run is closed at exit */
}
