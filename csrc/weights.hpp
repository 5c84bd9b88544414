// The weights of one layer and direction, packed into panels for the products of its cell.
#pragma once
#include "cells.hpp"

namespace TGDU_LEVEL {

constexpr Size STRETCH = 256;  // symbols whose gradients of weights are added at once, about

template <class T> struct Weights {
  const tgdu_problem& p;
  const Size I, H;
  const Size P;  // units padded to whole vectors
  const Size X;  // inputs padded likewise

  explicit Weights(const tgdu_problem& problem)
      : p(problem), I(p.inputs), H(p.units), P(rounded(H, lanes<T>)), X(rounded(I, lanes<T>)) {}

  // Where a product's part of (state, 1, x) begins and ends.
  Size from(const Product& product) const { return product.part == ONE_X ? H : 0; }
  Size to(const Product& product) const { return product.part == STATE_ONE ? H + 1 : H + 1 + I; }

  const T* weight_ih(Size row) const { return static_cast<const T*>(p.weight_ih) + row * I; }
  const T* weight_hh(Size row) const { return static_cast<const T*>(p.weight_hh) + row * H; }
  T bias(const Product& product, Size row) const {
    if (product.part == STATE_ONE)
      return p.bias_hn ? static_cast<const T*>(p.bias_hn)[row % H] : T(0);
    return p.bias ? static_cast<const T*>(p.bias)[row] : T(0);
  }

  // Weights whose depth is (state, 1, x), and whose columns are the blocks of sums.
  [[gnu::noinline]] void pack_forward(const Product& product, Panels<T>& panels, Size rows,
                                      Arena& arena) const {
    const Size begin = from(product), depth = to(product) - begin, columns = product.count * P;
    panels = {depth, columns, best_width(rows, columns / lanes<T>), arena.take<T>(depth * columns)};
    if (!arena.real()) return;
    each_vector(panels, [&](Size column, T* out, Size k_step) {
      const Size unit = column % P, row = (product.row + column / P) * H + unit;
      const Size width = smaller(lanes<T>, H - unit);  // the rest of the vector is padding
      const auto transpose = [&](const T* in, Size length) {
        for (Size k = 0; k < length; ++k, out += k_step) {
          for (Size lane = 0; lane < width; ++lane) out[lane] = in[lane * length + k];
          for (Size lane = width; lane < lanes<T>; ++lane) out[lane] = T(0);
        }
      };
      if (begin == 0) transpose(weight_hh(row), H);
      for (Size lane = 0; lane < lanes<T>; ++lane)
        out[lane] = lane < width ? bias(product, row + lane) : T(0);
      out += k_step;
      if (product.part != STATE_ONE) transpose(weight_ih(row), I);
    });
  }
  // Weights whose depth is the blocks of sums, and whose columns are the state, or the inputs.
  void pack_back(const Product& product, Panels<T>& panels, Size rows, Arena& arena) const {
    pack_rows(product, panels, rows, arena, weight_hh(product.row * H), H, P);
  }
  void pack_back_x(const Product& product, Panels<T>& panels, Arena& arena) const {
    pack_rows(product, panels, STRETCH, arena, weight_ih(product.row * H), I, X);
  }
  [[gnu::noinline]] void pack_rows(const Product& product, Panels<T>& panels, Size rows,
                                   Arena& arena, const T* weights, Size length, Size padded) const {
    const Size depth = product.count * H;
    panels = {depth, padded, best_width(rows, padded / lanes<T>), arena.take<T>(depth * padded)};
    if (!arena.real()) return;
    each_vector(panels, [&](Size column, T* out, Size k_step) {
      const Size width = smaller(lanes<T>, length - column);
      for (Size k = 0; k < depth; ++k, out += k_step) {
        const T* in = weights + k * length + column;
        if (width == lanes<T>) {
          store<T>(out, load(in));
        } else {
          for (Size lane = 0; lane < lanes<T>; ++lane) out[lane] = lane < width ? in[lane] : T(0);
        }
      }
    });
  }
  // Calls `fill` with each column that begins a vector, where it lies, and the way to the next k.
  template <class Fill> static void each_vector(const Panels<T>& panels, Fill fill) {
    const Size step = panels.width * lanes<T>;
    for (Size first = 0; first < panels.columns; first += step) {
      const Size width = smaller(step, panels.columns - first);
      for (Size column = first; column < first + width; column += lanes<T>)
        fill(column, panels.data + first * panels.depth + (column - first), width);
    }
  }
};

}  // namespace TGDU_LEVEL
