// Paged attention, for bf16 and fp32. Callers check shapes and bounds. Hidden scores are masked without infinities.

#include <vector>

#include "vectors.h"

namespace {

constexpr int kRows = 4;        // query rows that one pass over a key tile serves from registers
constexpr int kKeys = 64;       // keys in a tile: tiles start at multiples of this, wherever a chunk or a page starts
constexpr int kTileRows = 128;  // query rows that share the work of rearranging a key tile
constexpr float kHidden = -1e30f;

// c[kRows][n vectors] = keep[row] * c + a[kRows][depth] * b[depth][n vectors], all strides in words.
template <typename T, int n>
inline void product(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth,
                    float* c, int64_t c_stride, const float* keep) {
  Floats sum[kRows][n];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < n; ++j) sum[r][j] = keep ? read(c + r * c_stride + j * kLanes) * keep[r] : Floats{};
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

// Keys as rows -> packed[word][key]. Pages are scattered, which hides them from the processor's own prefetching; so the
// rows of the tile ahead are asked for here, a few at a time, as asking for all of them at once drops some.
void pack_keys(const char* const* rows, const char* const* ahead, int64_t words, uint32_t* packed) {
  for (int key = 0; key < kKeys; key += kLanes) {
    int64_t w = 0;
    for (; w + kLanes <= words; w += kLanes) {
      Words square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load<Words>(rows[key + i] + 4 * w);
      for (int i = 0; i < kLanes; ++i) __builtin_prefetch(ahead[key + i] + 4 * w);
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(packed + (w + i) * kKeys + key, square[i]);
    }
    for (; w < words; ++w)
      for (int i = 0; i < kLanes; ++i) std::memcpy(packed + w * kKeys + key + i, rows[key + i] + 4 * w, 4);
  }
}

// Values as rows -> packed[key][column] in fp32, packed[pair of keys][column] in bf16.
void pack_values(const char* const* rows, const char* const* ahead, int64_t dim, int64_t columns, uint32_t* packed,
                 float) {
  for (int key = 0; key < kKeys; ++key) {
    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(ahead[key] + 4 * d);
    std::memcpy(packed + key * columns, rows[key], 4 * dim);
  }
}
void pack_values(const char* const* rows, const char* const* ahead, int64_t dim, int64_t columns, uint32_t* packed,
                 Bf16) {
  for (int key = 0; key < kKeys; key += 2, packed += columns) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      if (2 * d % 64 == 0) {
        __builtin_prefetch(ahead[key] + 2 * d);
        __builtin_prefetch(ahead[key + 1] + 2 * d);
      }
      const Words even = __builtin_convertvector(load<Halves>(rows[key] + 2 * d), Words);
      const Words odd = __builtin_convertvector(load<Halves>(rows[key + 1] + 2 * d), Words);
      store(packed + d, even | (odd << 16));
    }
    for (; d < dim; ++d) {
      const uint16_t even = load<uint16_t>(rows[key] + 2 * d), odd = load<uint16_t>(rows[key + 1] + 2 * d);
      packed[d] = even | (uint32_t(odd) << 16);
    }
  }
}

// Probabilities take the place of their scores, in the element type of the values.
inline void put(float* scores, int v, Floats p, float) { write(scores + v * kLanes, p); }
inline void put(float* scores, int v, Floats p, Bf16) { write((Bf16*)scores + v * kLanes, p); }

// One row of scores -> unnormalised probabilities of the keys first <= key <= last. Returns what the row's sums so far
// are to be multiplied by. A row that sees none of the keys changes nothing, so it matters not which tiles it is shown.
template <typename T>
inline float soften(float* scores, float scale, int64_t first, int64_t last, float& peak, Floats& sum) {
  constexpr int n = kKeys / kLanes;
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Floats s[n], highest = Floats{} + peak;
  Ints seen[n];
  for (int v = 0; v < n; ++v) {
    const Ints key = lane + v * kLanes;
    seen[v] = (key >= int32_t(first)) & (key <= int32_t(last));
    s[v] = seen[v] ? read(scores + v * kLanes) * scale : Floats{} + kHidden;
    highest = larger(highest, s[v]);
  }
  const float top = largest(highest, Lanes{});
  const float keep = exp2(Floats{} + (peak - top))[0];
  peak = top;
  Floats fresh{};
  for (int v = 0; v < n; ++v) {
    const Floats p = seen[v] ? exp2(s[v] - top) : Floats{};
    fresh = fresh + p;
    put(scores, v, p, T{});
  }
  sum = sum * keep + fresh;
  return keep;
}

// One layer of one step. Strides are in elements; a row is contiguous, and so are a head's rows in a page.
struct AttentionCall {
  const char *query, *key, *value;
  char *kv, *out;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head, kv_page, kv_plane, kv_head;
  const int32_t *query_indptr, *page_indptr, *page_ids, *context_lens;
  int64_t chunks, heads, kv_heads, head_dim, block_size, window, bf16, threads;
  double scale;
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
  const int64_t plane = call.kv_plane * int64_t(sizeof(T));  // from a key to its value

  int64_t past(int64_t chunk) const {  // tokens of the chunk's sequence before the chunk
    return call.context_lens[chunk] - (call.query_indptr[chunk + 1] - call.query_indptr[chunk]);
  }

  int64_t first_seen(int64_t position) const { return position + 1 > call.window ? position + 1 - call.window : 0; }

  char* slot(const Item& item, int64_t position) const {
    const int64_t page = call.page_ids[call.page_indptr[item.chunk] + position / call.block_size];
    const int64_t row = position % call.block_size * call.head_dim;
    return call.kv + (page * call.kv_page + item.head * call.kv_head + row) * int64_t(sizeof(T));
  }

  void store_rows(const Item& item) const {
    for (int64_t i = item.token; i < item.token + item.tokens; ++i) {
      const int64_t token = call.query_indptr[item.chunk] + i;
      const int64_t key = token * call.key_token + item.head * call.key_head;
      const int64_t value = token * call.value_token + item.head * call.value_head;
      char* to = slot(item, past(item.chunk) + i);
      std::memcpy(to, call.key + key * int64_t(sizeof(T)), row_bytes);
      std::memcpy(to + plane, call.value + value * int64_t(sizeof(T)), row_bytes);
    }
  }

  struct KeyTile {
    int64_t begin;
    const char *keys[kKeys], *values[kKeys];
  };

  // Where the rows of a key tile lie. Past the end lie zeros: the unused slots of a page hold anything, NaN too.
  void locate(const Item& item, int64_t begin, const char* zeros, KeyTile& tile) const {
    const int64_t end = past(item.chunk) + item.token + item.tokens;
    const char* row = nullptr;
    tile.begin = begin;
    for (int64_t i = 0, left = 0; i < kKeys; ++i, --left, row += row_bytes) {
      const bool exists = begin + i < end;
      if (exists && left == 0) {
        row = slot(item, begin + i);
        left = call.block_size - (begin + i) % call.block_size;
      }
      tile.keys[i] = exists ? row : zeros;
      tile.values[i] = exists ? row + plane : zeros;
    }
  }

  void locate_first(const Item& item, const char* zeros, KeyTile& tile) const {
    locate(item, first_seen(past(item.chunk) + item.token) / kKeys * kKeys, zeros, tile);
  }

  // `after` is what this thread will most likely do next; its first keys are fetched during the last tile of this item.
  void attend(const Item& item, const Item& after) const {
    const int64_t rows = item.tokens * group, padded = (rows + kRows - 1) / kRows * kRows;
    thread_local std::vector<uint32_t> scratch;
    const int64_t need = words * (padded + kKeys + 1) + columns * (padded + kKeys) + kKeys * kRows +
                         padded * (kLanes + 1) + 8 * 16;  // up to a cache line before each of the eight parts
    if (int64_t(scratch.size()) < need) scratch.resize(need);
    // Each part starts at a cache line: a load that straddles two costs as much as both.
    uintptr_t next = reinterpret_cast<uintptr_t>(scratch.data());
    const auto take = [&next](int64_t n) {
      const uintptr_t start = (next + 63) / 64 * 64;
      next = start + 4 * n;
      return reinterpret_cast<uint32_t*>(start);
    };
    uint32_t *query = take(words * padded), *packed_keys = take(words * kKeys), *packed_values = take(columns * kKeys);
    float *sums = (float*)take(columns * padded), *scores = (float*)take(kKeys * kRows);
    float *masses = (float*)take(padded * kLanes), *peaks = (float*)take(padded);
    const char* zeros = (char*)std::memset(take(words), 0, row_bytes);

    const int64_t token = call.query_indptr[item.chunk] + item.token;
    for (int64_t r = 0; r < padded; ++r) {
      const int64_t from = (token + r / group) * call.query_token + (item.head * group + r % group) * call.query_head;
      if (r < rows) std::memcpy(query + r * words, call.query + from * int64_t(sizeof(T)), row_bytes);
      else std::memset(query + r * words, 0, row_bytes);
      peaks[r] = kHidden;
    }
    std::memset(sums, 0, 4 * columns * padded);
    std::memset(masses, 0, 4 * padded * kLanes);

    const float scale = float(call.scale * 1.4426950408889634);  // softmax in powers of two
    const int64_t position = past(item.chunk) + item.token, end = position + item.tokens;
    KeyTile tiles[2];
    locate_first(item, zeros, tiles[0]);
    for (int now = 0, last = 0; !last; now ^= 1) {
      const KeyTile &tile = tiles[now], &ahead = tiles[now ^ 1];
      const int64_t begin = tile.begin;
      last = begin + kKeys >= end;
      if (last) locate_first(after, zeros, tiles[now ^ 1]);
      else locate(item, begin + kKeys, zeros, tiles[now ^ 1]);
      pack_keys(tile.keys, ahead.keys, words, packed_keys);
      pack_values(tile.values, ahead.values, call.head_dim, columns, packed_values, T{});
      for (int64_t r = 0; r < padded; r += kRows) {
        const int64_t newest = position + (r + kRows - 1) / group;
        if (newest < begin || first_seen(position + r / group) >= begin + kKeys) continue;
        multiply<T>(query + r * words, words, packed_keys, kKeys, words, scores, nullptr);
        float keep[kRows];
        for (int i = 0; i < kRows; ++i) {
          const int64_t p = position + (r + i) / group;
          Floats mass = read(masses + (r + i) * kLanes);
          keep[i] = soften<T>(scores + i * kKeys, scale, first_seen(p) - begin, p - begin, peaks[r + i], mass);
          write(masses + (r + i) * kLanes, mass);
        }
        multiply<T>((uint32_t*)scores, kKeys, packed_values, columns, kKeys * sizeof(T) / 4, sums + r * columns, keep);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float share = 1.f / total(read(masses + r * kLanes));
      const int64_t row = (token + r / group) * call.heads + item.head * group + r % group;
      T* to = (T*)call.out + row * call.head_dim;
      for (int64_t d = 0; d < call.head_dim; d += kLanes)
        write_some(to + d, read(sums + r * columns + d) * share, call.head_dim - d);
    }
  }

  std::vector<Item> items() const {
    std::vector<Item> items;
    const int32_t limit = group < kTileRows ? int32_t(kTileRows / group) : 1;
    for (int32_t chunk = 0; chunk < call.chunks; ++chunk) {
      const int32_t tokens = call.query_indptr[chunk + 1] - call.query_indptr[chunk];
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
