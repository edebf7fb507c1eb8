/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of about 5 ms, in short runs with pl_step and without in turn; worker 0 prints, in processor seconds of the
   thread, the median of a step without, and the median and the quartiles of the ratios of all pairs of runs. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "paceline.h"

enum { SIZE = 1 << 16, RUN = 8, WARM = 3 };
static float weights[SIZE];

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void step(int rounds) {
  for (int k = 0; k < rounds; ++k)
    for (int i = 0; i < SIZE; ++i) weights[i] -= 1e-4f * (weights[i] - k);
}

/* Seconds of a step in a run. */
static double run(int rounds, int attached) {
  const double began = now();
  for (int k = 0; k < RUN; ++k) {
    step(rounds);
    if (attached && pl_step() < 0) {
      fprintf(stderr, "%s\n", pl_error());
      exit(1);
    }
  }
  return (now() - began) / RUN;
}

/* Of a few, as the processor may be shared. */
static double fastest(int rounds) {
  double best = 1;
  for (int k = 0; k < 3; ++k) {
    const double took = run(rounds, 0);
    if (took < best) best = took;
  }
  return best;
}

static int compare(const void *one, const void *other) {
  const double difference = *(const double *)one - *(const double *)other;
  return difference > 0 ? 1 : difference < 0 ? -1 : 0;
}

int main(int count, char **words) {
  const int pairs = count > 1 ? atoi(words[1]) : 100;
  void *arrays[] = {weights};
  int64_t sizes[] = {SIZE};
  int dtypes[] = {PL_FLOAT32}, rounds = 1;
  double *plain = malloc(sizeof(double) * pairs), *ratios = malloc(sizeof(double) * pairs);
  while (fastest(rounds) < 0.005) rounds += 1 + rounds / 8;
  if (pl_attach(1, arrays, sizes, dtypes, "cpu", "bmuf(period=1000000000)") < 0) return fprintf(stderr, "%s\n", pl_error()), 1;
  for (int k = -WARM; k < pairs; ++k) {
    double took[2];
    for (int half = 0; half < 2; ++half) took[half ^ (k & 1)] = run(rounds, half ^ (k & 1)); /* each is first in turn */
    if (k < 0) continue;
    plain[k] = took[0];
    ratios[k] = took[1] / took[0];
  }
  qsort(plain, pairs, sizeof(double), compare);
  qsort(ratios, pairs, sizeof(double), compare);
  if (pl_rank() == 0)
    printf("ANSWER %.9f %.6f %.6f %.6f\n", plain[pairs / 2], ratios[pairs / 2], ratios[pairs / 4], ratios[3 * pairs / 4]);
  return pl_close() < 0;
}
