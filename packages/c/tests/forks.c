/* SPDX-License-Identifier: Apache-2.0 */
/* A tool that forks in its training, and saves to a path that it is given. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "paceline.h"

static float weights[] = {1, 1, 1};

static int child(void) {
  const int stepped = pl_step(), attached = pl_attach(0, NULL, NULL, NULL, NULL, NULL), closed = pl_close();
  printf("child: %d %d %d: %s\n", stepped, attached, closed, pl_error());
  return 0;
}

int main(int count, char **words) {
  void *arrays[] = {weights};
  int64_t sizes[] = {3};
  int dtypes[] = {PL_FLOAT32}, status = 0;
  if (count < 2 || pl_attach(1, arrays, sizes, dtypes, NULL, "bmuf(period=4)") < 0) return printf("%s\n", pl_error()), 1;
  for (int k = 0; k < 30; ++k) {
    weights[0] *= 0.5f;
    if (pl_step() < 0) return printf("%s\n", pl_error()), 2;
    if (k != 20) continue;
    fflush(stdout);
    if (fork() == 0) exit(child());
    wait(&status);
  }
  printf("child ended with %d after %lld steps\n", status, (long long)pl_minibatches());
  if (pl_save(words[1]) < 0) printf("%s\n", pl_error());
  return pl_close() < 0;
}
