// What all CPU kernels share: vectors as wide as the registers, and numbers in bf16 and fp32.
//
// Plain C++17 with the vector extensions of GCC and clang, and no header of torch or Python: everything compiles in
// seconds, and one build serves every version of both. No kernel is compiled with -ffast-math, which may reorder sums
// differently in each copy of an inlined loop: an output row is computed in an order that depends on its own inputs
// alone, never on the batch, the tiling or the thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// Vectors as wide as the registers, and as many accumulators (kRows * kVectors) as leave registers for the operands.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kVectors = 2;
#else
constexpr int kLanes = 4, kVectors = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
using Lanes = std::make_integer_sequence<int, kLanes>;

struct Bf16 {
  uint16_t bits;
};

template <typename V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename V>
inline void store(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

inline Floats widen(Halves h) { return (Floats)(__builtin_convertvector(h, Words) << 16); }

// To the nearest, ties to even, as torch rounds.
inline Halves narrow(Floats f) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)f);
#else
  const Words w = (Words)f;
  return __builtin_convertvector((w + 0x7fff + ((w >> 16) & 1)) >> 16, Halves);
#endif
}

inline Floats read(const float* from) { return load<Floats>(from); }
inline Floats read(const Bf16* from) { return widen(load<Halves>(from)); }
inline void write(float* to, Floats f) { store(to, f); }
inline void write(Bf16* to, Floats f) { store(to, narrow(f)); }

// The same at the end of a row, where fewer than a vector's numbers may be left.
template <typename T>
inline Floats read_some(const T* from, int64_t left) {
  if (left >= kLanes) return read(from);
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, left * sizeof(T));
  return read(lanes);
}

template <typename T>
inline void write_some(T* to, Floats f, int64_t left) {
  if (left >= kLanes) return write(to, f);
  T lanes[kLanes];
  write(lanes, f);
  std::memcpy(to, lanes, left * sizeof(T));
}

inline Floats larger(Floats a, Floats b) { return b > a ? b : a; }

// 2^x for x <= 126, to 2e-7; below -126 it stays at 2^-126. NaN stays NaN.
inline Floats exp2(Floats x) {
  x = x < -126.f ? Floats{} - 126.f : x;
  const Floats shifted = x + 12582912.f;  // 1.5 * 2^23: the low bits now hold x rounded to an integer
  const Floats f = x - (shifted - 12582912.f);
  Floats p = f * 1.5353362e-4f + 1.3398874e-3f;
  p = p * f + 9.6184373e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314720e-1f;
  p = p * f + 1.f;
  // The low bits of a NaN may be anything, and would make a number of it.
  return x == x ? (Floats)((Words)p + ((Words)shifted << 23)) : x;
}

// x / (1 + 2^power).
inline Floats over_one_plus_exp2(Floats x, Floats power) {
  return x / (1.f + exp2(power > 126.f ? Floats{} + 126.f : power));
}

inline Floats silu(Floats x) { return over_one_plus_exp2(x, x * -1.44269504f); }

// GELU by its approximation with tanh (Hendrycks and Gimpel 2016): x / (1 + e^(-2 sqrt(2 / pi) (x + 0.044715 x^3))).
inline Floats gelu_tanh(Floats x) { return over_one_plus_exp2(x, x * (x * x * -0.10294324f - 2.30220820f)); }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

template <int... i>
inline float largest(Floats v, std::integer_sequence<int, i...>) {
  if (kLanes >= 16) v = larger(v, SHUFFLE(v, v, (i ^ 8) % kLanes...));
  if (kLanes >= 8) v = larger(v, SHUFFLE(v, v, (i ^ 4) % kLanes...));
  v = larger(v, SHUFFLE(v, v, (i ^ 2)...));
  v = larger(v, SHUFFLE(v, v, (i ^ 1)...));
  return v[0];
}

inline float total(Floats v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// One stage of a transposition: exchanges the off-diagonal squares of side h.
template <int h, int... i>
inline void exchange(Words (&m)[kLanes], std::integer_sequence<int, i...>) {
  for (int r = 0; r < kLanes; ++r) {
    if (r & h) continue;
    const Words a = m[r], b = m[r + h];
    m[r] = SHUFFLE(a, b, (i & h ? kLanes + i - h : i)...);
    m[r + h] = SHUFFLE(a, b, (i & h ? kLanes + i : i + h)...);
  }
}

inline void transpose(Words (&m)[kLanes]) {
  if constexpr (kLanes >= 16) exchange<8>(m, Lanes{});
  if constexpr (kLanes >= 8) exchange<4>(m, Lanes{});
  exchange<2>(m, Lanes{});
  exchange<1>(m, Lanes{});
}

// Products work on 32-bit words: one fp32 number, or two neighbours in bf16, whose products are exact in fp32.
inline Floats fused(Floats sum, Words a, Words b, float) { return sum + (Floats)a * (Floats)b; }
inline Floats fused(Floats sum, Words a, Words b, Bf16) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum = sum + (Floats)(a << 16) * (Floats)(b << 16);
  return sum + (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
}

inline Floats rounded(Floats f, float) { return f; }
inline Floats rounded(Floats f, Bf16) { return widen(narrow(f)); }

}  // namespace
