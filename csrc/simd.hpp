// One vector type, by the compiler's vector extensions: the same source for every instruction set.
// TGDU_BYTES and TGDU_REGISTERS come from the build, with the flags of the instruction set.
#pragma once
#include <cstdint>
#include <cstring>

#ifndef TGDU_BYTES
#define TGDU_BYTES 16  // of a vector register
#endif
#ifndef TGDU_REGISTERS
#define TGDU_REGISTERS 16
#endif

namespace TGDU_LEVEL {

template <class T> struct Simd;
template <> struct Simd<float> {
  typedef float V __attribute__((vector_size(TGDU_BYTES)));
  typedef std::int32_t I __attribute__((vector_size(TGDU_BYTES)));
  typedef std::int32_t Int;
  static constexpr int mantissa = 23, bias = 127, degree = 7;
  // e^x counts as 0 below `low`; tanh x is ±1 beyond `flat`.
  static constexpr float low = -87.3f, flat = 9.2f;
  static constexpr float magic = 12582912.0f;  // 1.5·2^23: adding it rounds to a whole number
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
};
template <> struct Simd<double> {
  typedef double V __attribute__((vector_size(TGDU_BYTES)));
  typedef std::int64_t I __attribute__((vector_size(TGDU_BYTES)));
  typedef std::int64_t Int;
  static constexpr int mantissa = 52, bias = 1023, degree = 13;
  static constexpr double low = -708.3, flat = 20.0;
  static constexpr double magic = 6755399441055744.0;  // 1.5·2^52
  static constexpr double ln2_high = 0.693147180369123816490, ln2_low = 1.90821492927058770002e-10;
};

template <class T> using Vec = typename Simd<T>::V;
template <class T> using Ints = typename Simd<T>::I;
template <class T> constexpr int lanes = TGDU_BYTES / sizeof(T);

// 0, 1, … N − 1 as template arguments.
template <int... i> struct Lanes {};
template <int N, int... i> struct Count : Count<N - 1, N - 1, i...> {};
template <int... i> struct Count<0, i...> { typedef Lanes<i...> All; };

// Vectors in memory need no alignment, and may lie over anything.
template <class T> inline Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class T> inline void store(T* to, Vec<T> v) { std::memcpy(to, &v, sizeof v); }
template <class T> inline Vec<T> all(T value) { return value - Vec<T>{}; }

template <class T, int D, int... i> inline Vec<T> partner(Vec<T> v, Lanes<i...>) {
  return __builtin_shufflevector(v, v, (i ^ D)...);
}
// Lane i of the result is lane i XOR D.
template <class T, int D> inline Vec<T> partner(Vec<T> v) {
  return partner<T, D>(v, typename Count<lanes<T>>::All());
}
// Each lane becomes the sum of its `size` neighbours, a power of two.
template <class T> inline Vec<T> folded(Vec<T> v, int size) {
  if (size > 1) v += partner<T, 1>(v);
  if constexpr (lanes<T> > 2)
    if (size > 2) v += partner<T, 2>(v);
  if constexpr (lanes<T> > 4)
    if (size > 4) v += partner<T, 4>(v);
  if constexpr (lanes<T> > 8)
    if (size > 8) v += partner<T, 8>(v);
  return v;
}
template <class T> inline T total(Vec<T> v) { return folded<T>(v, lanes<T>)[0]; }
template <class T> inline bool any(Ints<T> mask) {
  std::uint64_t words[TGDU_BYTES / 8], found = 0;
  std::memcpy(words, &mask, sizeof words);
  for (std::uint64_t word : words) found |= word;
  return found != 0;
}

template <class T> constexpr T inverse_factorial(int k) {
  T value = 1;
  for (int i = 2; i <= k; ++i) value /= i;
  return value;
}

// x = n·ln 2 + r with |r| ≤ ln 2 / 2: e^x = power + power·rest, power = 2^n, rest = e^r − 1.
template <class T> struct Exponential {
  Vec<T> power, rest;
};
template <class T> inline Exponential<T> exponential(Vec<T> x) {
  using S = Simd<T>;
  const Vec<T> shifted = x * T(1.44269504088896340736) + S::magic;
  const Vec<T> n = shifted - S::magic;
  const Vec<T> r = (x - n * S::ln2_high) - n * S::ln2_low;
  Vec<T> sum = all(inverse_factorial<T>(S::degree));
#pragma GCC unroll 16
  for (int k = S::degree - 1; k >= 1; --k) sum = sum * r + inverse_factorial<T>(k);
  Ints<T> bits;
  std::memcpy(&bits, &shifted, sizeof bits);  // the low bits of `shifted` hold n
  bits = (bits << S::mantissa) + (typename S::Int(S::bias) << S::mantissa);
  Exponential<T> result;
  std::memcpy(&result.power, &bits, sizeof bits);
  result.rest = sum * r;
  return result;
}

// e^x for low ≤ x ≤ 80, and NaN.
template <class T> inline Vec<T> exp_small(Vec<T> x) {
  const Exponential<T> e = exponential<T>(x);
  return e.power + e.power * e.rest;
}

// e^x for x ≤ 80, and NaN.
template <class T> inline Vec<T> exp(Vec<T> x) {
  using S = Simd<T>;
  const Vec<T> value = exp_small<T>(x < S::low ? all(S::low) : x);
  return x < S::low ? Vec<T>{} : value;
}

// 0 where e^x counts as 0: what it is multiplied with may be infinite, and 0·∞ is NaN.
template <class T> inline Vec<T> sigmoid(Vec<T> x) {
  using S = Simd<T>;
  const Vec<T> inside = x > -S::low ? all(-S::low) : (x < S::low ? all(S::low) : x);
  const Exponential<T> e = exponential<T>(-inside);
  const Vec<T> value = T(1) / (T(1) + (e.power + e.power * e.rest));
  return x < S::low ? Vec<T>{} : value;
}

// (e^2x − 1) / (e^2x + 1), with e^2x − 1 exact near 0.
template <class T> inline Vec<T> tanh(Vec<T> x) {
  using S = Simd<T>;
  const Vec<T> inside = x > S::flat ? all(S::flat) : (x < -S::flat ? all(-S::flat) : x);
  const Exponential<T> e = exponential<T>(inside + inside);
  const Vec<T> less_one = e.power * e.rest + (e.power - T(1));
  return less_one / (less_one + T(2));
}

}  // namespace TGDU_LEVEL
