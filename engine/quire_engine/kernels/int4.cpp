// Products of a weight in four bits with activations that are rounded to int8 on the way. Callers check shapes and
// bounds.
//
// A weight is `scale * (q - zero)`: q of 0 to 15, and for every `group` inputs (32, 64 or 128) of every channel a scale
// and a zero in fp16. Scales are relative to a power of two of the channel's, so that none is too small for fp16.
// Every kGroup activations of a row have a scale. Products and sums of integers within a group of weights are exact in
// whatever order; groups are added in fp32 in their order. So a row of the result depends on its own inputs alone, bit
// for bit.
//
// In memory a panel is, for every group of inputs, [2 sides, kSide channels] scales, the same of zeros, and for every
// eight inputs [2 sides, kSide channels, 4 bytes]: the low half of a byte is of the first four inputs.

#include "panels.h"

struct Int4Call {  // field by field as in bindings.py
  const uint8_t* panels;
  const float *scales, *bias;  // [panels, 2, kSide]
  const void* x;               // [rows, inputs], with `stride` numbers from row to row
  void* out;                   // [rows, outputs], or [rows, outputs / 2] if gated
  int64_t inputs, outputs, group, stride, rows, gated, bf16, threads;
};

namespace {

constexpr int kSpan = 2 * kSide, kEight = 2 * kStep, kEightBytes = kSpan * kStep;
constexpr int kHeaderBytes = 2 * kSpan * sizeof(uint16_t);
// Rows of a tile: besides the sums of a group there are those of kGroup inputs, and the unpacked weights.
constexpr int kTile = kLanes == 16 ? 6 : kLanes == 8 ? 3 : 2;
constexpr int64_t kSmallest = 32;  // inputs in a group, at least

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

// Sums of kSmallest products of q and x. Without an instruction for four of them, and with one for two, 16 bits are
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
// the other's, and so for the scale of every kGroup inputs, and for the sum of every group of the weight's.
struct Activations {
  int64_t words, scaled, groups;
  std::vector<int8_t> values;
  std::vector<float> scales, sums;

  void reserve(int64_t rows, int64_t inputs, int64_t group) {
    groups = (inputs + group - 1) / group, words = groups * group / kStep, scaled = (inputs + kGroup - 1) / kGroup;
    if (int64_t(values.size()) < rows * words * kStep) values.resize(rows * words * kStep);
    if (int64_t(scales.size()) < rows * scaled) scales.resize(rows * scaled);
    if (int64_t(sums.size()) < rows * groups) sums.resize(rows * groups);
  }
};

// kGroup inputs of one row or what is left of them: returns the scale. What is not finite makes a scale that is not
// finite, and so does its row.
template <typename T>
inline float round_group(const T* x, int64_t count, int64_t padded, int64_t group, int8_t* values, float* sums,
                         int64_t rows) {
  const float most = magnitude(x, count);
  const bool vanishes = most < 1e-35f;
  const float inverse = vanishes ? 0.f : 127.f / most;
  int8_t bytes[kGroup + kLanes] = {};
  for (int64_t first = 0; first < padded; first += group, sums += rows) {
    Words total{};  // what is not finite gives any bits, whose sum may overflow
    for (int64_t i = first; i < std::min(first + group, count); i += kLanes) {
      // 1.5 * 2^23: the low bits now hold the number rounded to an integer, ties to even.
      const Ints bits = (Ints)(read_some(x + i, count - i) * inverse + 12582912.f);
      total = total + ((Words)bits - 0x4b400000u);
      store(bytes + i, low_bytes(bits));
    }
    *sums = float(int32_t(fold(total, [](Words a, Words b) { return a + b; }, Lanes{})[0]));
  }
  for (int64_t i = 0; i < padded; i += kStep) std::memcpy(values + i / kStep * rows * kStep, bytes + i, kStep);
  return vanishes ? 0.f : most / 127.f;
}

template <typename T>
void round_tile(const T* x, const Int4Call& call, int64_t first, int64_t rows, Activations& to) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < to.scaled; ++g) {
      const int64_t begin = g * kGroup;
      int8_t* values = to.values.data() + (first * to.words + begin / kStep * rows + r) * kStep;
      float* sums = to.sums.data() + first * to.groups + begin / call.group * rows + r;
      const int64_t padded = std::min(kGroup, to.words * kStep - begin);
      to.scales[first * to.scaled + g * rows + r] = round_group(
          x + (first + r) * call.stride + begin, std::min(kGroup, call.inputs - begin), padded, call.group, values,
          sums, rows);
    }
}

int64_t group_bytes(int64_t group) { return kHeaderBytes + group / kEight * kEightBytes; }

// Where a tile prefetches from: `pace` bytes for every eight inputs.
struct Fetch {
  const uint8_t* from;
  int64_t pace;
};

// A lone tile prefetches what it will need itself. Several share the prefetching of the next panel, as only the first
// of them waits for memory.
inline Fetch fetch_of(const uint8_t* panel, int64_t bytes, int64_t group, int64_t tile, int64_t tiles) {
  const int64_t pace = (group_bytes(group) + group / kEight - 1) / (group / kEight);
  if (tiles == 1) return {panel + kDistance, pace};
  const int64_t shared = (pace + tiles - 1) / tiles;
  return {panel + bytes + tile * (bytes / tiles), shared};
}

// Not inlined: one copy serves both types of activations.
template <int kRows>
__attribute__((noinline)) void multiply(const uint8_t* panel, const Activations& x, int64_t group, int64_t first,
                                        Fetch fetch, Floats (&sums)[kRows][kWide]) {
  const int8_t* values = x.values.data() + first * x.words * kStep;
  const float* scales = x.scales.data() + first * x.scaled;
  const float* totals = x.sums.data() + first * x.groups;
  const int64_t per_scale = kGroup / group;
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kWide; ++v) sums[r][v] = Floats{};
  for (int64_t g = 0; g < x.groups; scales += kRows) {
    Floats parts[kRows][kWide] = {};
    for (const int64_t end = std::min(g + per_scale, x.groups); g < end; ++g, totals += kRows) {
      const uint8_t* header = panel;
      panel += kHeaderBytes;
      for (int64_t done = 0; done < group; done += kSmallest) {
        Ints exact[kRows][kWide] = {};
        for (int step = 0; step < kSmallest / kEight; ++step) {
          Ints low[kWide], high[kWide];
          for (int v = 0; v < kWide; ++v) {
            const Words both = load<Words>(panel + v * sizeof(Words));
            low[v] = (Ints)(both & 0x0f0f0f0fu), high[v] = (Ints)(both >> 4 & 0x0f0f0f0fu);
          }
          __builtin_prefetch(fetch.from), __builtin_prefetch(fetch.from + fetch.pace / 3);
          __builtin_prefetch(fetch.from + fetch.pace * 2 / 3);
          for (int r = 0; r < kRows; ++r) {
            const Ints a = Ints{} + load<int32_t>(values + r * kStep);
            const Ints b = Ints{} + load<int32_t>(values + (kRows + r) * kStep);
            for (int v = 0; v < kWide; ++v)
              exact[r][v] = add_products(add_products(exact[r][v], low[v], a), high[v], b);
          }
          panel += kEightBytes, values += 2 * kRows * kStep, fetch.from += fetch.pace;
        }
        // Scale and zero of a group are applied to each part of it, so that groups of every size have one loop.
        for (int v = 0; v < kWide; ++v) {
          const Floats scale = halves(header + v * sizeof(Halves));
          const Floats shift = scale * halves(header + kHeaderBytes / 2 + v * sizeof(Halves));
          for (int r = 0; r < kRows; ++r) {
            parts[r][v] = parts[r][v] + scale * __builtin_convertvector(whole(exact[r][v]), Floats);
            if (done == 0) parts[r][v] = parts[r][v] - shift * totals[r];
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kWide; ++v) sums[r][v] = sums[r][v] + parts[r][v] * scales[r];
  }
}

template <int kRows, typename T>
void compute_rows(const Int4Call& call, const Activations& x, const uint8_t* weights, int64_t first, int64_t rows,
                  int64_t panel, Fetch fetch, const Target<T>& to) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return compute_rows<kRows - 1>(call, x, weights, first, rows, panel, fetch, to);
  }
  Floats sums[kRows][kWide];
  multiply<kRows>(weights, x, call.group, first, fetch, sums);
  for (int r = 0; r < kRows; ++r) put(to, call.scales, call.bias, first + r, panel, sums[r]);
}

template <typename T>
void compute_block(const Int4Call& call, const T* x, int64_t rows, const Target<T>& to) {
  static thread_local Activations rounded;
  Activations& shared = rounded;
  shared.reserve(rows, call.inputs, call.group);
  const int64_t tiles = tiles_of<kTile>(rows), panels = (to.half + kSide - 1) / kSide;
  const int64_t panel_bytes = shared.groups * group_bytes(call.group);
  const auto round = [&](int64_t tile) {
    const int64_t first = tile_begin<kTile>(rows, tile);
    round_tile(x, call, first, tile_begin<kTile>(rows, tile + 1) - first, shared);
  };
  const auto compute = [&](int64_t panel) {
    const uint8_t* weights = call.panels + panel * panel_bytes;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = tile_begin<kTile>(rows, tile), count = tile_begin<kTile>(rows, tile + 1) - first;
      const Fetch fetch = fetch_of(weights, panel_bytes, call.group, tile, tiles);
      compute_rows<kTile>(call, shared, weights, first, count, panel, fetch, to);
    }
  };
  const bool alone = call.threads == 1 || rows * call.inputs < kWorthSharing;
  for (int64_t tile = 0; alone && tile < tiles; ++tile) round(tile);
  if (call.threads == 1) {  // entering a parallel region costs as much as a small product
    for (int64_t panel = 0; panel < panels; ++panel) compute(panel);
    return;
  }
#pragma omp parallel num_threads(int(call.threads))
  {
    if (!alone) {
#pragma omp for
      for (int64_t tile = 0; tile < tiles; ++tile) round(tile);
    }
#pragma omp for nowait
    for (int64_t panel = 0; panel < panels; ++panel) compute(panel);
  }
}

}  // namespace

extern "C" void quire_int4_linear(const Int4Call* call) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const int64_t half = (call->outputs + 1) / 2, width = call->gated ? half : call->outputs;
    for (int64_t first = 0; first < call->rows; first += kBlock) {
      const Target<T> to{(T*)call->out + first * width, width, half, bool(call->gated)};
      compute_block(*call, (const T*)call->x + first * call->stride, std::min(kBlock, call->rows - first), to);
    }
  };
  call->bf16 ? run(Bf16{}) : run(float{});
}
