// Replays a CPU graph (worker/cpu_graph.py): repeats the captured calls of kernels, all in one call from Python. With a
// call for each, the interpreter would take as long between two short kernels as they do. A call's rows are set first:
// that is all that differs between steps of different numbers of tokens.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

struct AttentionCall;
struct LinearLayer;
struct GroupsCall;
struct Int8Call;
struct LoraCall;
struct RouteCall;
struct ExpertsCall;
struct SumCall;

extern "C" {
void quire_attention(const AttentionCall*);
void quire_linear(const LinearLayer*);
void quire_groups_linear(const GroupsCall*);
void quire_int8_linear(const Int8Call*);
void quire_lora(const LoraCall*);
void quire_route(const RouteCall*);
void quire_experts(const ExpertsCall*);
void quire_sum(const SumCall*);
void quire_embed(const void*, const int64_t*, void*, int64_t, int64_t);
void quire_int8_rows(const uint8_t*, const float*, const int64_t*, void*, int64_t, int64_t, int64_t, int64_t);
void quire_scale(void*, int64_t, int64_t, float, int64_t);
void quire_cos_sin(const int32_t*, const float*, const float*, float*, float*, int64_t, int64_t);
void quire_rms_norm(const void*, int64_t, int64_t, void*, const void*, void*, int64_t, int64_t, int64_t, float, float,
                    int64_t, int64_t);
void quire_square_sums(const void*, int64_t, float*, int64_t, int64_t, int64_t, int64_t, int64_t);
void quire_norm_by_sums(void*, int64_t, const float*, int64_t, const void*, int64_t, int64_t, int64_t, float, int64_t,
                        int64_t);
void quire_add(const void*, void*, int64_t, int64_t, int64_t);
void quire_silu_mul(const void*, int64_t, void*, int64_t, int64_t, int64_t, int64_t);
void quire_gelu_mul(const void*, int64_t, void*, int64_t, int64_t, int64_t, int64_t);
void quire_rotate(void*, int64_t, int64_t, const float*, const float*, int64_t, const void*, const void*, int64_t,
                  int64_t, int64_t, int64_t, int64_t, float, float, int64_t, int64_t);
}

namespace {

constexpr int kSlots = 17;

// A call as numbers: pointers and integers as they are, floats by their bits. `rows` is the place of its number of rows,
// in a slot or in a struct that a slot points to; null if the call has none. There are `per_token` of them per token.
struct Call {
  void (*play)(const int64_t* slots);
  int64_t slots[kSlots];
  int64_t* rows;
  int64_t per_token;
};

template <typename A>
A from_slot(int64_t slot) {
  if constexpr (std::is_pointer_v<A>) {
    return reinterpret_cast<A>(slot);
  } else {
    A number;
    static_assert(sizeof number <= sizeof slot);
    std::memcpy(&number, &slot, sizeof number);
    return number;
  }
}

template <typename... A, size_t... i>
void apply(void (*function)(A...), const int64_t* slots, std::index_sequence<i...>) {
  static_assert(sizeof...(A) <= kSlots);
  function(from_slot<A>(slots[i])...);
}

template <typename... A>
constexpr std::index_sequence_for<A...> places(void (*)(A...)) {
  return {};
}

template <auto function>
void play(const int64_t* slots) {
  apply(function, slots, places(function));
}

struct Player {
  const char* name;
  void (*play)(const int64_t* slots);
};

#define PLAYER(function) {#function, play<function>}
constexpr Player kPlayers[] = {
    PLAYER(quire_attention), PLAYER(quire_linear),   PLAYER(quire_int8_linear), PLAYER(quire_groups_linear),
    PLAYER(quire_rms_norm),  PLAYER(quire_silu_mul), PLAYER(quire_rotate),      PLAYER(quire_lora),
    PLAYER(quire_route),     PLAYER(quire_experts),  PLAYER(quire_sum),         PLAYER(quire_gelu_mul),
    PLAYER(quire_add),       PLAYER(quire_square_sums), PLAYER(quire_norm_by_sums),
    PLAYER(quire_embed),     PLAYER(quire_int8_rows), PLAYER(quire_scale),      PLAYER(quire_cos_sin),
};

}  // namespace

extern "C" {

// The function that repeats calls of a kernel, by the kernel's name; null for one that cannot be captured.
void* quire_player(const char* name) {
  for (const Player& player : kPlayers)
    if (!std::strcmp(player.name, name)) return reinterpret_cast<void*>(player.play);
  return nullptr;
}

void quire_replay(const Call* const* calls, int64_t count, int64_t tokens) {
  for (int64_t i = 0; i < count; ++i) {
    const Call& call = *calls[i];
    if (call.rows) *call.rows = tokens * call.per_token;
    call.play(call.slots);
  }
}
}
