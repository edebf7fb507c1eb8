// SPDX-License-Identifier: Apache-2.0
// The wrapper: what it throws, and what becomes of the run that an exception leaves.
#include <array>
#include <cstdio>
#include <memory>

#include "paceline.hpp"

int main() {
  std::vector<float> weights(6, 1.f);
  std::array<double, 2> bias{{0, 0}};
  paceline::Array third(weights.data(), 6);
  const std::vector<paceline::Array> arrays{third, bias, {new double[3](), 3}};
  try {
    paceline::Run run(arrays, "no_such_rule");
  } catch (const paceline::Error &error) {
    std::printf("%d %s\n", error.status(), error.what());
  }
  try {
    paceline::Run run(arrays, "averaging");
    for (paceline::Range range : run.ranges(5, 2)) {
      weights[0] += range.size();
      run.step();
    }
    {
      paceline::GlobalModel global;
      std::printf("%g at %lld\n", weights[0], static_cast<long long>(run.minibatches()));
    }
    throw std::runtime_error("of the tool");
  } catch (const std::runtime_error &error) {
    std::printf("%s; attached: %d\n", error.what(), pl_epoch() >= 0);
  }
  std::unique_ptr<double[]> gone(static_cast<double *>(arrays[2].data));
  std::vector<std::vector<float> *> parameters{&weights};
  paceline::Run again(parameters);
  std::printf("%d of %d, rate %g\n", again.rank(), again.size(), again.tuned("lr", 0.5));
  again.close();
}
