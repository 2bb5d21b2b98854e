// Paged attention, for bf16 and fp32, over KV memory of the same or of int8. Callers check shapes and bounds. Hidden scores are masked without infinities.

#include <algorithm>
#include <vector>

#include "tiles.h"

namespace {

#ifdef __AVX512F__
constexpr int kRows = 6;  // query rows that one pass over a key tile serves from registers
#else
constexpr int kRows = 4;
#endif
constexpr int kMostFew = 8;     // query rows that take their keys and values straight from the pages
constexpr int kTileRows = 128;  // query rows that share the work of rearranging a key tile
constexpr float kHidden = -1e30f;
constexpr double kLog2e = 1.4426950408889634;

// A product that is rounded before anything is added to it: compilers may fuse the two in one copy of a sum and not in
// another.
inline Floats settled(Floats f) {
#if defined(__AVX512F__)
  asm("" : "+v"(f));
#elif defined(__x86_64__)
  asm("" : "+x"(f));
#elif defined(__aarch64__)
  asm("" : "+w"(f));
#endif
  return f;
}

// c[kRows][n vectors] = keep[row] * c + a[kRows][depth] * b[depth][n vectors], all strides in words.
template <typename T, int n>
inline void product(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth,
                    float* c, int64_t c_stride, const float* keep) {
  Floats sum[kRows][n];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < n; ++j) sum[r][j] = keep ? settled(read(c + r * c_stride + j * kLanes) * keep[r]) : Floats{};
  for (int64_t k = 0; k < depth; ++k) {
    Words column[n];
    for (int j = 0; j < n; ++j) column[j] = load<Words>(b + k * b_stride + j * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Words x = Words{} + a[r * a_stride + k];
      for (int j = 0; j < n; ++j) sum[r][j] = fused(sum[r][j], x, column[j], T{});
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < n; ++j) write(c + r * c_stride + j * kLanes, sum[r][j]);
}

template <typename T>
void multiply(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t columns, int64_t depth, float* c,
              const float* keep) {
  int64_t j = 0;
  for (; j + kVectors * kLanes <= columns; j += kVectors * kLanes)
    product<T, kVectors>(a, a_stride, b + j, columns, depth, c + j, columns, keep);
  for (; j < columns; j += kLanes) product<T, 1>(a, a_stride, b + j, columns, depth, c + j, columns, keep);
}

// Probabilities take the place of their scores, in the element type of the values.
inline void put(float* scores, int v, Floats p, float) { write(scores + v * kLanes, p); }
inline void put(float* scores, int v, Floats p, Bf16) { write((Bf16*)scores + v * kLanes, p); }

// The products below serve few rows straight from a tile's rows. Each sum runs in the order of `product` above, over
// words for a score and over keys for an output, so that a row gets the same bits from both.

// scores[rows][kKeys] of `many` runs of the tile: so many that no sum has to wait for itself.
template <typename T, int rows, int many>
inline void score(const uint32_t* query, const KeyTile& tile, const KeyTile& ahead, int run, int64_t words,
                  float* scores) {
  constexpr int parts = kRun / kLanes, n = many * parts;
  const int64_t row_bytes = 4 * words, step_bytes = 4 * kStep * kLanes;
  Floats sum[rows][n] = {};
  for (int64_t w = 0; w < words; w += kStep) {
    for (int v = 0; v < n; ++v) {
      const int at = run + v / parts, part = v % parts;
      fetch(ahead.keys[at] + (part * words + w) / kStep * step_bytes, step_bytes);
      Words column[kStep];
      columns(tile.keys[at] + part * kLanes * row_bytes + 4 * w, row_bytes, column);
      for (int i = 0; i < kStep; ++i)
        for (int r = 0; r < rows; ++r) sum[r][v] = fused(sum[r][v], Words{} + query[r * words + w + i], column[i], T{});
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < n; ++v) write(scores + r * kKeys + run * kRun + v * kLanes, sum[r][v]);
}

// What one step over keys takes from a run's rows: one key in fp32, two in bf16, n vectors of their columns.
template <int n>
inline void take(const char* row, int64_t, Words (&column)[n], float) {
  for (int j = 0; j < n; ++j) column[j] = load<Words>(row + 4 * j * kLanes);
}
template <int n>
inline void take(const char* row, int64_t row_bytes, Words (&column)[n], Bf16) {
  for (int j = 0; j < n; j += 2, row += 4 * kLanes) pairs(row, row + row_bytes, column[j], column[j + 1]);
}

// sums[rows][n vectors] = keep[row] * sums + probabilities[rows][kKeys] * values of the tile's first `runs` runs.
template <typename T, int rows, int n>
inline void weigh(const uint32_t* probabilities, const KeyTile& tile, const KeyTile& ahead, int runs, int64_t from,
                  int64_t row_bytes, const float* keep, float* sums, int64_t stride) {
  constexpr int keys = 4 / sizeof(T);  // in a word of probabilities
  Floats sum[rows][n];
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < n; ++j) sum[r][j] = settled(read(sums + r * stride + j * kLanes) * keep[r]);
  for (int run = 0; run < runs; ++run) {
    const char *row = tile.values[run] + from, *next = ahead.values[run] + from;
    const uint32_t* p = probabilities + run * kRun / keys;
    for (int k = 0; k < kRun / keys; ++k, row += keys * row_bytes, next += keys * row_bytes) {
      Words column[n];
      take(row, row_bytes, column, T{});
      for (int i = 0; i < keys; ++i) fetch(next + i * row_bytes, n * kLanes * sizeof(T));
      for (int r = 0; r < rows; ++r)
        for (int j = 0; j < n; ++j) sum[r][j] = fused(sum[r][j], Words{} + p[r * kKeys + k], column[j], T{});
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < n; ++j) write(sums + r * stride + j * kLanes, sum[r][j]);
}

// 2^x for x <= 0, to 2e-7. NaN stays NaN.
inline Floats power(Floats x) {
#ifdef __AVX512F__
  const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats f = x - (Floats)whole;
  Floats p = f * 1.5353362e-4f + 1.3398874e-3f;
  p = p * f + 9.6184373e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314720e-1f;
  p = p * f + 1.f;
  return (Floats)_mm512_scalef_ps((__m512)p, whole);
#else
  return exp2(x);
#endif
}

// cap * tanh(x / cap), for x and cap in powers of two.
inline Floats capped(Floats x, float cap) {
  const Floats far = x < 0.f ? x : -x;
  const Floats e = power(far * float(2 * kLog2e) / cap);
  const Floats most = settled((1.f - e) / (1.f + e) * cap);
  return x < 0.f ? -most : most;
}

// Rows of KV memory in int8, as `kv_rows.py` defines them: integers, and behind them the float that they are to be
// multiplied by. The integers are exact in bf16 too, so a tile holds them as numbers of T, and their scales go into the
// scores and the probabilities.

typedef int8_t Bytes __attribute__((vector_size(kLanes)));

template <typename T>
inline void quantize_row(const T* from, int64_t dim, char* to) {
  Floats most{}, sound{};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Floats x = read_some(from + d, dim - d);
    most = larger(x < 0.f ? -x : x, most);
    sound = sound + x * 0.f;  // stays zero but for infinity and NaN
  }
  const bool finite = total(sound) == 0.f;
  const float scale = finite ? largest(most, Lanes{}) / 127.f : NAN;
  const float divisor = scale > 0.f ? scale : INFINITY;
  for (int64_t d = 0; d < dim; d += kLanes) {
    Floats x = finite ? read_some(from + d, dim - d) / divisor : Floats{};
    x = (x + 12582912.f) - 12582912.f;  // to the nearest integer, ties to even
    x = x > 127.f ? Floats{} + 127.f : x < -127.f ? Floats{} - 127.f : x;  // of a row of subnormal numbers
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(x, Ints), Bytes);
    std::memcpy(to + d, &bytes, std::min<int64_t>(dim - d, kLanes));
  }
  std::memcpy(to + dim, &scale, 4);
}

// The integers of a row as numbers of T. Returns their scale.
template <typename T>
inline float widen_row(const char* row, int64_t dim, T* to) {
  int64_t d = 0;
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == 2) {  // two vectors in one rounding, which is what takes longest
    for (; d + 32 <= dim; d += 32) {
      const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(row + d)));
      const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(row + d + 16)));
      store(to + d, _mm512_cvtne2ps_pbh(high, low));
    }
  }
#endif
  for (; d < dim; d += kLanes) {
    Bytes bytes{};
    if (dim - d >= kLanes) bytes = load<Bytes>(row + d);
    else std::memcpy(&bytes, row + d, dim - d);
    write_some(to + d, __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats), dim - d);
  }
  return load<float>(row + dim);
}

// One row of scores -> unnormalised probabilities of the keys first <= key <= last. Returns what the row's sums so far
// are to be multiplied by. A row that sees none of the keys changes nothing, so any further tiles may be passed to it.
// Scores are multiplied by the keys' own scales first, and probabilities by the values' last, where there are any. Those
// beyond `cap` approach it, unless it is 0.
template <typename T, bool all>
inline float soften(float* scores, const float* key_scales, const float* value_scales, float scale, float cap,
                    int64_t first, int64_t last, float& peak, Floats& sum) {
  constexpr int n = kKeys / kLanes;
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Floats s[n], highest = Floats{} + peak;
  Ints seen[n];
  for (int v = 0; v < n; ++v) {
    const Ints key = lane + v * kLanes;
    seen[v] = (key >= int32_t(first)) & (key <= int32_t(last));
    s[v] = read(scores + v * kLanes);
    if (key_scales) s[v] = settled(s[v] * read(key_scales + v * kLanes));
    s[v] = settled(s[v] * scale);
    if (cap > 0.f) s[v] = capped(s[v], cap);
    if (!all) s[v] = seen[v] ? s[v] : Floats{} + kHidden;
    highest = larger(highest, s[v]);
  }
  const float top = largest(highest, Lanes{});
  const float keep = power(Floats{} + (peak - top))[0];
  peak = top;
  Floats fresh{};
  for (int v = 0; v < n; ++v) {
    Floats p = power(s[v] - top);
    if (!all) p = seen[v] ? p : Floats{};
    fresh = fresh + p;
    if (value_scales) p = p * read(value_scales + v * kLanes);
    put(scores, v, p, T{});
  }
  sum = sum * keep + fresh;
  return keep;
}

// The ragged batch of one step.
struct AttentionPlan {
  const int32_t *query_indptr, *page_indptr, *page_ids, *context_lens;
  int64_t chunks;
};

// One layer of one step. Strides are in elements; a row is contiguous, and so are a head's rows in a page. Queries, keys
// and values are bf16 or fp32, and so are rows in a page unless they are int8.
struct AttentionCall {
  const char *query, *key, *value;
  char *kv, *out;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head, kv_page, kv_plane, kv_head;
  const AttentionPlan* plan;
  int64_t heads, kv_heads, head_dim, block_size, window, bf16, int8, threads;
  double scale, soft_cap;  // a soft cap of 0 is none
  const float* sinks;      // a score of each head without a key; null for none
};

// Tokens of a chunk that one KV head serves together. Its rows are these tokens times the query heads of the KV head.
struct Item {
  int32_t chunk, token, tokens, head;
};

template <typename T>
struct Attention {
  const AttentionCall& call;
  const int64_t group = call.heads / call.kv_heads;
  const int64_t row_bytes = call.head_dim * int64_t(sizeof(T)), words = row_bytes / 4;
  const int64_t columns = (call.head_dim + kLanes - 1) / kLanes * kLanes;
  const int64_t element = call.int8 ? 1 : sizeof(T), slot_bytes = call.int8 ? call.head_dim + 4 : row_bytes;
  const int64_t plane = call.kv_plane * element;  // from a key to its value

  int64_t past(int64_t chunk) const {  // tokens of the chunk's sequence before the chunk
    return call.plan->context_lens[chunk] - (call.plan->query_indptr[chunk + 1] - call.plan->query_indptr[chunk]);
  }

  int64_t first_seen(int64_t position) const { return position + 1 > call.window ? position + 1 - call.window : 0; }

  char* slot(const Item& item, int64_t position) const {
    const int64_t page = call.plan->page_ids[call.plan->page_indptr[item.chunk] + position / call.block_size];
    const int64_t row = position % call.block_size * slot_bytes;
    return call.kv + (page * call.kv_page + item.head * call.kv_head) * element + row;
  }

  void store_rows(const Item& item) const {
    for (int64_t i = item.token; i < item.token + item.tokens; ++i) {
      const int64_t token = call.plan->query_indptr[item.chunk] + i;
      const int64_t key = token * call.key_token + item.head * call.key_head;
      const int64_t value = token * call.value_token + item.head * call.value_head;
      char* to = slot(item, past(item.chunk) + i);
      if (call.int8) {
        quantize_row((const T*)call.key + key, call.head_dim, to);
        quantize_row((const T*)call.value + value, call.head_dim, to + plane);
        continue;
      }
      std::memcpy(to, call.key + key * int64_t(sizeof(T)), row_bytes);
      std::memcpy(to + plane, call.value + value * int64_t(sizeof(T)), row_bytes);
    }
  }

  int64_t end(const Item& item) const { return past(item.chunk) + item.token + item.tokens; }

  int64_t first_tile(const Item& item) const { return first_seen(past(item.chunk) + item.token) / kKeys * kKeys; }

  // Where the runs of a key tile lie: in a page, or in `copies`.
  void locate(const Item& item, int64_t begin, char* copies, KeyTile& tile) const {
    const int64_t run_bytes = kRun * row_bytes;
    for (int run = 0; run < kRuns; ++run, begin += kRun, copies += 2 * run_bytes) {
      const bool in_page = begin < end(item) && begin % call.block_size + kRun <= call.block_size;
      const char* rows = in_page ? slot(item, begin) : nullptr;
      tile.keys[run] = in_page ? rows : copies;
      tile.values[run] = in_page && begin + kRun <= end(item) ? rows + plane : copies + run_bytes;
      if (tile.keys[run] == copies) copy(item, begin, 0, copies);
      if (tile.values[run] != rows + plane) copy(item, begin, plane, copies + run_bytes);
    }
  }

  // The rows of a run, in pieces that lie in one page. Past the end lie zeros: the unused slots of a page hold
  // anything, NaN too. A key may be that, as its score is hidden; a value not, as nothing times NaN is NaN.
  void copy(const Item& item, int64_t begin, int64_t from, char* to) const {
    const int64_t last = std::min(end(item), begin + kRun);
    char* const stop = to + kRun * row_bytes;
    for (int64_t rows; begin < last; begin += rows, to += rows * row_bytes) {
      rows = std::min(last - begin, call.block_size - begin % call.block_size);
      std::memcpy(to, slot(item, begin) + from, rows * row_bytes);
    }
    std::memset(to, 0, stop - to);
  }

  // What an item is computed in, all of it starting at cache lines: a load that straddles two costs as much as both.
  struct Scratch {
    uint32_t *query, *keys, *values;
    float *sums, *scores, *masses, *peaks;
    int32_t* positions;
    char* copies;
    float *key_scales, *value_scales;  // of a tile; null where rows have none
  };

  // The same for pages of int8: all of the tile in `copies`, and its scales. What the next tile is made of is fetched
  // here, as nothing else reads the pages.
  void unpack(const Item& item, int64_t begin, const Scratch& at, KeyTile& tile, KeyTile& ahead) const {
    const int64_t run_bytes = kRun * row_bytes;
    char* copies = at.copies;
    const char* row = nullptr;
    int64_t left = 0;  // rows from `row` to the end of its page
    for (int run = 0; run < kRuns; ++run, copies += 2 * run_bytes) {
      fetch(ahead.keys[run], kRun * slot_bytes);
      fetch(ahead.values[run], kRun * slot_bytes);
      tile.keys[run] = copies;
      tile.values[run] = copies + run_bytes;
      for (int k = 0; k < kRun; ++k, row += slot_bytes, --left) {
        const int64_t key = run * kRun + k, position = begin + key;
        T *to_key = (T*)(copies + k * row_bytes), *to_value = (T*)(copies + run_bytes + k * row_bytes);
        if (position >= end(item)) {
          std::memset(to_key, 0, row_bytes);
          std::memset(to_value, 0, row_bytes);
          at.key_scales[key] = at.value_scales[key] = 0;
          continue;
        }
        if (left == 0) {
          row = slot(item, position);
          left = call.block_size - position % call.block_size;
        }
        at.key_scales[key] = widen_row(row, call.head_dim, to_key);
        at.value_scales[key] = widen_row(row + plane, call.head_dim, to_value);
      }
    }
    ahead = tile;
  }

  // The runs as far ahead of the tile's as a tile is long, in this item or the next: what is fetched during this tile.
  void foresee(const Item& item, const Item& after, int64_t begin, KeyTile& tile) const {
    const int64_t over = first_tile(after) - (end(item) + kRun - 1) / kRun * kRun;
    const char* row = call.kv;
    for (int run = 0; run < kRuns; ++run) {
      const int64_t position = begin + kKeys + run * kRun;
      if (position < end(item)) row = slot(item, position);
      else if (position + over < end(after)) row = slot(after, position + over);
      tile.keys[run] = row;
      tile.values[run] = row + plane;
    }
  }

  Scratch scratch(int64_t rows) const {
    const int64_t sizes[] = {words * rows,     words * kKeys, columns * kKeys, columns * rows,   kKeys * kMostFew,
                             kLanes * rows, rows,          rows,            2 * words * kKeys, 2 * kKeys};
    constexpr int count = sizeof sizes / sizeof *sizes;
    thread_local std::vector<uint32_t> memory;
    uint32_t* parts[count];
    int64_t need = 16;
    for (const int64_t size : sizes) need += (size + 15) / 16 * 16;
    if (int64_t(memory.size()) < need) memory.resize(need);
    uint32_t* next = reinterpret_cast<uint32_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    for (int i = 0; i < count; next += (sizes[i++] + 15) / 16 * 16) parts[i] = next;
    float* scales = call.int8 ? (float*)parts[9] : nullptr;
    return {parts[0],         parts[1],         parts[2],           (float*)parts[3],  (float*)parts[4],
            (float*)parts[5], (float*)parts[6], (int32_t*)parts[7], (char*)parts[8],  scales,
            scales ? scales + kKeys : nullptr};
  }

  // Rows of queries, and nothing seen yet.
  void begin(const Item& item, int64_t rows, int64_t padded, const Scratch& at) const {
    const int64_t token = call.plan->query_indptr[item.chunk] + item.token;
    std::memset(at.masses, 0, 4 * padded * kLanes);
    for (int64_t r = 0; r < padded; ++r) {
      const int64_t from = (token + r / group) * call.query_token + (item.head * group + r % group) * call.query_head;
      if (r < rows) std::memcpy(at.query + r * words, call.query + from * int64_t(sizeof(T)), row_bytes);
      else std::memset(at.query + r * words, 0, row_bytes);
      at.peaks[r] = kHidden;
      if (call.sinks && r < rows) {  // as if a key without a value had been seen
        at.peaks[r] = call.sinks[item.head * group + r % group] * kLog2e;
        at.masses[r * kLanes] = 1;
      }
      at.positions[r] = int32_t(past(item.chunk) + item.token + r / group);
    }
    std::memset(at.sums, 0, 4 * columns * padded);
  }

  void finish(const Item& item, int64_t rows, const Scratch& at) const {
    const int64_t token = call.plan->query_indptr[item.chunk] + item.token;
    for (int64_t r = 0; r < rows; ++r) {
      const float share = 1.f / total(read(at.masses + r * kLanes));
      const int64_t row = (token + r / group) * call.heads + item.head * group + r % group;
      T* to = (T*)call.out + row * call.head_dim;
      for (int64_t d = 0; d < call.head_dim; d += kLanes)
        write_some(to + d, read(at.sums + r * columns + d) * share, call.head_dim - d);
    }
  }

  // Scores of row r in the tile at `begin` -> probabilities. Returns what its sums so far are to be multiplied by.
  __attribute__((noinline)) float soften_row(int64_t r, int64_t begin, float* scores, const Scratch& at) const {
    const int64_t position = at.positions[r];
    const int64_t first = first_seen(position) - begin, last = position - begin;
    const bool all = first <= 0 && last >= kKeys - 1;
    const float scale = float(call.scale * kLog2e), cap = float(call.soft_cap * kLog2e);  // softmax in powers of two
    Floats mass = read(at.masses + r * kLanes);
    const auto work = all ? soften<T, true> : soften<T, false>;
    const float keep = work(scores, at.key_scales, at.value_scales, scale, cap, first, last, at.peaks[r], mass);
    write(at.masses + r * kLanes, mass);
    return keep;
  }

  // Calls work(begin, tile, ahead, runs) for each key tile of the item, of which `runs` runs have keys. `after` is what
  // this thread will most likely do next; its first keys are fetched during the last tile of this item.
  template <typename Work>
  void each_tile(const Item& item, const Item& after, const Scratch& at, const Work& work) const {
    KeyTile tile, ahead;
    for (int64_t begin = first_tile(item); begin < end(item); begin += kKeys) {
      foresee(item, after, begin, ahead);
      if (call.int8) unpack(item, begin, at, tile, ahead);
      else locate(item, begin, at.copies, tile);
      work(begin, tile, ahead, int((std::min<int64_t>(end(item) - begin, kKeys) + kRun - 1) / kRun));
    }
  }

  void attend_many(const Item& item, const Item& after) const {
    const int64_t rows = item.tokens * group, padded = (rows + kRows - 1) / kRows * kRows;
    const Scratch at = scratch(padded);
    begin(item, rows, padded, at);
    each_tile(item, after, at, [&](int64_t begin, const KeyTile& tile, const KeyTile& ahead, int) {
      const uint32_t* probabilities = (uint32_t*)at.scores;
      pack_keys(tile, ahead, words, at.keys);
      pack_values(tile, ahead, call.head_dim, columns, at.values, T{});
      for (int64_t r = 0; r < padded; r += kRows) {
        if (at.positions[r + kRows - 1] < begin || first_seen(at.positions[r]) >= begin + kKeys) continue;
        multiply<T>(at.query + r * words, words, at.keys, kKeys, words, at.scores, nullptr);
        float keep[kRows];
        for (int i = 0; i < kRows; ++i) keep[i] = soften_row(r + i, begin, at.scores + i * kKeys, at);
        multiply<T>(probabilities, kKeys, at.values, columns, kKeys * sizeof(T) / 4, at.sums + r * columns, keep);
      }
    });
    finish(item, rows, at);
  }

  template <int rows>
  void attend_few(const Item& item, const Item& after) const {
    constexpr int n = rows <= 4 ? 4 : 2, many = rows <= 4 ? 2 : 1;  // vectors of outputs and runs of keys at once
    const Scratch at = scratch(rows);
    begin(item, rows, rows, at);
    each_tile(item, after, at, [&](int64_t begin, const KeyTile& tile, const KeyTile& ahead, int runs) {
      int run = 0;
      for (; run + many <= runs; run += many) score<T, rows, many>(at.query, tile, ahead, run, words, at.scores);
      for (; run < runs; ++run) score<T, rows, 1>(at.query, tile, ahead, run, words, at.scores);
      float keep[rows];
      for (int r = 0; r < rows; ++r) keep[r] = soften_row(r, begin, at.scores + r * kKeys, at);
      const uint32_t* p = (uint32_t*)at.scores;
      int64_t d = 0;
      for (; d + n * kLanes <= columns; d += n * kLanes)
        weigh<T, rows, n>(p, tile, ahead, runs, d * sizeof(T), row_bytes, keep, at.sums + d, columns);
      for (; d < columns; d += 2 * kLanes)
        weigh<T, rows, 2>(p, tile, ahead, runs, d * sizeof(T), row_bytes, keep, at.sums + d, columns);
    });
    finish(item, rows, at);
  }

  template <int rows = 1>
  void attend(const Item& item, const Item& after) const {
    if constexpr (rows > kMostFew) attend_many(item, after);
    else if (item.tokens * group == rows && call.head_dim % (2 * kLanes) == 0) attend_few<rows>(item, after);
    else attend<rows + 1>(item, after);
  }

  std::vector<Item> items() const {
    std::vector<Item> items;
    const int32_t limit = group < kTileRows ? int32_t(kTileRows / group) : 1;
    for (int32_t chunk = 0; chunk < call.plan->chunks; ++chunk) {
      const int32_t tokens = call.plan->query_indptr[chunk + 1] - call.plan->query_indptr[chunk];
      for (int32_t token = 0; token < tokens; token += limit)
        for (int32_t head = 0; head < call.kv_heads; ++head)
          items.push_back({chunk, token, tokens - token < limit ? tokens - token : limit, head});
    }
    return items;
  }

  void run() const {
    const std::vector<Item> todo = items();
    const int64_t n = int64_t(todo.size());
#pragma omp parallel num_threads(int(call.threads)) if (n > 1)
    {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < n; ++i) store_rows(todo[i]);
      // A chunk's last tokens see the most keys; they go first, so that no thread is left with much at the end.
#pragma omp for schedule(dynamic)
      for (int64_t i = n - 1; i >= 0; --i) attend(todo[i], todo[i < call.threads ? i : i - call.threads]);
    }
  }
};

}  // namespace

extern "C" {

void quire_attention(const AttentionCall* call) {
  if (call->bf16) Attention<Bf16>{*call}.run();
  else Attention<float>{*call}.run();
}
}
