// What products with quantised weights share: panels of channels, products of bytes, and rounding.
//
// A panel is what one thread computes at a time: kSide channels of the first half of the outputs and the same of the
// second half. A gate and the number that it multiplies so meet in registers.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int kSide = 16, kParts = kSide / kLanes, kWide = 2 * kParts, kStep = 4;
constexpr int64_t kGroup = 128;
// Rows that are rounded at once: they stay in the second level cache while all panels pass by.
constexpr int64_t kBlock = 240;
constexpr int64_t kDistance = 8192;  // bytes between what a lone tile multiplies by and what it prefetches
constexpr int64_t kWorthSharing = 32768;  // numbers to round; below, waking the other threads costs more

typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

#if defined(__AVX512BW__)
inline Ints multiply_add(Shorts a, Shorts b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
inline Ints multiply_add(Shorts a, Shorts b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#elif defined(__SSE2__) && !defined(__AVX__)
inline Ints multiply_add(Shorts a, Shorts b) { return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b); }
#else
inline Ints multiply_add(Shorts a, Shorts b) {
  const Ints x = (Ints)a, y = (Ints)b;
  const Ints low = ((Ints)((Words)x << 16) >> 16) * ((Ints)((Words)y << 16) >> 16);
  return low + (x >> 16) * (y >> 16);
}
#endif

// Adds to each lane the products of its four bytes of `w`, unsigned, with those of `x`, signed.
inline Ints dot(Ints sum, Ints w, Ints x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else
  const Shorts even = (Shorts)((Words)w & 0x00ff00ffu), odd = (Shorts)((Words)w >> 8 & 0x00ff00ffu);
  const Shorts x_even = (Shorts)((Words)x << 8 & 0xff00ff00u) >> 8, x_odd = (Shorts)x >> 8;
  return sum + multiply_add(even, x_even) + multiply_add(odd, x_odd);
#endif
}

// The lowest byte of each lane. GCC takes the vector apart for it, where AVX-512 has an instruction.
inline Bytes low_bytes(Ints v) {
#ifdef __AVX512F__
  return (Bytes)_mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)v);
#else
  return __builtin_convertvector(v, Bytes);
#endif
}

// All lanes as one.
template <typename V, typename Join, int... i>
inline V fold(V v, Join join, std::integer_sequence<int, i...>) {
  if constexpr (kLanes >= 16) v = join(v, SHUFFLE(v, v, (i ^ 8) % kLanes...));
  if constexpr (kLanes >= 8) v = join(v, SHUFFLE(v, v, (i ^ 4) % kLanes...));
  v = join(v, SHUFFLE(v, v, (i ^ 2)...));
  return join(v, SHUFFLE(v, v, (i ^ 1)...));
}

// The largest magnitude. Where there is a NaN, it is that: its bits are above those of all numbers.
template <typename T>
inline float magnitude(const T* x, int64_t count) {
  const auto larger_of = [](Words a, Words b) { return a > b ? a : b; };
  Words most{};
  for (int64_t i = 0; i < count; i += kLanes)
    most = larger_of(most, (Words)read_some(x + i, count - i) & 0x7fffffffu);
  return ((Floats)fold(most, larger_of, Lanes{}))[0];
}

// kGroup activations of one row, or the `count` that are left of them, rounded to int8: of every four, `stride` bytes
// after those before. Returns their scale, and calls `total(g, sum)` with the sum of every `group` of them. `padded` is
// as many as are written. What is not finite makes a scale that is not finite, and so does its row.
template <typename T, typename Total>
inline float round_group(const T* x, int64_t count, int64_t padded, int64_t group, int8_t* values, int64_t stride,
                         Total total) {
  const float most = magnitude(x, count);
  const bool vanishes = most < 1e-35f;
  const float inverse = vanishes ? 0.f : 127.f / most;
  int8_t bytes[kGroup + kLanes] = {};
  for (int64_t first = 0; first < padded; first += group) {
    Words sums{};  // what is not finite gives any bits, whose sum may overflow
    for (int64_t i = first; i < std::min(first + group, count); i += kLanes) {
      // 1.5 * 2^23: the low bits now hold the number rounded to an integer, ties to even.
      const Ints bits = (Ints)(read_some(x + i, count - i) * inverse + 12582912.f);
      sums = sums + ((Words)bits - 0x4b400000u);
      store(bytes + i, low_bytes(bits));
    }
    total(first / group, fold(sums, [](Words a, Words b) { return a + b; }, Lanes{})[0]);
  }
  for (int64_t i = 0; i < padded; i += kStep) std::memcpy(values + i / kStep * stride, bytes + i, kStep);
  return vanishes ? 0.f : most / 127.f;
}

// Tiles of at most kTile rows, and of equal height, as far as that goes.
template <int kTile>
inline int64_t tiles_of(int64_t rows) {
  return (rows + kTile - 1) / kTile;
}
template <int kTile>
inline int64_t tile_begin(int64_t rows, int64_t tile) {
  return rows * tile / tiles_of<kTile>(rows);
}

// Where the results of a pass go: rows of `width` numbers, of which the second half begins at `half`.
template <typename T>
struct Target {
  T* out;
  int64_t width, half;
  bool gated;
};

// `scales` and `bias` are [panels, 2, kSide].
template <typename T>
inline void put(const Target<T>& to, const float* all_scales, const float* all_bias, int64_t row, int64_t panel,
                const Floats* sums) {
  const float *scales = all_scales + panel * 2 * kSide, *bias = all_bias + panel * 2 * kSide;
  T* out = to.out + row * to.width;
  for (int part = 0; part < kParts; ++part) {
    const int64_t channel = panel * kSide + part * kLanes, left = to.half - channel;
    const auto value = [&](int v) { return sums[v] * read(scales + v * kLanes) + read(bias + v * kLanes); };
    const Floats a = value(part), b = value(kParts + part);
    if (left > 0) write_some(out + channel, to.gated ? silu(a) * b : a, left);
    const int64_t right = to.width - to.half - channel;
    if (!to.gated && right > 0) write_some(out + to.half + channel, b, right);
  }
}

// Rows of one call that are computed in one pass.
template <typename T, typename Call>
struct Piece {
  const Call* call;
  const T* x;
  int64_t rows, tiles;
  Target<T> to;
};

// One pass: `round(i, tile)` for all tiles of all pieces, then `compute(i, panel)` for all panels, over the calls'
// threads. Each thread takes its part of every piece's panels.
template <typename T, typename Call, typename Round, typename Compute>
inline void over_panels(const std::vector<Piece<T, Call>>& pieces, Round round, Compute compute) {
  const Call& any = *pieces.front().call;
  const int64_t panels = ((any.outputs + 1) / 2 + kSide - 1) / kSide, count = pieces.size();
  int64_t rows = 0;
  for (const auto& piece : pieces) rows += piece.rows;
  const bool alone = any.threads == 1 || rows * any.inputs < kWorthSharing;
  for (int64_t i = 0; alone && i < count; ++i)
    for (int64_t tile = 0; tile < pieces[i].tiles; ++tile) round(i, tile);
  if (any.threads == 1) {  // entering a parallel region costs as much as a small product
    for (int64_t i = 0; i < count; ++i)
      for (int64_t panel = 0; panel < panels; ++panel) compute(i, panel);
    return;
  }
#pragma omp parallel num_threads(int(any.threads))
  {
    if (!alone) {
      for (int64_t i = 0; i < count; ++i) {
#pragma omp for nowait
        for (int64_t tile = 0; tile < pieces[i].tiles; ++tile) round(i, tile);
      }
#pragma omp barrier
    }
    for (int64_t i = 0; i < count; ++i) {
#pragma omp for nowait
      for (int64_t panel = 0; panel < panels; ++panel) compute(i, panel);
    }
  }
}

// `pass(pieces)` for every kBlock rows of `calls`, which are of layers of one shape, with pointers of their type of
// activations.
template <int kTile, typename Call, typename Pass>
inline void over_blocks(const Call* calls, int64_t count, Pass pass) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    static thread_local std::vector<Piece<T, Call>> pieces;
    int64_t room = kBlock;
    const auto flush = [&] {
      if (!pieces.empty()) pass(pieces);
      pieces.clear(), room = kBlock;
    };
    for (int64_t i = 0; i < count; ++i) {
      const Call& call = calls[i];
      const int64_t half = (call.outputs + 1) / 2, width = call.gated ? half : call.outputs;
      for (int64_t first = 0, rows; first < call.rows; first += rows) {
        rows = std::min(room, call.rows - first);
        const Target<T> to{(T*)call.out + first * width, width, half, bool(call.gated)};
        pieces.push_back({&call, (const T*)call.x + first * call.stride, rows, tiles_of<kTile>(rows), to});
        if (!(room -= rows)) flush();
      }
    }
    flush();
  };
  calls->bf16 ? run(Bf16{}) : run(float{});
}

}  // namespace
