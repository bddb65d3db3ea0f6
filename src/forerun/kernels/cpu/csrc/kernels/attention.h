// Attention along each row's own path, in path order. Included once for each instruction set.
//
// A row sees the slots 0..prefix-1, then those of its tail. Rows of one sequence that follow each other in the forward
// are computed in groups, which read each key and value once; what a row adds up, and in which order, depends on its own
// path alone. A page holds, layer by layer, keys [heads][page / 16][width][16] and values [heads][width / 16][page][16]:
// lanes are keys in the scores, and outputs in the mixture.

constexpr int GROUP_ROWS = 8;

// Up to GROUP_ROWS rows of one sequence.
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
    int64_t span;           // floats of one query's weights
    const float* query;     // [H_kv][rows][heads per key][key width], rotated and scaled
    float* out;             // [rows][H][value width]
    float* weights;         // [groups][H_kv][8 * heads per key][span], where phases are split among threads
    float* inverses;        // [groups][H_kv][8 * heads per key]
};

INLINE int64_t key_bytes(const ForerunAttention& a) { return a.cache_float32 ? 4 : 2; }
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

INLINE void store_number(float* at, float x) { *at = x; }
INLINE void store_number(uint16_t* at, float x) {  // to nearest, ties to even
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        *at = (uint16_t)(bits >> 16 | 64);
    else
        *at = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// key, value: [H_kv][width] of one row.
template <class E> FN void write_row(const Attention& a, int32_t row, const float* key, const float* value) {
    const int64_t slot = a.rows->slot[row], width = a.shape->key_width, values = a.shape->value_width;
    for (int64_t head = 0; head < a.shape->num_kv_heads; head++) {
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

// Scores of up to R queries with the keys of 16 slots.
template <class E, int R = MAX_ROWS>
INLINE void score_block(const E* keys, const float* query, int64_t width, int64_t queries, float* scores, int64_t span) {
    if constexpr (R > 1)
        if (queries < R) return score_block<E, R - 1>(keys, query, width, queries, scores, span);
    F sum[R];
    EACH_ROW sum[r] = f_zero();
    accumulate<E, R>(keys, width, query, width, sum);
    EACH_ROW f_store(scores + r * span, sum[r]);
}

// Products of the queries of a group and a key head with the slots from..to; `from` is a multiple of 16.
template <class E>
FN void scores(const Attention& a, const Group& g, int64_t head, int64_t from, int64_t to, float* weights) {
    const int64_t width = a.shape->key_width, count = (int64_t)g.count * a.heads_per_key;
    const float* query = a.query + (head * a.rows->num_rows + g.row) * a.heads_per_key * width;
    for (int64_t slot = from; slot < to; slot += 16) {
        const E* keys = key_block<E>(a, g.row, head, slot);
        for (int64_t q = 0; q < count; q += MAX_ROWS)
            score_block<E>(keys, query + q * width, width, count - q, weights + q * a.span + slot, a.span);
    }
}

// From the scores of one query by slot to weights in path order, not yet divided by their sum. Returns 1 / sum.
FN float softmax(const Attention& a, int32_t row, int64_t head, float* w) {
    const ForerunRows& rows = *a.rows;
    const int64_t prefix = rows.prefix[row], tail = rows.tail_start[row], length = path_length(a, row);
    for (int64_t i = prefix; i < length; i++) w[i] = w[rows.tail[tail + i - prefix]];  // tails rise, so none is overwritten
    const int64_t first = first_seen(a, row);
    const float sink = a.shape->sinks ? a.shape->sinks[head] : 0.0f;
    for (int64_t i = length; i < length + 16; i++) w[i] = -__builtin_inff();
    if (a.shape->softcap != 0.0f)
        for (int64_t i = first; i < length; i += 16) {
            const F capped = f_softcap(f_load(w + i), a.shape->softcap);
            put(w + i, capped, length - i);
        }
    F most = f_load(w + first);
    for (int64_t i = first + 16; i < length; i += 16) most = f_max(most, f_load(w + i));
    float lane[16];
    f_store(lane, most);
    float top = a.shape->sinks ? sink : lane[0];
    for (int j = 0; j < 16; j++) top = lane[j] > top ? lane[j] : top;
    const F shift = f_set(top);
    F sums = f_zero();
    for (int64_t i = first; i < length; i += 16) {
        const F e = f_exp(f_sub(f_load(w + i), shift));
        f_store(w + i, e);
        sums = f_add(sums, length - i >= 16 ? e : f_load_n(w + i, (int)(length - i)));
    }
    float sum = sum_lanes(sums);
    if (a.shape->sinks) {
        f_store(lane, f_exp(f_set(sink - top)));
        sum += lane[0];
    }
    return 1.0f / sum;
}

// Up to R queries: y [R][16] += weights times values of n slots that follow each other in a page.
template <class E, int R = MAX_ROWS>
INLINE void mix_run(const E* values, int64_t n, const float* w, int64_t span, int64_t queries, float* y) {
    if constexpr (R > 1)
        if (queries < R) return mix_run<E, R - 1>(values, n, w, span, queries, y);
    F sum[R];
    EACH_ROW sum[r] = f_load(y + 16 * r);
    accumulate<E, R>(values, n, w, span, sum);
    EACH_ROW f_store(y + 16 * r, sum[r]);
}

// The same for any number of queries.
template <class E>
FN void mix_slots(const E* values, int64_t n, const float* w, int64_t span, int64_t count, float* y) {
    for (int64_t q = 0; q < count; q += MAX_ROWS) mix_run<E>(values, n, w + q * span, span, count - q, y + 16 * q);
}

// The same for the slots from..to of the prefix, page by page.
template <class E>
FN void mix_span(const Attention& a, int32_t row, int64_t head, int64_t chunk, int64_t from, int64_t to, const float* w,
                 int64_t count, float* y) {
    const int64_t page = a.shape->page;
    while (from < to) {
        const int64_t end = (from / page + 1) * page, n = (end < to ? end : to) - from;
        mix_slots<E>(value_row<E>(a, row, head, chunk, from), n, w + from, a.span, count, y);
        from += n;
    }
}

// Sixteen outputs of a group and a key head: what comes before the slots that all its rows see, those, and what follows.
// y: [8 * heads per key][16], to work in.
template <class E>
FN void mixture(const Attention& a, const Group& g, int64_t head, int64_t chunk, const float* weights,
                const float* inverses, float* y) {
    const ForerunRows& rows = *a.rows;
    const int64_t each = a.heads_per_key, total = a.shape->num_heads, width = a.shape->value_width;
    for (int64_t i = 0; i < g.count * each * 16; i++) y[i] = 0.0f;
    const bool shared = g.first < g.common;
    for (int32_t r = 0; shared && r < g.count; r++)
        mix_span<E>(a, g.row + r, head, chunk, first_seen(a, g.row + r), g.first, weights + r * each * a.span, each,
                    y + r * each * 16);
    if (shared) mix_span<E>(a, g.row, head, chunk, g.first, g.common, weights, g.count * each, y);
    for (int32_t r = 0; r < g.count; r++) {
        const int32_t row = g.row + r;
        const float* w = weights + r * each * a.span;
        float* sum = y + r * each * 16;
        const int64_t first = first_seen(a, row), prefix = rows.prefix[row];
        mix_span<E>(a, row, head, chunk, shared ? g.common : first, prefix, w, each, sum);
        for (int64_t i = first > prefix ? first : prefix; i < path_length(a, row); i++) {
            const int64_t slot = rows.tail[rows.tail_start[row] + i - prefix];
            mix_slots<E>(value_row<E>(a, row, head, chunk, slot), 1, w + i, a.span, each, sum);
        }
        for (int64_t h = 0; h < each; h++) {
            const F mixed = f_mul(f_load(sum + 16 * h), f_set(inverses[r * each + h]));
            put(a.out + ((int64_t)row * total + head * each + h) * width + 16 * chunk, mixed, width - 16 * chunk);
        }
    }
}

template <class E> FN void whole_unit(const Attention& a, const Group& g, int64_t head, float* scratch) {
    const int64_t each = a.heads_per_key, count = g.count * each;
    float *weights = scratch, *inverses = weights + count * a.span, *y = inverses + count;
    scores<E>(a, g, head, g.begin / 16 * 16, g.end, weights);
    for (int64_t q = 0; q < count; q++)
        inverses[q] = softmax(a, g.row + (int32_t)(q / each), head * each + q % each, weights + q * a.span);
    for (int64_t chunk = 0; 16 * chunk < a.shape->value_width; chunk++)
        mixture<E>(a, g, head, chunk, weights, inverses, y);
}

// Attention of all groups. Where there are few, the slots, the queries and the outputs are shared among the threads;
// where there are many, whole groups. scratch: this thread's.
template <class E> FN void attend(const Attention& a, forerun::Member& member, int threads, float* scratch) {
    const int64_t heads = a.shape->num_kv_heads, each = a.heads_per_key, pairs = a.num_groups * heads;
    int64_t first, last;
    if (threads == 1 || pairs >= 4 * threads) {
        member.open(pairs);
        while (member.claim(first, last))
            for (int64_t u = first; u < last; u++) whole_unit<E>(a, a.groups[u / heads], u % heads, scratch);
        return member.close();
    }
    const int64_t room = GROUP_ROWS * each, chunks = (a.shape->value_width + 15) / 16;
    const int64_t page = a.shape->page, pages = (a.span + page - 1) / page;
    member.open(pairs * pages);
    while (member.claim(first, last))
        for (int64_t u = first; u < last; u++) {
            const Group& g = a.groups[u / pages / heads];
            const int64_t from = u % pages * page, to = from + page, begin = g.begin / 16 * 16;
            scores<E>(a, g, u / pages % heads, from > begin ? from : begin, to < g.end ? to : g.end,
                      a.weights + u / pages * room * a.span);
        }
    member.close();
    member.open(pairs * room);
    while (member.claim(first, last))
        for (int64_t u = first; u < last; u++) {
            const Group& g = a.groups[u / room / heads];
            const int64_t q = u % room, head = u / room % heads;
            if (q < g.count * each)
                a.inverses[u] = softmax(a, g.row + (int32_t)(q / each), head * each + q % each, a.weights + u * a.span);
        }
    member.close();
    member.open(pairs * chunks);
    while (member.claim(first, last))
        for (int64_t u = first; u < last; u++) {
            const int64_t pair = u / chunks;
            mixture<E>(a, a.groups[pair / heads], pair % heads, u % chunks, a.weights + pair * room * a.span,
                       a.inverses + pair * room, scratch);
        }
    member.close();
}
