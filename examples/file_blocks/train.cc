// SPDX-License-Identifier: Apache-2.0
// A closed training tool, as a team may have it: one thread, plain SGD, no word of any cluster.
//
//   train --make-data SAMPLES SEED > samples.txt      a sample a line: its class, then its features
//   train --init SEED model.f32                       a model: raw float32, one layer after another
//   train --in M --out M --samples FILE --lr R --seed S [--held-out FILE]
//   train --in M --held-out FILE                      prints loss= and error= alone
//
// The network has one hidden layer of tanh and a softmax: the shape of a small frame classifier.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int kFeatures = 16, kHidden = 32, kClasses = 6;
constexpr int kModel = kHidden * kFeatures + kHidden + kClasses * kHidden + kClasses;

struct Sample {
  int label;
  float x[kFeatures];
};

[[noreturn]] void Fail(const std::string &what) {
  std::fprintf(stderr, "train: %s\n", what.c_str());
  std::exit(3);
}

// A normal number of our own: the standard library's differ between compilers.
float Normal(std::mt19937 &random) {
  double sum = 0;
  for (int k = 0; k < 12; k++) sum += random() / 4294967296.0;
  return static_cast<float>(sum - 6);
}

std::vector<Sample> ReadSamples(const std::string &path) {
  FILE *file = std::fopen(path.c_str(), "r");
  if (!file) Fail("cannot read " + path);
  std::vector<Sample> samples;
  for (Sample one; std::fscanf(file, "%d", &one.label) == 1;) {
    for (float &value : one.x)
      if (std::fscanf(file, "%f", &value) != 1) Fail(path + " ends within a sample");
    samples.push_back(one);
  }
  std::fclose(file);
  return samples;
}

std::vector<float> ReadModel(const std::string &path) {
  std::vector<float> model(kModel);
  FILE *file = std::fopen(path.c_str(), "rb");
  if (!file || std::fread(model.data(), sizeof(float), kModel, file) != kModel) Fail("no model in " + path);
  std::fclose(file);
  return model;
}

void WriteModel(const std::string &path, const std::vector<float> &model) {
  FILE *file = std::fopen(path.c_str(), "wb");
  if (!file || std::fwrite(model.data(), sizeof(float), kModel, file) != kModel) Fail("cannot write " + path);
  std::fclose(file);
}

// The classes are those of a random network, and one label of ten is wrong.
void MakeData(int count, unsigned seed) {
  std::mt19937 teacher(7), random(seed);
  std::vector<float> w(kClasses * kFeatures), v(kClasses * kFeatures);
  for (float &value : w) value = Normal(teacher);
  for (float &value : v) value = Normal(teacher);
  for (int n = 0; n < count; n++) {
    float x[kFeatures], best = -1e30f;
    int label = 0;
    for (float &value : x) value = Normal(random);
    for (int c = 0; c < kClasses; c++) {
      float a = 0, b = 0;
      for (int k = 0; k < kFeatures; k++) a += w[c * kFeatures + k] * x[k], b += v[c * kFeatures + k] * x[k];
      float score = a + std::sin(b);
      if (score > best) best = score, label = c;
    }
    if (random() % 10 == 0) label = static_cast<int>(random() % kClasses);
    std::printf("%d", label);
    for (float value : x) std::printf(" %.4f", value);
    std::printf("\n");
  }
}

class Network {
 public:
  explicit Network(std::vector<float> &model)
      : w1_(model.data()), b1_(w1_ + kHidden * kFeatures), w2_(b1_ + kHidden), b2_(w2_ + kClasses * kHidden) {}

  // Cross entropy of a sample; fills what the backward pass needs.
  float Forward(const Sample &sample) {
    for (int h = 0; h < kHidden; h++) {
      float sum = b1_[h];
      for (int k = 0; k < kFeatures; k++) sum += w1_[h * kFeatures + k] * sample.x[k];
      hidden_[h] = std::tanh(sum);
    }
    float largest = -1e30f, total = 0;
    for (int c = 0; c < kClasses; c++) {
      out_[c] = b2_[c];
      for (int h = 0; h < kHidden; h++) out_[c] += w2_[c * kHidden + h] * hidden_[h];
      largest = std::max(largest, out_[c]);
    }
    for (float &value : out_) total += value = std::exp(value - largest);
    for (float &value : out_) value /= total;
    return -std::log(std::max(out_[sample.label], 1e-20f));
  }

  int Best() const { return static_cast<int>(std::max_element(out_, out_ + kClasses) - out_); }

  void Step(const Sample &sample, float rate) {
    Forward(sample);
    float back[kHidden] = {};
    for (int c = 0; c < kClasses; c++) {
      float error = out_[c] - (c == sample.label);
      for (int h = 0; h < kHidden; h++) {
        back[h] += error * w2_[c * kHidden + h];
        w2_[c * kHidden + h] -= rate * error * hidden_[h];
      }
      b2_[c] -= rate * error;
    }
    for (int h = 0; h < kHidden; h++) {
      float error = back[h] * (1 - hidden_[h] * hidden_[h]);
      for (int k = 0; k < kFeatures; k++) w1_[h * kFeatures + k] -= rate * error * sample.x[k];
      b1_[h] -= rate * error;
    }
  }

 private:
  float *w1_, *b1_, *w2_, *b2_, hidden_[kHidden], out_[kClasses];
};

void Evaluate(std::vector<float> &model, const std::string &path) {
  Network network(model);
  std::vector<Sample> samples = ReadSamples(path);
  double loss = 0;
  int wrong = 0;
  for (const Sample &one : samples) loss += network.Forward(one), wrong += network.Best() != one.label;
  std::printf("held-out loss=%.6f error=%.4f\n", loss / samples.size(), double(wrong) / samples.size());
}

}  // namespace

int main(int count, char **words) {
  std::map<std::string, std::string> options;
  if (count > 3 && !std::strcmp(words[1], "--make-data")) {
    MakeData(std::atoi(words[2]), static_cast<unsigned>(std::atoi(words[3])));
    return 0;
  }
  if (count > 3 && !std::strcmp(words[1], "--init")) {
    std::mt19937 random(static_cast<unsigned>(std::atoi(words[2])));
    std::vector<float> model(kModel);
    for (float &value : model) value = 0.2f * Normal(random);
    WriteModel(words[3], model);
    return 0;
  }
  for (int k = 1; k + 1 < count; k += 2) options[words[k]] = words[k + 1];
  std::vector<float> model = ReadModel(options["--in"]);
  if (options.count("--samples")) {
    std::vector<Sample> samples = ReadSamples(options["--samples"]);
    std::mt19937 random(static_cast<unsigned>(std::atoll(options["--seed"].c_str())));
    for (size_t n = samples.size(); n > 1; n--) std::swap(samples[n - 1], samples[random() % n]);
    Network network(model);
    for (const Sample &one : samples) network.Step(one, std::strtof(options["--lr"].c_str(), nullptr));
    WriteModel(options["--out"], model);
  }
  if (options.count("--held-out")) Evaluate(model, options["--held-out"]);
  return 0;
}
