// The arguments of the products with packed weights, field by field as in bindings.py. Each also says how the weight is
// held, and is what a call for other rows is made from.
#pragma once

#include <cstdint>

struct LinearLayer {  // of linear.cpp
  const uint32_t* weight;
  const void* bias;  // [outputs], or null
  int64_t inputs, outputs, bf16;
  int64_t bytes, paired, fast;  // set by quire_linear_describe
  const void* x;                // this and the rest are of one call: [rows], with `stride` numbers from row to row
  void* out;
  int64_t stride, rows, gated, threads;
};

struct Int8Call {  // of int8.cpp
  const uint8_t* panels;
  const float *scales, *bias;  // [panels, 2, kSide]
  const void* x;               // [rows, inputs], with `stride` numbers from row to row
  void* out;                   // [rows, outputs], or [rows, outputs / 2] if gated
  int64_t inputs, outputs, stride, rows, gated, bf16, threads;
};

struct GroupsCall {  // of groups.cpp
  const uint8_t* panels;
  const float *scales, *bias;  // [panels, 2, kSide]
  const void* x;               // [rows, inputs], with `stride` numbers from row to row
  void* out;                   // [rows, outputs], or [rows, outputs / 2] if gated
  int64_t inputs, outputs, bits, group, stride, rows, gated, bf16, threads;
};

extern "C" {
void quire_linear(const LinearLayer*);
void quire_int8_linear(const Int8Call*);
void quire_groups_linear(const GroupsCall*);

// The same for `count` layers of one shape, each with rows of its own, over the threads of the first.
void quire_linear_grouped(const LinearLayer*, int64_t count);
void quire_int8_grouped(const Int8Call*, int64_t count);
void quire_groups_grouped(const GroupsCall*, int64_t count);
}
