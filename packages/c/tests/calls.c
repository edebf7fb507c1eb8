/* SPDX-License-Identifier: Apache-2.0 */
/* Every function, again and again; the Python half is the test's own, and answers an error every second time. */
#include <stdio.h>
#include <stdlib.h>

#include "paceline.h"

int main(int count, char **words) {
  double weights[3] = {0}, value;
  void *arrays[] = {weights};
  int64_t sizes[] = {3}, begin, end;
  int dtypes[] = {PL_FLOAT64}, wrong = 0;
  for (int k = 0; k < (count > 1 ? atoi(words[1]) : 1); ++k) {
    pl_set("seed", "1");
    pl_buffers(1, arrays, sizes, dtypes);
    pl_momentum(1, arrays, 0.9);
    pl_attach(1, arrays, sizes, dtypes, "cpu", "bmuf");
    pl_mean(arrays);
    pl_next_range(10, 2, &begin, &end);
    pl_tuned("lr", 0.5, &value);
    pl_tune("lr", 0.5);
    pl_log("loss", 0.5);
    pl_save("place");
    pl_resume(NULL);
    pl_global_model(k % 2);
    wrong += pl_step() < 0;
    wrong += pl_minibatches() < 0;
    pl_close();
  }
  printf("%d wrong, %s\n", wrong, pl_error());
  return 0;
}
