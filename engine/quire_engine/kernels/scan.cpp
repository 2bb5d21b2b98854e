// What sampling needs of a row of logits, in one pass: its highest number, and whether all are finite.

#include "vectors.h"

namespace {

// Lanes keep the first of their highest numbers; the lowest place of those that are as high as any is the row's.
template <typename T>
int64_t highest_place(const T* row, int64_t width) {
  Floats highest = Floats{} - INFINITY;
  Ints places{}, here;
  for (int i = 0; i < kLanes; ++i) here[i] = i;
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes, here = here + kLanes) {
    const Floats v = read(row + d);
    const Ints higher = v > highest;
    highest = higher ? v : highest;
    places = higher ? here : places;
  }
  float top = -INFINITY;
  int64_t place = 0;
  for (int i = 0; i < kLanes; ++i)
    if (highest[i] > top || (highest[i] == top && places[i] < place)) top = highest[i], place = places[i];
  if (d < width) {
    const Floats rest = read_some(row + d, width - d);
    for (int64_t i = 0; d + i < width; ++i)
      if (rest[i] > top) top = rest[i], place = d + i;
  }
  return place;
}

// Numbers that are not finite have all bits of the exponent.
template <typename T>
bool all_finite(const T* row, int64_t width) {
  Ints odd{};
  for (int64_t d = 0; d < width; d += kLanes)
    odd |= ((Words)read_some(row + d, width - d) & 0x7f800000u) == 0x7f800000u;
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= odd[i] != 0;
  return !any;
}

}  // namespace

extern "C" {

// Of each row, into what is not null: the lowest place of its highest number, anything where a NaN is, and whether all of
// its numbers are finite.
void quire_scan_rows(const void* rows, int64_t stride, int64_t count, int64_t width, int64_t bf16, int64_t* places,
                     bool* finite, int64_t threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
#pragma omp parallel for num_threads(int(threads)) if (count > 1)
    for (int64_t r = 0; r < count; ++r) {
      const T* row = (const T*)rows + r * stride;
      if (places) places[r] = highest_place(row, width);
      if (finite) finite[r] = all_finite(row, width);
    }
  };
  bf16 ? run(Bf16{}) : run(float{});
}
}
