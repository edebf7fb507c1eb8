// SPDX-License-Identifier: Apache-2.0
// A tool that catches nothing: a wrong rule is an Error of paceline, and "own" an exception of its own.
#include <cstring>
#include <stdexcept>

#include "paceline.hpp"

int main(int, char **words) {
  std::vector<float> weights(6, 1.f);
  const std::vector<paceline::Array> arrays{weights};
  paceline::Run run(arrays, words[1]);
  if (!std::strcmp(words[2], "own")) throw std::runtime_error("of the tool");
  run.tuned("speed", 1);
}
