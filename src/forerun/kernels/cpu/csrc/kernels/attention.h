// Attention along each row's own path, in path order. Included once for each instruction set.
//
// A row sees the slots 0..prefix-1, then those of its tail. Its path is added in parts of PART positions, whose results are
// joined in order. Rows of one sequence that follow each other in the forward are computed in groups, which read each key
// and value once; what a row adds up, and in which order, depends on its own path alone. A page holds, layer by layer,
// keys [heads][page / 16][width][16] and values [heads][width / 16][page][16]: lanes are keys in the scores, and outputs
// in the weighted values. Numbers of 8 bits are converted as they are read; a score is multiplied with its key's scale,
// and a weight with its value's.

constexpr int GROUP_ROWS = 8;
constexpr int64_t GROUP_QUERIES = 128;  // of a key head: where a row has many, its parts' sums take much memory
constexpr int64_t PART = 128;  // positions; two pages

// The most rows of a group.
static inline int32_t most_rows(int64_t heads_per_key) {
    const int64_t most = GROUP_QUERIES / heads_per_key;
    return (int32_t)(most < 1 ? 1 : most < GROUP_ROWS ? most : GROUP_ROWS);
}

// Rows of one sequence.
struct Group {
    int32_t row, count;
    int32_t common;   // slots that all of them see: their least prefix
    int32_t first;    // the first slot that all of them see (windows)
    int32_t begin, end;  // slots in sight of any
    int32_t longest;  // path
};

struct Attention {
    const ForerunAttention* shape;
    const ForerunRows* rows;
    const Group* groups;
    int32_t num_groups, heads_per_key;
    int64_t room;           // queries of a group, at most
    int64_t span;           // floats of one query's weights in a part
    int64_t parts;          // of the longest path
    int64_t wide;           // floats of one query's sum: the value width in whole chunks
    int64_t sums_size;      // floats of a group's and a key head's sums: [parts][room][wide], and twice [room][parts + 16]
    const float* query;     // [H_kv][rows][heads per key][key width], rotated and scaled
    float* out;             // [rows][H][value width]
    float* sums;            // [groups][H_kv][sums_size], where parts are shared among threads
};

INLINE char* slot_page(const Attention& a, int32_t row, int64_t slot) {
    const ForerunRows& rows = *a.rows;
    return (char*)rows.pages[rows.page_start[rows.sequence[row]] + slot / a.shape->page] + a.shape->offset;
}
// The keys of 16 slots, [width][16].
template <class E> INLINE E* key_block(const Attention& a, int32_t row, int64_t head, int64_t slot) {
    const int64_t page = a.shape->page, width = a.shape->key_width;
    return (E*)slot_page(a, row, slot) + (head * page + slot % page / 16 * 16) * width;
}
// The values of a slot in a chunk of 16 outputs; those of the next slot in the page follow.
template <class E> INLINE E* value_row(const Attention& a, int32_t row, int64_t head, int64_t chunk, int64_t slot) {
    const int64_t page = a.shape->page, chunks = (a.shape->value_width + 15) / 16;
    E* values = (E*)slot_page(a, row, slot) + (int64_t)a.shape->num_kv_heads * page * a.shape->key_width;
    return values + ((head * chunks + chunk) * page + slot % page) * 16;
}

// The scale of a slot's keys, or values, of 8 bits; those of the next slot in the page follow.
INLINE float* scale_at(const Attention& a, int32_t row, int64_t head, int64_t slot, bool of_values) {
    const int64_t page = a.shape->page, heads = a.shape->num_kv_heads, wide = (a.shape->value_width + 15) / 16 * 16;
    float* scales = (float*)(slot_page(a, row, slot) + heads * page * (a.shape->key_width + wide));
    return scales + ((of_values ? heads : 0) + head) * page + slot % page;
}

INLINE void store_number(float* at, float x) { *at = x; }
INLINE void store_number(uint16_t* at, float x) {  // to nearest, ties to even
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        *at = (uint16_t)(bits >> 16 | 64);
    else
        *at = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Write the keys and values of one row as bytes. key, value: [H_kv][width].
FN void write_bytes(const Attention& a, int32_t row, const float* key, const float* value) {
    const int64_t slot = a.rows->slot[row], width = a.shape->key_width, values = a.shape->value_width;
    for (int64_t head = 0; head < a.shape->num_kv_heads; head++, key += width, value += values) {
        const Scale k = scale_of(largest_bits(key, width), 127.0f), v = scale_of(largest_bits(value, values), 127.0f);
        int8_t *keys = key_block<int8_t>(a, row, head, slot) + slot % 16, lane[16];
        for (int64_t d = 0; d < width; d += 16) {
            i_store_bytes(lane, codes_of(padded_load(key, d, width), k.inverse));
            for (int64_t i = d; i < d + 16 && i < width; i++) keys[16 * i] = lane[i - d];
        }
        for (int64_t d = 0; d < values; d += 16)
            i_store_bytes(value_row<int8_t>(a, row, head, d / 16, slot), codes_of(padded_load(value, d, values), v.inverse));
        *scale_at(a, row, head, slot, false) = k.scale;
        *scale_at(a, row, head, slot, true) = v.scale;
    }
}
// The same in any format.
template <class E> FN void write_row(const Attention& a, int32_t row, const float* key, const float* value) {
    const int64_t slot = a.rows->slot[row], width = a.shape->key_width, values = a.shape->value_width;
    if constexpr (sizeof(E) == 1)
        return write_bytes(a, row, key, value);
    else for (int64_t head = 0; head < a.shape->num_kv_heads; head++) {
        E* keys = key_block<E>(a, row, head, slot) + slot % 16;
        for (int64_t d = 0; d < width; d++) store_number(keys + 16 * d, key[head * width + d]);
        for (int64_t d = 0; d < values; d += 16) {
            E* at = value_row<E>(a, row, head, d / 16, slot);
            for (int64_t i = d; i < d + 16; i++) store_number(at + i - d, i < values ? value[head * values + i] : 0.0f);
        }
    }
}

INLINE int64_t first_seen(const Attention& a, int32_t row) {
    const int64_t first = (int64_t)a.rows->position[row] - a.shape->window + 1;
    return a.shape->window && first > 0 ? first : 0;
}
INLINE int64_t path_length(const Attention& a, int32_t row) { return (int64_t)a.rows->position[row] + 1; }

// y[r] = or += w [n][16] of C blocks, which lie `apart`, times x[r][0..n), in order. What lies `soon` bytes beyond w is
// asked for: pages are too short and too far apart for the processor to do it.
template <class E, bool FRESH, int R, int C>
INLINE void add_tile(const E* w, int64_t apart, int64_t n, const float* x, int64_t stride, int64_t soon, float* y,
                     int64_t next) {
    F sum[C][R];
    EACH_ROW EACH_BLOCK sum[c][r] = FRESH ? f_zero() : f_load(y + r * next + 16 * c);
    for (int64_t k = 0; k < n; k++)
        EACH_BLOCK {
            const E* at = w + c * apart + 16 * k;
            __builtin_prefetch((const char*)at + soon);
            fma_rows<R>(at, x + k, stride, sum[c]);
        }
    EACH_ROW EACH_BLOCK f_store(y + r * next + 16 * c, sum[c][r]);
}

// The same for up to R queries and any number of blocks, as many at once as there are registers.
template <class E, bool FRESH, int R = TILE>
INLINE void add_blocks(const E* w, int64_t apart, int64_t blocks, int64_t n, const float* x, int64_t stride,
                       int64_t queries, int64_t soon, float* y, int64_t next) {
    if constexpr (R > 1)
        if (queries < R) return add_blocks<E, FRESH, R - 1>(w, apart, blocks, n, x, stride, queries, soon, y, next);
    int64_t b = 0;
    if constexpr (4 * R <= TILE)
        for (; b + 4 <= blocks; b += 4)
            add_tile<E, FRESH, R, 4>(w + b * apart, apart, n, x, stride, soon, y + 16 * b, next);
    if constexpr (2 * R <= TILE && TILE > 2)  // two are slower in portable vectors
        for (; b + 2 <= blocks; b += 2)
            add_tile<E, FRESH, R, 2>(w + b * apart, apart, n, x, stride, soon, y + 16 * b, next);
    for (; b < blocks; b++) add_tile<E, FRESH, R, 1>(w + b * apart, apart, n, x, stride, soon, y + 16 * b, next);
}

#if defined(UNPACKED_TILE)
// The same of floats, [n][2][16], for up to R queries: an input is read once for all blocks.
template <bool FRESH, int R = UNPACKED_TILE>
INLINE void add_floats(const float* w, int64_t n, const float* x, int64_t stride, int64_t queries, float* y, int64_t next) {
    constexpr int C = 2;
    if constexpr (R > 1)
        if (queries < R) return add_floats<FRESH, R - 1>(w, n, x, stride, queries, y, next);
    F sum[C][R], weight[C];
    EACH_ROW EACH_BLOCK sum[c][r] = FRESH ? f_zero() : f_load(y + r * next + 16 * c);
    for (int64_t k = 0; k < n; k++) {
        EACH_BLOCK weight[c] = f_load(w + 16 * (C * k + c));
        EACH_ROW {
            const F input = f_set(x[r * stride + k]);
            EACH_BLOCK sum[c][r] = f_fma(weight[c], input, sum[c][r]);
        }
    }
    EACH_ROW EACH_BLOCK f_store(y + r * next + 16 * c, sum[c][r]);
}

// The same for many queries: numbers become floats once, of as many inputs as the nearest cache holds.
template <class E, bool FRESH>
FN void add_unpacked(const E* w, int64_t apart, int64_t blocks, int64_t n, const float* x, int64_t stride, int64_t count,
                     int64_t soon, float* y, int64_t next) {
    constexpr int64_t MOST = 128, C = 2;
    alignas(64) float floats[MOST * 16 * C];
    const int64_t passes = (count + UNPACKED_TILE - 1) / UNPACKED_TILE, each = (count + passes - 1) / passes;
    for (int64_t b = 0; b < blocks; b += C)
        for (int64_t from = 0; from < n; from += MOST) {
            const int64_t some = n - from < MOST ? n - from : MOST;
            for (int64_t k = 0; k < some; k++)
                EACH_BLOCK {
                    const E* at = w + (b + c) * apart + 16 * (from + k);
                    __builtin_prefetch((const char*)at + soon);
                    f_store(floats + 16 * (C * k + c), f_load(at));
                }
            for (int64_t q = 0; q < count; q += each) {
                const int64_t queries = count - q < each ? count - q : each;
                float* sums = y + q * next + 16 * b;
                if (FRESH && from == 0)
                    add_floats<true>(floats, some, x + q * stride, stride, queries, sums, next);
                else
                    add_floats<false>(floats, some, x + q * stride + from, stride, queries, sums, next);
            }
        }
}
#endif

// The same for any number of queries, shared evenly among passes.
template <class E, bool FRESH>
FN void add_products(const E* w, int64_t apart, int64_t blocks, int64_t n, const float* x, int64_t stride, int64_t count,
                     int64_t soon, float* y, int64_t next) {
#if defined(UNPACKED_TILE)
    if (count > UNPACKED_TILE && n >= 16 && blocks % 2 == 0)
        return add_unpacked<E, FRESH>(w, apart, blocks, n, x, stride, count, soon, y, next);
#endif
    const int64_t passes = (count + TILE - 1) / TILE, each = (count + passes - 1) / passes;
    for (int64_t q = 0; q < count; q += each)
        add_blocks<E, FRESH>(w, apart, blocks, n, x + q * stride, stride, count - q < each ? count - q : each, soon,
                             y + q * next, next);
}

// Ask for the scales of a head's keys and values in a page, which lie apart from these.
INLINE void ask_for_scales(const Attention& a, int32_t row, int64_t head, int64_t slot) {
    const int64_t page = a.shape->page, first = slot / page * page;
    const float *keys = scale_at(a, row, head, first, false), *values = scale_at(a, row, head, first, true);
    for (int64_t i = 0; i < page; i += 16) {
        __builtin_prefetch(keys + i);
        __builtin_prefetch(values + i);
    }
}

// w[q][i] *= scales[i]
FN void scale_numbers(float* w, int64_t stride, int64_t count, int64_t n, const float* __restrict scales) {
    for (int64_t q = 0; q < count; q++)
        for (int64_t i = 0; i < n; i++) w[q * stride + i] *= scales[i];
}

// Products of the queries of a group and a key head with the slots from..to; `from` is a multiple of 16.
template <class E>
FN void scores(const Attention& a, const Group& g, int64_t head, int64_t from, int64_t to, float* weights) {
    const int64_t width = a.shape->key_width, page = a.shape->page;
    const float* query = a.query + (head * a.rows->num_rows + g.row) * a.heads_per_key * width;
    while (from < to) {
        const int64_t end = (from / page + 1) * page, blocks = ((end < to ? end : to) - from + 15) / 16;
        const E* keys = key_block<E>(a, g.row, head, from);
        const int64_t soon = (char*)value_row<E>(a, g.row, head, 0, from / page * page) - (char*)keys;
        if constexpr (sizeof(E) == 1) ask_for_scales(a, g.row, head, from);
        add_products<E, true>(keys, 16 * width, blocks, width, query, width, g.count * a.heads_per_key, soon, weights,
                              a.span);
        if constexpr (sizeof(E) == 1)
            scale_numbers(weights, a.span, g.count * a.heads_per_key, 16 * blocks, scale_at(a, g.row, head, from, false));
        from += 16 * blocks;
        weights += 16 * blocks;
    }
}

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// From the scores of one query by slot to the weights of a part, from..from + PART - 1, in path order; w[0] is that of
// `from`. They are not yet divided by their sum, *total; the largest score, *most, has the weight 1.
FN void softmax(const Attention& a, int32_t row, int64_t from, float* w, float* most, float* total) {
    const ForerunRows& rows = *a.rows;
    const int64_t prefix = rows.prefix[row], tail = rows.tail_start[row] - prefix;
    const int64_t first = larger(first_seen(a, row), from), length = lesser(path_length(a, row), from + PART);
    if (first >= length) return;
    w -= from;
    for (int64_t i = larger(prefix, from); i < length; i++)
        w[i] = w[rows.tail[tail + i]];  // tails rise, so none is overwritten
    for (int64_t i = length; i < length + 16; i++) w[i] = -__builtin_inff();
    if (a.shape->softcap != 0.0f)
        for (int64_t i = first; i < length; i += 16) {
            const F capped = f_softcap(f_load(w + i), a.shape->softcap);
            put(w + i, capped, length - i);
        }
    F largest = f_load(w + first);
    for (int64_t i = first + 16; i < length; i += 16) largest = f_max(largest, f_load(w + i));
    float lane[16];
    f_store(lane, largest);
    float top = lane[0];
    for (int j = 1; j < 16; j++) top = lane[j] > top ? lane[j] : top;
    const F shift = f_set(top);
    F sums = f_zero();
    for (int64_t i = first; i < length; i += 16) {
        const F e = f_exp(f_sub(f_load(w + i), shift));
        f_store(w + i, e);
        sums = f_add(sums, length - i >= 16 ? e : f_load_n(w + i, (int)(length - i)));
    }
    *most = top;
    *total = sum_lanes(sums);
}

// Some queries of a row: y += weights times values of the slots from..to of the prefix; w[0] is that of `from`.
template <class E>
FN void add_values(const Attention& a, const Group& g, int32_t row, int64_t head, int64_t from, int64_t to, float* w,
                   int64_t count, float* y) {
    const int64_t page = a.shape->page;
    while (from < to) {
        const int64_t n = lesser((from / page + 1) * page, to) - from;
        const E* values = value_row<E>(a, row, head, 0, from);
        const int64_t then = from / page * page + PART;
        const int64_t soon = then < g.end ? (char*)key_block<E>(a, row, head, then) - (char*)(values - from % page * 16) : 0;
        if constexpr (sizeof(E) == 1) scale_numbers(w, a.span, count, n, scale_at(a, row, head, from, true));
        add_products<E, false>(values, 16 * page, a.wide / 16, n, w, a.span, count, soon, y, a.wide);
        from += n;
        w += n;
    }
}

// The sums of a part, y [room][wide]: what comes before the slots that all rows of the group see, those, and what follows.
template <class E>
FN void weighted_values(const Attention& a, const Group& g, int64_t head, int64_t from, float* weights, float* y) {
    const ForerunRows& rows = *a.rows;
    const int64_t each = a.heads_per_key, page = a.shape->page, to = from + PART;
    const int64_t begin = larger(g.first, from), end = lesser(g.common, to);
    const bool shared = begin < end;
    for (int64_t i = 0; i < g.count * each * a.wide; i++) y[i] = 0.0f;
    for (int32_t r = 0; shared && r < g.count; r++) {
        const int64_t first = larger(first_seen(a, g.row + r), from);
        add_values<E>(a, g, g.row + r, head, first, begin, weights + r * each * a.span + first - from, each,
                      y + r * each * a.wide);
    }
    if (shared) add_values<E>(a, g, g.row, head, begin, end, weights + begin - from, g.count * each, y);
    for (int32_t r = 0; r < g.count; r++) {
        const int32_t row = g.row + r;
        const int64_t seen = larger(first_seen(a, row), from), first = shared ? end : seen, prefix = rows.prefix[row];
        float* w = weights + r * each * a.span - from;
        float* sum = y + r * each * a.wide;
        add_values<E>(a, g, row, head, first, lesser(prefix, to), w + first, each, sum);
        for (int64_t i = larger(prefix, seen); i < lesser(path_length(a, row), to); i++) {
            const int64_t slot = rows.tail[rows.tail_start[row] + i - prefix];
            const E* values = value_row<E>(a, row, head, 0, slot);
            if constexpr (sizeof(E) == 1) scale_numbers(w + i, a.span, each, 1, scale_at(a, row, head, slot, true));
            add_products<E, false>(values, 16 * page, a.wide / 16, 1, w + i, a.span, each, 0, sum, a.wide);
        }
    }
}

// Where the largest score and the sum of weights of each part of a query lie.
INLINE float* largest_of(const Attention& a, float* sums, int64_t q) {
    return sums + a.parts * a.room * a.wide + q * 2 * (a.parts + 16);
}

// One part of the paths of a group, for a key head: into its place in `sums`. weights: [room][span], to work in.
template <class E>
FN void add_part(const Attention& a, const Group& g, int64_t head, int64_t part, float* weights, float* sums) {
    const int64_t from = part * PART, to = from + PART, each = a.heads_per_key, begin = larger(from, g.begin / 16 * 16);
    if (to <= g.begin || from >= g.longest) return;
    scores<E>(a, g, head, begin, to <= g.common ? to : g.end, weights + begin - from);
    for (int64_t q = 0; q < g.count * each; q++) {
        float* most = largest_of(a, sums, q) + part;
        softmax(a, g.row + (int32_t)(q / each), from, weights + q * a.span, most, most + a.parts + 16);
    }
    weighted_values<E>(a, g, head, from, weights, sums + part * a.room * a.wide);
}

// The result of query q of a group and a key head: its parts in order, each about the largest score of all.
FN void join_parts(const Attention& a, const Group& g, int64_t head, int64_t q, float* sums) {
    const int64_t each = a.heads_per_key, width = a.shape->value_width, h = head * each + q % each;
    const int32_t row = g.row + (int32_t)(q / each);
    const int64_t first = first_seen(a, row) / PART, end = (path_length(a, row) + PART - 1) / PART;
    float *factor = largest_of(a, sums, q), *totals = factor + a.parts + 16;
    float top = a.shape->sinks ? a.shape->sinks[h] : factor[first], lane[16];
    for (int64_t p = first; p < end; p++) top = factor[p] > top ? factor[p] : top;
    for (int64_t p = first; p < end; p += 16) {
        const F e = f_exp(f_sub(get(factor + p, end - p), f_set(top)));
        put(factor + p, e, end - p);
    }
    float total = 0.0f;
    if (a.shape->sinks) {
        f_store(lane, f_exp(f_set(a.shape->sinks[h] - top)));
        total = lane[0];
    }
    for (int64_t p = first; p < end; p++) total += factor[p] * totals[p];
    const F inverse = f_set(1.0f / total);
    for (int64_t d = 0; d < width; d += 16) {
        F joined = f_zero();
        for (int64_t p = first; p < end; p++)
            joined = f_fma_at(f_load(sums + (p * a.room + q) * a.wide + d), factor + p, joined);
        put(a.out + (row * (int64_t)a.shape->num_heads + h) * width + d, f_mul(joined, inverse), width - d);
    }
}

// Attention of all groups. Where there are few, their parts are shared among the threads; where there are many, whole
// groups. scratch: this thread's.
template <class E> FN void attend(const Attention& a, forerun::Member& member, int threads, float* scratch) {
    const int64_t heads = a.shape->num_kv_heads, pairs = a.num_groups * heads, room = a.room;
    if (!a.sums) {
        float* sums = scratch + room * a.span;
        for (const int64_t u : member.each(pairs)) {
            const Group& g = a.groups[u / heads];
            for (int64_t part = g.begin / PART; part * PART < g.longest; part++)
                add_part<E>(a, g, u % heads, part, scratch, sums);
            for (int64_t q = 0; q < g.count * a.heads_per_key; q++) join_parts(a, g, u % heads, q, sums);
        }
        return;
    }
    for (const int64_t u : member.each(pairs * a.parts)) {
        const int64_t pair = u / a.parts;
        add_part<E>(a, a.groups[pair / heads], pair % heads, u % a.parts, scratch, a.sums + pair * a.sums_size);
    }
    for (const int64_t u : member.each(pairs * room)) {
        const int64_t pair = u / room;
        const Group& g = a.groups[pair / heads];
        if (u % room < g.count * a.heads_per_key)
            join_parts(a, g, pair % heads, u % room, a.sums + pair * a.sums_size);
    }
}
