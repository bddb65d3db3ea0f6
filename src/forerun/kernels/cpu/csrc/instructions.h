// What the kernels of each instruction set include, which are compiled apart, beside one another.
#pragma once
#include "forerun.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "packing.h"
#include "parallel.h"
#include "step.h"

namespace forerun {
// What one instruction set offers.
struct Entries {
    void (*linear)(const ForerunLinear*, const float*, int64_t, const float*, float*, int);
    void (*forward_layers)(const ForerunModel*, const ForerunRows*, int32_t, int32_t, float*, const int32_t*, int32_t, float*,
                           int);
    void (*head)(const ForerunModel*, int64_t, float*, float*, int);
    void (*attention)(const ForerunAttention*, const ForerunRows*, const float*, const float*, const float*, float*, int);
    void (*eagle)(const ForerunEagle*, const ForerunRows*, const float*, const float*, const int64_t*, int64_t, float*,
                  float*, int);
    void (*fuse)(const ForerunLinear*, const float*, int32_t, float, const float*, int64_t, float*, int);
    void (*context)(const ForerunModel*, const float*, const ForerunRows*, const float*, int);
    void (*greedy_chains)(const ForerunLinear*, const float*, const int64_t*, const float*, const int64_t*, const int64_t*,
                          int64_t, int64_t*, int);
    void (*argmax)(const float*, int64_t, int64_t, int64_t, int64_t*, float*);
    void (*read)(const uint64_t*, const int64_t*, int64_t, int64_t, int);
    void (*topk)(const float*, int64_t, int64_t, int64_t, int64_t*);
};

// By their numbers, what the instruction sets that were compiled into this library offer; null: one that was not.
constexpr int32_t NUM_INSTRUCTIONS = 9;
extern const Entries* offered[NUM_INSTRUCTIONS];  // null before what initializes any file runs
struct Offer {
    Offer(int32_t number, const Entries& entries) { offered[number] = &entries; }
};
}  // namespace forerun
// Make a namespace's kernels those of a number, as the library is loaded.
#define OFFER(name, number) static const forerun::Offer OFFER_OF_##name(number, name::ENTRIES);
using forerun::Entries;
using forerun::half_power;
using forerun::half_to_float;
