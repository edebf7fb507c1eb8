/* SPDX-License-Identifier: Apache-2.0 */
/* A tool whose model counts: which samples entered it, and how often, can be read off its parameters.

       counting FOLDER SAMPLES EPOCHS HOLD [PLACE STEP]...

   Each sample adds its fingerprint, 64 whole numbers, to the 64 parameters: two multisets of samples have the same sum
   only if 64 sums agree by chance. Each worker also writes its ranges into FOLDER. The worker at PLACE gets SIGKILL in
   its step STEP, before pl_step, or after it where STEP is negative; once. After HOLD steps a worker waits until there
   is a file FOLDER/go. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "paceline.h"

enum { PRINTS = 64, BATCH = 4 };
static double model[PRINTS], expected[PRINTS];
static char path[4096];

static void must(int64_t status) {
  if (status >= 0) return;
  fprintf(stderr, "%d: %s\n", (int)status, pl_error());
  exit(9);
}

/* Splitmix64's finaliser, of which 20 bits are taken. */
static double print_of(int64_t sample, int place) {
  uint64_t x = (uint64_t)sample * PRINTS + (uint64_t)place;
  if (place == 0) return 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (double)(x >> 44);
}

static void add(double *to, int64_t begin, int64_t end) {
  for (int64_t sample = begin; sample < end; ++sample)
    for (int k = 0; k < PRINTS; ++k) to[k] += print_of(sample, k);
}

static const char *in(const char *folder, const char *name, int place, int number) {
  snprintf(path, sizeof path, "%s/%s.%d.%d", folder, name, place, number);
  return path;
}

static void die_at(int step, int place, const char *folder, int count, char **words) {
  for (int k = 5; k + 1 < count; k += 2) {
    if (atoi(words[k]) != place || atoi(words[k + 1]) != step || access(in(folder, "died", place, step), F_OK) == 0) continue;
    fclose(fopen(path, "w"));
    kill(getpid(), SIGKILL);
  }
}

int main(int count, char **words) {
  const char *folder = words[1], *local = getenv("LOCAL_RANK");
  const int64_t samples = atoll(words[2]), epochs = atoll(words[3]);
  const int hold = atoi(words[4]), place = local == NULL ? 0 : atoi(local);
  void *arrays[] = {model};
  int64_t sizes[] = {PRINTS}, begin, end;
  int dtypes[] = {PL_FLOAT64}, step = 0, status, wrong = 0;
  FILE *ranges = fopen(in(folder, "ranges", place, getpid()), "w");
  status = pl_attach(1, arrays, sizes, dtypes, "cpu", NULL);
  if (status == PL_OVER) return 0;
  must(status);
  for (int64_t epoch = pl_epoch(); epoch < epochs; ++epoch) {
    while ((status = pl_next_range(samples, BATCH, &begin, &end)) == PL_MORE) {
      usleep(1000 * (1 + (unsigned)place % 4)); /* stands for the work of a device */
      add(model, begin, end);
      fprintf(ranges, "%lld %lld %lld\n", (long long)epoch, (long long)begin, (long long)end);
      fflush(ranges);
      die_at(++step, place, folder, count, words);
      must(pl_step());
      die_at(-step, place, folder, count, words);
      snprintf(path, sizeof path, "%s/go", folder);
      while (step == hold && access(path, F_OK) != 0) usleep(10000);
    }
    must(status);
  }
  must(pl_close());
  for (int64_t epoch = 0; epoch < epochs; ++epoch) add(expected, 0, samples);
  for (int k = 0; k < PRINTS; ++k) wrong += model[k] != expected[k];
  printf("ended: %d steps, %d numbers wrong, %g samples too many\n", step, wrong, model[0] - expected[0]);
  return 0;
}
