// Draws one token from each of many rows of logits, as sampling/sample_ops.py does in torch, to the same bits.
//
// A row is read once for its highest number and whether all are finite, which is all that greedy needs; once more to
// draw; and with a top-k or top-p once or more in between, to find the lowest score that is kept. Nothing is sorted and
// nothing is written but histograms and the few scores of the bucket that the border is in.
//
// With a top-p alone the border is mostly not needed: the token that would be drawn without it is drawn with it too, if
// the nucleus has that token, and what weighs more than the token says whether it has. Passes of vectors find that out,
// where a histogram takes its numbers one by one; the exact weights matter only where rough ones are too close to call.
//
// Why the bits are the same on every processor, by however many threads and in slices of any length: scores, weights
// and noise are single IEEE operations in the order of sampling/exact_math.py, and nothing here is contracted to a fused
// multiply-add; weights are summed as integers; highest, lowest and argmax know no order.
//
// The noise itself is two logarithms, but hardly any token needs it: the bits of a float, read as an integer, bound its
// logarithm, and where score and bound are below the best so far the token cannot win.

#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("-ffp-contract=off")
#endif

#include <algorithm>
#include <vector>

#include "vectors.h"
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

struct SampleCall {       // field by field as in bindings.py
  const void* logits;     // [rows, width], with `stride` numbers from row to row
  const int64_t* row_of;  // [draws]: the row that each draw is from
  // The parameters of each draw, as in SamplingMetadata; null if all are greedy.
  const float* temperature;
  const int64_t* top_k;
  const double* top_p;
  const float* log_min_p;
  const uint32_t* keys;  // [draws, 2]
  // What is found, of each draw and of each row; any of them may be null.
  int64_t* token_ids;   // [draws]
  float* noisy;         // [draws]: the score of the token with its noise
  float* lowest_kept;   // [draws]: the lowest score that could be drawn
  int64_t* places;      // [rows]: the lowest place of the highest number, some place where a NaN is
  float* highest;       // [rows]: that number, or NaN where one is
  bool* finite;         // [rows]
  int64_t stride, rows, width, draws, bf16, threads;
};

namespace {

typedef int64_t Longs __attribute__((vector_size(8 * kLanes)));

constexpr float kMinTemperature = 1e-30f;
constexpr uint32_t kGolden = 0x9e3779b9u, kMixA = 0x85ebca6bu, kMixB = 0xc2b2ae35u;
constexpr int kBuckets = 1024;
constexpr float kBucketsPerUnit = 64;    // at least: 16 units of score hold all but e^-16 of what a token weighs
constexpr int64_t kWorthSharing = 32768;  // numbers; below, waking the other threads costs more
constexpr int64_t kSlice = 4096;          // numbers at least in a slice of a row
constexpr double kRoughness = 0.005;      // of which the polynomial takes 0.0018 and the sums of 2^18 numbers 0.001
constexpr double kWorthGuessing = 0.5;    // a lower top-p mostly excludes the token that is guessed

inline bool any(Ints mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX__) && !defined(__AVX512F__)
  return _mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__) && !defined(__AVX512F__)
  return _mm_movemask_ps((__m128)mask);
#else
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= mask[i];
  return bits;
#endif
}

inline Words count_up(uint32_t from) {
  Words lanes{};
  for (int i = 0; i < kLanes; ++i) lanes[i] = from + i;
  return lanes;
}

// exact_math.py: the logarithm of (1 + f) * 2^exponent, with 1 + f between the roots of 1/2 and 2.
inline Floats log_of_parts(Floats f, Floats exponent) {
  const Floats s = f / (f + 2.f), z = s * s, w = z * z;
  const Floats r = (w * 0xf89e26p-26f + 0xccce13p-25f) * w + (w * 0x91e9eep-25f + 0xaaaaaap-24f) * z;
  const Floats half = f * f * 0.5f;
  return s * (half + r) + exponent * 0x1.2fefa2p-17f - half + f + exponent * 0x1.62e3p-1f;
}

inline Words above_root(Floats x) { return (Words)x - 0x3f3504f3u; }
inline Floats exponent_of(Words above) { return __builtin_convertvector((Ints)above >> 23, Floats); }
inline Floats fraction_of(Words above) { return (Floats)((above & 0x7fffffu) + 0x3f3504f3u) - 1.f; }

// metadata.py: 32 random bits of each token, and the uniform number of them.
inline Floats uniform(Words golden_id, uint32_t low, uint32_t high) {
  Words x = golden_id ^ low;
  x = (x ^ (x >> 16)) * kMixA + high;
  x = (x ^ (x >> 13)) * kMixB;
  x = (x ^ (x >> 16)) & 0x7fffffffu;
  const Floats u = (__builtin_convertvector((Ints)x, Floats) + 0.5f) * 0x1p-31f;
  return u < 0x0.ffffffp0f ? u : Floats{} + 0x0.ffffffp0f;
}

inline Floats gumbel(Floats u) {
  const Words above = above_root(1.f - u);
  const Floats exponent = exponent_of(above);
  // Close to 1, where 1 - u would lose the low bits of u, -u itself is the fraction.
  const Floats exponential = -log_of_parts(exponent == 0.f ? -u : fraction_of(above), exponent);
  const Words other = above_root(exponential);
  return -log_of_parts(fraction_of(other), exponent_of(other));
}

// At least the noise of u: it is below -log(u), and a float's bits are a line from power to power of two, which is
// nowhere above the logarithm. The rest covers what rounding can add.
inline Floats noise_bound(Floats u) {
  return 88.0297f + 0.001f - __builtin_convertvector((Ints)u, Floats) * 0x1.62e43p-24f;
}

// exact_math.py: 2^40 times the exponential of scores of at most 0, to be cut to an integer. NaN weighs nothing.
inline Floats weight(Floats score) {
  Floats t = score * 0x1.715476p0f;
  t = t > -60.f ? t : Floats{} - 60.f;
  const Floats shifted = t + 12582912.f, k = shifted - 12582912.f, f = t - k;  // 1.5 * 2^23: rounds to an integer
  Floats p = f * 1.5353362e-4f + 1.3398874e-3f;
  p = p * f + 9.6184373e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314720e-1f;
  p = p * f + 1.f;
  return (Floats)((Words)p + ((Words)(__builtin_convertvector(k, Ints) + 40) << 23));
}

inline uint64_t weight_of(float score) { return uint64_t(weight(Floats{} + score)[0]); }

// The lowest of `values` with less than `need` of the weight strictly above it; all weigh at least `need` together.
template <typename W>
float lowest_with_less_above(std::vector<float>& values, uint64_t need, W weigh) {
  auto from = values.begin(), to = values.end();
  while (from < to) {
    const float a = *from, b = from[(to - from) / 2], c = to[-1];
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    const auto equal = std::partition(from, to, [=](float v) { return v > pivot; });
    const auto less = std::partition(equal, to, [=](float v) { return v == pivot; });
    uint64_t above = 0;
    for (auto v = from; v < equal; ++v) above += weigh(*v);
    const uint64_t through = above + uint64_t(less - equal) * weigh(pivot);
    if (need <= above) {
      to = equal;
    } else if (need <= through) {
      return pivot;
    } else {
      need -= through;
      from = less;
    }
  }
  return -INFINITY;
}

// What one pass over a row, or a slice of it, finds.
struct Scan {
  float highest = -INFINITY, lowest = INFINITY;
  int64_t place = 0;
  bool finite = true, broken = false;  // broken: a NaN

  void add(const Scan& next) {  // of what follows in the row
    if (next.highest > highest) highest = next.highest, place = next.place;
    lowest = std::min(lowest, next.lowest);
    finite &= next.finite, broken |= next.broken;
  }
};

// Lanes keep the first of their highest numbers; the lowest place of those that are as high as any is the row's.
template <typename T>
Scan scan(const T* row, int64_t begin, int64_t end) {
  Floats highest = Floats{} - INFINITY, lowest = Floats{} + INFINITY;
  Ints places{}, here = (Ints)count_up(0), odd{}, broken{};
  const auto look = [&](Floats v) {
    const Ints higher = v > highest;
    highest = higher ? v : highest;
    places = higher ? here : places;
    lowest = v < lowest ? v : lowest;
    odd |= ((Words)v & 0x7f800000u) == 0x7f800000u;  // numbers that are not finite have all bits of the exponent
    broken |= v != v;
  };
  int64_t d = begin;
  for (; d + kLanes <= end; d += kLanes, here = here + kLanes) look(read(row + d));
  Scan found;
  for (int i = 0; i < kLanes; ++i) {
    const int64_t place = begin + places[i];
    if (highest[i] > found.highest || (highest[i] == found.highest && place < found.place))
      found.highest = highest[i], found.place = place;
    found.lowest = std::min(found.lowest, lowest[i]);
  }
  found.finite = !any(odd), found.broken = any(broken);
  for (; d < end; ++d) {
    const float v = read_some(row + d, 1)[0];
    Scan one;
    one.place = d;
    one.finite = std::isfinite(v), one.broken = std::isnan(v);
    if (!one.broken) one.highest = one.lowest = v;
    found.add(one);
  }
  return found;
}

struct Best {
  float score = -INFINITY;
  int64_t id = 0;

  void add(Best other) {
    if (other.score > score || (other.score == score && other.id < id)) *this = other;
  }
};

struct Histogram {
  uint64_t weights[kBuckets];
  int64_t counts[kBuckets];
};

// One draw, and what is known of it so far. It is settled when the nucleus has the token that was guessed.
struct Draw {
  const void* row;
  int64_t index;
  bool random, has_top_k, has_top_p, guesses, settled;
  float temperature, highest, log_min_p, scale;
  uint32_t low, high;
  double top_p;
  uint64_t need_of_kth, need;
  int kth_bucket = kBuckets, bucket;
  float kth = -INFINITY, lowest = -INFINITY, guessed;
  Best start;  // the most probable token: a good one to beat

  template <typename T>
  Floats scores(const T* at, int64_t left) const {
    const Floats below = read_some(at, left) - highest;
    return temperature == 1.f ? below : below / temperature;
  }

  Ints buckets(Floats scores) const {
    const Floats bucket = scores * -scale, last = Floats{} + float(kBuckets - 1);
    return __builtin_convertvector(bucket < last ? bucket : last, Ints);
  }
};

// What was found of a draw in one slice of its row.
struct Part {
  Histogram histogram;
  std::vector<float> border;
  Best best;
  uint64_t total, above;  // what all tokens weigh, and what those above the guessed one do
  double rough_total, rough_above;
};

template <typename T>
void tally(const Draw& draw, const T* row, int64_t begin, int64_t end, Histogram& histogram) {
  std::memset(&histogram, 0, sizeof histogram);
  for (int64_t d = begin; d < end; d += kLanes) {
    const Floats scores = draw.scores(row + d, end - d);
    const int count = int(std::min<int64_t>(kLanes, end - d));
    int32_t buckets[kLanes];
    store(buckets, draw.buckets(scores));
    if (draw.has_top_k)
      for (int i = 0; i < count; ++i) ++histogram.counts[buckets[i]];
    if (draw.has_top_p) {
      float weights[kLanes];
      store(weights, weight(scores));
      for (int i = 0; i < count; ++i) histogram.weights[buckets[i]] += uint64_t(int64_t(weights[i]));
    }
  }
}

// In units of the heaviest, to within a part of kRoughness of the exact weights' sums.
template <typename T>
void weigh_roughly(const Draw& draw, const T* row, int64_t begin, int64_t end, Part& part) {
  Floats total{}, above{};
  for (int64_t d = begin; d < end; d += kLanes) {
    const Floats scores = draw.scores(row + d, end - d);
    Floats t = scores * 0x1.715476p0f;
    t = t > -120.f ? t : Floats{} - 120.f;
    const Floats shifted = t + 12582912.f, f = t - (shifted - 12582912.f);  // 1.5 * 2^23: the low bits hold an integer
    const Floats p = (f * 0.23841252f + 0.70341639f) * f + 1.00044185f;
    Floats weights = (Floats)((Words)p + ((Words)shifted << 23));
    if (end - d < kLanes) weights = (Ints)count_up(0) < int32_t(end - d) ? weights : Floats{};
    total = total + weights;
    above = above + (scores > draw.guessed ? weights : Floats{});
  }
  part.rough_total = part.rough_above = 0;
  for (int i = 0; i < kLanes; ++i) part.rough_total += total[i], part.rough_above += above[i];
}

// As integers, as the histogram's are.
template <typename T>
void weigh(const Draw& draw, const T* row, int64_t begin, int64_t end, Part& part) {
  Longs total{}, above{};
  for (int64_t d = begin; d < end; d += kLanes) {
    const Floats scores = draw.scores(row + d, end - d);
    Floats weights = weight(scores);
    if (end - d < kLanes) weights = (Ints)count_up(0) < int32_t(end - d) ? weights : Floats{};
    total += __builtin_convertvector(weights, Longs);
    above += __builtin_convertvector(scores > draw.guessed ? weights : Floats{}, Longs);
  }
  part.total = part.above = 0;
  for (int i = 0; i < kLanes; ++i) part.total += uint64_t(total[i]), part.above += uint64_t(above[i]);
}

// The scores in the draw's bucket that top-k keeps.
template <typename T>
void collect(const Draw& draw, const T* row, int64_t begin, int64_t end, std::vector<float>& border) {
  border.clear();
  for (int64_t d = begin; d < end; d += kLanes) {
    const Floats scores = draw.scores(row + d, end - d);
    const Ints wanted = (draw.buckets(scores) == draw.bucket) & (scores >= draw.kth);
    if (!any(wanted)) continue;
    for (int i = 0; i < std::min<int64_t>(kLanes, end - d); ++i)
      if (wanted[i]) border.push_back(scores[i]);
  }
}

template <typename T>
Best choose(const Draw& draw, const T* row, int64_t begin, int64_t end) {
  Best best = draw.start;
  const bool filtered = draw.lowest > -INFINITY;
  Words golden_id = count_up(uint32_t(begin)) * kGolden;
  for (int64_t d = begin; d < end; d += kLanes, golden_id += kLanes * kGolden) {
    const Floats scores = draw.scores(row + d, end - d);
    const Ints kept = scores >= draw.lowest;
    if (filtered && !any(kept)) continue;
    const Floats u = uniform(golden_id, draw.low, draw.high);
    const Ints hopeful = (scores + noise_bound(u) >= best.score) & kept;
    if (!any(hopeful)) continue;
    const Floats noisy = scores + gumbel(u);
    for (int i = 0; i < std::min<int64_t>(kLanes, end - d); ++i)
      if (hopeful[i]) best.add({noisy[i], d + i});
  }
  return best;
}

enum Stage { kGuess, kWeighRoughly, kWeigh, kTally, kCollectKth, kCollectLast, kChoose, kStages };

bool has_stage(const Draw& draw, int stage) {
  if (!draw.random || draw.settled) return false;
  return stage == kChoose || (stage <= kWeigh && draw.guesses) ||
         (stage == kTally && (draw.has_top_k || draw.has_top_p)) || (stage == kCollectKth && draw.has_top_k) ||
         (stage == kCollectLast && draw.has_top_p);
}

template <typename T>
void run_stage(int stage, const Draw& draw, int64_t begin, int64_t end, Part& part) {
  const T* row = (const T*)draw.row;
  if (stage == kWeighRoughly) weigh_roughly(draw, row, begin, end, part);
  if (stage == kWeigh) weigh(draw, row, begin, end, part);
  if (stage == kTally) tally(draw, row, begin, end, part.histogram);
  if (stage == kCollectKth || stage == kCollectLast) collect(draw, row, begin, end, part.border);
  if (stage == kGuess || stage == kChoose) part.best = choose(draw, row, begin, end);
}

// Adds the scores of all slices to those of the first.
std::vector<float>& joined_border(Part* parts, int64_t slices) {
  auto& border = parts->border;
  for (int64_t s = 1; s < slices; ++s) border.insert(border.end(), parts[s].border.begin(), parts[s].border.end());
  return border;
}

// The first bucket up to which there is `need`, which is reduced by what is in the buckets before.
template <typename N>
int bucket_that_reaches(const N* buckets, uint64_t& need) {
  int b = 0;
  for (; b < kBuckets - 1 && uint64_t(buckets[b]) < need; ++b) need -= buckets[b];
  return b;
}

void conclude_tally(Draw& draw, Part* parts, int64_t slices) {
  Histogram& all = parts->histogram;
  for (int64_t s = 1; s < slices; ++s)
    for (int b = 0; b < kBuckets; ++b) {
      all.weights[b] += parts[s].histogram.weights[b];
      all.counts[b] += parts[s].histogram.counts[b];
    }
  if (draw.has_top_k) draw.bucket = draw.kth_bucket = bucket_that_reaches(all.counts, draw.need_of_kth);
}

// How much of the weight the nucleus has at least.
inline uint64_t weight_of_nucleus(const Draw& draw, uint64_t total) {
  return uint64_t(std::ceil(draw.top_p * double(total)));
}

// Where the nucleus ends, counted among what top-k keeps.
void find_last_bucket(Draw& draw, Part* parts, const std::vector<float>& border) {
  uint64_t* weights = parts->histogram.weights;
  if (draw.has_top_k) {
    weights[draw.kth_bucket] = 0;
    for (const float score : border)
      if (score >= draw.kth) weights[draw.kth_bucket] += weight_of(score);
    std::fill(weights + draw.kth_bucket + 1, weights + kBuckets, 0);
  }
  uint64_t total = 0;
  for (int b = 0; b < kBuckets; ++b) total += weights[b];
  draw.need = weight_of_nucleus(draw, total);
  draw.bucket = bucket_that_reaches(weights, draw.need);
}

// What only all slices together tell.
template <typename T>
void conclude(int stage, Draw& draw, Part* parts, int64_t slices) {
  if (stage == kWeighRoughly) {
    for (int64_t s = 1; s < slices; ++s)
      parts->rough_total += parts[s].rough_total, parts->rough_above += parts[s].rough_above;
    const double nucleus = draw.top_p * parts->rough_total, above = parts->rough_above;
    draw.settled = above * (1 + kRoughness) < nucleus * (1 - kRoughness);
    draw.guesses = above * (1 - kRoughness) <= nucleus * (1 + kRoughness);  // else the nucleus lacks the token
  } else if (stage == kWeigh) {
    for (int64_t s = 1; s < slices; ++s) parts->total += parts[s].total, parts->above += parts[s].above;
    draw.settled = parts->above < weight_of_nucleus(draw, parts->total);
  } else if (stage == kTally) {
    conclude_tally(draw, parts, slices);
    if (draw.has_top_p && !draw.has_top_k) find_last_bucket(draw, parts, {});
  } else if (stage == kCollectKth) {
    auto& border = joined_border(parts, slices);
    draw.kth = lowest_with_less_above(border, draw.need_of_kth, [](float) -> uint64_t { return 1; });
    draw.lowest = std::max(draw.lowest, draw.kth);
    if (draw.has_top_p) find_last_bucket(draw, parts, border);
  } else if (stage == kCollectLast) {
    draw.lowest = std::max(draw.lowest, lowest_with_less_above(joined_border(parts, slices), draw.need, weight_of));
  } else {
    for (int64_t s = 1; s < slices; ++s) parts->best.add(parts[s].best);
    draw.guessed = draw.scores((const T*)draw.row + parts->best.id, 1)[0];
  }
}

Draw make_draw(const SampleCall& call, int64_t index, const Scan& scan) {
  Draw draw{};
  draw.row = (const char*)call.logits + call.row_of[index] * call.stride * (call.bf16 ? 2 : 4);
  draw.index = index;
  draw.start = {0, scan.place};
  draw.kth = draw.lowest = -INFINITY;
  draw.random = call.temperature && call.temperature[index] != 0 && !scan.broken && std::isfinite(scan.highest);
  if (!draw.random) return draw;
  draw.temperature = std::max(call.temperature[index], kMinTemperature);
  draw.highest = scan.highest;
  draw.has_top_k = call.top_k[index] > 0 && call.top_k[index] < call.width;
  draw.has_top_p = call.top_p[index] < 1;
  draw.guesses = draw.has_top_p && !draw.has_top_k && call.top_p[index] >= kWorthGuessing && !call.lowest_kept;
  draw.need_of_kth = uint64_t(call.top_k[index]), draw.top_p = call.top_p[index];
  draw.lowest = call.log_min_p[index];
  const float range = (scan.highest - scan.lowest) / draw.temperature;
  draw.scale = range > 0 ? std::max(kBucketsPerUnit, std::min((kBuckets - 1) / range, 1e30f)) : kBucketsPerUnit;
  draw.low = call.keys[2 * index], draw.high = call.keys[2 * index + 1];
  draw.start.score = gumbel(uniform(Words{} + uint32_t(scan.place) * kGolden, draw.low, draw.high))[0];
  return draw;
}

void write_draw(const SampleCall& call, const Draw& draw, const Best& best) {
  if (call.token_ids) call.token_ids[draw.index] = best.id;
  if (call.noisy) call.noisy[draw.index] = best.score;
  if (call.lowest_kept) call.lowest_kept[draw.index] = draw.lowest;
}

void write_scan(const SampleCall& call, int64_t row, const Scan& scan) {
  if (call.places) call.places[row] = scan.place;
  if (call.highest) call.highest[row] = scan.broken ? NAN : scan.highest;
  if (call.finite) call.finite[row] = scan.finite;
}

// With many rows a thread takes one from its scan to its draws, while it is in the thread's cache.
template <typename T>
void run_rows(const SampleCall& call) {
  std::vector<std::vector<int64_t>> draws_of(call.rows);
  for (int64_t i = 0; i < call.draws; ++i) draws_of[call.row_of[i]].push_back(i);
#pragma omp parallel num_threads(int(call.threads)) if (call.rows * call.width > kWorthSharing)
  {
    Part part;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < call.rows; ++r) {
      const Scan scanned = scan((const T*)call.logits + r * call.stride, 0, call.width);
      write_scan(call, r, scanned);
      for (const int64_t index : draws_of[r]) {
        Draw draw = make_draw(call, index, scanned);
        for (int stage = 0; stage < kStages; ++stage)
          if (has_stage(draw, stage)) {
            run_stage<T>(stage, draw, 0, call.width, part);
            conclude<T>(stage, draw, &part, 1);
          }
        write_draw(call, draw, draw.random ? part.best : draw.start);
      }
    }
  }
}

// With few rows the threads share each of them, and wait for each other after each pass.
template <typename T>
void run_slices(const SampleCall& call, int64_t slices) {
  const int64_t length = ((call.width + slices - 1) / slices + 63) / 64 * 64;
  const auto begin_of = [&](int64_t slice) { return std::min(slice * length, call.width); };
  std::vector<Scan> scans(call.rows * slices);
  std::vector<Draw> draws(call.draws);
  std::vector<Part> parts(call.temperature ? call.draws * slices : 0);
#pragma omp parallel num_threads(int(call.threads))
  {
#pragma omp for
    for (int64_t i = 0; i < call.rows * slices; ++i)
      scans[i] = scan((const T*)call.logits + i / slices * call.stride, begin_of(i % slices), begin_of(i % slices + 1));
#pragma omp for
    for (int64_t r = 0; r < call.rows; ++r) {
      for (int64_t s = 1; s < slices; ++s) scans[r * slices].add(scans[r * slices + s]);
      write_scan(call, r, scans[r * slices]);
    }
#pragma omp for
    for (int64_t i = 0; i < call.draws; ++i) draws[i] = make_draw(call, i, scans[call.row_of[i] * slices]);
    for (int stage = 0; stage < kStages; ++stage) {
      if (std::none_of(draws.begin(), draws.end(), [=](const Draw& draw) { return has_stage(draw, stage); })) continue;
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < call.draws * slices; ++i)
        if (has_stage(draws[i / slices], stage))
          run_stage<T>(stage, draws[i / slices], begin_of(i % slices), begin_of(i % slices + 1), parts[i]);
#pragma omp for
      for (int64_t i = 0; i < call.draws; ++i)
        if (has_stage(draws[i], stage)) conclude<T>(stage, draws[i], &parts[i * slices], slices);
    }
#pragma omp for
    for (int64_t i = 0; i < call.draws; ++i)
      write_draw(call, draws[i], draws[i].random ? parts[i * slices].best : draws[i].start);
  }
}

}  // namespace

extern "C" {

void quire_sample(const SampleCall* call) {
  if (!call->rows) return;
  const int64_t wanted = (4 * call->threads + call->rows - 1) / call->rows;
  const int64_t slices = std::min({wanted, call->threads, call->width / kSlice});
  if (call->bf16)
    slices > 1 ? run_slices<Bf16>(*call, slices) : run_rows<Bf16>(*call);
  else
    slices > 1 ? run_slices<float>(*call, slices) : run_rows<float>(*call);
}
}
