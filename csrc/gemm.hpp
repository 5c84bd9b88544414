// Matrix products: packed panels and one micro-kernel, for all three products of a recurrence.
#pragma once
#include "simd.hpp"

namespace TGDU_LEVEL {

typedef std::int64_t Size;

inline Size rounded(Size n, Size to) { return (n + to - 1) / to * to; }
inline Size smaller(Size a, Size b) { return a < b ? a : b; }
inline Size larger(Size a, Size b) { return a > b ? a : b; }

constexpr int MAX_WIDTH = 8;   // vectors side by side in a tile of C
constexpr int MAX_HEIGHT = 14; // rows of a tile of C

// The tallest tile of `width` vectors whose sums, and what they are made of, stay in registers.
constexpr int tallest(int width) {
  const int rows = (TGDU_REGISTERS - 1 - width) / width;
  return rows < 1 ? 1 : rows < MAX_HEIGHT ? rows : MAX_HEIGHT;
}

// The operands of one tile: C (+)= Σ over segments and k of A(row, k) · B(k).
template <class T> struct Tile {
  Size segments;     // stretches of k that lie apart in A
  Size depth;        // of a segment
  const T* a;
  Size a_row, a_k;   // elements between rows of A, between its k; one of them is 1
  Size a_segment;    // elements between its segments
  const T* b;
  Size b_k;          // elements between the k of B
  T* c;
  Size c_row;
  bool add;          // to what C holds; else in its place
};

// Each element of C is one chain of multiply-adds over k in order, whatever the tile's size: the
// bits of a row do not depend on the rows beside it. What C holds is added last: a sum over many
// calls is one of partial sums, whose rounding errors do not grow with its length.
template <class T, int HEIGHT, int WIDTH, bool A_BY_ROWS> void multiply_tile(const Tile<T>& tile) {
  constexpr int W = lanes<T>;
  Vec<T> sum[HEIGHT][WIDTH];
#pragma GCC unroll 16
  for (int i = 0; i < HEIGHT; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < WIDTH; ++v)
      sum[i][v] = Vec<T>{};
  const T* b = tile.b;
  const Size row = A_BY_ROWS ? tile.a_row : 1, along = A_BY_ROWS ? 1 : tile.a_k;
  for (Size s = 0; s < tile.segments; ++s) {
    const T* a = tile.a + s * tile.a_segment;
    for (Size k = 0; k < tile.depth; ++k, a += along, b += tile.b_k) {
      Vec<T> columns[WIDTH];
#pragma GCC unroll 16
      for (int v = 0; v < WIDTH; ++v) columns[v] = load(b + v * W);
#pragma GCC unroll 16
      for (int i = 0; i < HEIGHT; ++i) {
        const T value = a[i * row];
#pragma GCC unroll 16
        for (int v = 0; v < WIDTH; ++v) sum[i][v] += value * columns[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < HEIGHT; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < WIDTH; ++v) {
      T* c = tile.c + i * tile.c_row + v * W;
      store(c, tile.add ? load(c) + sum[i][v] : sum[i][v]);
    }
}

// The kernels by height and width, for what is known only now.
template <class T, bool A_BY_ROWS> struct Kernels {
  typedef void (*Kernel)(const Tile<T>&);
  Kernel of[MAX_WIDTH][MAX_HEIGHT] = {};

  constexpr Kernels() { fill<1, 1>(); }
  template <int WIDTH, int HEIGHT> constexpr void fill() {
    of[WIDTH - 1][HEIGHT - 1] = multiply_tile<T, HEIGHT, WIDTH, A_BY_ROWS>;
    if constexpr (HEIGHT < tallest(WIDTH)) fill<WIDTH, HEIGHT + 1>();
    else if constexpr (WIDTH < MAX_WIDTH) fill<WIDTH + 1, 1>();
  }
};
template <class T, bool A_BY_ROWS>
inline void multiply(const Tile<T>& tile, Size height, Size width) {
  static constexpr Kernels<T, A_BY_ROWS> kernels;
  kernels.of[width - 1][height - 1](tile);
}

// How many vectors wide tiles should be for `rows` × `vectors` of C: the fewest cycles, counting two
// multiply-adds and two loads a cycle, and four cycles until a sum can be added to again.
inline Size best_width(Size rows, Size vectors) {
  Size best = 1;
  double fewest = 1e300;
  for (int width = 1; width <= MAX_WIDTH && width <= vectors; ++width) {
    const Size down = (rows + tallest(width) - 1) / tallest(width);
    const double height = double(rows) / double(down);
    double cycles = 0;
    for (Size left = vectors, w = width; left > 0; left -= w) {
      w = smaller(width, left);
      const double products = height * double(w) / 2, loads = (height + double(w)) / 2;
      const double busy = products < loads ? loads : products;
      cycles += double(down) * (busy < 4 ? 4 : busy);
      if (left > 64 * width) { cycles *= double(left) / double(w); break; }  // all alike
    }
    if (cycles < fewest * 0.99) fewest = cycles, best = width;
  }
  return best;
}

// A matrix [depth, columns] cut into panels `width` vectors wide (the last may be narrower), each
// [depth, its width]: what a tile reads is one stream. `columns` is a whole number of vectors.
template <class T> struct Panels {
  Size depth, columns, width;
  T* data;

  Size size() const { return depth * columns; }
};

// C [rows, columns] (+)= A [rows, segments·depth] · B. The rows of C are cut into tiles as equal as
// can be; a panel of B stays in the cache while all rows pass.
template <class T>
void multiply_panels(Size rows, Size segments, const T* a, Size a_row, Size a_segment,
                     const Panels<T>& b, T* c, Size c_row, bool add) {
  constexpr int W = lanes<T>;
  const Size vectors = b.columns / W;
  const Size down = (rows + tallest(int(b.width)) - 1) / tallest(int(b.width));
  for (Size v = 0; v < vectors; v += b.width) {
    const Size width = smaller(b.width, vectors - v);
    const T* panel = b.data + v * W * b.depth;
    for (Size i = 0; i < down; ++i) {
      const Size from = rows * i / down, height = rows * (i + 1) / down - from;
      multiply<T, true>({segments, b.depth / segments, a + from * a_row, a_row, 1, a_segment, panel,
                         width * W, c + from * c_row + v * W, c_row, add},
                        height, width);
    }
  }
}

// Σ a_k b_k.
template <class T> inline T dot(const T* a, const T* b, Size n) {
  Vec<T> many{};
  Size k = 0;
  for (; k + lanes<T> <= n; k += lanes<T>) many += load(a + k) * load(b + k);
  T sum = k > 0 ? total<T>(many) : T(0);
  for (; k < n; ++k) sum += a[k] * b[k];
  return sum;
}

// So many terms are added up before their sum is added to C: long chains of float32 round badly.
constexpr Size CHAIN = 32;

// C [rows, columns] += Aᵀ · B with A [depth, rows] and B [depth, columns], both by their strides.
template <class T>
void add_outer(Size rows, Size columns, Size depth, const T* a, Size a_k, const T* b, Size b_k, T* c,
               Size c_row) {
  constexpr int W = lanes<T>;
  const Size vectors = columns / W, across = best_width(rows, vectors);
  const Size down = (rows + tallest(int(across)) - 1) / tallest(int(across));
  for (Size v = 0; v < vectors; v += across) {
    const Size width = smaller(across, vectors - v);
    for (Size i = 0; i < down; ++i) {
      const Size from = rows * i / down, height = rows * (i + 1) / down - from;
      for (Size k = 0; k < depth; k += CHAIN)
        multiply<T, false>({1, smaller(CHAIN, depth - k), a + k * a_k + from, 1, a_k, 0,
                            b + k * b_k + v * W, b_k, c + from * c_row + v * W, c_row, true},
                           height, width);
    }
  }
}

}  // namespace TGDU_LEVEL
