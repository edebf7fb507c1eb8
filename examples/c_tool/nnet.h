// SPDX-License-Identifier: Apache-2.0
// A feed-forward network for frames and its data: spliced frames in, sigmoid layers, softmax over classes, plain SGD on
// minibatches, one thread. In the shape of the tools of about 2012; nothing here knows paceline.
#ifndef NNET_H
#define NNET_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

typedef std::vector<float> Matrix;  // row after row

template <class Value>
std::vector<Value> read_all(const std::string &path) {
  FILE *file = std::fopen(path.c_str(), "rb");
  if (!file) {
    std::perror(path.c_str());
    std::exit(1);
  }
  std::vector<Value> values;
  Value value;
  while (std::fread(&value, sizeof value, 1, file) == 1) values.push_back(value);
  std::fclose(file);
  return values;
}

struct Frames {
  static const int kDim = 20, kContext = 2, kClasses = 24;
  static const int kInput = kDim * (2 * kContext + 1);
  Matrix features;
  std::vector<int32_t> labels;

  explicit Frames(const std::string &prefix)
      : features(read_all<float>(prefix + ".feats")), labels(read_all<int32_t>(prefix + ".labels")) {}
  int size() const { return static_cast<int>(labels.size()); }

  // A frame with its neighbours; the ends repeat.
  void splice(int frame, float *to) const {
    for (int offset = -kContext; offset <= kContext; ++offset) {
      const int from = std::min(std::max(frame + offset, 0), size() - 1);
      to = std::copy_n(&features[static_cast<std::size_t>(from) * kDim], kDim, to);
    }
  }
};

struct Layer {
  int in, out;
  Matrix weights, bias;  // in x out, out
};

class Net {
 public:
  Net(std::vector<int> widths, unsigned seed) {
    std::mt19937 random(seed);
    for (std::size_t k = 0; k + 1 < widths.size(); ++k) {
      Layer layer = {widths[k], widths[k + 1], Matrix(widths[k] * widths[k + 1]), Matrix(widths[k + 1], 0.f)};
      const float scale = 2 * std::sqrt(6.f / (layer.in + layer.out));
      for (float &weight : layer.weights) weight = scale * (random() / 2147483648.f - 1);
      layers_.push_back(layer);
    }
  }

  std::vector<Matrix *> parameters() {
    std::vector<Matrix *> found;
    for (Layer &layer : layers_) found.insert(found.end(), {&layer.weights, &layer.bias});
    return found;
  }

  // One step of SGD on a minibatch of frames.
  void train(const Frames &data, const int *frames, int count, float rate) {
    forward(data, frames, count);
    Matrix error = activations_.back();
    for (int row = 0; row < count; ++row) error[row * Frames::kClasses + data.labels[frames[row]]] -= 1;
    for (int k = static_cast<int>(layers_.size()) - 1; k >= 0; --k) {
      const Matrix &input = activations_[k];
      Matrix below = k ? backward(layers_[k], input, error, count) : Matrix();
      update(layers_[k], input, error, count, rate / count);
      error.swap(below);
    }
  }

  // The part of the frames that are classified wrong.
  double error(const Frames &data) {
    std::vector<int> frames(data.size());
    std::iota(frames.begin(), frames.end(), 0);
    int wrong = 0;
    for (int begin = 0; begin < data.size(); begin += 256) {
      const int count = std::min(256, data.size() - begin);
      forward(data, &frames[begin], count);
      for (int row = 0; row < count; ++row) {
        const float *scores = &activations_.back()[row * Frames::kClasses];
        wrong += std::max_element(scores, scores + Frames::kClasses) - scores != data.labels[begin + row];
      }
    }
    return static_cast<double>(wrong) / data.size();
  }

  void save(const std::string &path) {
    FILE *file = std::fopen(path.c_str(), "wb");
    bool good = file != nullptr;
    for (const Matrix *one : parameters()) good = good && std::fwrite(one->data(), 4, one->size(), file) == one->size();
    if (!good || std::fclose(file)) {
      std::perror(path.c_str());
      std::exit(1);
    }
  }

 private:
  void forward(const Frames &data, const int *frames, int count) {
    activations_.assign(1, Matrix(static_cast<std::size_t>(count) * Frames::kInput));
    for (int row = 0; row < count; ++row) data.splice(frames[row], &activations_[0][row * Frames::kInput]);
    for (std::size_t k = 0; k < layers_.size(); ++k) {
      const Layer &layer = layers_[k];
      Matrix result(static_cast<std::size_t>(count) * layer.out);
      for (int row = 0; row < count; ++row) {
        float *to = &result[row * layer.out];
        std::copy(layer.bias.begin(), layer.bias.end(), to);
        for (int i = 0; i < layer.in; ++i) add(to, &layer.weights[i * layer.out], activations_[k][row * layer.in + i], layer.out);
        k + 1 < layers_.size() ? sigmoid(to, layer.out) : softmax(to, layer.out);
      }
      activations_.push_back(result);
    }
  }

  // The error at the input of a layer, which is the output of a sigmoid.
  static Matrix backward(const Layer &layer, const Matrix &input, const Matrix &error, int count) {
    Matrix below(static_cast<std::size_t>(count) * layer.in);
    for (int row = 0; row < count; ++row) {
      for (int i = 0; i < layer.in; ++i) {
        const float *weights = &layer.weights[i * layer.out], *from = &error[row * layer.out];
        const float y = input[row * layer.in + i];
        below[row * layer.in + i] = y * (1 - y) * std::inner_product(weights, weights + layer.out, from, 0.f);
      }
    }
    return below;
  }

  static void update(Layer &layer, const Matrix &input, const Matrix &error, int count, float rate) {
    for (int row = 0; row < count; ++row) {
      const float *from = &error[row * layer.out];
      for (int i = 0; i < layer.in; ++i) add(&layer.weights[i * layer.out], from, -rate * input[row * layer.in + i], layer.out);
      add(layer.bias.data(), from, -rate, layer.out);
    }
  }

  static void add(float *to, const float *from, float factor, int count) {
    for (int k = 0; k < count; ++k) to[k] += factor * from[k];
  }
  static void sigmoid(float *values, int count) {
    for (int k = 0; k < count; ++k) values[k] = 1 / (1 + std::exp(-values[k]));
  }
  static void softmax(float *values, int count) {
    const float most = *std::max_element(values, values + count);
    float sum = 0;
    for (int k = 0; k < count; ++k) sum += values[k] = std::exp(values[k] - most);
    for (int k = 0; k < count; ++k) values[k] /= sum;
  }

  std::vector<Layer> layers_;
  std::vector<Matrix> activations_;  // of each layer, the spliced frames first
};

#endif
