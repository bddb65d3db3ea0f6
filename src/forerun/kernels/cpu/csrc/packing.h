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

struct Packing {
    int32_t kind;
    int64_t out, in, span;
    const void* numbers;
    const uint16_t* scales;
    const void* behind;
    uint8_t* packed;
    Team* team;
};

// Numbers go in words of four bytes: a float32, or the bfloat16 of two inputs.
inline void pack_numbers(const Packing& c, int64_t index, int64_t row_bytes) {
    const int64_t words = row_bytes / 4, rows = c.out - 16 * index;
    const uint8_t* from = (const uint8_t*)c.numbers + 16 * index * row_bytes;
    uint32_t* to = (uint32_t*)c.packed + 16 * index * ((row_bytes + 3) / 4);
    for (int64_t w = 0; w < words; w++, to += 16)
        for (int64_t o = 0; o < 16; o++) to[o] = o < rows ? four_bytes(from + o * row_bytes + 4 * w) : 0;
    for (int64_t o = 0; 4 * words < row_bytes && o < 16; o++)
        to[o] = o < rows ? two_bytes(from + o * row_bytes + 4 * words) : 0;
}

inline void pack_codes(const Packing& c, int64_t index) {
    const Layout& l = layout_of(c.kind);
    const int64_t groups = (c.in + 31) / 32, span = span_of(l, c.span), first = 16 * index;
    const int64_t shared = l.has_zeros() ? (groups + span - 1) / span : groups, rows = c.out - first < 16 ? c.out - first : 16;
    uint8_t* block = c.packed + index * l.block(groups, span);
    memset(block, 0, l.block(groups, span));
    for (int64_t g = 0; g < groups; g++) {
        uint8_t *to = block + l.at(g, span), whole[32];
        memset(whole, l.low == 8 ? 0x80 : 0, 32);  // what is 0, behind the last input
        for (int64_t o = 0; o < rows; o++, to += 4) {
            const uint8_t* row = (const uint8_t*)c.numbers + (first + o) * c.in + 32 * g;
            if (c.in - 32 * g < 32) row = (uint8_t*)memcpy(whole, row, c.in - 32 * g);
            if (l.low == 4) {
                GroupCodes codes;
                take_halves(codes, row, 0, 0, 32);
                put_codes<0>(to, 0, codes);
            }
            for (int i = 0; l.low == 8 && i < 8; i++) {
                const uint32_t word = four_bytes(row + 4 * i) ^ 0x80808080;
                memcpy(to + 64 * i, &word, 4);
            }
        }
    }
    if (l.scales != Scales::halves && !l.has_zeros()) return;
    for (int64_t g = 0; g < shared; g++) {
        uint8_t* to = block + (l.has_zeros() ? l.at(g * span, span) - l.head() : l.at(g) + l.codes());
        for (int64_t o = 0, at = first * shared + g; o < rows; o++, at += shared) {
            put_half(to, o, c.scales[at]);
            if (l.minima) put_half(to + 32, o, ((const uint16_t*)c.behind)[at]);
            if (l.has_zeros()) to[32 + o] = (uint8_t)(((const uint8_t*)c.behind)[at] ^ (l.low == 8 ? 0x80 : 0));
        }
    }
}

inline void pack_body(void* data) {
    const Packing& c = *(const Packing*)data;
    Member member(*c.team);
    for (const int64_t index : member.each((c.out + 15) / 16)) {
        if (c.kind == FORERUN_FLOAT32 || c.kind == FORERUN_BFLOAT16)
            pack_numbers(c, index, c.in * (c.kind == FORERUN_FLOAT32 ? 4 : 2));
        else
            pack_codes(c, index);
    }
}

// Words of eight numbers of 4 bits, to bytes: of the word in row r and column c, the inputs from 8 r on of output c; or, as
// AWQ has them, input r of the outputs from 8 c on.
struct WordUnpacking {
    const uint32_t* words;
    int64_t rows, columns, row_stride, column_stride;
    bool of_outputs;
    uint8_t* values;
    Team* team;
};

// A byte for each half of a word's bytes, the lowest first.
inline uint64_t halves_of(uint64_t word) {
    word = (word | word << 16) & 0x0000ffff0000ffff;
    word = (word | word << 8) & 0x00ff00ff00ff00ff;
    return (word | word << 4) & 15 * EACH_BYTE;
}

inline void unpack_words_body(void* data) {
    constexpr int64_t COLUMNS = 16, ROWS = 64;
    constexpr int HALVES[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    const WordUnpacking& c = *(const WordUnpacking*)data;
    Member member(*c.team);
    for (const auto [first, last] : member.parts((c.columns + COLUMNS - 1) / COLUMNS))
        for (int64_t unit = first, row = 0; unit < last; row + ROWS < c.rows ? row += ROWS : (row = 0, unit++)) {
            const int64_t start = COLUMNS * unit, rest = c.columns - start, width = rest < COLUMNS ? rest : COLUMNS;
            const int64_t count = c.rows - row < ROWS ? c.rows - row : ROWS;
            uint32_t words[COLUMNS][ROWS] = {};  // sixteen columns lie in a line of the cache
            for (int64_t r = 0; r < count; r++)
                for (int64_t w = 0; w < width; w++)
                    words[w][r] = c.words[(row + r) * c.row_stride + (start + w) * c.column_stride];
            for (int64_t w = 0; w < width; w++) {
                uint8_t* values = c.values + 8 * (start + w) * c.rows;
                for (int64_t r = 0; !c.of_outputs && r < count; r++) {
                    const uint64_t eight = halves_of(words[w][r]);
                    memcpy(values + 8 * (row + r), &eight, 8);
                }
                if (!c.of_outputs) continue;
                uint8_t bytes[4][ROWS], part[ROWS];
                for (int b = 0; b < 4; b++)
                    for (int64_t r = 0; r < ROWS; r++) bytes[b][r] = (uint8_t)(words[w][r] >> 8 * b);
                for (int i = 0; i < 8; i++) {
                    const int half = HALVES[i];
                    for (int64_t r = 0; r < ROWS; r++) part[r] = bytes[half / 2][r] >> half % 2 * 4 & 15;
                    memcpy(values + i * c.rows + row, part, count);
                }
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
    const uint8_t* block = (const uint8_t*)w.packed + row / 16 * l.block((w.in_features + 31) / 32, span);
    float scale = 0.0f, minimum = 0.0f;
    int zero = l.zero;
    for (int64_t k = 0; k < w.in_features; k++) {
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
    const int64_t in = w.in_features;
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
