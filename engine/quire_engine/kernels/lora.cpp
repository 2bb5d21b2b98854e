// What LoRA adapters add to a product: out += (x A^T) B, for each row of x with the A and B of the adapter in its slot.
// Callers check shapes and bounds.
//
// Rows of one slot are taken a few at a time (a tile), so that the adapter's numbers are read once for all of them. A
// row's sums are in an order of its own: neither its tile nor the threads change a bit of what it gets.

#include <algorithm>

#include "vectors.h"

struct LoraPlan {  // field by field as in bindings.py
  const int64_t* rows;   // of x that have an adapter, those of one slot behind each other
  const int64_t* tiles;  // [count][3]: the slot, and where its rows begin and end in `rows`
  int64_t count;
};

struct LoraCall {  // field by field as in bindings.py
  const void *x, *a, *b;  // a [slots][parts * max_rank][inputs], b [slots][max_rank][outputs]
  void* out;
  const int64_t *ranks, *columns;  // ranks [slots][parts], 0 for a part as it is; columns [parts + 1]: where each begins
  const LoraPlan* plan;
  int64_t x_stride, out_stride, inputs, outputs, parts, max_rank, bf16, threads;
};

namespace {

constexpr int kTile = 4;      // rows: as in lora_kernel.py
constexpr int kRanks = 4;     // of an adapter that are multiplied at once
constexpr int kMostRank = 512;
constexpr int64_t kWorthSharing = 1 << 16;  // below so many products, waking threads costs more than they save

// The sum of a vector's lanes, halves added to halves: a chain of additions would take longer than the products.
template <int... i>
inline float folded(Floats v, std::integer_sequence<int, i...>) {
  if (kLanes >= 16) v = v + SHUFFLE(v, v, (i ^ 8) % kLanes...);
  if (kLanes >= 8) v = v + SHUFFLE(v, v, (i ^ 4) % kLanes...);
  v = v + SHUFFLE(v, v, (i ^ 2)...);
  v = v + SHUFFLE(v, v, (i ^ 1)...);
  return v[0];
}

// low[row][j] for rows of x and `ranks` rows of a.
template <typename T, int rows, int ranks>
void shrink(const T* const* x, const T* a, int64_t inputs, float (*low)[kMostRank]) {
  constexpr int64_t step = sizeof(Words) / sizeof(T);
  Floats sums[rows][ranks] = {};
  const auto add = [&](int64_t k, int64_t left) {
    Words numbers[ranks];
    for (int j = 0; j < ranks; ++j) {
      numbers[j] = Words{};
      std::memcpy(&numbers[j], a + j * inputs + k, left * sizeof(T));
    }
    for (int r = 0; r < rows; ++r) {
      Words some{};
      std::memcpy(&some, x[r] + k, left * sizeof(T));
      for (int j = 0; j < ranks; ++j) sums[r][j] = fused(sums[r][j], some, numbers[j], T{});
    }
  };
  int64_t k = 0;
  for (; k + step <= inputs; k += step) add(k, step);
  if (k < inputs) add(k, inputs - k);
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < ranks; ++j) low[r][j] = folded(sums[r][j], Lanes{});
}

// out[row][c] += the sum of low[row][j] * b[j][c], for the columns of one part.
template <typename T, int rows>
void expand(float (*low)[kMostRank], int64_t rank, const T* b, int64_t outputs, int64_t columns, T* const* out) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    Floats sums[rows] = {};
    for (int64_t j = 0; j < rank; ++j) {
      const Floats numbers = read_some(b + j * outputs + c, columns - c);
      for (int r = 0; r < rows; ++r) sums[r] = sums[r] + low[r][j] * numbers;
    }
    for (int r = 0; r < rows; ++r)
      write_some(out[r] + c, read_some(out[r] + c, columns - c) + sums[r], columns - c);
  }
}

template <typename T, int rows>
void add_tile(const LoraCall& call, int64_t slot, const int64_t* row) {
  if constexpr (rows > 0) {
    const T *x[rows], *a = (const T*)call.a + slot * call.parts * call.max_rank * call.inputs;
    const T* b = (const T*)call.b + slot * call.max_rank * call.outputs;
    float low[rows][kMostRank];
    for (int r = 0; r < rows; ++r) x[r] = (const T*)call.x + row[r] * call.x_stride;
    for (int64_t part = 0; part < call.parts; ++part) {
      const int64_t rank = call.ranks[slot * call.parts + part], first = call.columns[part];
      if (!rank) continue;
      int64_t j = 0;
      const auto from = [&](int64_t j) { return (float(*)[kMostRank])(&low[0][j]); };
      for (; j + kRanks <= rank; j += kRanks) shrink<T, rows, kRanks>(x, a + j * call.inputs, call.inputs, from(j));
      for (; j < rank; ++j) shrink<T, rows, 1>(x, a + j * call.inputs, call.inputs, from(j));
      T* out[rows];
      for (int r = 0; r < rows; ++r) out[r] = (T*)call.out + row[r] * call.out_stride + first;
      expand<T, rows>(low, rank, b + first, call.outputs, call.columns[part + 1] - first, out);
      a += rank * call.inputs;
    }
  }
}

template <typename T>
void add_rows(const LoraCall& call, int64_t slot, const int64_t* row, int64_t rows) {
  switch (rows) {
    case 1: return add_tile<T, 1>(call, slot, row);
    case 2: return add_tile<T, 2>(call, slot, row);
    case 3: return add_tile<T, 3>(call, slot, row);
    default: return add_tile<T, kTile>(call, slot, row);
  }
}

}  // namespace

extern "C" void quire_lora(const LoraCall* call) {
  const LoraPlan& plan = *call->plan;
  const int64_t products = plan.count * kTile * call->max_rank * (call->parts * call->inputs + call->outputs);
#pragma omp parallel for schedule(static) num_threads(int(call->threads)) if (products > kWorthSharing)
  for (int64_t i = 0; i < plan.count; ++i) {
    const int64_t *tile = plan.tiles + 3 * i, rows = tile[2] - tile[1];
    if (call->bf16)
      add_rows<Bf16>(*call, tile[0], plan.rows + tile[1], rows);
    else
      add_rows<float>(*call, tile[0], plan.rows + tile[1], rows);
  }
}
