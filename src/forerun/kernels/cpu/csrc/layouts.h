// How the codes and scales of each kind lie in a group of 32 inputs and 16 outputs, for packing and for kernels.
#pragma once
#include <cstring>

#include "forerun.h"

namespace forerun {

// Where the scales of 16 outputs are.
enum class Scales {
    by_output,   // one for all inputs, in ForerunLinear
    halves,      // float16 behind each group
    exponents,   // bytes behind each group, powers of 2
    two_levels,  // float16 before eight groups, and bytes behind each of them
    zeros,       // float16 and whole zeros before `span` groups, and one by output
};

constexpr int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled; scales are halved

// A row of weight_formats.h.
struct Layout {
    int kind;
    int low, high;
    int zero;
    const int8_t* table;
    Scales scales;
    bool minima;
    int group;
    bool has_blocks;

    constexpr int codes() const { return 64 * (low + high); }  // bytes
    constexpr int bytes() const {
        const int each = scales == Scales::halves ? 32 : scales == Scales::by_output || has_zeros() ? 0 : 16;
        return codes() + each * (32 / group + minima);
    }
    constexpr bool has_zeros() const { return scales == Scales::zeros; }
    // Bytes before the groups of a super-block: eight, or with zeros `span` of them.
    constexpr int head() const { return scales == Scales::two_levels ? 32 * (1 + minima) : has_zeros() ? 48 : 0; }
    constexpr int64_t at(int64_t group, int64_t span = 8) const { return group * bytes() + (group / span + 1) * head(); }
    constexpr int64_t block(int64_t groups, int64_t span = 8) const {
        return groups * bytes() + (groups + span - 1) / span * head();
    }
};

// By kind, from FORERUN_INT8 on.
constexpr Layout LAYOUTS[] = {
#define FORMAT(name, number, low, high, zero, table, scales, minima, group, wide, has_blocks) \
    {number, low, high, zero, table, Scales::scales, minima, group, has_blocks},
#include "weight_formats.h"
};
constexpr const Layout& layout_of(int32_t kind) { return LAYOUTS[kind - FORERUN_INT8]; }

constexpr bool are_in_order() {
    for (const Layout& layout : LAYOUTS)
        if (&layout != &layout_of(layout.kind)) return false;
    return true;
}
static_assert(are_in_order(), "rows of weight_formats.h stand in the order of their numbers");

inline float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    uint32_t bits;
    if (exponent == 31)
        bits = sign | 0x7f800000 | fraction << 13;
    else if (exponent)
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    else {
        const float tiny = (float)fraction * 5.9604644775390625e-8f;  // 2^-24
        memcpy(&bits, &tiny, 4);
        bits |= sign;
    }
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// 2^(exponent - 128): half of what the exponent of a float is.
inline float half_power(uint8_t exponent) {
    const uint32_t bits = exponent ? (uint32_t)exponent << 23 : 1u << 22;
    float x;
    memcpy(&x, &bits, 4);
    return 0.5f * x;
}

}  // namespace forerun
