// Products of a weight in four or eight bits, with a scale for every `group` inputs of every channel, with activations
// that are rounded to int8 on the way. Callers check shapes and bounds.
//
// In four bits a weight is `scale * (q - zero)`: q of 0 to 15, a group of 32, 64 or 128 inputs, a zero for each. In eight
// it is `scale * q`, q of -128 to 127, and a group may be of 16 inputs too. Scales and zeros are fp16; scales are
// relative to a power of two of the channel's, so that none is too small for it. Every kGroup activations of a row have
// a scale. Products and sums of integers within a group of weights are exact in whatever order; groups are added in fp32
// in their order. So a row of the result depends on its own inputs alone, bit for bit.
//
// The processors' instruction multiplies unsigned by signed bytes: eight bits are held as q + 128, and 128 times the sum
// of the group's activations is taken off where the sum begins.
//
// In memory a panel is, for every group of inputs, [2 sides, kSide channels] scales, in four bits the same of zeros, and
// for every eight inputs, in four bits, [2 sides, kSide channels, 4 bytes], of which the low halves are the first four
// inputs; in eight bits [2 halves of 4 inputs, 2 sides, kSide channels, 4 bytes].

#include "panels.h"
#include "products.h"

namespace {

constexpr int kSpan = 2 * kSide, kEight = 2 * kStep, kVectorsBytes = kSpan * kStep;
// Rows of a tile: besides the sums of a group there are those of kGroup inputs, and the unpacked weights.
constexpr int kTile = kLanes == 16 ? 6 : kLanes == 8 ? 3 : 2;

// How a weight is held. `kPart` inputs of a group are summed in integers at once, so that groups of every size have one
// loop.
template <int kBits_, int kPart_>
struct Form {
  static constexpr int kBits = kBits_, kPart = kPart_;
  static constexpr bool kHasZeros = kBits == 4;
  static constexpr int kHeaderBytes = (kHasZeros ? 2 : 1) * kSpan * sizeof(uint16_t);
  static constexpr int kEightBytes = kVectorsBytes * kBits / 4;
  static constexpr int kFetches = kBits == 4 ? 3 : 5;  // cache lines of a header and eight inputs

  static constexpr int64_t group_bytes(int64_t group) { return kHeaderBytes + group / kEight * kEightBytes; }
};

#if defined(__AVX512F__)
inline Floats halves(const uint8_t* from) { return (Floats)_mm512_cvtph_ps(load<__m256i>(from)); }
#elif defined(__F16C__)
inline Floats halves(const uint8_t* from) { return (Floats)_mm256_cvtph_ps(load<__m128i>(from)); }
#else
// 2^112 moves the exponent from fp16's bias to fp32's, and normalises what is subnormal in fp16.
inline Floats halves(const uint8_t* from) {
  const Words bits = __builtin_convertvector(load<Halves>(from), Words);
  const Floats size = (Floats)((bits & 0x7fffu) << 13) * 5.192296858534828e33f;
  return (Floats)((Words)size | (bits & 0x8000u) << 16);
}
#endif

// Sums of 32 products of x and q in four bits. Without an instruction for four of them, and with one for two, 16 bits are
// enough: 32 * 15 * 127 / 2 < 2^15.
#if !defined(__AVX512VNNI__) && !(defined(__AVXVNNI__) && !defined(__AVX512F__)) && \
    (defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)))
#ifdef __AVX512BW__
inline Ints add_products(Ints sum, Ints q, Ints x) {
  return (Ints)((Shorts)sum + (Shorts)_mm512_maddubs_epi16((__m512i)q, (__m512i)x));
}
#else
inline Ints add_products(Ints sum, Ints q, Ints x) {
  return (Ints)((Shorts)sum + (Shorts)_mm256_maddubs_epi16((__m256i)q, (__m256i)x));
}
#endif
inline Ints whole(Ints sum) { return multiply_add((Shorts)sum, Shorts{} + 1); }
#else
inline Ints add_products(Ints sum, Ints q, Ints x) { return dot(sum, q, x); }
inline Ints whole(Ints sum) { return sum; }
#endif

// The activations of one pass, rounded. The rows of a tile lie beside each other: of every four inputs one row's after
// the other's, and so for the scale of every kGroup inputs, and for what every group of the weight's needs of their sum.
struct Activations {
  int64_t words, scaled, groups;
  std::vector<int8_t> values;
  std::vector<float> scales, sums;
  std::vector<int32_t> offsets;

  void reserve(int64_t rows, int64_t inputs, int64_t group) {
    groups = (inputs + group - 1) / group, words = groups * group / kStep, scaled = (inputs + kGroup - 1) / kGroup;
    if (int64_t(values.size()) < rows * words * kStep) values.resize(rows * words * kStep);
    if (int64_t(scales.size()) < rows * scaled) scales.resize(rows * scaled);
    if (int64_t(sums.size()) < rows * groups) sums.resize(rows * groups), offsets.resize(rows * groups);
  }
};

template <typename T>
void round_tile(const T* x, const GroupsCall& call, int64_t first, int64_t rows, Activations& to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < to.scaled; ++g) {
      const int64_t begin = g * kGroup, at = first * to.groups + begin / call.group * rows + r;
      int8_t* values = to.values.data() + (first * to.words + begin / kStep * rows + r) * kStep;
      const int64_t padded = std::min(kGroup, to.words * kStep - begin);
      to.scales[first * to.scaled + g * rows + r] = round_group(
          x + (first + r) * call.stride + begin, std::min(kGroup, call.inputs - begin), padded, call.group, values,
          rows * kStep, [&](int64_t part, uint32_t sum) {
            to.sums[at + part * rows] = float(int32_t(sum));
            to.offsets[at + part * rows] = int32_t(sum * -128u);
          });
    }
}

// Where a tile prefetches from: `pace` bytes for every eight inputs.
struct Fetch {
  const uint8_t* from;
  int64_t pace;
};

// A lone tile prefetches what it will need itself. Several share the prefetching of the next panel, as only the first
// of them waits for memory.
inline Fetch fetch_of(const uint8_t* panel, int64_t bytes, int64_t inputs, int64_t tile, int64_t tiles) {
  const int64_t pace = (bytes + inputs / kEight - 1) / (inputs / kEight);
  if (tiles == 1) return {panel + kDistance, pace};
  const int64_t shared = (pace + tiles - 1) / tiles;
  return {panel + bytes + tile * (bytes / tiles), shared};
}

// Not inlined: one copy serves both types of activations.
template <typename Held, int kRows>
__attribute__((noinline)) void multiply(const uint8_t* panel, const Activations& x, int64_t group, int64_t first,
                                        Fetch fetch, Floats (&sums)[kRows][kWide]) {
  const int8_t* values = x.values.data() + first * x.words * kStep;
  const float* scales = x.scales.data() + first * x.scaled;
  const float* totals = x.sums.data() + first * x.groups;
  const int32_t* offsets = x.offsets.data() + first * x.groups;
  const int64_t per_scale = kGroup / group;
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) sums[r][v] = Floats{};
  for (int64_t g = 0; g < x.groups; scales += kRows) {
    Floats parts[kRows][kWide] = {};
    for (const int64_t end = std::min(g + per_scale, x.groups); g < end; ++g, totals += kRows, offsets += kRows) {
      const uint8_t* header = panel;
      panel += Held::kHeaderBytes;
      for (int64_t done = 0; done < group; done += Held::kPart) {
        Ints exact[kRows][kWide] = {};
        if (!Held::kHasZeros && done == 0)
          for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kWide; ++v) exact[r][v] = Ints{} + offsets[r];
        for (int step = 0; step < Held::kPart / kEight; ++step) {
          Ints low[kWide], high[kWide];
          for (int v = 0; v < kWide; ++v) {
            const Words both = load<Words>(panel + v * sizeof(Words));
            if constexpr (Held::kBits == 4)
              low[v] = (Ints)(both & 0x0f0f0f0fu), high[v] = (Ints)(both >> 4 & 0x0f0f0f0fu);
            else
              low[v] = (Ints)both, high[v] = load<Ints>(panel + kVectorsBytes + v * sizeof(Ints));
          }
          for (int line = 0; line < Held::kFetches; ++line)
            __builtin_prefetch(fetch.from + fetch.pace * line / Held::kFetches);
          for (int r = 0; r < kRows; ++r) {
            const Ints a = Ints{} + load<int32_t>(values + r * kStep);
            const Ints b = Ints{} + load<int32_t>(values + (kRows + r) * kStep);
            for (int v = 0; v < kWide; ++v) {
              if constexpr (Held::kBits == 4)
                exact[r][v] = add_products(add_products(exact[r][v], low[v], a), high[v], b);
              else
                exact[r][v] = dot(dot(exact[r][v], low[v], a), high[v], b);
            }
          }
          panel += Held::kEightBytes, values += 2 * kRows * kStep, fetch.from += fetch.pace;
        }
        for (int v = 0; v < kWide; ++v) {
          const Floats scale = halves(header + v * sizeof(Halves));
          if constexpr (Held::kHasZeros) {
            const Floats shift = scale * halves(header + Held::kHeaderBytes / 2 + v * sizeof(Halves));
            for (int r = 0; r < kRows; ++r) {
              parts[r][v] = parts[r][v] + scale * __builtin_convertvector(whole(exact[r][v]), Floats);
              if (done == 0) parts[r][v] = parts[r][v] - shift * totals[r];
            }
          } else {
            for (int r = 0; r < kRows; ++r)
              parts[r][v] = parts[r][v] + scale * __builtin_convertvector(exact[r][v], Floats);
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWide; ++v) sums[r][v] = sums[r][v] + parts[r][v] * scales[r];
  }
}

template <typename Held, int kRows, typename T>
void compute_rows(const GroupsCall& call, const Activations& x, const uint8_t* weights, int64_t first, int64_t rows,
                  int64_t panel, Fetch fetch, const Target<T>& to) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return compute_rows<Held, kRows - 1>(call, x, weights, first, rows, panel, fetch, to);
  }
  Floats sums[kRows][kWide];
  multiply<Held, kRows>(weights, x, call.group, first, fetch, sums);
  for (int r = 0; r < kRows; ++r) put(to, call.scales, call.bias, first + r, panel, sums[r]);
}

template <typename Held, typename T>
void compute_pieces(const std::vector<Piece<T, GroupsCall>>& pieces) {
  static thread_local std::vector<Activations> rounded;
  if (rounded.size() < pieces.size()) rounded.resize(pieces.size());
  Activations* shared = rounded.data();
  for (const auto& piece : pieces) shared++->reserve(piece.rows, piece.call->inputs, piece.call->group);
  shared = rounded.data();
  const auto round = [&](int64_t i, int64_t tile) {
    const Piece<T, GroupsCall>& piece = pieces[i];
    const int64_t first = tile_begin<kTile>(piece.rows, tile);
    round_tile(piece.x, *piece.call, first, tile_begin<kTile>(piece.rows, tile + 1) - first, shared[i]);
  };
  over_panels(pieces, round, [&](int64_t i, int64_t panel) {
    const Piece<T, GroupsCall>& piece = pieces[i];
    const int64_t bytes = shared[i].groups * Held::group_bytes(piece.call->group);
    const uint8_t* weights = piece.call->panels + panel * bytes;
    for (int64_t tile = 0; tile < piece.tiles; ++tile) {
      const int64_t first = tile_begin<kTile>(piece.rows, tile);
      const int64_t count = tile_begin<kTile>(piece.rows, tile + 1) - first;
      const Fetch fetch = fetch_of(weights, bytes, shared[i].words * kStep, tile, piece.tiles);
      compute_rows<Held, kTile>(*piece.call, shared[i], weights, first, count, panel, fetch, piece.to);
    }
  });
}

}  // namespace

extern "C" {

void quire_groups_linear(const GroupsCall* call) { quire_groups_grouped(call, 1); }

void quire_groups_grouped(const GroupsCall* calls, int64_t count) {
  over_blocks<kTile>(calls, count, [&](const auto& pieces) {
    if (calls->bits == 4) return compute_pieces<Form<4, 32>>(pieces);
    if (calls->group == 16) return compute_pieces<Form<8, 16>>(pieces);
    compute_pieces<Form<8, 32>>(pieces);
  });
}
}
