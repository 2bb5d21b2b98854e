// Products of a weight in int8 with activations that are rounded to int8 on the way. Callers check shapes and bounds.
//
// Every output channel of the weight has one scale. Every kGroup activations of a row have one too, so that an outlier
// takes the digits of its own group only. Products and sums within a group are integers, hence exact in whatever order;
// groups are added in fp32 in their order. So a row of the result depends on its own inputs alone, bit for bit.
//
// The processors' instruction multiplies unsigned by signed bytes: a weight w is held as w + 128, and 128 times the sum
// of the group's activations is taken off where the sum begins.
//
// In memory a panel is, for every four inputs, [2 sides, kSide channels, 4 inputs].

#include "panels.h"
#include "products.h"

namespace {

constexpr int kStepBytes = 2 * kSide * kStep;
// As many sums (rows * kWide) as leave registers for the operands.
constexpr int kTile = kLanes == 16 ? 12 : kLanes == 8 ? 3 : 2;

// The activations of one pass, rounded. The rows of a tile lie beside each other: of every four inputs one row's after
// the other's, and so for the scales and offsets of every group.
struct Rounded {
  int64_t words, groups;
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> offsets;

  void reserve(int64_t rows, int64_t inputs) {
    words = (inputs + kStep - 1) / kStep, groups = (inputs + kGroup - 1) / kGroup;
    if (int64_t(values.size()) < rows * words * kStep) values.resize(rows * words * kStep);
    if (int64_t(scales.size()) < rows * groups) scales.resize(rows * groups), offsets.resize(rows * groups);
  }
};

template <typename T>
void round_tile(const T* x, int64_t stride, int64_t first, int64_t rows, int64_t inputs, Rounded& to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < to.groups; ++g) {
      const int64_t begin = g * kGroup, at = first * to.groups + g * rows + r;
      int8_t* values = to.values.data() + (first * to.words + begin / kStep * rows + r) * kStep;
      const auto round = [&](int64_t count) {
        return round_group(x + r * stride + begin, count, (count + kStep - 1) / kStep * kStep, kGroup, values,
                           rows * kStep, [&](int64_t, uint32_t sum) { to.offsets[at] = int32_t(sum * -128u); });
      };
      // A whole group, as most are, is known to be one here: its loops need no ends.
      to.scales[at] = inputs - begin >= kGroup ? round(kGroup) : round(inputs - begin);
    }
}

// What is prefetched while a tile multiplies: `pace` bytes of the weight for every four inputs.
struct Ahead {
  const uint8_t* from;
  int64_t pace;
};

// A lone tile prefetches what it will need itself. Several share the prefetching of the next panel, as only the first
// of them waits for memory.
inline Ahead ahead_of(const uint8_t* panel, int64_t words, int64_t tile, int64_t tiles) {
  if (tiles == 1) return {panel + kDistance, kStepBytes};
  const int64_t pace = (kStepBytes + tiles - 1) / tiles;
  return {panel + words * (kStepBytes + tile * pace), pace};
}

// Not inlined: one copy serves both types of activations.
template <int kRows>
__attribute__((noinline)) void multiply(const uint8_t* panel, const Rounded& x, int64_t first, Ahead ahead,
                                        Floats (&sums)[kRows][kWide]) {
  const int8_t* values = x.values.data() + first * x.words * kStep;
  const float* scales = x.scales.data() + first * x.groups;
  const int32_t* offsets = x.offsets.data() + first * x.groups;
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) sums[r][v] = Floats{};
  for (int64_t begin = 0; begin < x.words; begin += kGroup / kStep) {
    Ints exact[kRows][kWide];
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWide; ++v) exact[r][v] = Ints{} + offsets[r];
    const int64_t end = std::min(begin + kGroup / kStep, x.words);
    for (int64_t word = begin; word < end; ++word) {
      Ints w[kWide];
      for (int v = 0; v < kWide; ++v) w[v] = load<Ints>(panel + v * sizeof(Ints));
      __builtin_prefetch(ahead.from), __builtin_prefetch(ahead.from + ahead.pace / 2);
      for (int r = 0; r < kRows; ++r) {
        const Ints four = Ints{} + load<int32_t>(values + r * kStep);
        for (int v = 0; v < kWide; ++v) exact[r][v] = dot(exact[r][v], w[v], four);
      }
      panel += kStepBytes, values += kRows * kStep, ahead.from += ahead.pace;
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWide; ++v)
        sums[r][v] = sums[r][v] + __builtin_convertvector(exact[r][v], Floats) * scales[r];
    scales += kRows, offsets += kRows;
  }
}

template <int kRows, typename T>
void compute_rows(const Int8Call& call, const Rounded& x, int64_t first, int64_t rows, int64_t panel, Ahead ahead,
                  const Target<T>& to) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return compute_rows<kRows - 1>(call, x, first, rows, panel, ahead, to);
  }
  Floats sums[kRows][kWide];
  multiply<kRows>(call.panels + panel * x.words * kStepBytes, x, first, ahead, sums);
  for (int r = 0; r < kRows; ++r) put(to, call.scales, call.bias, first + r, panel, sums[r]);
}

template <typename T>
void compute_tile(const Int8Call& call, const Rounded& x, int64_t rows, int64_t tile, int64_t panel,
                  const Target<T>& to) {
  const int64_t first = tile_begin<kTile>(rows, tile), count = tile_begin<kTile>(rows, tile + 1) - first;
  const Ahead ahead = ahead_of(call.panels + panel * x.words * kStepBytes, x.words, tile, tiles_of<kTile>(rows));
  compute_rows<kTile>(call, x, first, count, panel, ahead, to);
}

template <typename T>
void compute_pieces(const std::vector<Piece<T, Int8Call>>& pieces) {
  static thread_local std::vector<Rounded> rounded;
  if (rounded.size() < pieces.size()) rounded.resize(pieces.size());
  Rounded* shared = rounded.data();
  for (const auto& piece : pieces) shared++->reserve(piece.rows, piece.call->inputs);
  shared = rounded.data();
  const auto round = [&](int64_t i, int64_t tile) {
    const Piece<T, Int8Call>& piece = pieces[i];
    const int64_t first = tile_begin<kTile>(piece.rows, tile), end = tile_begin<kTile>(piece.rows, tile + 1);
    const int64_t stride = piece.call->stride;
    round_tile(piece.x + first * stride, stride, first, end - first, piece.call->inputs, shared[i]);
  };
  over_panels(pieces, round, [&](int64_t i, int64_t panel) {
    const Piece<T, Int8Call>& piece = pieces[i];
    for (int64_t tile = 0; tile < piece.tiles; ++tile)
      compute_tile(*piece.call, shared[i], piece.rows, tile, panel, piece.to);
  });
}

}  // namespace

extern "C" {

void quire_int8_linear(const Int8Call* call) { quire_int8_grouped(call, 1); }

// The rows of the weight that `channels` names, as numbers.
void quire_int8_rows(const uint8_t* panels, const float* scales, const int64_t* channels, void* out, int64_t rows,
                     int64_t inputs, int64_t outputs, int64_t bf16) {
  const int64_t words = (inputs + kStep - 1) / kStep, half = (outputs + 1) / 2;
  const auto run = [&](auto type) {
    using T = decltype(type);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t side = channels[r] / half, place = channels[r] % half, panel = place / kSide, lane = place % kSide;
      const uint8_t* from = panels + panel * words * kStepBytes + (side * kSide + lane) * kStep;
      const float scale = scales[(panel * 2 + side) * kSide + lane];
      for (int64_t d = 0; d < inputs; d += kLanes) {
        float lanes[kLanes] = {};
        for (int64_t i = d; i < std::min<int64_t>(inputs, d + kLanes); ++i)
          lanes[i - d] = (float(from[i / kStep * kStepBytes + i % kStep]) - 128) * scale;
        write_some((T*)out + r * inputs + d, read(lanes), inputs - d);
      }
    }
  };
  bf16 ? run(Bf16{}) : run(float{});
}

void quire_int8_grouped(const Int8Call* calls, int64_t count) {
  over_blocks<kTile>(calls, count, [](const auto& pieces) { compute_pieces(pieces); });
}
}
