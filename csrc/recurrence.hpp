// One cell along a sequence, forward and backward: the walk through time that all cells share.
//
// Sequences never meet during a walk, so each thread takes some of them through all steps, with no
// barrier. A thread takes its sequences in blocks whose buffers stay in its cache. Time has a
// position, 0 to T − 1 in the order of processing, and a step, which counts the other way in reverse.
#pragma once
#include <new>

#include "parallel.h"
#include "weights.hpp"

namespace TGDU_LEVEL {

constexpr Size BLOCK = 64;     // sequences of a block, at most
constexpr Size FEW = 4;        // symbols for which panels do not pay off

// What all threads share: sizes, weights as panels. `rows` of a panel are those it is multiplied with.
template <class T, class C> struct Recurrence : Weights<T> {
  using Weights<T>::p;
  using Weights<T>::P;
  static constexpr int products = sizeof(C::products) / sizeof(Product);

  const Size T_, B;
  const Size inputs;   // elements of a row (state, 1, x), with room for a padded state
  const Size sums;     // elements of a row of sums
  Size threads;
  bool direct;         // so few symbols that the weights are read as they lie
  Size block;          // sequences of the largest block
  const Size* begins;  // packed: the first symbol of each step
  C cell;
  Panels<T> forward[products], back[products], back_x[products];

  // A row whose length is a multiple of a page maps all rows to one place in the cache.
  static Size apart(Size length) {
    length = rounded(length, lanes<T>);
    return length * sizeof(T) % 512 == 0 ? length + lanes<T> : length;
  }

  Recurrence(const tgdu_problem& problem, Arena& arena, bool backward)
      : Weights<T>(problem), T_(p.steps), B(p.batch), inputs(apart(larger(P, p.units + 1 + p.inputs))),
        sums(apart(C::blocks * P)), threads(how_many(p)),
        direct(!backward && !p.saved && T_ * B <= FEW), cell(p, arena) {
    const Size most = (B + threads - 1) / threads;
    const Size blocks = (most + BLOCK - 1) / BLOCK;
    block = (most + blocks - 1) / blocks;
    Size* all = p.batch_sizes ? arena.take<Size>(T_ + 1) : nullptr;
    if (all) {
      all[0] = 0;
      for (Size t = 0; t < T_; ++t) all[t + 1] = all[t] + p.batch_sizes[t];
    }
    begins = all;
    const bool again = backward && p.checkpoint;  // backward steps forward once more
    for (int k = 0; k < products; ++k) {
      const Product& product = C::products[k];
      if (again || (!backward && !direct)) this->pack_forward(product, forward[k], block, arena);
      if (backward && product.part != ONE_X) this->pack_back(product, back[k], block, arena);
      if (backward && p.grad_x && product.part != STATE_ONE)
        this->pack_back_x(product, back_x[k], arena);
    }
  }

  // Threads pay off when each has some 50 µs of work.
  static Size how_many(const tgdu_problem& p) {
    const double work = 2e-5 * double(p.steps) * double(p.batch) * double(p.inputs + p.units) *
                        double(p.units) * C::blocks;  // µs, about
    const Size useful = work < 100 ? 1 : work > 1e6 ? p.threads : Size(work / 50);
    return larger(1, smaller(smaller(p.threads, useful), p.batch));
  }
};

// The sequences that go through time together: `first`, `first + stride`, …
struct Sequences {
  Size first, stride, count;
  Size operator[](Size i) const { return first + i * stride; }
};

template <class T, class C> class Walk {
 public:
  using R = Recurrence<T, C>;

  // The buffers of one thread.
  Walk(const R& recurrence, Arena& arena, bool backward)
      : r(recurrence), p(r.p), again_(backward && p.checkpoint) {
    const Size m = r.block;
    const bool steps = !backward || again_;
    state_ = steps ? arena.take<T>(m * r.inputs) : nullptr;
    gated_ = steps && C::gated ? arena.take<T>(m * r.inputs) : nullptr;
    memory_ = p.cell == TGDU_LSTM ? arena.take<T>(m * r.P) : nullptr;
    sums_ = steps ? arena.take<T>(m * r.sums) : nullptr;
    scratch_ = arena.take<T>(r.P);
    kept_ = arena.take<T>((again_ ? p.checkpoint : 1) * m * C::kept * r.P);
    if (!backward) return;
    stretch_ = larger(1, smaller(STRETCH / m, r.T_));
    const Size symbols = stretch_ * m;
    grad_ = arena.take<T>(m * r.P);
    grad_memory_ = p.cell == TGDU_LSTM ? arena.take<T>(m * r.P) : nullptr;
    grad_gated_ = C::gated ? arena.take<T>(m * r.P) : nullptr;
    all_inputs_ = arena.take<T>(symbols * r.inputs);
    all_gated_ = C::gated ? arena.take<T>(symbols * r.inputs) : nullptr;
    all_sums_ = arena.take<T>(symbols * r.sums);
    grad_x_ = p.grad_x ? arena.take<T>(symbols * r.X) : nullptr;
    for (int k = 0; k < R::products; ++k) {
      const Product& product = C::products[k];
      grad_weights[k] = arena.take<T>((r.to(product) - r.from(product)) * columns(product));
    }
    grad_scale = p.grad_scale ? arena.take<T>(r.P) : nullptr;
    grad_base = p.grad_base ? arena.take<T>(r.P) : nullptr;
  }

  // What this thread found of the weights' gradients: [part of (state, 1, x), columns] a product.
  T* grad_weights[R::products];
  T *grad_scale, *grad_base;
  Size columns(const Product& product) const { return R::apart(product.count * r.P); }

  // Takes the thread's share of all sequences forward.
  void forward(Size thread) {
    each_block(thread, [&] {
      start(0);
      step_forward(0, r.T_);
      for (Size i = 0; i < rows_.count; ++i) {
        copy(static_cast<T*>(p.h_n) + rows_[i] * r.H, state_ + i * r.inputs, r.H);
        if (memory_) copy(static_cast<T*>(p.c_n) + rows_[i] * r.H, memory_ + i * r.P, r.H);
      }
    });
  }

  // Takes the thread's share of all sequences back.
  void backward(Size thread) {
    for (int k = 0; k < R::products; ++k) {
      const Product& product = C::products[k];
      clear(grad_weights[k], (r.to(product) - r.from(product)) * columns(product));
    }
    if (grad_scale) clear(grad_scale, r.P);
    if (grad_base) clear(grad_base, r.P);
    each_block(thread, [&] {
      for (Size i = 0; i < rows_.count; ++i) {
        begin_gradient(grad_ + i * r.P, p.grad_h_n, i);
        if (grad_memory_) begin_gradient(grad_memory_ + i * r.P, p.grad_c_n, i);
      }
      const Size length = p.checkpoint ? p.checkpoint : r.T_;
      for (Size from = (r.T_ - 1) / length * length; from >= 0; from -= length) {
        const Size to = smaller(from + length, r.T_);
        if (again_) {
          kept_from_ = from;
          start(from);
          step_forward(from, to);
        }
        for (Size end = to; end > from; end -= stretch_)
          stretch_back(larger(from, end - stretch_), end);
      }
      for (Size i = 0; i < rows_.count; ++i) {
        if (p.grad_h0) copy(static_cast<T*>(p.grad_h0) + rows_[i] * r.H, grad_ + i * r.P, r.H);
        if (grad_memory_ && p.grad_c0)
          copy(static_cast<T*>(p.grad_c0) + rows_[i] * r.H, grad_memory_ + i * r.P, r.H);
      }
    });
  }

 private:
  const R& r;
  const tgdu_problem& p;
  const bool again_;
  Sequences rows_{};
  Size kept_from_ = 0, stretch_ = 0;
  T *state_, *gated_, *memory_, *sums_, *scratch_, *kept_;
  T *grad_, *grad_memory_, *grad_gated_, *all_inputs_, *all_gated_, *all_sums_, *grad_x_;

  static void copy(T* to, const T* from, Size n) { std::memcpy(to, from, std::size_t(n) * sizeof(T)); }
  static void clear(T* to, Size n) { std::memset(to, 0, std::size_t(n) * sizeof(T)); }

  // Sequences of equal length are shared out side by side; packed ones, which fall in length, in turn.
  template <class Work> void each_block(Size thread, Work work) {
    const bool packed = p.batch_sizes != nullptr;
    const Size first = packed ? thread : r.B * thread / r.threads, stride = packed ? r.threads : 1;
    const Size mine = packed ? (r.B - thread + r.threads - 1) / r.threads
                             : r.B * (thread + 1) / r.threads - first;
    const Size blocks = (mine + r.block - 1) / r.block;
    for (Size k = 0; k < blocks; ++k) {
      const Size from = mine * k / blocks, to = mine * (k + 1) / blocks;
      rows_ = {first + from * stride, stride, to - from};
      work();
    }
  }

  Size step_at(Size position) const { return p.reverse ? r.T_ - 1 - position : position; }
  // How many of the rows still run, or run already, at a step.
  Size running(Size t) const {
    if (!p.batch_sizes) return rows_.count;
    const Size before = p.batch_sizes[t] - rows_.first;
    return before <= 0 ? 0 : smaller(rows_.count, (before + rows_.stride - 1) / rows_.stride);
  }
  Size symbol(Size t, Size i) const { return (p.batch_sizes ? r.begins[t] : t * r.B) + rows_[i]; }
  const T* x_at(Size t, Size i) const {
    const Size at = p.batch_sizes ? symbol(t, i) * p.x_row : t * p.x_step + rows_[i] * p.x_row;
    return static_cast<const T*>(p.x) + at;
  }
  const T* grad_output_at(Size t, Size i) const {
    const Size at = p.batch_sizes ? symbol(t, i) * p.grad_row : t * p.grad_step + rows_[i] * p.grad_row;
    return static_cast<const T*>(p.grad_output) + at;
  }
  T* output_at(Size t, Size i) const { return static_cast<T*>(p.output) + symbol(t, i) * r.H; }
  // The state before a position.
  const T* state_before(Size position, Size i) const {
    if (position > 0 && i < running(step_at(position - 1))) return output_at(step_at(position - 1), i);
    return static_cast<const T*>(p.h0) + rows_[i] * r.H;
  }
  // How many symbols a sequence has: the steps at which it still runs, which come first.
  Size length(Size i) const {
    Size from = 0, to = r.T_;
    while (p.batch_sizes && from < to) {
      const Size middle = (from + to) / 2;
      if (rows_[i] < p.batch_sizes[middle]) from = middle + 1;
      else to = middle;
    }
    return to;
  }
  Size clock(Size t, Size i) const {
    if (!p.clock) return 0;
    return p.clock[rows_[i]] + (p.reverse ? length(i) - 1 - t : t);
  }
  // Where the gates of a symbol are kept for backward; each row has one place if they need not be.
  T* kept_at(Size position, Size i) const {
    constexpr Size length = C::kept;
    if (again_) return kept_ + ((position - kept_from_) * r.block + i) * length * r.P;
    if (p.checkpoint || !p.saved) return kept_ + i * length * r.P;
    return static_cast<T*>(p.saved) + symbol(step_at(position), i) * length * r.P;
  }
  // LSTM, checkpoint: where c before a stretch is kept.
  T* memory_at(Size position, Size i) const {
    return static_cast<T*>(p.saved) + (position / p.checkpoint * r.B + rows_[i]) * r.P;
  }

  Row<T> row(T* sums, T* state, T* kept) const {
    Row<T> row{};
    row.padded = r.P;
    row.sums = sums;
    row.state = state;
    row.kept = kept;
    row.scratch = scratch_;
    return row;
  }

  // Sets the state to what it is before a position.
  void start(Size position) {
    for (Size i = 0; i < rows_.count; ++i) {
      copy(state_ + i * r.inputs, state_before(position, i), r.H);
      if (!memory_) continue;
      if (again_) copy(memory_ + i * r.P, memory_at(position, i), r.P);
      else copy(memory_ + i * r.P, static_cast<const T*>(p.c0) + rows_[i] * r.H, r.H);
    }
  }

  // Completes a row (state, 1, x).
  void read_input(T* row, Size t, Size i) const {
    row[r.H] = T(1);
    const T* x = x_at(t, i);
    T* to = row + r.H + 1;
    if (r.I > 8) copy(to, x, r.I);
    else
      for (Size k = 0; k < r.I; ++k) to[k] = x[k];
  }

  void multiply_forward(bool gated, Size m) const {
    for (int k = 0; k < R::products; ++k) {
      const Product& product = C::products[k];
      if (product.gated != gated) continue;
      if (r.direct) {
        multiply_directly(product, gated ? gated_ : state_, m);
        continue;
      }
      multiply_panels<T>(m, 1, (gated ? gated_ : state_) + r.from(product), r.inputs, 0, r.forward[k],
                         sums_ + product.first * r.P, r.sums, false);
    }
  }

  // The same product from the weights as they lie: one sum after the other.
  void multiply_directly(const Product& product, const T* input, Size m) const {
    for (Size i = 0; i < m; ++i, input += r.inputs)
      for (Size b = 0; b < product.count; ++b) {
        T* to = sums_ + i * r.sums + (product.first + b) * r.P;
        for (Size j = 0; j < r.H; ++j) {
          const Size row = (product.row + b) * r.H + j;
          T sum = r.bias(product, row);
          if (product.part != ONE_X) sum += dot(input, r.weight_hh(row), r.H);
          if (product.part != STATE_ONE) sum += dot(input + r.H + 1, r.weight_ih(row), r.I);
          to[j] = sum;
        }
        clear(to + r.H, r.P - r.H);  // padding is read too: what is large in it would change bits
      }
  }

  void step_forward(Size from, Size to) {
    const bool store_memory = memory_ && p.checkpoint && p.saved && !again_;
    for (Size position = from; position < to; ++position) {
      const Size t = step_at(position), m = running(t);
      if (store_memory && position % p.checkpoint == 0)
        for (Size i = 0; i < rows_.count; ++i) copy(memory_at(position, i), memory_ + i * r.P, r.P);
      for (Size i = 0; i < m; ++i) read_input(state_ + i * r.inputs, t, i);
      multiply_forward(false, m);
      if constexpr (C::gated) {
        for (Size i = 0; i < m; ++i) {
          Row<T> now = row(sums_ + i * r.sums, state_ + i * r.inputs, kept_at(position, i));
          now.gated = gated_ + i * r.inputs;
          r.cell.gate(now);
          read_input(now.gated, t, i);
        }
        multiply_forward(true, m);
      }
      for (Size i = 0; i < m; ++i) {
        Row<T> now = row(sums_ + i * r.sums, state_ + i * r.inputs, kept_at(position, i));
        if (memory_) now.memory = memory_ + i * r.P;
        now.clock = clock(t, i);
        r.cell.step(now);
        if (!again_) copy(output_at(t, i), now.state, r.H);
      }
    }
  }

  void begin_gradient(T* to, const void* given, Size i) const {
    if (given) copy(to, static_cast<const T*>(given) + rows_[i] * r.H, r.H);
    else clear(to, r.H);
  }

  void multiply_back(bool gated, Size m, const T* sums, T* grad, bool add) const {
    for (int k = 0; k < R::products; ++k) {
      const Product& product = C::products[k];
      if (product.gated != gated || product.part == ONE_X) continue;
      multiply_panels<T>(m, product.count, sums + product.first * r.P, r.sums, r.P, r.back[k], grad,
                         r.P, add);
    }
  }

  // Positions from `end` − 1 down to `from`: first step by step, then all weights at once.
  void stretch_back(Size from, Size end) {
    Size symbols = 0;
    for (Size position = end; position-- > from;) {
      const Size t = step_at(position), m = running(t);
      T* sums = all_sums_ + symbols * r.sums;
      for (Size i = 0; i < m; ++i) {
        T* input = all_inputs_ + (symbols + i) * r.inputs;
        T* grad = grad_ + i * r.P;
        copy(input, state_before(position, i), r.H);
        read_input(input, t, i);
        if (p.grad_output) {
          const T* given = grad_output_at(t, i);
          for (Size j = 0; j < r.H; ++j) grad[j] += given[j];
        }
        Row<T> now = row(sums + i * r.sums, input, kept_at(position, i));
        now.grad = grad;
        if (grad_memory_) now.memory = grad_memory_ + i * r.P;
        now.grad_scale = grad_scale;
        now.grad_base = grad_base;
        now.clock = clock(t, i);
        r.cell.step_back(now);
      }
      if constexpr (C::gated) {
        multiply_back(true, m, sums, grad_gated_, false);
        for (Size i = 0; i < m; ++i) {
          Row<T> now = row(sums + i * r.sums, all_inputs_ + (symbols + i) * r.inputs,
                           kept_at(position, i));
          now.grad = grad_ + i * r.P;
          now.grad_gated = grad_gated_ + i * r.P;
          now.gated = all_gated_ + (symbols + i) * r.inputs;
          r.cell.gate_back(now);
          read_input(now.gated, t, i);
        }
      }
      multiply_back(false, m, sums, grad_, true);
      symbols += m;
    }
    for (int k = 0; k < R::products; ++k) {
      const Product& product = C::products[k];
      add_outer<T>(r.to(product) - r.from(product), product.count * r.P, symbols,
                   (product.gated ? all_gated_ : all_inputs_) + r.from(product), r.inputs,
                   all_sums_ + product.first * r.P, r.sums, grad_weights[k], columns(product));
    }
    if (p.grad_x) write_grad_x(from, end, symbols);
  }

  void write_grad_x(Size from, Size end, Size symbols) {
    bool add = false;
    for (int k = 0; k < R::products; ++k) {
      const Product& product = C::products[k];
      if (product.part == STATE_ONE) continue;
      multiply_panels<T>(symbols, product.count, all_sums_ + product.first * r.P, r.sums, r.P,
                         r.back_x[k], grad_x_, r.X, add);
      add = true;
    }
    const T* found = grad_x_;
    for (Size position = end; position-- > from;) {
      const Size t = step_at(position), m = running(t);
      for (Size i = 0; i < m; ++i, found += r.X)
        copy(static_cast<T*>(p.grad_x) + symbol(t, i) * r.I, found, r.I);
    }
  }
};

// Adds up what the threads found, in their order, and writes it as the weights lie.
template <class T, class C>
void write_gradients(const Recurrence<T, C>& r, const Walk<T, C>* walks) {
  const tgdu_problem& p = r.p;
  const Size H = r.H, I = r.I;
  for (int k = 0; k < Recurrence<T, C>::products; ++k) {
    const Product& product = C::products[k];
    const Size columns = walks[0].columns(product), begin = r.from(product), end = r.to(product);
    T* found = walks[0].grad_weights[k];
    for (Size thread = 1; thread < r.threads; ++thread)
      for (Size e = 0; e < (end - begin) * columns; ++e) found[e] += walks[thread].grad_weights[k][e];
    void* bias = product.part == STATE_ONE ? p.grad_bias_hn : p.grad_bias;
    const Size bias_row = product.part == STATE_ONE ? 0 : product.row;
    for (Size b = 0; b < product.count; ++b) {
      // Entry (k, j) of `found` is the gradient of weight (j, k).
      const T* from = found + b * r.P;
      const Size rows = (product.row + b) * H;
      if (p.grad_weight_hh && begin == 0) {
        T* to = static_cast<T*>(p.grad_weight_hh) + rows * H;
        for (Size j = 0; j < H; ++j)
          for (Size e = 0; e < H; ++e) to[j * H + e] = from[e * columns + j];
      }
      from += (H - begin) * columns;
      if (bias)
        std::memcpy(static_cast<T*>(bias) + (bias_row + b) * H, from, std::size_t(H) * sizeof(T));
      from += columns;
      if (p.grad_weight_ih && product.part != STATE_ONE) {
        T* to = static_cast<T*>(p.grad_weight_ih) + rows * I;
        for (Size j = 0; j < H; ++j)
          for (Size e = 0; e < I; ++e) to[j * I + e] = from[e * columns + j];
      }
    }
  }
  for (Size thread = 1; thread < r.threads; ++thread)
    for (Size j = 0; j < H; ++j) {
      if (p.grad_scale) walks[0].grad_scale[j] += walks[thread].grad_scale[j];
      if (p.grad_base) walks[0].grad_base[j] += walks[thread].grad_base[j];
    }
  const std::size_t length = std::size_t(H) * sizeof(T);
  if (p.grad_scale) std::memcpy(p.grad_scale, walks[0].grad_scale, length);
  if (p.grad_base) std::memcpy(p.grad_base, walks[0].grad_base, length);
}

template <class T, class C> Size saved_bytes(const tgdu_problem& p) {
  const Size P = rounded(p.units, lanes<T>);
  if (p.checkpoint)
    return p.cell == TGDU_LSTM
               ? (p.steps + p.checkpoint - 1) / p.checkpoint * p.batch * P * Size(sizeof(T))
               : 0;
  Size symbols = p.steps * p.batch;
  if (p.batch_sizes) {
    symbols = 0;
    for (Size t = 0; t < p.steps; ++t) symbols += p.batch_sizes[t];
  }
  return symbols * C::kept * P * Size(sizeof(T));
}

// Runs a problem: counts the memory, takes it, walks, and writes what was found.
template <class T, class C> Size run(const tgdu_problem& p, bool backward) {
  Arena count;
  const Recurrence<T, C> sizes(p, count, backward);
  for (Size thread = 0; thread < sizes.threads; ++thread) Walk<T, C>(sizes, count, backward);
  const Size walks_at = rounded(count.used(), 64);
  void* block = tgdu_allocate(walks_at + sizes.threads * Size(sizeof(Walk<T, C>)));
  if (!block) return TGDU_NO_MEMORY;
  Arena arena(block);
  const Recurrence<T, C> r(p, arena, backward);
  Walk<T, C>* walks = reinterpret_cast<Walk<T, C>*>(static_cast<char*>(block) + walks_at);
  for (Size thread = 0; thread < r.threads; ++thread)
    new (walks + thread) Walk<T, C>(r, arena, backward);
  struct Work {
    Walk<T, C>* walks;
    bool backward;
  } work{walks, backward};
  tgdu_parallel(r.threads, &work, [](void* context, std::int64_t thread) {
    const Work& work = *static_cast<Work*>(context);
    if (work.backward) work.walks[thread].backward(thread);
    else work.walks[thread].forward(thread);
  });
  if (backward) write_gradients<T, C>(r, walks);
  tgdu_free(block);
  return TGDU_OK;
}

}  // namespace TGDU_LEVEL
