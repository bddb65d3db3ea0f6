// Weights from rows to blocks of sixteen outputs, and back.
#pragma once
#include <cstring>

#include "forerun.h"

namespace forerun {

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

// Bytes of a group of 32 inputs and 16 outputs, and how many of them are codes.
inline int64_t group_bytes(int32_t kind) {
    switch (kind) {
    case FORERUN_INT8: return 512;
    case FORERUN_INT8_GROUPS: return 544;
    case FORERUN_INT4_GROUPS: return 288;
    default: return 320;
    }
}
inline int64_t code_bytes(int32_t kind) { return kind <= FORERUN_INT8_GROUPS ? 512 : 256; }
inline int zero_code(int32_t kind) { return kind == FORERUN_INT4_GROUPS ? 8 : kind == FORERUN_INT4_MINIMA ? 0 : 128; }
// Codes of 8 bits are kept about their zero, as signed bytes.
inline uint8_t kept_code(int32_t kind, uint8_t code) { return kind <= FORERUN_INT8_GROUPS ? code ^ 0x80 : code; }

inline int64_t packed_bytes(int32_t kind, int64_t out, int64_t in) {
    const int64_t blocks = (out + 15) / 16;
    if (kind == FORERUN_FLOAT32) return blocks * in * 64;
    if (kind == FORERUN_BFLOAT16) return blocks * (in + in % 2) * 32;
    return blocks * ((in + 31) / 32) * group_bytes(kind);
}

// Where the code of output o of a block and input k lies, from the block's start, and its shift. Four bytes hold, of one
// output, four codes of 8 bits or eight of 4 bits.
inline int64_t code_place(int32_t kind, int64_t o, int64_t k, int* shift) {
    const int64_t group = k / 32 * group_bytes(kind), i = k % 32;
    if (kind <= FORERUN_INT8_GROUPS) {
        *shift = 0;
        return group + i / 4 * 64 + 4 * o + i % 4;
    }
    *shift = i % 8 / 4 * 4;
    return group + i / 8 * 64 + 4 * o + i % 4;
}

// Where the number of output o of a block and input k lies, from the block's start.
inline int64_t float_place(int64_t o, int64_t k) { return k * 16 + o; }
inline int64_t bfloat16_place(int64_t o, int64_t k) { return k / 2 * 32 + 2 * o + k % 2; }

template <class E, class Place>
void pack_numbers(int64_t out, int64_t in, int64_t padded, const E* numbers, E* packed, const Place& place) {
    for (int64_t o = 0; o < (out + 15) / 16 * 16; o++)
        for (int64_t k = 0; k < padded; k++)
            packed[o / 16 * padded * 16 + place(o % 16, k)] = o < out && k < in ? numbers[o * in + k] : E(0);
}

inline void pack(int32_t kind, int64_t out, int64_t in, const void* numbers, const uint16_t* scales,
                 const uint16_t* minima, void* packed) {
    if (kind == FORERUN_FLOAT32)
        return pack_numbers(out, in, in, (const float*)numbers, (float*)packed, float_place);
    if (kind == FORERUN_BFLOAT16)
        return pack_numbers(out, in, in + in % 2, (const uint16_t*)numbers, (uint16_t*)packed, bfloat16_place);
    memset(packed, 0, packed_bytes(kind, out, in));
    const uint8_t* codes = (const uint8_t*)numbers;
    const int64_t block_bytes = packed_bytes(kind, 16, in), groups = (in + 31) / 32;
    for (int64_t o = 0; o < out; o++) {
        uint8_t* block = (uint8_t*)packed + o / 16 * block_bytes;
        for (int64_t k = 0; k < in; k++) {
            int shift;
            const int64_t place = code_place(kind, o % 16, k, &shift);
            block[place] |= (uint8_t)(kept_code(kind, codes[o * in + k]) << shift);
        }
        for (int64_t g = 0; kind != FORERUN_INT8 && g < groups; g++) {
            uint16_t* behind = (uint16_t*)(block + g * group_bytes(kind) + code_bytes(kind));
            behind[o % 16] = scales[o * groups + g];
            if (kind == FORERUN_INT4_MINIMA) behind[16 + o % 16] = minima[o * groups + g];
        }
    }
}

inline void unpack(const ForerunLinear& w, const int64_t* rows, int64_t n, float* numbers) {
    const int64_t in = w.in, block_bytes = packed_bytes(w.kind, 16, in);
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = rows[i], o = row % 16;
        const uint8_t* block = (const uint8_t*)w.packed + row / 16 * block_bytes;
        float* to = numbers + i * in;
        for (int64_t k = 0; k < in; k++) {
            if (w.kind == FORERUN_FLOAT32) {
                to[k] = ((const float*)block)[float_place(o, k)];
            } else if (w.kind == FORERUN_BFLOAT16) {
                const uint32_t bits = (uint32_t)((const uint16_t*)block)[bfloat16_place(o, k)] << 16;
                memcpy(to + k, &bits, 4);
            } else {
                int shift;
                const int64_t place = code_place(w.kind, o, k, &shift);
                const int mask = w.kind >= FORERUN_INT4_GROUPS ? 15 : 255;
                const float code = (float)(kept_code(w.kind, (uint8_t)(block[place] >> shift & mask)) - zero_code(w.kind));
                if (w.kind == FORERUN_INT8) {
                    to[k] = w.scales[row] * code;
                    continue;
                }
                const uint16_t* behind = (const uint16_t*)(block + k / 32 * group_bytes(w.kind) + code_bytes(w.kind));
                to[k] = half_to_float(behind[o]) * code;
                if (w.kind == FORERUN_INT4_MINIMA) to[k] += half_to_float(behind[16 + o]);
            }
        }
    }
}

// Slots rise and go down, so each is read before it is written over.
inline void move_slots(const uint64_t* pages, const int32_t* shapes, const int64_t* starts, int32_t layers, int64_t page,
                       int64_t bytes, const int64_t* slots, int64_t n, int64_t start) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t from = slots[i], to = start + i, a = from % page, b = to % page;
        const char* source = (const char*)pages[from / page];
        char* target = (char*)pages[to / page];
        for (int32_t layer = 0; layer < layers; layer++) {
            const int64_t heads = shapes[3 * layer], width = shapes[3 * layer + 1], chunks = (shapes[3 * layer + 2] + 15) / 16;
            int64_t at = starts[layer];
            for (int64_t head = 0; head < heads; head++, at += page * width * bytes)
                for (int64_t d = 0; d < width; d++)
                    memcpy(target + at + ((b / 16 * width + d) * 16 + b % 16) * bytes,
                           source + at + ((a / 16 * width + d) * 16 + a % 16) * bytes, bytes);
            for (int64_t chunk = 0; chunk < heads * chunks; chunk++, at += page * 16 * bytes)
                memcpy(target + at + b * 16 * bytes, source + at + a * 16 * bytes, 16 * bytes);
            for (int64_t head = 0; bytes == 1 && head < 2 * heads; head++, at += page * 4)
                memcpy(target + at + b * 4, source + at + a * 4, 4);
        }
    }
}

}  // namespace forerun
