/* SPDX-License-Identifier: Apache-2.0 */
/* paceline.h for C++11 and later: a Run attaches in its constructor and closes in its destructor.

       std::vector<paceline::Array> arrays{{weights, count}, bias};   // pointer and size, or anything with data(), size()
       paceline::Run run(arrays, "bmuf(period=16)");
       for (paceline::Range range : run.ranges(samples, batch)) {
         train(range.begin, range.end, run.tuned("lr", 0.1));
         run.step();
       }

   What fails throws paceline::Error, whose what() is pl_error(). One that nobody catches ends the tool with exit code 1. */
#ifndef PACELINE_HPP
#define PACELINE_HPP

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "paceline.h"

namespace paceline {

/* A status below 0, with its sentence. */
class Error : public std::runtime_error {
 public:
  explicit Error(int status) : std::runtime_error(pl_error()), status_(status) {}
  int status() const noexcept { return status_; }

 private:
  int status_;
};

/* The result of a function of paceline.h; throws if it is a status below 0. */
template <class Number>
Number checked(Number result) {
  if (result < 0) throw Error(static_cast<int>(result));
  return result;
}

template <class Value>
struct Dtype;
template <>
struct Dtype<float> {
  static const int value = PL_FLOAT32;
};
template <>
struct Dtype<double> {
  static const int value = PL_FLOAT64;
};

/* Numbers of the tool; they stay where they are while the run is open. */
struct Array {
  void *data;
  int64_t size;
  int dtype;

  template <class Value>
  Array(Value *data, std::size_t size) : data(data), size(static_cast<int64_t>(size)), dtype(Dtype<Value>::value) {}
  template <class Container, class = decltype(std::declval<Container &>().data())>
  Array(Container &container) : Array(container.data(), container.size()) {} /* std::vector, std::span, Eigen, ... */
  Array(void *data, int64_t size, int dtype) : data(data), size(size), dtype(dtype) {}
};

/* Samples `begin` up to but not `end`. */
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/* One epoch of this worker's ranges; iterate it once. */
class Ranges {
 public:
  class iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Range;
    using difference_type = std::ptrdiff_t;
    using pointer = const Range *;
    using reference = const Range &;

    iterator() : total_(0), batch_(0), more_(false), range_() {}
    iterator(int64_t total, int64_t batch) : total_(total), batch_(batch), more_(true), range_() { ++*this; }
    reference operator*() const { return range_; }
    pointer operator->() const { return &range_; }
    iterator &operator++() {
      more_ = checked(pl_next_range(total_, batch_, &range_.begin, &range_.end)) == PL_MORE;
      return *this;
    }
    bool operator==(const iterator &other) const { return more_ == other.more_; }
    bool operator!=(const iterator &other) const { return more_ != other.more_; }

   private:
    int64_t total_, batch_;
    bool more_;
    Range range_;
  };

  Ranges(int64_t total, int64_t batch) : total_(total), batch_(batch) {}
  iterator begin() const { return iterator(total_, batch_); }
  iterator end() const { return iterator(); }

 private:
  int64_t total_, batch_;
};

/* While it lives, the arrays hold the global model. */
class GlobalModel {
 public:
  GlobalModel() { checked(pl_global_model(1)); }
  ~GlobalModel() { pl_global_model(0); }
  GlobalModel(const GlobalModel &) = delete;
  GlobalModel &operator=(const GlobalModel &) = delete;
};

namespace detail {
/* An Error that nobody catches ends the tool with its sentence and exit code 1, and not by abort(). */
inline std::terminate_handler &before() {
  static std::terminate_handler handler = nullptr;
  return handler;
}
inline void end() {
  try {
    if (std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const Error &error) {
    std::fprintf(stderr, "paceline: %s\n", error.what());
    std::fflush(nullptr);
    pl_abandon();
    std::_Exit(1);
  } catch (...) {
  }
  if (before()) before()();
  std::abort();
}
inline void watch_errors() {
  if (std::get_terminate() == end) return;
  before() = std::set_terminate(end);
}
}  // namespace detail

class Run {
 public:
  /* An empty rule takes that of `paceline run`. Exits with 0 where all workers have finished already. */
  explicit Run(const std::vector<Array> &arrays, const std::string &rule = "", const std::string &device = "cpu") {
    detail::watch_errors();
    const Columns columns(arrays);
    const int status = pl_attach(static_cast<int>(arrays.size()), columns.data.data(), columns.sizes.data(),
                                 columns.dtypes.data(), device.c_str(), rule.empty() ? nullptr : rule.c_str());
    if (status == PL_OVER) std::exit(0);
    checked(status);
  }
  /* The same for pointers to containers, such as std::vector<std::vector<float> *>. */
  template <class Container>
  explicit Run(const std::vector<Container *> &arrays, const std::string &rule = "", const std::string &device = "cpu")
      : Run(referred(arrays), rule, device) {}
  /* Closes the run; an exception on its way leaves it at once, so that the other workers do not wait. */
  ~Run() {
    if (!open_) return;
    if (unwinding()) {
      pl_abandon();
    } else if (pl_close() < 0) {
      std::fprintf(stderr, "paceline: %s\n", pl_error());
    }
  }
  Run(const Run &) = delete;
  Run &operator=(const Run &) = delete;

  int rank() const { return checked(pl_rank()); }
  int size() const { return checked(pl_size()); }
  int epoch() const { return checked(pl_epoch()); }
  int64_t minibatches() const { return checked(pl_minibatches()); }

  void step() { checked(pl_step()); }
  void mean(const std::vector<void *> &gradients) { checked(pl_mean(gradients.data())); }
  Ranges ranges(int64_t total, int64_t batch) { return Ranges(total, batch); }
  void done() { checked(pl_done()); }
  void merge() { checked(pl_merge()); }
  double tuned(const std::string &name, double preset) {
    double value = preset;
    checked(pl_tuned(name.c_str(), preset, &value));
    return value;
  }
  void tune(const std::string &name, double value) { checked(pl_tune(name.c_str(), value)); }
  void log(const std::string &name, double value) { checked(pl_log(name.c_str(), value)); }
  void save(const std::string &path) { checked(pl_save(path.c_str())); }
  bool resume(const std::string &path = "") { return checked(pl_resume(path.empty() ? nullptr : path.c_str())) == PL_MORE; }
  void close() {
    open_ = false;
    checked(pl_close());
  }

 private:
  struct Columns {
    std::vector<void *> data;
    std::vector<int64_t> sizes;
    std::vector<int> dtypes;
    explicit Columns(const std::vector<Array> &arrays) {
      for (const Array &array : arrays) {
        data.push_back(array.data);
        sizes.push_back(array.size);
        dtypes.push_back(array.dtype);
      }
    }
  };
  template <class Container>
  static std::vector<Array> referred(const std::vector<Container *> &arrays) {
    std::vector<Array> found;
    for (Container *array : arrays) found.push_back(*array);
    return found;
  }
  static bool unwinding() {
#if __cplusplus >= 201703L
    return std::uncaught_exceptions() > 0;
#else
    return std::uncaught_exception();
#endif
  }
  bool open_ = true;
};

}  // namespace paceline

#endif
