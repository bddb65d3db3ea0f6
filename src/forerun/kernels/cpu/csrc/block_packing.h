// From the blocks of GGUF files, as ggml-quants.c of llama.cpp has them, to blocks of sixteen outputs. For processors that
// store the low byte first, as the files do.
#pragma once
#include "layouts.h"
#include "parallel.h"

namespace forerun {

constexpr uint64_t EACH_BYTE = 0x0101010101010101;

inline uint64_t eight_bytes(const uint8_t* p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}
inline uint32_t four_bytes(const uint8_t* p) {
    uint32_t x;
    memcpy(&x, p, 4);
    return x;
}
inline uint16_t two_bytes(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// The codes of one output for a group of 32 inputs, a byte each: low bits, and those beyond the fourth.
struct GroupCodes {
    uint64_t low[4], high[4];
};

// Low halves of bytes, or with `shift` 4 the high ones: inputs first..first + count - 1.
inline void take_halves(GroupCodes& c, const uint8_t* bytes, int shift, int first, int count) {
    for (int i = 0; i < count; i += 8) c.low[(first + i) / 8] = eight_bytes(bytes + i) >> shift & 15 * EACH_BYTE;
}
// Sixteen bytes whose low halves are of the first inputs.
inline void take_both_halves(GroupCodes& c, const uint8_t* bytes) {
    take_halves(c, bytes, 0, 0, 16);
    take_halves(c, bytes, 4, 16, 16);
}
// A bit for each input, the first the lowest: a bit goes to the byte of its number, and becomes 1 there.
inline void take_bits(GroupCodes& c, const uint8_t* bits) {
    for (int i = 0; i < 4; i++)
        c.high[i] = ((bits[i] * EACH_BYTE & 0x8040201008040201) + 0x7f * EACH_BYTE) >> 7 & EACH_BYTE;
}
// `count` bits of each of 32 bytes, from bit `shift` on.
inline void take_fields(GroupCodes& c, const uint8_t* bytes, int shift, uint64_t mask) {
    for (int i = 0; i < 4; i++) c.high[i] = eight_bytes(bytes + 8 * i) >> shift & mask * EACH_BYTE;
}

// The scale (6 bits) and the minimum of group g of eight, in 12 bytes.
inline uint8_t scale_of_6_bits(const uint8_t* p, int g) {
    return g < 4 ? p[g] & 63 : (p[g + 4] & 15) | (p[g - 4] >> 6) << 4;
}
inline uint8_t minimum_of_6_bits(const uint8_t* p, int g) {
    return g < 4 ? p[g + 4] & 63 : p[g + 4] >> 4 | (p[g] >> 6) << 4;
}

inline void put_half(uint8_t* behind, int64_t o, uint16_t half) { memcpy(behind + 2 * o, &half, 2); }

// Codes of output o into its group: words of four inputs.
template <int HIGH> inline void put_codes(uint8_t* group, int64_t o, const GroupCodes& c) {
    uint32_t planes[2] = {0, 0};
    for (int i = 0; i < 4; i++) {
        const uint32_t word = (uint32_t)c.low[i] | (uint32_t)(c.low[i] >> 32) << 4;
        memcpy(group + 64 * i + 4 * o, &word, 4);
        if (!HIGH) continue;
        const int shift = 2 * i * HIGH % 8;
        planes[2 * i * HIGH / 8] |= (uint32_t)c.high[i] << shift | (uint32_t)(c.high[i] >> 32) << (shift + HIGH);
    }
    for (int i = 0; i < HIGH; i++) memcpy(group + 256 + 64 * i + 4 * o, planes + i, 4);
}

// A block of output o, from `b`, into its place: a group, or eight behind their head. Returns whether its scales are finite.
template <int KIND> inline bool put_block(const uint8_t* b, uint8_t* to, int64_t o) {
    constexpr Layout L = layout_of(KIND);
    constexpr bool LARGE = L.scales == Scales::two_levels, PACKED = KIND == FORERUN_Q4_K || KIND == FORERUN_Q5_K;
    constexpr int D = KIND == FORERUN_Q6_K ? 208 : 0;  // where the float16 scale is
    uint16_t d = KIND == FORERUN_MXFP4 ? (b[0] == 255 ? 0x7c00 : 0) : two_bytes(b + D), m = L.minima ? two_bytes(b + 2) : 0;
    const bool finite = (d & 0x7c00) != 0x7c00 && (m & 0x7c00) != 0x7c00;
    if (LARGE) {
        put_half(to, o, d);
        if (L.minima) put_half(to + 32, o, m ^ 0x8000);  // they are taken off
        to += L.head();
    }
    for (int g = 0; g < (LARGE ? 8 : 1); g++, to += L.bytes()) {
        uint8_t* behind = to + L.codes();
        GroupCodes c;
        if (KIND == FORERUN_INT8_GROUPS) {
            for (int i = 0; i < 8; i++) memcpy(to + 64 * i + 4 * o, b + 2 + 4 * i, 4);
        } else if (PACKED) {
            take_halves(c, b + (KIND == FORERUN_Q4_K ? 16 : 48) + g / 2 * 32, g % 2 * 4, 0, 32);
            if (KIND == FORERUN_Q5_K) take_fields(c, b + 16, g, 1);
            behind[o] = scale_of_6_bits(b + 4, g);
            behind[16 + o] = minimum_of_6_bits(b + 4, g);
        } else if (KIND == FORERUN_Q6_K) {  // halves of 128 inputs, of which 64 bytes hold codes, and 32 fields
            take_halves(c, b + g / 4 * 64 + g % 2 * 32, g % 4 / 2 * 4, 0, 32);
            take_fields(c, b + 128 + g / 4 * 32, g % 4 * 2, 3);
            behind[o] = b[192 + 2 * g];
            behind[16 + o] = b[193 + 2 * g];
        } else if (KIND == FORERUN_IQ4_XS) {
            take_both_halves(c, b + 8 + 16 * g);
            behind[o] = (uint8_t)(((b[4 + g / 2] >> g % 2 * 4 & 15) | (two_bytes(b + 2) >> 2 * g & 3) << 4) - 32);
        } else if (KIND == FORERUN_MXFP4) {
            take_both_halves(c, b + 1);
            behind[o] = b[0];
        } else {
            take_both_halves(c, b + 2 + 2 * L.minima + 4 * L.high);
            if (L.high) take_bits(c, b + 2 + 2 * L.minima);
        }
        if (L.low == 4) put_codes<L.high>(to, o, c);
        if (L.scales == Scales::halves) put_half(behind, o, d);
        if (L.scales == Scales::halves && L.minima) put_half(behind + 32, o, m);
    }
    return finite;
}

struct BlockPacking {
    int64_t out, in;
    const uint8_t* blocks;
    int64_t row_bytes, block_bytes;
    const int64_t* order;
    uint8_t* packed;
    Team* team;
    std::atomic<int64_t> bad;  // the first row with a scale that is not finite
};

// Sixteen outputs, block of inputs by block, so that what is written stays in the cache.
template <int KIND> inline void pack_outputs(BlockPacking& c, int64_t index) {
    constexpr Layout L = layout_of(KIND);
    constexpr int64_t GROUPS = L.head() ? 8 : 1;
    const int64_t first = 16 * index, rows = c.out - first < 16 ? c.out - first : 16;
    uint8_t* to = c.packed + index * L.block(c.in / 32);
    const uint8_t* from[16];
    for (int64_t o = 0; o < rows; o++) from[o] = c.blocks + (c.order ? c.order[first + o] : first + o) * c.row_bytes;
    if (rows < 16) memset(to, 0, L.block(c.in / 32));
    for (int64_t at = 0; at < c.in; at += 32 * GROUPS, to += L.block(GROUPS))
        for (int64_t o = 0; o < rows; o++, from[o - 1] += c.block_bytes)
            if (!put_block<KIND>(from[o], to, o)) {
                int64_t bad = c.bad.load();
                while (first + o < bad && !c.bad.compare_exchange_weak(bad, first + o)) {}
            }
}

template <int KIND> void pack_blocks_body(void* data) {
    BlockPacking& c = *(BlockPacking*)data;
    Member member(*c.team);
    for (const int64_t index : member.each((c.out + 15) / 16)) pack_outputs<KIND>(c, index);
}

// What packs a format, or null.
template <int KIND> constexpr auto body_of() -> void (*)(void*) {
    if constexpr (layout_of(KIND).has_blocks)
        return pack_blocks_body<KIND>;
    else
        return nullptr;
}

// Returns the first row + 1 with a scale that is not finite, else 0.
inline int64_t pack_blocks(int32_t kind, int64_t out, int64_t in, const uint8_t* blocks, int64_t row_bytes,
                           const int64_t* order, void* packed, int threads) {
    Team team(threads);
    const int64_t size = layout_of(kind).head() ? 256 : 32;
    BlockPacking call{out, in, blocks, row_bytes, row_bytes / (in / size), order, (uint8_t*)packed, &team, {out}};
    void (*const bodies[])(void*) = {
#define FORMAT(name, ...) body_of<FORERUN_##name>(),
#include "weight_formats.h"
    };
    run_in_parallel(bodies[kind - FORERUN_INT8], &call, team);
    const int64_t bad = call.bad.load();
    return bad < out ? bad + 1 : 0;
}

}  // namespace forerun
