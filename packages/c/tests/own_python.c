/* SPDX-License-Identifier: Apache-2.0 */
/* A tool that has a Python of its own, and finalises it. */
#include <stdio.h>

#include "paceline.h"

void Py_InitializeEx(int signals);
int PyRun_SimpleStringFlags(const char *text, void *flags);
int Py_FinalizeEx(void);

int main(void) {
  double weights[] = {1, 1};
  void *arrays[] = {weights};
  int64_t sizes[] = {2};
  int dtypes[] = {PL_FLOAT64};
  Py_InitializeEx(1);
  PyRun_SimpleStringFlags("import json; mine = json.loads('[1]')", NULL);
  if (pl_attach(1, arrays, sizes, dtypes, "cpu", "bmuf") < 0) return fprintf(stderr, "%s\n", pl_error()), 1;
  weights[0] = 0.5;
  if (pl_step() < 0 || pl_close() < 0) return fprintf(stderr, "%s\n", pl_error()), 1;
  PyRun_SimpleStringFlags("assert mine == [1]", NULL);
  if (Py_FinalizeEx() < 0) return 1;
  printf("status %d: %s\n", pl_step(), pl_error());
  return 0;
}
