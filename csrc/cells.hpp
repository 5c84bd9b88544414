// What happens to each unit at each step, forward and backward: one struct a cell.
//
// A row belongs to one sequence at one step. Its buffers hold blocks of H units, padded to whole
// vectors (P units). No result depends on what the padding holds, but the way to it may: the sums
// that a forward step is given are 0 there, because the distributor looks at whole vectors.
//
// A cell says
//   blocks    how many blocks of sums W x + U s + b it needs, `sums`
//   kept      how many blocks it keeps for its backward step, `kept`
//   products  how those sums come about
//   gated     whether some products read `gated`, made of the state and the sums before them
// and does
//   gate      sums of the ungated products → `gated`              (gated cells alone)
//   step      all sums, old `state` → new `state`, and `kept`
//   step_back gradient of the new `state` → of the sums, and of the old state past all products
//   gate_back gradient of `gated` → of the sums before it, of the old state; and `gated` again
#pragma once
#include "distributor.hpp"

namespace TGDU_LEVEL {

// A product adds `count` blocks of sums: rows of the weights from block `row` on, times a part of
// (state, 1, x), where the 1 stands for the bias.
enum Part { STATE_ONE_X, STATE_ONE, ONE_X };
struct Product {
  int first, count, row;
  Part part = STATE_ONE_X;
  bool gated = false;
};

template <class T> struct Row {
  Size padded;    // P
  T* sums;        // [blocks, P]; in backward their gradient
  T* state;       // [P] forward: s, becomes the new one. Backward: the old s
  T* memory;      // [P] LSTM forward: c; backward: its gradient
  T* gated;       // [P] forward and gate_back: what gated products read
  T* kept;        // [kept, P]
  T* grad;        // [P] backward: gradient of the new state, becomes that of the old one
  T* grad_gated;  // [P]
  T* scratch;     // [P]
  T* grad_scale;  // [P] GDU backward: sums over all rows, or null
  T* grad_base;   // [P]
  Size clock;     // CWRNN: symbols that the sequence has had
};

template <class T> inline Vec<T> slope_tanh(Vec<T> y) { return T(1) - y * y; }
template <class T> inline Vec<T> slope_sigmoid(Vec<T> y) { return y * (T(1) - y); }

// s = (1 − α) s + α c, for all coupled cells alike.
template <class T> inline Vec<T> blend(Vec<T> alpha, Vec<T> c, Vec<T> s) {
  return (T(1) - alpha) * s + alpha * c;
}

template <class T> struct Srn {
  static constexpr int blocks = 1, kept = 1;
  static constexpr bool gated = false;
  static constexpr Product products[] = {{0, 1, 0}};
  explicit Srn(const tgdu_problem&, Arena&) {}

  void step(const Row<T>& r) const {
    for (Size v = 0; v < r.padded; v += lanes<T>) {
      const Vec<T> s = tanh<T>(load(r.sums + v));
      store(r.kept + v, s);
      store(r.state + v, s);
    }
  }
  void step_back(const Row<T>& r) const {
    for (Size v = 0; v < r.padded; v += lanes<T>) {
      store<T>(r.sums + v, load(r.grad + v) * slope_tanh<T>(load(r.kept + v)));
      store(r.grad + v, Vec<T>{});
    }
  }
};

template <class T> struct Lstm {
  static constexpr int blocks = 4, kept = 5;
  static constexpr bool gated = false;
  static constexpr Product products[] = {{0, 4, 0}};
  explicit Lstm(const tgdu_problem&, Arena&) {}

  void step(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> i = sigmoid<T>(load(r.sums + v)), f = sigmoid<T>(load(r.sums + P + v)),
                   g = tanh<T>(load(r.sums + 2 * P + v)), o = sigmoid<T>(load(r.sums + 3 * P + v)),
                   before = load(r.memory + v), c = f * before + i * g;
      store(r.kept + v, i);
      store(r.kept + P + v, f);
      store(r.kept + 2 * P + v, g);
      store(r.kept + 3 * P + v, o);
      store(r.kept + 4 * P + v, before);
      store(r.memory + v, c);
      store<T>(r.state + v, o * tanh<T>(c));
    }
  }
  void step_back(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> i = load(r.kept + v), f = load(r.kept + P + v), g = load(r.kept + 2 * P + v),
                   o = load(r.kept + 3 * P + v), before = load(r.kept + 4 * P + v),
                   high = tanh<T>(f * before + i * g), dh = load(r.grad + v),
                   dc = load(r.memory + v) + dh * o * slope_tanh<T>(high);
      store<T>(r.sums + v, dc * g * slope_sigmoid<T>(i));
      store<T>(r.sums + P + v, dc * before * slope_sigmoid<T>(f));
      store<T>(r.sums + 2 * P + v, dc * i * slope_tanh<T>(g));
      store<T>(r.sums + 3 * P + v, dh * high * slope_sigmoid<T>(o));
      store<T>(r.memory + v, dc * f);
      store(r.grad + v, Vec<T>{});
    }
  }
};

// The reset before the product: n reads r ⊙ s.
template <class T> struct Gru {
  static constexpr int blocks = 3, kept = 3;
  static constexpr bool gated = true;
  static constexpr Product products[] = {{0, 2, 0}, {2, 1, 2, STATE_ONE_X, true}};
  explicit Gru(const tgdu_problem&, Arena&) {}

  void gate(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> reset = sigmoid<T>(load(r.sums + v));
      store(r.kept + v, reset);
      store<T>(r.kept + P + v, sigmoid<T>(load(r.sums + P + v)));
      store<T>(r.gated + v, reset * load(r.state + v));
    }
  }
  void step(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> z = load(r.kept + P + v), n = tanh<T>(load(r.sums + 2 * P + v));
      store(r.kept + 2 * P + v, n);
      store<T>(r.state + v, z * load(r.state + v) + (T(1) - z) * n);
    }
  }
  void step_back(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> z = load(r.kept + P + v), n = load(r.kept + 2 * P + v), d = load(r.grad + v);
      store<T>(r.sums + P + v, d * (load(r.state + v) - n) * slope_sigmoid<T>(z));
      store<T>(r.sums + 2 * P + v, d * (T(1) - z) * slope_tanh<T>(n));
      store<T>(r.grad + v, d * z);
    }
  }
  void gate_back(const Row<T>& r) const {
    for (Size v = 0; v < r.padded; v += lanes<T>) {
      const Vec<T> reset = load(r.kept + v), s = load(r.state + v), d = load(r.grad_gated + v);
      store<T>(r.sums + v, d * s * slope_sigmoid<T>(reset));
      store<T>(r.grad + v, load(r.grad + v) + d * reset);
      store<T>(r.gated + v, reset * s);
    }
  }
};

// The reset after the product: n = tanh(W x + b + r ⊙ (U s + b_hn)); two sums for the one n.
template <class T> struct GruAfter {
  static constexpr int blocks = 4, kept = 4;
  static constexpr bool gated = false;
  static constexpr Product products[] = {{0, 2, 0}, {2, 1, 2, ONE_X}, {3, 1, 2, STATE_ONE}};
  explicit GruAfter(const tgdu_problem&, Arena&) {}

  void step(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> reset = sigmoid<T>(load(r.sums + v)), z = sigmoid<T>(load(r.sums + P + v)),
                   inner = load(r.sums + 3 * P + v),
                   n = tanh<T>(load(r.sums + 2 * P + v) + reset * inner);
      store(r.kept + v, reset);
      store(r.kept + P + v, z);
      store(r.kept + 2 * P + v, n);
      store(r.kept + 3 * P + v, inner);
      store<T>(r.state + v, z * load(r.state + v) + (T(1) - z) * n);
    }
  }
  void step_back(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> reset = load(r.kept + v), z = load(r.kept + P + v), n = load(r.kept + 2 * P + v),
                   d = load(r.grad + v), dn = d * (T(1) - z) * slope_tanh<T>(n);
      store<T>(r.sums + v, dn * load(r.kept + 3 * P + v) * slope_sigmoid<T>(reset));
      store<T>(r.sums + P + v, d * (load(r.state + v) - n) * slope_sigmoid<T>(z));
      store(r.sums + 2 * P + v, dn);
      store<T>(r.sums + 3 * P + v, dn * reset);
      store<T>(r.grad + v, d * z);
    }
  }
};

template <class T> struct Ugrnn {
  static constexpr int blocks = 2, kept = 2;
  static constexpr bool gated = false;
  static constexpr Product products[] = {{0, 2, 0}};
  explicit Ugrnn(const tgdu_problem&, Arena&) {}

  void step(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> alpha = sigmoid<T>(load(r.sums + v)), c = tanh<T>(load(r.sums + P + v));
      store(r.kept + v, alpha);
      store(r.kept + P + v, c);
      store<T>(r.state + v, blend<T>(alpha, c, load(r.state + v)));
    }
  }
  void step_back(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> alpha = load(r.kept + v), c = load(r.kept + P + v), d = load(r.grad + v);
      store<T>(r.sums + v, d * (c - load(r.state + v)) * slope_sigmoid<T>(alpha));
      store<T>(r.sums + P + v, d * alpha * slope_tanh<T>(c));
      store<T>(r.grad + v, d * (T(1) - alpha));
    }
  }
};

// The candidate reads γ ⊙ s, γ = f or 1 − f.
template <class T, bool KEEPS> struct Mgu {
  static constexpr int blocks = 2, kept = 2;
  static constexpr bool gated = true;
  static constexpr Product products[] = {{0, 1, 0}, {1, 1, 1, STATE_ONE_X, true}};
  explicit Mgu(const tgdu_problem&, Arena&) {}

  static Vec<T> gamma(Vec<T> f) { return KEEPS ? T(1) - f : f; }

  void gate(const Row<T>& r) const {
    for (Size v = 0; v < r.padded; v += lanes<T>) {
      const Vec<T> f = sigmoid<T>(load(r.sums + v));
      store(r.kept + v, f);
      store<T>(r.gated + v, gamma(f) * load(r.state + v));
    }
  }
  void step(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> c = tanh<T>(load(r.sums + P + v));
      store(r.kept + P + v, c);
      store<T>(r.state + v, blend<T>(load(r.kept + v), c, load(r.state + v)));
    }
  }
  void step_back(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> f = load(r.kept + v), c = load(r.kept + P + v), d = load(r.grad + v);
      store<T>(r.sums + v, d * (c - load(r.state + v)));  // gate_back adds its share of f
      store<T>(r.sums + P + v, d * f * slope_tanh<T>(c));
      store<T>(r.grad + v, d * (T(1) - f));
    }
  }
  void gate_back(const Row<T>& r) const {
    for (Size v = 0; v < r.padded; v += lanes<T>) {
      const Vec<T> f = load(r.kept + v), s = load(r.state + v), d = load(r.grad_gated + v);
      const Vec<T> through = KEEPS ? -(d * s) : d * s;
      store<T>(r.sums + v, (load(r.sums + v) + through) * slope_sigmoid<T>(f));
      store<T>(r.grad + v, load(r.grad + v) + d * gamma(f));
      store<T>(r.gated + v, gamma(f) * s);
    }
  }
};

// Group k is the k-th equal slice of the units, awake when its period divides the clock.
template <class T> struct Cwrnn {
  static constexpr int blocks = 1, kept = 1;
  static constexpr bool gated = false;
  static constexpr Product products[] = {{0, 1, 0}};

  const std::int64_t* periods;
  Size groups, slice;

  explicit Cwrnn(const tgdu_problem& p, Arena&)
      : periods(p.partition), groups(p.parts), slice(p.units / p.parts) {}

  // 1 for the units that are awake, 0 for those that sleep, into `scratch`.
  void wake(const Row<T>& r) const {
    for (Size k = 0; k < groups; ++k) {
      const T awake = r.clock % periods[k] == 0;
      for (Size j = k * slice; j < (k + 1) * slice; ++j) r.scratch[j] = awake;
    }
  }
  void step(const Row<T>& r) const {
    wake(r);
    for (Size v = 0; v < r.padded; v += lanes<T>) {
      const Vec<T> c = tanh<T>(load(r.sums + v));
      store(r.kept + v, c);
      store<T>(r.state + v, load(r.scratch + v) > T(0) ? c : load(r.state + v));
    }
  }
  void step_back(const Row<T>& r) const {
    wake(r);
    for (Size v = 0; v < r.padded; v += lanes<T>) {
      const Vec<T> d = load(r.grad + v), inner = d * slope_tanh<T>(load(r.kept + v));
      store<T>(r.sums + v, load(r.scratch + v) > T(0) ? inner : Vec<T>{});
      store<T>(r.grad + v, load(r.scratch + v) > T(0) ? Vec<T>{} : d);
    }
  }
};

template <class T> struct Gdu {
  static constexpr int blocks = 2, kept = 2;
  static constexpr bool gated = false;
  static constexpr Product products[] = {{0, 2, 0}};

  Distributor<T> distributor;

  explicit Gdu(const tgdu_problem& p, Arena& arena) : distributor(p, arena) {}

  void step(const Row<T>& r) const {
    const Size P = r.padded;
    distributor.weigh(r.sums, r.scratch);
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> d = load(r.sums + v) / load(r.scratch + v), c = tanh<T>(load(r.sums + P + v)),
                   alpha = load(distributor.scale + v) * d + load(distributor.base + v);
      store(r.kept + v, d);
      store(r.kept + P + v, c);
      store<T>(r.state + v, blend<T>(alpha, c, load(r.state + v)));
    }
  }
  void step_back(const Row<T>& r) const {
    const Size P = r.padded;
    for (Size v = 0; v < P; v += lanes<T>) {
      const Vec<T> d = load(r.kept + v), c = load(r.kept + P + v), scale = load(distributor.scale + v),
                   alpha = scale * d + load(distributor.base + v), grad = load(r.grad + v),
                   grad_alpha = grad * (c - load(r.state + v)), grad_d = grad_alpha * scale;
      store<T>(r.sums + P + v, grad * alpha * slope_tanh<T>(c));
      store<T>(r.grad + v, grad * (T(1) - alpha));
      store(r.sums + v, grad_d);
      store<T>(r.scratch + v, grad_d * d);
      if (r.grad_scale) store<T>(r.grad_scale + v, load(r.grad_scale + v) + grad_alpha * d);
      if (r.grad_base) store<T>(r.grad_base + v, load(r.grad_base + v) + grad_alpha);
    }
    distributor.sum(r.scratch, r.scratch);
    for (Size v = 0; v < P; v += lanes<T>)
      store<T>(r.sums + v, load(r.kept + v) * (load(r.sums + v) - load(r.scratch + v)));
  }
};

}  // namespace TGDU_LEVEL
