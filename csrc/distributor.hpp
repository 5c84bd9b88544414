// Sums over the groups of a GDU, and the exponentials that its softmax is made of.
#pragma once
#include "arena.hpp"
#include "gemm.hpp"

namespace TGDU_LEVEL {

template <class T> struct Distributor {
  T *scale, *base;  // [P]: α = scale·d + base
  // Each vector of units lies whole in groups of a size 2, 4, … lanes that divides it, and is summed
  // in the register (`fold` is that size); or fold is 0 and its groups are in the list.
  Size vectors;
  Size* fold;
  struct Group {
    Size first, size;
  };
  Group* listed;
  Size count = 0;
  Group* groups;  // all of them
  Size all_groups;

  Distributor(const tgdu_problem& p, Arena& arena)
      : vectors(rounded(p.units, lanes<T>) / lanes<T>), all_groups(p.parts) {
    const Size P = vectors * lanes<T>;
    scale = arena.take<T>(P);
    base = arena.take<T>(P);
    fold = arena.take<Size>(vectors);
    listed = arena.take<Group>(p.parts);
    groups = arena.take<Group>(p.parts);
    if (!arena.real()) return;
    const T *given_scale = static_cast<const T*>(p.scale), *given_base = static_cast<const T*>(p.base);
    for (Size j = 0; j < P; ++j) {
      scale[j] = j < p.units ? given_scale[j] : T(0);
      base[j] = j < p.units ? given_base[j] : T(0);
    }
    for (Size v = 0; v < vectors; ++v) fold[v] = -1;  // unknown
    Size first = 0;
    for (Size g = 0; g < p.parts; first += p.partition[g++]) {
      const Size size = p.partition[g];
      groups[g] = {first, size};
      const bool folds = lanes<T> % size == 0 && first % size == 0;
      for (Size v = first / lanes<T>; v <= (first + size - 1) / lanes<T>; ++v)
        fold[v] = folds && (fold[v] == -1 || fold[v] == size) ? size : 0;
    }
    for (Size g = 0; g < p.parts; ++g) {
      bool whole = true;
      for (Size v = groups[g].first / lanes<T>;
           v <= (groups[g].first + groups[g].size - 1) / lanes<T>; ++v)
        whole = whole && fold[v] > 0;
      if (!whole) listed[count++] = groups[g];
    }
  }

  // The sum of each group into every unit of `sums`, which may be `values` itself.
  void sum(const T* values, T* sums) const {
    for (Size g = 0; g < count; ++g) {
      const Group group = listed[g];
      const T* from = values + group.first;
      Size j = 0;
      T whole = 0;
      if (group.size >= lanes<T>) {
        Vec<T> many{};
        for (; j + lanes<T> <= group.size; j += lanes<T>) many += load(from + j);
        whole = total<T>(many);
      }
      for (; j < group.size; ++j) whole += from[j];
      fill(sums + group.first, group.size, whole);
    }
    for (Size v = 0; v < vectors; ++v)
      if (fold[v] > 0) store<T>(sums + v * lanes<T>, folded<T>(load(values + v * lanes<T>), int(fold[v])));
  }

  // logits → their exponentials (by their group's largest where they are large), and the sums.
  void weigh(T* logits, T* sums) const {
    Ints<T> large{};
    for (Size v = 0; v < vectors; ++v) {
      const Vec<T> x = load(logits + v * lanes<T>);
      large |= ~((x <= T(60)) & (x >= T(-60)));
    }
    if (any<T>(large)) subtract_largest(logits);
    for (Size v = 0; v < vectors; ++v) {
      const Vec<T> x = load(logits + v * lanes<T>);
      store<T>(logits + v * lanes<T>, exp<T>(x));
    }
    sum(logits, sums);
  }

 private:
  static void fill(T* to, Size size, T value) {
    Size j = 0;
    for (; j + lanes<T> <= size; j += lanes<T>) store<T>(to + j, all(value));
    for (; j < size; ++j) to[j] = value;
  }

  void subtract_largest(T* logits) const {
    for (Size g = 0; g < all_groups; ++g) {
      T* x = logits + groups[g].first;
      T largest = x[0];
      for (Size j = 1; j < groups[g].size; ++j) largest = x[j] > largest ? x[j] : largest;
      for (Size j = 0; j < groups[g].size; ++j) x[j] -= largest;
    }
  }
};

}  // namespace TGDU_LEVEL
