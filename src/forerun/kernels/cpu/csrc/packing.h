// Weights from rows to blocks of sixteen outputs, and back.
#pragma once
#include "block_packing.h"

namespace forerun {

inline int64_t span_of(const Layout& l, int64_t span) { return l.has_zeros() ? span : 8; }

inline int64_t packed_bytes(int32_t kind, int64_t out, int64_t in, int64_t span) {
    const int64_t blocks = (out + 15) / 16;
    if (kind == FORERUN_FLOAT32) return blocks * in * 64;
    if (kind == FORERUN_BFLOAT16) return blocks * (in + in % 2) * 32;
    return blocks * layout_of(kind).block((in + 31) / 32, span_of(layout_of(kind), span));
}

// Where the code of output o and input i of a group lies, from the group's start, and its shift. Four bytes hold, of one
// output, four codes of 8 bits or eight of 4 bits.
inline int64_t code_place(const Layout& l, int64_t o, int64_t i, int* shift) {
    *shift = l.low == 8 ? 0 : i % 8 / 4 * 4;
    return (l.low == 8 ? i / 4 : i / 8) * 64 + 4 * o + i % 4;
}
// The same for what lies in planes: 64 bytes hold the bits of 8 / high fours of inputs.
inline int64_t plane_place(const Layout& l, int64_t o, int64_t i, int* shift) {
    const int64_t fours = 8 / l.high;
    *shift = (int)(i / 4 % fours) * l.high;
    return 256 + i / 4 / fours * 64 + 4 * o + i % 4;
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

// behind: minima as float16, or zeros as bytes.
inline void pack(int32_t kind, int64_t out, int64_t in, int64_t span, const void* numbers, const uint16_t* scales,
                 const void* behind, void* packed) {
    if (kind == FORERUN_FLOAT32)
        return pack_numbers(out, in, in, (const float*)numbers, (float*)packed, float_place);
    if (kind == FORERUN_BFLOAT16)
        return pack_numbers(out, in, in + in % 2, (const uint16_t*)numbers, (uint16_t*)packed, bfloat16_place);
    memset(packed, 0, packed_bytes(kind, out, in, span));
    const Layout& l = layout_of(kind);
    const uint8_t* codes = (const uint8_t*)numbers;
    const int64_t groups = (in + 31) / 32, shared = l.has_zeros() ? (groups + span - 1) / span : groups;
    span = span_of(l, span);
    for (int64_t o = 0; o < out; o++) {
        uint8_t* block = (uint8_t*)packed + o / 16 * l.block(groups, span);
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *to = block + l.at(g, span), row[32];
            memset(row, l.low == 8 ? 0x80 : 0, 32);  // what is 0, behind the last input
            memcpy(row, codes + o * in + 32 * g, in - 32 * g < 32 ? in - 32 * g : 32);
            GroupCodes c;
            for (int i = 0; i < 4; i++) {
                c.low[i] = eight_bytes(row + 8 * i);
                if (l.low == 4) continue;
                c.low[i] ^= 0x80 * EACH_BYTE;
                memcpy(to + 128 * i + 4 * (o % 16), &c.low[i], 4);
                memcpy(to + 128 * i + 64 + 4 * (o % 16), (char*)&c.low[i] + 4, 4);
            }
            if (l.low == 4) put_codes<0>(to, o % 16, c);
        }
        for (int64_t g = 0; (l.scales == Scales::halves || l.has_zeros()) && g < shared; g++) {
            uint8_t* at = block + (l.has_zeros() ? l.at(g * span, span) - l.head() : l.at(g) + l.codes());
            ((uint16_t*)at)[o % 16] = scales[o * shared + g];
            if (l.minima) ((uint16_t*)at)[16 + o % 16] = ((const uint16_t*)behind)[o * shared + g];
            if (l.has_zeros()) at[32 + o % 16] = (uint8_t)(((const uint8_t*)behind)[o * shared + g] ^ (l.low == 8 ? 0x80 : 0));
        }
    }
}

// What output o has for the inputs from i on of a group: their scale, minimum and zero.
inline void group_scales(const Layout& l, const uint8_t* group, const uint8_t* head, int64_t o, int64_t i, float* scale,
                         float* minimum, int* zero) {
    const uint8_t* behind = group + l.codes();
    if (l.has_zeros()) {
        *scale = half_to_float(((const uint16_t*)head)[o]);
        *zero = (int8_t)head[32 + o];
    } else if (l.scales == Scales::exponents) {
        *scale = half_power(behind[o]);
    } else if (l.scales == Scales::halves) {
        *scale = half_to_float(((const uint16_t*)behind)[o]);
        if (l.minima) *minimum = half_to_float(((const uint16_t*)behind)[16 + o]);
    } else {
        *scale = half_to_float(((const uint16_t*)head)[o]) * (float)(int8_t)behind[i / l.group * 16 + o];
        if (l.minima) *minimum = half_to_float(((const uint16_t*)head)[16 + o]) * (float)behind[16 + o];
    }
}

// The numbers of a row, of codes.
inline void unpack_codes(const ForerunLinear& w, int64_t row, float* to) {
    const Layout& l = layout_of(w.kind);
    const int64_t o = row % 16, span = span_of(l, w.span);
    const uint8_t* block = (const uint8_t*)w.packed + row / 16 * l.block((w.in + 31) / 32, span);
    float scale = 0.0f, minimum = 0.0f;
    int zero = l.zero;
    for (int64_t k = 0; k < w.in; k++) {
        const int64_t g = k / 32, i = k % 32;
        const uint8_t* group = block + l.at(g, span);
        int shift, code;
        if (i % l.group == 0 && l.scales != Scales::by_output)
            group_scales(l, group, block + l.at(g / span * span, span) - l.head(), o, i, &scale, &minimum, &zero);
        code = group[code_place(l, o, i, &shift)];
        code = l.low == 8 ? (int8_t)code : code >> shift & 15;
        if (l.high) {
            const int plane = group[plane_place(l, o, i, &shift)];
            code |= (plane >> shift & ((1 << l.high) - 1)) << 4;
        }
        const float value = (float)(l.table ? l.table[code] : code - zero);
        to[k] = (l.scales == Scales::by_output ? w.scales[row] : scale) * value;
        if (l.has_zeros()) to[k] *= w.scales[row];
        if (l.minima) to[k] += minimum;
    }
}

inline void unpack(const ForerunLinear& w, const int64_t* rows, int64_t n, float* numbers) {
    const int64_t in = w.in;
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = rows[i], o = row % 16;
        const char* block = (const char*)w.packed + row / 16 * packed_bytes(w.kind, 16, in, w.span);
        float* to = numbers + i * in;
        if (w.kind >= FORERUN_INT8) unpack_codes(w, row, to);
        for (int64_t k = 0; w.kind == FORERUN_FLOAT32 && k < in; k++) to[k] = ((const float*)block)[float_place(o, k)];
        for (int64_t k = 0; w.kind == FORERUN_BFLOAT16 && k < in; k++) {
            const uint32_t bits = (uint32_t)((const uint16_t*)block)[bfloat16_place(o, k)] << 16;
            memcpy(to + k, &bits, 4);
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
