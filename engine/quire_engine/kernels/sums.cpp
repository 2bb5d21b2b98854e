// Sums over ranks on one machine, through memory that they share. Callers check shapes and bounds.
//
// Each rank copies its numbers to a slot of its own, says so, waits for the others, and adds all slots up in the order of
// the ranks, in float32: all get the same bits, whatever the position in the tensor. Slots alternate: who begins a sum
// has ended the last one, for which all others had ended the one before, so nobody reads any more what is overwritten.

#include <algorithm>
#include <cstdint>
#include <ctime>

#include "vectors.h"
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct SumRanks {  // field by field as in bindings.py: one rank's view
  char* memory;    // for each rank a Flag, then one for all, then [2][size][slot_bytes]
  int64_t rank, size, slot_bytes, spins;
  int64_t sequence, sums, failed;  // passes and sums begun; whether one has ended without the others
};

struct SumCall {  // field by field as in bindings.py
  void* x;        // [count], overwritten with the sum
  int64_t count, bf16;
  SumRanks* ranks;
};

namespace {

struct alignas(64) Flag {
  uint32_t number;    // the pass that the rank has copied its numbers for; of the one for all: whether it is over
  uint32_t sleepers;  // who waits for the rank without spinning
};

constexpr int64_t kNanoseconds = 20'000'000;  // between two looks at whether it is over

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline bool has_come(const Flag& flag, uint32_t number) {
  return int32_t(__atomic_load_n(&flag.number, __ATOMIC_SEQ_CST) - number) >= 0;
}

inline void sleep_on(Flag& flag, uint32_t seen) {
  const timespec least{0, kNanoseconds};
#ifdef __linux__
  syscall(SYS_futex, &flag.number, FUTEX_WAIT, seen, &least, nullptr, 0);
#else
  nanosleep(&least, nullptr);
#endif
}

void arrive(Flag& flag, uint32_t number) {
  __atomic_store_n(&flag.number, number, __ATOMIC_SEQ_CST);
  // A sleeper counts itself before it looks at the number, so one of the two is seen.
#ifdef __linux__
  if (__atomic_load_n(&flag.sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &flag.number, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Whether the rank has come; false where all is over before.
bool wait_for(Flag& flag, const Flag& over, uint32_t number, int64_t spins) {
  for (int64_t i = 0; i < spins; ++i, relax())
    if (has_come(flag, number)) return true;
  while (!has_come(flag, number)) {
    if (__atomic_load_n(&over.number, __ATOMIC_SEQ_CST)) return false;
    __atomic_fetch_add(&flag.sleepers, 1, __ATOMIC_SEQ_CST);
    const uint32_t seen = __atomic_load_n(&flag.number, __ATOMIC_SEQ_CST);
    if (int32_t(seen - number) < 0) sleep_on(flag, seen);
    __atomic_fetch_sub(&flag.sleepers, 1, __ATOMIC_SEQ_CST);
  }
  return true;
}

template <typename T>
void add_slots(const char* slots, const SumRanks& ranks, T* out, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats sum = read_some((const T*)slots + i, count - i);
    for (int64_t r = 1; r < ranks.size; ++r)
      sum = sum + read_some((const T*)(slots + r * ranks.slot_bytes) + i, count - i);
    write_some(out + i, sum, count - i);
  }
}

template <typename T>
void sum(T* x, int64_t count, SumRanks& ranks) {
  Flag* flags = (Flag*)ranks.memory;
  char* all = ranks.memory + (ranks.size + 1) * sizeof(Flag);
  const int64_t most = ranks.slot_bytes / int64_t(sizeof(T));
  for (int64_t first = 0; first < count; first += most) {
    const int64_t some = std::min(most, count - first);
    const uint32_t number = uint32_t(++ranks.sequence);
    char* slots = all + (ranks.sequence & 1) * ranks.size * ranks.slot_bytes;
    std::memcpy(slots + ranks.rank * ranks.slot_bytes, x + first, some * sizeof(T));
    arrive(flags[ranks.rank], number);
    for (int64_t r = 0; r < ranks.size; ++r)
      if (!wait_for(flags[r], flags[ranks.size], number, ranks.spins)) {
        ranks.failed = 1;
        return;
      }
    add_slots(slots, ranks, x + first, some);
  }
}

}  // namespace

extern "C" {

// Adds up x over the ranks. Where all is over before, x holds anything, and `failed` of the ranks is set.
void quire_sum(const SumCall* call) {
  ++call->ranks->sums;
  call->bf16 ? sum((Bf16*)call->x, call->count, *call->ranks) : sum((float*)call->x, call->count, *call->ranks);
}

// Ends the waiting of all ranks, now and from now on.
void quire_end_sums(const SumRanks* ranks) {
  __atomic_store_n(&((Flag*)ranks->memory)[ranks->size].number, 1, __ATOMIC_SEQ_CST);
}
}
