// SPDX-License-Identifier: Apache-2.0
// Makes frames to classify, in the manner of speech: classes follow each other, each lasts a few frames, and a slow drift
// lies over all of them.
//
//     frames PREFIX FRAMES SEED        writes PREFIX.feats (float32, FRAMES x 20) and PREFIX.labels (int32, FRAMES)
//
// All seeds draw from the same classes.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

const int kDim = 20, kClasses = 24;

class Random {  // the same numbers everywhere, which the standard library does not promise
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 1) {}
  double uniform() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return ((state_ >> 11) + 0.5) / 9007199254740992.0;
  }
  double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }

 private:
  uint64_t state_;
};

template <class Value>
void write(const std::string &path, const std::vector<Value> &values) {
  FILE *file = std::fopen(path.c_str(), "wb");
  if (!file || std::fwrite(values.data(), sizeof(Value), values.size(), file) != values.size() || std::fclose(file)) {
    std::perror(path.c_str());
    std::exit(1);
  }
}

int main(int count, char **words) {
  if (count != 4) return std::fprintf(stderr, "usage: frames PREFIX FRAMES SEED\n"), 2;
  const int frames = std::atoi(words[2]);
  Random classes(1), random(100 + std::atoi(words[3]));
  std::vector<double> means(kClasses * kDim);
  for (double &mean : means) mean = 0.6 * classes.normal();

  std::vector<float> features;
  std::vector<int32_t> labels;
  std::vector<double> drift(kDim, 0.0);
  int label = 0;
  for (int frame = 0; frame < frames; ++frame) {
    if (random.uniform() < 0.15) label = static_cast<int>(random.uniform() * kClasses);
    for (int k = 0; k < kDim; ++k) {
      drift[k] = 0.99 * drift[k] + 0.07 * random.normal();
      features.push_back(static_cast<float>(means[label * kDim + k] + drift[k] + random.normal()));
    }
    labels.push_back(label);
  }
  write(std::string(words[1]) + ".feats", features);
  write(std::string(words[1]) + ".labels", labels);
}
