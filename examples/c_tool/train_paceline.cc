// SPDX-License-Identifier: Apache-2.0
// Trains a network to classify frames.
//
//     train TRAINING HELDOUT MODEL [EPOCHS [RATE [BATCH]]]
#include "nnet.h"
#include "paceline.hpp"

int main(int count, char **words) {
  if (count < 4) return std::fprintf(stderr, "usage: train TRAINING HELDOUT MODEL [EPOCHS [RATE [BATCH]]]\n"), 2;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // lines appear at once, in a pipe, too
  const Frames training(words[1]), heldout(words[2]);
  const int epochs = count > 4 ? std::atoi(words[4]) : 8;
  float rate = count > 5 ? std::atof(words[5]) : 0.5f;
  const int batch = count > 6 ? std::atoi(words[6]) : 32;

  Net net({Frames::kInput, 64, 64, Frames::kClasses}, 1);
  paceline::Run run(net.parameters());
  std::vector<int> order(training.size());
  std::iota(order.begin(), order.end(), 0);

  for (int epoch = 0; epoch < epochs; ++epoch) {
    std::shuffle(order.begin(), order.end(), std::mt19937(epoch));
    for (paceline::Range range : run.ranges(training.size(), batch)) {
      net.train(training, &order[range.begin], range.size(), run.tuned("lr", rate));
      run.step();
    }
    run.merge();
    paceline::GlobalModel global;
    if (run.rank() == 0) std::printf("epoch %d: held-out error %.2f %%\n", epoch + 1, 100 * net.error(heldout));
    rate *= 0.8f;
  }
  run.close();
  if (run.rank() == 0) net.save(words[3]);
}
