// Products with a weight that never changes: y = x W^T + bias, and silu(gate) * up of it. Callers check shapes and
// bounds.
//
// The weight is packed once into panels of two vectors of outputs. Its rows become columns of 32-bit words: one number
// in fp32, two neighbours in bf16. A tile is some rows of x against one panel, summed in registers over all inputs in
// their order. So an output depends on its row of x alone, bit for bit: neither the number of rows, nor how they fall
// into tiles, nor the threads change an order of summation.
//
// Where the processor has no products of bf16, inputs are widened to fp32 once for all panels, and each word of a weight
// once for all rows of a tile. Products of bf16 are exact in fp32, so the sums are the same bits.

#include <algorithm>
#include <vector>

#include "products.h"
#include "vectors.h"

namespace {

constexpr int kSpan = 2 * kLanes;  // outputs in a panel
// Rows in a tile: as many as leave registers for a panel's vectors and an input.
#ifdef __AVX512F__
constexpr int kMostRows = 14;
#else
constexpr int kMostRows = 6;
#endif
constexpr int64_t kDepth = 768;             // words: so much of a panel stays in the second cache
constexpr int64_t kGroupBytes = 1 << 19;    // of x, which stay there while the panels pass by
constexpr int kMostTiles = 12;              // in a group of rows
constexpr int64_t kAhead = 1 << 13;         // bytes of a panel between what is read and what is prefetched
constexpr int64_t kWorthSharing = 1 << 16;  // below so many products, waking threads costs more than they save

// How a tile reads inputs of type T: `kParts` numbers for each word of a weight, which it multiplies as `Element`.
template <typename T>
struct Inputs {
  static constexpr int kParts = 1;
  using Element = T;
};
#ifndef __AVX512BF16__
template <>
struct Inputs<Bf16> {
  static constexpr int kParts = 2;
  using Element = float;
};
#endif

int64_t words_of(const LinearLayer& layer) { return layer.bf16 ? (layer.inputs + 1) / 2 : layer.inputs; }
int64_t panels_of(const LinearLayer& layer) { return (layer.outputs + kSpan - 1) / kSpan; }

// The first output of a panel's vector. Where gate and up halves divide evenly, a panel has one vector of each.
int64_t column_of(const LinearLayer& layer, int64_t panel, int vector) {
  return layer.paired ? vector * (layer.outputs / 2) + panel * kLanes : panel * kSpan + vector * kLanes;
}

// The words of one vector's rows, one after the other, to every second vector of `packed`.
template <typename T>
void pack_vector(const T* weight, int64_t inputs, int64_t outputs, uint32_t* packed) {
  const int64_t whole = inputs * sizeof(T) / 4;
  int64_t w = 0;
  if (outputs >= kLanes)
    for (; w + kLanes <= whole; w += kLanes) {
      Words square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load<Words>(weight + i * inputs + w * 4 / sizeof(T));
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(packed + (w + i) * kSpan, square[i]);
    }
  for (; w * int64_t(4 / sizeof(T)) < inputs; ++w)
    for (int i = 0; i < kLanes; ++i) {
      const int64_t k = w * 4 / sizeof(T);
      uint32_t word = 0;  // also past the last input and the last output
      if (i < outputs) std::memcpy(&word, weight + i * inputs + k, std::min<int64_t>(4, (inputs - k) * sizeof(T)));
      packed[w * kSpan + i] = word;
    }
}

// One of `parts` numbers of each word of a weight, in a form that can be multiplied.
template <int parts>
inline Words part_of(Words weight, int part) {
  if constexpr (parts == 1) return weight;
  return part == 0 ? weight << 16 : weight & 0xffff0000u;
}

// sums[rows][2] of x[rows][depth] against a panel, going on from what they are. `ahead` is what will be read next from
// memory: each word of depth prefetches `pace` more bytes of it, so that the products hide the latency.
template <typename T, int rows>
void tile(const char* x, int64_t stride, const uint32_t* panel, int64_t depth, const char* ahead, int64_t pace,
          Floats* sums) {
  constexpr int kParts = Inputs<T>::kParts;
  constexpr typename Inputs<T>::Element kElement{};
  Floats sum[rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) sum[r][0] = sums[2 * r], sum[r][1] = sums[2 * r + 1];
  for (const uint32_t* end = panel + depth * kSpan; panel < end; panel += kSpan, x += 4 * kParts, ahead += pace) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + 64, 0, 2);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const Words first = part_of<kParts>(load<Words>(panel), part);
      const Words second = part_of<kParts>(load<Words>(panel + kLanes), part);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const Words input = Words{} + load<uint32_t>(x + r * stride + 4 * part);
        sum[r][0] = fused(sum[r][0], input, first, kElement);
        sum[r][1] = fused(sum[r][1], input, second, kElement);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) sums[2 * r] = sum[r][0], sums[2 * r + 1] = sum[r][1];
}

template <typename T, int... r>
auto tile_of(int64_t rows, std::integer_sequence<int, r...>) {
  static constexpr decltype(&tile<T, 1>) kTiles[] = {&tile<T, r + 1>...};
  return kTiles[rows - 1];
}

// One call. Rows fall into tiles of nearly one size, and tiles into groups whose inputs stay in the second cache. Work
// is numbered by group, panel and tile, the tile fastest, and each thread takes a stretch of it.
template <typename T>
class Product {
 public:
  explicit Product(const LinearLayer& layer)
      : layer_(layer), out_((T*)layer.out), rows_(layer.rows), words_(words_of(layer)), panels_(panels_of(layer)),
        tiles_((layer.rows + kMostRows - 1) / kMostRows),
        group_(std::clamp<int64_t>(kGroupBytes / (kMostRows * kWord * std::min(words_, kDepth)), 1, kMostTiles)) {}

  int64_t size() const { return rows_ * panels_ * kSpan * words_; }

  // One of `parts` that are equal.
  void run(int64_t part, int64_t parts) {
    const int64_t all = tiles_ * panels_;
    stretch(all * part / parts, all * (part + 1) / parts);
  }

 private:
  void stretch(const int64_t begin, const int64_t end) {
    for (int64_t item = begin; item < end;) {
      const int64_t group = item / (group_ * panels_), within = item - group * group_ * panels_;
      const int64_t size = std::min(group_, tiles_ - group * group_), panel = within / size, tile = within % size;
      const int64_t count = std::min(size - tile, end - item);
      if (item == begin || within == 0) find_inputs(group * group_, size);
      against(panel, group * group_ + tile, count);
      item += count;
    }
  }

  // Has x_ and stride_ say where tiles find the inputs of a group.
  void find_inputs(int64_t first, int64_t size) {
    x_ = (const char*)layer_.x, stride_ = layer_.stride * sizeof(T);
    if constexpr (kWord != 4) {
      static thread_local std::vector<float> widened;
      const int64_t row = row_of(first), rows = row_of(first + size) - row, inputs = 2 * words_;
      widened.resize(rows * inputs);
      for (int64_t r = 0; r < rows; ++r) {
        const T* from = (const T*)(x_ + (row + r) * stride_);
        float* to = widened.data() + r * inputs;
        int64_t k = 0;
        for (; k + kLanes <= layer_.inputs; k += kLanes) write(to + k, read(from + k));
        for (; k < inputs; ++k) to[k] = k < layer_.inputs ? read_some(from + k, 1)[0] : 0.f;
      }
      stride_ = inputs * sizeof(float), x_ = (const char*)widened.data() - row * stride_;
    }
  }

  // Tiles against one panel, a part of the depth after the other.
  void against(int64_t panel, int64_t first, int64_t count) const {
    Floats sums[kMostTiles * kMostRows * 2];
    const int64_t whole = kWord == 4 ? layer_.inputs * sizeof(T) / 4 : words_;
    const int64_t parts = std::max<int64_t>(1, (whole + kDepth - 1) / kDepth);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t from = whole * part / parts, to = whole * (part + 1) / parts;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = row_of(first + i), rows = row_of(first + i + 1) - row;
        Floats* mine = sums + (parts > 1 ? 2 * (row - row_of(first)) : 0);
        if (part == 0) std::fill(mine, mine + 2 * rows, Floats{});
        multiply(panel, row, rows, from, to, i, count, mine);
        if (to < whole) continue;
        if (whole < words_) multiply_last(panel, row, rows, mine);
        finish(panel, row, rows, mine);
      }
    }
  }

  int64_t row_of(int64_t tile) const { return rows_ * tile / tiles_; }

  void multiply(int64_t panel, int64_t row, int64_t rows, int64_t from, int64_t to, int64_t i, int64_t count,
                Floats* sums) const {
    const uint32_t* at = layer_.weight + (panel * words_ + from) * kSpan;
    const int64_t pace = (4 * kSpan + count - 1) / count;
    // Several tiles share the prefetching of what comes after this part. A lone one prefetches what it will read soon.
    const char* ahead = (const char*)at + (count == 1 ? kAhead : (to - from) * (4 * kSpan + i * pace));
    tile_of<T>(rows, Rows{})(x_ + row * stride_ + kWord * from, stride_, at, to - from, ahead, pace, sums);
  }

  // The last of an odd number of inputs in bf16 that are not widened, as words of which the other half is zero.
  void multiply_last(int64_t panel, int64_t row, int64_t rows, Floats* sums) const {
    uint32_t last[kMostRows] = {};
    for (int64_t r = 0; r < rows; ++r) std::memcpy(last + r, x_ + (row + r) * stride_ + 4 * (words_ - 1), sizeof(T));
    const uint32_t* at = layer_.weight + (panel * words_ + words_ - 1) * kSpan;
    tile_of<T>(rows, Rows{})((const char*)last, 4, at, 1, (const char*)at, 0, sums);
  }

  void finish(int64_t panel, int64_t row, int64_t rows, const Floats* sums) const {
    if (layer_.gated) return finish_gated(panel, row, rows, sums);
    for (int j = 0; j < 2; ++j) {
      const int64_t column = column_of(layer_, panel, j), left = layer_.outputs - column;
      if (left <= 0) continue;
      const Floats bias = bias_of(column, left);
      T* out = out_ + row * layer_.outputs + column;
      for (int64_t r = 0; r < rows; ++r) write_some(out + r * layer_.outputs, sums[2 * r + j] + bias, left);
    }
  }

  void finish_gated(int64_t panel, int64_t row, int64_t rows, const Floats* sums) const {
    const int64_t half = layer_.outputs / 2, column = panel * kLanes;
    const Floats gate_bias = bias_of(column, kLanes), up_bias = bias_of(half + column, kLanes);
    for (int64_t r = 0; r < rows; ++r) {
      const Floats gate = rounded(sums[2 * r] + gate_bias, T{}), up = rounded(sums[2 * r + 1] + up_bias, T{});
      write(out_ + (row + r) * half + column, rounded(silu(gate), T{}) * up);
    }
  }

  Floats bias_of(int64_t column, int64_t left) const {
    return layer_.bias ? read_some((const T*)layer_.bias + column, left) : Floats{};
  }

  using Rows = std::make_integer_sequence<int, kMostRows>;
  static constexpr int64_t kWord = 4 * Inputs<T>::kParts;  // bytes of inputs for a word of a weight
  const LinearLayer& layer_;
  const char* x_ = nullptr;
  int64_t stride_ = 0;  // bytes
  T* out_;
  const int64_t rows_, words_, panels_, tiles_, group_;
};

// Each thread takes its part of every layer, so that they end together however rows are spread over layers.
template <typename T>
void multiply_all(const LinearLayer* layers, int64_t count) {
  int64_t size = 0;
  for (int64_t i = 0; i < count; ++i) size += Product<T>(layers[i]).size();
  const int64_t parts = size < kWorthSharing ? 1 : layers->threads;
#pragma omp parallel for schedule(static) num_threads(int(parts)) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t i = 0; i < count; ++i) Product<T>(layers[i]).run(part, parts);
}

}  // namespace

extern "C" {

// From inputs, outputs and bf16: how many bytes the packed weight takes, whether the layer can be gated here, and
// whether this build multiplies as fast as the processor can.
void quire_linear_describe(LinearLayer* layer) {
  layer->bytes = panels_of(*layer) * words_of(*layer) * kSpan * 4;
  layer->paired = layer->outputs % kSpan == 0;
#if defined(__AVX512BF16__)
#if defined(__AMX_BF16__)  // matrix registers would do better than vectors
  layer->fast = !layer->bf16;
#else
  layer->fast = 1;
#endif
#elif defined(__AVX512F__)  // oneDNN has bf16 products here
  layer->fast = !layer->bf16;
#elif defined(__AVX2__)  // and here it has none
  layer->fast = 1;
#else
  layer->fast = 0;
#endif
}

// weight [outputs][inputs] -> layer->weight, `bytes` at the start of a cache line.
void quire_linear_pack(const LinearLayer* layer, const void* weight, int64_t threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(int(threads))
    for (int64_t panel = 0; panel < panels_of(*layer); ++panel)
      for (int j = 0; j < 2; ++j) {
        const int64_t column = column_of(*layer, panel, j), left = layer->outputs - column;
        uint32_t* packed = (uint32_t*)layer->weight + panel * words_of(*layer) * kSpan + j * kLanes;
        pack_vector((const T*)weight + column * layer->inputs, layer->inputs, left, packed);
      }
  };
  layer->bf16 ? run(Bf16{}) : run(float{});
}

// x [rows][inputs] -> out [rows][outputs], or [rows][outputs / 2] if gated, which rounds where product, activation and
// multiplication would, each on its own.
void quire_linear(const LinearLayer* layer) { quire_linear_grouped(layer, 1); }

void quire_linear_grouped(const LinearLayer* layers, int64_t count) {
  layers->bf16 ? multiply_all<Bf16>(layers, count) : multiply_all<float>(layers, count);
}
}
