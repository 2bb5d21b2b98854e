// The small operations around products and attention: embedding, norm, activation, rotation. Callers check shapes and
// bounds.

#include "vectors.h"

namespace {

// Where torch would run one operation after the other, results are rounded between them as torch would. A weight with an
// offset multiplies what is not rounded yet, as Gemma's norm does.
template <typename T>
void scale_row(const T* x, float scale, const T* weight, T* out, int64_t dim, float offset) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Floats v = read_some(x + d, dim - d) * scale, w = read_some(weight + d, dim - d);
    write_some(out + d, offset ? v * (w + offset) : rounded(v, T{}) * w, dim - d);
  }
}

template <typename T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t dim, float eps, float offset) {
  Floats squares{};
  for (int64_t d = 0; d < dim; d += kLanes) {
    Floats v = read_some(x + d, dim - d);
    if (residual) {
      v = rounded(v + read_some(residual + d, dim - d), T{});
      write_some(residual + d, v, dim - d);
    }
    squares = squares + v * v;
  }
  scale_row(residual ? residual : x, 1.f / std::sqrt(total(squares) / float(dim) + eps), weight, out, dim, offset);
}

template <Floats (*activate)(Floats), typename T>
void gated_row(const T* gate, const T* up, T* out, int64_t dim) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Floats activated = rounded(activate(read_some(gate + d, dim - d)), T{});
    write_some(out + d, activated * read_some(up + d, dim - d), dim - d);
  }
}

template <typename T>
void rotate_row(T* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t d = 0; d < half; d += kLanes) {
    const Floats c = read_some(cos + d, half - d), s = read_some(sin + d, half - d);
    const Floats a = read_some(head + d, half - d), b = read_some(head + half + d, half - d);
    write_some(head + d, a * c - b * s, half - d);
    write_some(head + half + d, b * c + a * s, half - d);
  }
}

typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef int64_t Longs __attribute__((vector_size(8 * kLanes)));

// Cosines and sines of angles, to the last bit of a float. The angles are reduced to at most pi / 4 in two parts of
// pi / 2, which is exact for far positions too; the rest are Taylor's series.
inline void turn(Floats angles, Floats& cos, Floats& sin) {
  constexpr double kRound = 6755399441055744;  // 1.5 * 2^52: the low bits now hold the number of quarters
  const Doubles angle = __builtin_convertvector(angles, Doubles);
  const Doubles shifted = angle * 0.63661977236758134 + kRound, quarters = shifted - kRound;
  const Doubles x = angle - quarters * 1.5707963267341256 - quarters * 6.0771005065061922e-11, z = x * x;
  Doubles s = z * -2.5052108385441719e-8 + 2.7557319223985891e-6;
  s = s * z - 1.9841269841269841e-4;
  s = s * z + 8.3333333333333333e-3;
  s = s * z - 1.6666666666666667e-1;
  s = s * z * x + x;
  Doubles c = z * 2.0876756987868099e-9 - 2.7557319223985891e-7;
  c = c * z + 2.4801587301587302e-5;
  c = c * z - 1.3888888888888889e-3;
  c = c * z + 4.1666666666666667e-2;
  c = (c * z - 0.5) * z + 1.0;
  const Longs quarter = (Longs)shifted, odd = (quarter & 1) != 0;
  const Doubles first = odd ? s : c, second = odd ? c : s;
  cos = __builtin_convertvector((Doubles)((Longs)first ^ ((quarter + 1) & 2) << 62), Floats);
  sin = __builtin_convertvector((Doubles)((Longs)second ^ (quarter & 2) << 62), Floats);
}

// Below so many numbers, waking the other threads costs more than they save.
constexpr int64_t kWorthSharing = 32768;

template <Floats (*activate)(Floats)>
void gated_rows(const void* gate_up, int64_t row, void* out, int64_t rows, int64_t dim, int64_t bf16, int64_t threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(int(threads)) if (rows * dim > kWorthSharing)
    for (int64_t r = 0; r < rows; ++r) {
      const T* gate = (const T*)gate_up + r * row;
      gated_row<activate>(gate, gate + dim, (T*)out + r * dim, dim);
    }
  };
  bf16 ? run(Bf16{}) : run(float{});
}

}  // namespace

extern "C" {

// Copies row `ids[t]` of the table, of so many bytes, for each token.
void quire_embed(const void* table, const int64_t* ids, void* out, int64_t tokens, int64_t bytes) {
  for (int64_t t = 0; t < tokens; ++t) std::memcpy((char*)out + t * bytes, (const char*)table + ids[t] * bytes, bytes);
}

void quire_scale(void* x, int64_t tokens, int64_t dim, float factor, int64_t bf16) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    T* row = (T*)x;
    for (int64_t t = 0; t < tokens; ++t, row += dim)
      for (int64_t d = 0; d < dim; d += kLanes) write_some(row + d, read_some(row + d, dim - d) * factor, dim - d);
  };
  bf16 ? run(Bf16{}) : run(float{});
}

// The angles of each token, one per frequency, as cosines and sines times `scales`.
void quire_cos_sin(const int32_t* positions, const float* frequencies, const float* scales, float* cos, float* sin,
                   int64_t tokens, int64_t width) {
  for (int64_t t = 0; t < tokens; ++t, cos += width, sin += width)
    for (int64_t f = 0; f < width; f += kLanes) {
      Floats c, s;
      turn(read_some(frequencies + f, width - f) * float(positions[t]), c, s);
      const Floats scale = read_some(scales + f, width - f);
      write_some(cos + f, c * scale, width - f);
      write_some(sin + f, s * scale, width - f);
    }
}

void quire_rms_norm(const void* x, int64_t token, int64_t head, void* residual, const void* weight, void* out,
                    int64_t tokens, int64_t heads, int64_t dim, float eps, float offset, int64_t bf16, int64_t threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(int(threads)) if (tokens * heads * dim > kWorthSharing)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = (t * heads + h) * dim;  // of the tensors without gaps
        T* sum = residual ? (T*)residual + row : nullptr;
        norm_row((const T*)x + t * token + h * head, sum, (const T*)weight, (T*)out + row, dim, eps, offset);
      }
  };
  bf16 ? run(Bf16{}) : run(float{});
}

// A norm in two steps, for rows of which each rank has a part: the sums of squares of the own part, and then the norm in
// place by the sums of all ranks, which are for `width` numbers.
void quire_square_sums(const void* x, int64_t token, float* sums, int64_t step, int64_t tokens, int64_t dim,
                       int64_t bf16, int64_t threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(int(threads)) if (tokens * dim > kWorthSharing)
    for (int64_t t = 0; t < tokens; ++t) {
      const T* row = (const T*)x + t * token;
      Floats squares{};
      for (int64_t d = 0; d < dim; d += kLanes) {
        const Floats v = read_some(row + d, dim - d);
        squares = squares + v * v;
      }
      sums[t * step] = total(squares);
    }
  };
  bf16 ? run(Bf16{}) : run(float{});
}

void quire_norm_by_sums(void* x, int64_t token, const float* sums, int64_t step, const void* weight, int64_t tokens,
                        int64_t dim, int64_t width, float eps, int64_t bf16, int64_t threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(int(threads)) if (tokens * dim > kWorthSharing)
    for (int64_t t = 0; t < tokens; ++t) {
      T* row = (T*)x + t * token;
      scale_row(row, 1.f / std::sqrt(sums[t * step] / float(width) + eps), (const T*)weight, row, dim, 0.f);
    }
  };
  bf16 ? run(Bf16{}) : run(float{});
}

void quire_add(const void* x, void* residual, int64_t count, int64_t bf16, int64_t threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    T* sum = (T*)residual;
#pragma omp parallel for num_threads(int(threads)) if (count > kWorthSharing)
    for (int64_t i = 0; i < count; i += kLanes)
      write_some(sum + i, read_some((const T*)x + i, count - i) + read_some(sum + i, count - i), count - i);
  };
  bf16 ? run(Bf16{}) : run(float{});
}

void quire_silu_mul(const void* gate_up, int64_t row, void* out, int64_t rows, int64_t dim, int64_t bf16,
                    int64_t threads) {
  gated_rows<silu>(gate_up, row, out, rows, dim, bf16, threads);
}

void quire_gelu_mul(const void* gate_up, int64_t row, void* out, int64_t rows, int64_t dim, int64_t bf16,
                    int64_t threads) {
  gated_rows<gelu_tanh>(gate_up, row, out, rows, dim, bf16, threads);
}

// With `query_norm`, the first `queries` heads are normed by it before, and the others by `key_norm`.
void quire_rotate(void* x, int64_t token, int64_t head, const float* cos, const float* sin, int64_t angles,
                  const void* query_norm, const void* key_norm, int64_t tokens, int64_t heads, int64_t queries,
                  int64_t dim, int64_t half, float eps, float offset, int64_t bf16, int64_t threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(int(threads)) if (tokens * heads * half > kWorthSharing)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        T* row = (T*)x + t * token + h * head;
        const T* norm = (const T*)(h < queries ? query_norm : key_norm);
        if (norm) norm_row<T>(row, nullptr, norm, row, dim, eps, offset);
        rotate_row(row, cos + t * angles, sin + t * angles, half);
      }
  };
  bf16 ? run(Bf16{}) : run(float{});
}
}
