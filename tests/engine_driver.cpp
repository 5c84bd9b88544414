// Runs the engine without Python, for the sanitizers: every cell, type and instruction set, on shapes
// with ragged ends. Each buffer is an allocation of its own and of its exact size, so that a step
// beyond it is seen. Results must be finite, the same for every number of threads where that is
// promised, and the same when made again, also by calls that run at the same time.
//
//     engine_driver            all of it; ends with the number of runs
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../csrc/engine.h"

namespace {

struct Shape {
  int64_t steps, batch, inputs;
  std::vector<int64_t> groups;
  std::vector<int64_t> lengths;  // falling; empty: all sequences have `steps`
};

template <class T> struct Case {
  tgdu_problem p{};
  std::vector<std::unique_ptr<char[]>> buffers;
  std::vector<std::pair<char*, size_t>> results;
  std::mt19937 random{7};

  void* room(int64_t count, bool result, size_t size = sizeof(T)) {
    const size_t bytes = size_t(count) * size;
    buffers.emplace_back(new char[bytes]);
    std::memset(buffers.back().get(), 0xff, bytes);  // NaN
    if (result) results.emplace_back(buffers.back().get(), bytes);
    return buffers.back().get();
  }
  const void* numbers(int64_t count, double least, double most) {
    T* to = static_cast<T*>(room(count, false));
    std::uniform_real_distribution<double> between(least, most);
    for (int64_t i = 0; i < count; ++i) to[i] = T(between(random));
    return to;
  }
  const int64_t* whole(const std::vector<int64_t>& values) {
    void* to = room(int64_t(values.size()), false, sizeof(int64_t));
    std::memcpy(to, values.data(), values.size() * sizeof(int64_t));
    return static_cast<int64_t*>(to);
  }

  Case(int64_t cell, int64_t level, int64_t threads, const Shape& s, bool reverse,
       int64_t checkpoint, bool sparse) {
    constexpr int64_t rows[] = {1, 4, 3, 3, 2, 2, 2, 1, 2};
    const int64_t units = std::accumulate(s.groups.begin(), s.groups.end(), int64_t(0));
    const int64_t T_ = s.steps, B = s.batch, I = s.inputs, H = units, G = rows[cell];
    int64_t symbols = T_ * B;
    p.cell = cell;
    p.dtype = sizeof(T) == 4 ? TGDU_FLOAT32 : TGDU_FLOAT64;
    p.level = level;
    p.threads = threads;
    p.reverse = reverse;
    p.steps = T_, p.batch = B, p.inputs = I, p.units = H;
    p.checkpoint = checkpoint;
    p.x_step = B * I, p.x_row = I, p.grad_step = B * H, p.grad_row = H;
    if (!s.lengths.empty()) {
      std::vector<int64_t> sizes(size_t(T_), 0);
      for (int64_t length : s.lengths)
        for (int64_t t = 0; t < length; ++t) ++sizes[size_t(t)];
      symbols = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
      p.batch_sizes = whole(sizes);
    }
    if (cell == TGDU_GDU) p.partition = whole(s.groups), p.parts = int64_t(s.groups.size());
    if (cell == TGDU_CWRNN) p.partition = whole({3}), p.parts = 1;
    p.x = numbers(symbols * I, -1, 1);
    p.h0 = numbers(B * H, -1, 1);
    if (cell == TGDU_LSTM) p.c0 = numbers(B * H, -1, 1);
    if (cell == TGDU_CWRNN) p.clock = whole(std::vector<int64_t>(size_t(B), 2));
    const double most = 1 / std::sqrt(double(H));
    p.weight_ih = numbers(G * H * I, -most, most);
    p.weight_hh = numbers(G * H * H, -most, most);
    if (!sparse) p.bias = numbers(G * H, -most, most);
    if (!sparse && cell == TGDU_GRU_AFTER) p.bias_hn = numbers(H, -most, most);
    if (cell == TGDU_GDU) p.scale = numbers(H, 0.1, 0.9), p.base = numbers(H, 0, 0.1);
    p.output = room(symbols * H, true);
    p.h_n = room(B * H, true);
    if (cell == TGDU_LSTM) p.c_n = room(B * H, true);
    const int64_t bytes = tgdu_saved(&p);
    if (bytes < 0) std::abort();
    char* saved = static_cast<char*>(room(bytes + 64, false, 1));
    p.saved = saved + (64 - reinterpret_cast<uintptr_t>(saved) % 64) % 64;
    p.grad_h_n = numbers(B * H, -1, 1);
    p.grad_weight_ih = room(G * H * I, true);
    p.grad_weight_hh = room(G * H * H, true);
    if (sparse) return;
    p.grad_output = numbers(symbols * H, -1, 1);
    if (cell == TGDU_LSTM) p.grad_c_n = numbers(B * H, -1, 1);
    p.grad_x = room(symbols * I, true);
    p.grad_h0 = room(B * H, true);
    if (cell == TGDU_LSTM) p.grad_c0 = room(B * H, true);
    p.grad_bias = room(G * H, true);
    if (cell == TGDU_GRU_AFTER) p.grad_bias_hn = room(H, true);
    if (cell == TGDU_GDU) p.grad_scale = room(H, true), p.grad_base = room(H, true);
  }

  void run() {
    if (tgdu_forward(&p) != TGDU_OK || tgdu_backward(&p) != TGDU_OK) fail("a call did not work");
    for (const auto& [from, bytes] : results)
      for (size_t at = 0; at < bytes; at += sizeof(T)) {
        T value;
        std::memcpy(&value, from + at, sizeof value);
        if (!std::isfinite(value)) fail("a result is missing or not finite");
      }
  }
  void same(const Case& other, size_t count) const {
    for (size_t i = 0; i < count && i < results.size(); ++i)
      if (std::memcmp(results[i].first, other.results[i].first, results[i].second))
        fail("results differ that must not");
  }
  [[noreturn]] void fail(const char* what) const {
    std::printf("%s: cell %ld dtype %ld level %s threads %ld reverse %ld T %ld B %ld I %ld H %ld "
                "checkpoint %ld\n", what, long(p.cell), long(p.dtype), tgdu_level_name(p.level),
                long(p.threads), long(p.reverse), long(p.steps), long(p.batch), long(p.inputs),
                long(p.units), long(p.checkpoint));
    std::exit(1);
  }
};

// The forward results: output, h_n and perhaps c_n come first among the results.
size_t forward_results(int64_t cell) { return cell == TGDU_LSTM ? 3 : 2; }

template <class T> long all(int64_t level) {
  const Shape shapes[] = {
      {1, 1, 1, {1}, {}},
      {5, 3, 2, {2, 2, 2, 10, 1, 4}, {}},
      {4, 7, 9, {4, 4, 4, 4, 16, 40}, {4, 4, 3, 2, 1, 1, 1}},
      {300, 2, 3, {3, 1, 17}, {300, 120}},
      {3, 150, 5, {8, 8, 8, 8}, {}},
  };
  long runs = 0;
  for (const Shape& shape : shapes)
    for (int64_t cell = TGDU_SRN; cell <= TGDU_GDU; ++cell)
      for (int64_t checkpoint : {0, 2})
        for (bool reverse : {false, true}) {
          Case<T> one(cell, level, 1, shape, reverse, checkpoint, false);
          Case<T> many(cell, level, 3, shape, reverse, checkpoint, false);
          Case<T> beside(cell, level, 3, shape, reverse, checkpoint, false);
          Case<T> sparse(cell, level, 2, shape, reverse, checkpoint, true);
          one.run();
          std::thread other([&] { beside.run(); });
          many.run();
          other.join();
          sparse.run();
          many.same(beside, many.results.size());
          one.same(many, forward_results(cell));
          one.p.saved = nullptr;
          if (tgdu_forward(&one.p) != TGDU_OK) one.fail("a call did not work");
          runs += 4;
        }
  return runs;
}

}  // namespace

int main() {
  long runs = 0;
  for (int64_t level = 0; level < tgdu_levels(); ++level) {
    if (!tgdu_level_supported(level)) continue;
    runs += all<float>(level) + all<double>(level);
    std::printf("%s: done\n", tgdu_level_name(level));
  }
  std::printf("%ld runs\n", runs);
}
