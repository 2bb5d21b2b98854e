// Tiles of keys and values: rows as the pages hold them, and the same rearranged for products.
#pragma once

#include "vectors.h"

namespace {

constexpr int kKeys = 64;            // keys in a tile: tiles start at multiples of this, wherever chunks and pages do
constexpr int kRun = 16;             // keys whose rows lie beside each other, in a page or copied so
constexpr int kRuns = kKeys / kRun;  // of a tile

struct KeyTile {
  const char *keys[kRuns], *values[kRuns];
};

// Pages are scattered, so the processor's own prefetching does not find them. The next tile is prefetched piece by piece
// along with the work on this one, as prefetching all of it at once stalls that work.
inline void fetch(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Rows of words -> kStep columns of kLanes rows each.
#ifdef __AVX512F__
constexpr int kStep = 4;
inline void columns(const char* rows, int64_t row_bytes, Words (&out)[kStep]) {
  __m512i row[4];
  for (int i = 0; i < 4; ++i) {  // Four rows, four apart: the loads do the transposition of the quarters.
    const char* from = rows + i * row_bytes;
    row[i] = _mm512_castsi128_si512(load<__m128i>(from));
    row[i] = _mm512_mask_broadcast_i32x4(row[i], 0x00f0, load<__m128i>(from + 4 * row_bytes));
    row[i] = _mm512_mask_broadcast_i32x4(row[i], 0x0f00, load<__m128i>(from + 8 * row_bytes));
    row[i] = _mm512_mask_broadcast_i32x4(row[i], 0xf000, load<__m128i>(from + 12 * row_bytes));
  }
  const __m512i a = _mm512_unpacklo_epi32(row[0], row[1]), b = _mm512_unpackhi_epi32(row[0], row[1]);
  const __m512i c = _mm512_unpacklo_epi32(row[2], row[3]), d = _mm512_unpackhi_epi32(row[2], row[3]);
  out[0] = (Words)_mm512_unpacklo_epi64(a, c), out[1] = (Words)_mm512_unpackhi_epi64(a, c);
  out[2] = (Words)_mm512_unpacklo_epi64(b, d), out[3] = (Words)_mm512_unpackhi_epi64(b, d);
}
#else
constexpr int kStep = kLanes;
inline void columns(const char* rows, int64_t row_bytes, Words (&out)[kStep]) {
  for (int i = 0; i < kLanes; ++i) out[i] = load<Words>(rows + i * row_bytes);
  transpose(out);
}
#endif

#ifdef __AVX512BW__
struct PairOrder {
  alignas(64) uint16_t from[2][32];
  constexpr PairOrder() : from() {
    for (int i = 0; i < 64; ++i) from[i / 32][i % 32] = uint16_t(i / 2 + i % 2 * 32);
  }
};
constexpr PairOrder kPairOrder;
#endif

// kLanes numbers of two rows in bf16, as pairs.
inline Words pair(const char* even, const char* odd) {
  const Words low = __builtin_convertvector(load<Halves>(even), Words);
  return low | (__builtin_convertvector(load<Halves>(odd), Words) << 16);
}

// The same for twice as many.
inline void pairs(const char* even, const char* odd, Words& first, Words& second) {
#ifdef __AVX512BW__
  const __m512i a = load<__m512i>(even), b = load<__m512i>(odd);
  const __m512i order = load<__m512i>(kPairOrder.from[0]), next = load<__m512i>(kPairOrder.from[1]);
  first = (Words)_mm512_permutex2var_epi16(a, order, b);
  second = (Words)_mm512_permutex2var_epi16(a, next, b);
#else
  first = pair(even, odd), second = pair(even + 2 * kLanes, odd + 2 * kLanes);
#endif
}

// Keys as rows -> packed[word][key].
inline void pack_keys(const KeyTile& tile, const KeyTile& ahead, int64_t words, uint32_t* packed) {
  const int64_t row_bytes = 4 * words;
  for (int key = 0; key < kKeys; key += kLanes) {
    const int64_t first = key % kRun * row_bytes;
    const char *rows = tile.keys[key / kRun] + first, *next = ahead.keys[key / kRun] + first;
    int64_t w = 0;
    for (; w + kStep <= words; w += kStep, next += 4 * kStep * kLanes) {
      Words out[kStep];
      columns(rows + 4 * w, row_bytes, out);
      fetch(next, 4 * kStep * kLanes);
      for (int i = 0; i < kStep; ++i) store(packed + (w + i) * kKeys + key, out[i]);
    }
    for (; w < words; ++w)
      for (int i = 0; i < kLanes; ++i) std::memcpy(packed + w * kKeys + key + i, rows + i * row_bytes + 4 * w, 4);
  }
}

// Values as rows -> packed[key][column] in fp32, packed[pair of keys][column] in bf16.
inline void pack_values(const KeyTile& tile, const KeyTile& ahead, int64_t dim, int64_t columns, uint32_t* packed,
                        float) {
  for (int key = 0; key < kKeys; ++key) {
    const int64_t row = key % kRun * 4 * dim;
    fetch(ahead.values[key / kRun] + row, 4 * dim);
    std::memcpy(packed + key * columns, tile.values[key / kRun] + row, 4 * dim);
  }
}
inline void pack_values(const KeyTile& tile, const KeyTile& ahead, int64_t dim, int64_t columns, uint32_t* packed,
                        Bf16) {
  for (int key = 0; key < kKeys; key += 2, packed += columns) {
    const int64_t row = key % kRun * 2 * dim;
    const char *even = tile.values[key / kRun] + row, *odd = even + 2 * dim;
    fetch(ahead.values[key / kRun] + row, 4 * dim);
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(packed + d, pair(even + 2 * d, odd + 2 * d));
    for (; d < dim; ++d) packed[d] = load<uint16_t>(even + 2 * d) | (uint32_t(load<uint16_t>(odd + 2 * d)) << 16);
  }
}

}  // namespace
