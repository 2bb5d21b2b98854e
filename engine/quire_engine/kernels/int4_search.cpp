// Finds the scale and the zero of groups of weights in four bits, as quantization/int4.py describes and does in torch.

#include "vectors.h"

namespace {

constexpr float kLevels = 15, kRanges[] = {1.f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f, 0.7f};

struct Group {
  const float* w;
  int64_t size;

  // `add(sum, weights)` over all vectors.
  template <typename Add>
  Floats over(Floats sum, Add add) const {
    for (int64_t i = 0; i < size; i += kLanes) sum = add(sum, read(w + i));
    return sum;
  }
};

struct Fit {
  float scale, zero, error;
};

inline Floats smaller(Floats a, Floats b) { return b < a ? b : a; }

// 1.5 * 2^23: what is added to it is rounded to an integer, ties to even.
inline Floats level(Floats w, float inverse, float zero) {
  const Floats near = w * inverse + zero + 12582912.f;
  return smaller(larger(near - 12582912.f, Floats{}), Floats{} + kLevels);
}

inline float inverse_of(float scale) { return scale == 0 ? 0 : 1 / scale; }

// The scale and zero that suit the levels of a first pair best, by least squares; that pair where all are the same.
Fit fit(const Group& group, float scale, float zero) {
  const float inverse = inverse_of(scale), count = float(group.size);
  Floats levels{}, squares{}, products{}, weights{};
  for (int64_t i = 0; i < group.size; i += kLanes) {
    const Floats w = read(group.w + i), q = level(w, inverse, zero);
    levels = levels + q, squares = squares + q * q, products = products + q * w, weights = weights + w;
  }
  const float sum = total(levels), variance = total(squares) - sum * sum / count;
  const float covariance = total(products) - sum * total(weights) / count;
  Fit best{scale, zero, 0};
  if (variance > 0 && covariance > 0) {
    best.scale = covariance / variance;
    best.zero = std::fmin(std::fmax((sum - total(weights) / best.scale) / count, 0.f), kLevels);
  }
  best.error = total(group.over(Floats{}, [&](Floats error, Floats w) {
    const Floats off = (level(w, inverse, zero) - best.zero) * best.scale - w;
    return error + off * off;
  }));
  return best;
}

void search(const Group& group, uint8_t* q, float* scale, float* zero) {
  const Floats low = group.over(Floats{}, smaller), high = group.over(Floats{}, larger);
  float least = 0, most = 0;
  for (int i = 0; i < kLanes; ++i) least = std::fmin(least, low[i]), most = std::fmax(most, high[i]);
  const float step = (most - least) / kLevels, start = step == 0 ? 0 : -least / step;
  Fit best{step, start, 0};
  best.error = total(group.over(Floats{}, [&](Floats error, Floats w) {
    const Floats off = (level(w, inverse_of(step), start) - start) * step - w;
    return error + off * off;
  }));
  for (const float part : kRanges) {
    const Fit other = fit(group, step * part, start);
    if (other.error < best.error) best = other;
  }
  // What is not finite shows in the scale.
  const float finite = total(group.over(Floats{}, [](Floats sum, Floats w) { return sum + w * 0.f; }));
  *scale = best.scale + finite, *zero = finite == 0 ? best.zero : 0;
  for (int64_t i = 0; i < group.size; i += kLanes) {
    const Floats levels = level(read(group.w + i), inverse_of(best.scale), *zero);
    for (int lane = 0; lane < kLanes; ++lane) q[i + lane] = finite == 0 ? uint8_t(levels[lane]) : 0;
  }
}

}  // namespace

// w, q [groups, size] with a size of whole vectors; scales, zeros [groups].
extern "C" void quire_int4_search(const float* w, uint8_t* q, float* scales, float* zeros, int64_t groups, int64_t size,
                                  int64_t threads) {
#pragma omp parallel for num_threads(int(threads))
  for (int64_t g = 0; g < groups; ++g) search({w + g * size, size}, q + g * size, scales + g, zeros + g);
}
