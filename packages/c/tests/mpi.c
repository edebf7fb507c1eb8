/* SPDX-License-Identifier: Apache-2.0 */
/* A tool that uses MPI itself: it begins and ends MPI, and its messages are under way while paceline's are. */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "paceline.h"

enum { SIZE = 5, STEPS = 12 };

int main(int argc, char **argv) {
  const int wanted = argc > 1 && !strcmp(argv[1], "one") ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE;
  int level, rank, size, status, incoming = -1, finalized, handler_is_fatal;
  double weights[SIZE], sum = 0;
  void *arrays[] = {weights};
  const int64_t sizes[] = {SIZE};
  const int dtypes[] = {PL_FLOAT64};
  MPI_Request request;
  MPI_Errhandler handler;

  MPI_Init_thread(&argc, &argv, wanted, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Irecv(&incoming, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request);
  for (int k = 0; k < SIZE; ++k) weights[k] = rank + k;
  pl_set("transport", "mpi");
  if ((status = pl_attach(1, arrays, sizes, dtypes, "cpu", "averaging(period=3)")) < 0) {
    fprintf(stderr, "%d: %s\n", status, pl_error());
    return 9;
  }
  for (int step = 0; step < STEPS; ++step) {
    for (int k = 0; k < SIZE; ++k) weights[k] += 1 + pl_rank();
    if ((status = pl_step()) < 0) {
      fprintf(stderr, "%d: %s\n", status, pl_error());
      return 9;
    }
  }
  if (pl_close() < 0) return 9;
  MPI_Send(&rank, 1, MPI_INT, (rank + 1) % size, 77, MPI_COMM_WORLD);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  MPI_Allreduce(weights, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  handler_is_fatal = handler == MPI_ERRORS_ARE_FATAL;
  MPI_Finalized(&finalized);
  printf("rank %d: %a %a sum %a message %d fatal %d finalized %d\n", rank, weights[0], weights[SIZE - 1], sum, incoming,
         handler_is_fatal, finalized);
  fflush(stdout);
  MPI_Finalize();
  return 0;
}
