// A mixture of experts: which of them each token goes to, and the sum of what they make of it. Callers check shapes and
// bounds.
//
// Tokens are sorted by expert, and all experts' products are one grouped product: each thread computes its part of every
// expert. A token's sums are in the order of the router's choice, so that neither its neighbours nor the threads change a
// bit of what it gets.

#include <algorithm>
#include <limits>
#include <vector>

#include "products.h"
#include "vectors.h"

struct RouteCall {  // field by field as in bindings.py
  const void* logits;  // [rows][experts]
  float* weights;      // [rows][top], by descending weight
  int64_t* chosen;     // [rows][top]
  int64_t rows, experts, top, normalise, round, bf16, threads;
};

struct ExpertsCall {  // field by field as in bindings.py
  const void* x;         // [rows][hidden], with `stride` numbers from row to row
  const float* weights;  // [rows][top]
  const int64_t* chosen;
  void* out;                         // [rows][hidden]
  void *sorted, *between;  // memory for rows * top rows: [hidden] each, and [width] each, of gate and up where not paired
  const void *const *gate_up, *const *down;  // the layers of experts `first` to `first + count`
  int64_t gate_up_kind, down_kind;           // as kKinds of experts_kernel.py
  int64_t rows, stride, hidden, width, paired, top, first, count, round, bf16, threads;
  float alpha, limit;  // of a clamped SwiGLU, whose gate and up are not paired; a limit of 0 is none
};

namespace {

constexpr int64_t kWorthSharing = 32768;  // numbers to copy; below, waking the other threads costs more than they save

template <typename T>
void route_row(const T* logits, const RouteCall& call, float* all, float* weights, int64_t* chosen) {
  const int64_t experts = call.experts, top = call.top;
  Floats most = Floats{} - std::numeric_limits<float>::infinity();
  for (int64_t e = 0; e < experts; e += kLanes) store(all + e, most);  // past the last, as it stays
  for (int64_t e = 0; e < experts; e += kLanes) {
    write_some(all + e, read_some(logits + e, experts - e), experts - e);
    most = larger(most, read(all + e));
  }
  const Floats highest = Floats{} + largest(most, Lanes{});
  Floats sums{};
  for (int64_t e = 0; e < experts; e += kLanes) {
    const Floats power = exp2((read(all + e) - highest) * 1.44269504f);
    write(all + e, power);
    sums = sums + power;
  }
  const float sum = total(sums);
  int64_t held = 0;
  for (int64_t e = 0; e < experts; ++e) {  // what is no number is above none: there are always `top`, all different
    const float weight = all[e] / sum;
    if (held == top && !(weight > weights[top - 1])) continue;
    int64_t place = held < top ? held++ : top - 1;
    for (; place > 0 && weight > weights[place - 1]; --place)
      weights[place] = weights[place - 1], chosen[place] = chosen[place - 1];
    weights[place] = weight, chosen[place] = e;
  }
  float share = 0;
  for (int64_t j = 0; j < top; ++j) share += weights[j];
  for (int64_t j = 0; j < top; ++j) {
    if (call.normalise) weights[j] /= share;
    if (call.round) weights[j] = rounded(Floats{} + weights[j], Bf16{})[0];
  }
}

// Where the rows of a grouped product are, those of each expert after the other's, and how long they are.
struct Rows {
  const void* x;
  int64_t stride;
  void* out;
  int64_t width;
};

// The products of all experts that have rows.
template <typename Layer>
void multiply(const ExpertsCall& call, const void* const* layers, const std::vector<int64_t>& begins, const Rows& rows,
              bool gated, void (*run)(const Layer*, int64_t)) {
  static thread_local std::vector<Layer> calls;
  calls.clear();
  const int64_t size = call.bf16 ? 2 : 4;
  for (int64_t e = 0; e < call.count; ++e) {
    if (begins[e] == begins[e + 1]) continue;
    Layer layer = *(const Layer*)layers[e];
    layer.x = (const char*)rows.x + begins[e] * rows.stride * size, layer.stride = rows.stride;
    layer.out = (char*)rows.out + begins[e] * rows.width * size;
    layer.rows = begins[e + 1] - begins[e], layer.gated = gated, layer.threads = call.threads;
    calls.push_back(layer);
  }
  if (!calls.empty()) run(calls.data(), calls.size());
}

void multiply(const ExpertsCall& call, const void* const* layers, int64_t kind, const std::vector<int64_t>& begins,
              const Rows& rows, bool gated) {
  if (kind == 0) multiply<LinearLayer>(call, layers, begins, rows, gated, quire_linear_grouped);
  if (kind == 1) multiply<Int8Call>(call, layers, begins, rows, gated, quire_int8_grouped);
  if (kind == 2) multiply<GroupsCall>(call, layers, begins, rows, gated, quire_groups_grouped);
}

inline Floats smaller(Floats a, Floats b) { return b < a ? b : a; }

// silu(gate) * up of a row [gate, up], which takes the place of gate. Rounded where torch would round. With a limit, the
// clamped SwiGLU of gpt-oss, which is rounded once.
template <typename T>
void activate(T* row, int64_t inner, float alpha, float limit) {
  const Floats most = Floats{} + limit;
  for (int64_t d = 0; d < inner; d += kLanes) {
    const Floats gate = read_some(row + d, inner - d), up = read_some(row + inner + d, inner - d);
    if (limit == 0) {
      write_some(row + d, rounded(silu(gate), T{}) * up, inner - d);
      continue;
    }
    const Floats clamped = smaller(gate, most);
    const Floats glu = over_one_plus_exp2(clamped, clamped * (-1.44269504f * alpha));
    write_some(row + d, (larger(smaller(up, most), -most) + 1.f) * glu, inner - d);
  }
}

// Where each pair of a token and one of its experts lies, sorted by expert; -1 for experts of others.
void sort(const ExpertsCall& call, std::vector<int64_t>& begins, std::vector<int64_t>& places) {
  const int64_t pairs = call.rows * call.top;
  begins.assign(call.count + 1, 0), places.resize(pairs);
  const auto expert_of = [&](int64_t i) {
    const int64_t expert = call.chosen[i] - call.first;
    return expert >= 0 && expert < call.count ? expert : -1;
  };
  for (int64_t i = 0; i < pairs; ++i)
    if (const int64_t expert = expert_of(i); expert >= 0) ++begins[expert + 1];
  for (int64_t e = 0; e < call.count; ++e) begins[e + 1] += begins[e];
  static thread_local std::vector<int64_t> next;
  next = begins;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t expert = expert_of(i);
    places[i] = expert < 0 ? -1 : next[expert]++;
  }
}

// A token's sum, where rows of `outputs` are what its experts have made.
template <typename T>
void combine(const ExpertsCall& call, const T* outputs, const int64_t* places, const float* weights, T* out) {
  for (int64_t d = 0; d < call.hidden; d += kLanes) {
    const int64_t left = call.hidden - d;
    Floats sum{};
    for (int64_t j = 0; j < call.top; ++j) {
      if (places[j] < 0) continue;
      const Floats part = read_some(outputs + places[j] * call.hidden + d, left) * weights[j];
      sum = sum + (call.round ? rounded(part, T{}) : part);
    }
    write_some(out + d, sum, left);
  }
}

template <typename T>
void mix(const ExpertsCall& call) {
  static thread_local std::vector<int64_t> begins, kept;
  sort(call, begins, kept);
  const int64_t *places = kept.data(), top = call.top, hidden = call.hidden;
  T* sorted = (T*)call.sorted;
  const bool shared = call.rows * top * hidden > kWorthSharing;
#pragma omp parallel for num_threads(int(call.threads)) if (shared && call.threads > 1)
  for (int64_t row = 0; row < call.rows; ++row)
    for (int64_t j = 0; j < top; ++j)
      if (const int64_t place = places[row * top + j]; place >= 0)
        std::memcpy(sorted + place * hidden, (const T*)call.x + row * call.stride, hidden * sizeof(T));
  const Rows up{call.sorted, hidden, call.between, call.width}, down{call.between, call.width, call.sorted, hidden};
  multiply(call, call.gate_up, call.gate_up_kind, begins, up, call.paired);
  const int64_t unpaired = call.paired ? 0 : begins[call.count];  // other threads have a `begins` of their own
#pragma omp parallel for num_threads(int(call.threads)) if (shared && call.threads > 1)
  for (int64_t i = 0; i < unpaired; ++i)
    activate((T*)call.between + i * call.width, call.width / 2, call.alpha, call.limit);
  multiply(call, call.down, call.down_kind, begins, down, false);
#pragma omp parallel for num_threads(int(call.threads)) if (shared && call.threads > 1)
  for (int64_t row = 0; row < call.rows; ++row)
    combine(call, sorted, places + row * top, call.weights + row * top, (T*)call.out + row * hidden);
}

}  // namespace

extern "C" {

// Weights are those of the softmax over all experts, or add up to 1 with `normalise`; with `round` they are bf16.
void quire_route(const RouteCall* call) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const int64_t room = (call->experts + kLanes - 1) / kLanes * kLanes;
    const bool shared = call->threads > 1 && call->rows * call->experts > kWorthSharing;
#pragma omp parallel num_threads(int(call->threads)) if (shared)
    {
      std::vector<float> all(room);
#pragma omp for
      for (int64_t row = 0; row < call->rows; ++row)
        route_row((const T*)call->logits + row * call->experts, *call, all.data(), call->weights + row * call->top,
                  call->chosen + row * call->top);
    }
  };
  call->bf16 ? run(Bf16{}) : run(float{});
}

// The sum over a token's experts, of those that are here, of weight * down(activation(gate, up)).
void quire_experts(const ExpertsCall* call) { call->bf16 ? mix<Bf16>(*call) : mix<float>(*call); }
}
