// Layers that keep a state of fixed size. Included once for each instruction set.
//
// A row takes the state from the row that it follows, and changes it in an order that its own path fixes: alone, in a chain,
// in a tree and in a prompt it gives the same bits. The state in memory is that after the committed rows; what a row adds to
// it is written to a record, so that any path of them can be kept later: it is added when the state is read the next time.

// What the recurrent layers of one forward share.
struct RecurrentCall {
    std::vector<int32_t> first;  // [sequences + 1], packed rows
    int64_t channels = 0, heads = 0, tile = 0, wide = 0;  // the most of all layers
    float *raw, *after, *gates, *betas, *steps, *decays;
    float* tiles;  // [threads][tile]
};

// Columns of values that are scanned at once.
constexpr int64_t COLUMNS = 32;

static void plan_recurrence(RecurrentCall& c, const ForerunRecurrence& r) {
    const auto more = [](int64_t& most, int64_t size) { most = size > most ? size : most; };
    more(c.channels, r.channels > r.in_proj_b.out_features ? r.channels : r.in_proj_b.out_features);
    more(c.heads, r.heads);
    more(c.tile, r.key_width * COLUMNS);
    more(c.wide, r.in_proj_z.out_features);
}

static void find_sequences(RecurrentCall& c, const ForerunRows& rows) {
    for (int32_t t = 0; t < rows.num_rows; t++)
        if (!t || rows.sequence[t] != rows.sequence[t - 1]) c.first.push_back(t);
    c.first.push_back(rows.num_rows);
}

static void want_recurrence(forerun::Workspace& space, RecurrentCall& c, const ForerunRows& rows, int threads) {
    const int64_t n = rows.num_rows;
    space.want(c.raw, n * c.channels);
    space.want(c.after, n * c.channels);
    space.want(c.gates, n * c.wide);
    space.want(c.betas, n * (c.heads > c.channels ? c.heads : c.channels));
    space.want(c.steps, n * c.heads);
    space.want(c.decays, n * c.heads);
    space.want(c.tiles, threads * c.tile);
}

// One sequence in one layer.
struct Recalled {
    const RecurrentCall& c;
    const ForerunRecurrence& r;
    const ForerunState& s;
    int64_t record_size;
    int32_t first, last, num_pending;  // rows; records that the layer is yet to take in

    float* state() const { return s.state + r.state_offset; }
    float* tip() const { return s.tip + r.state_offset; }
    float* record(int32_t slot) const { return s.records + slot * record_size + r.record_offset; }
    const float* raw(int32_t row) const { return c.raw + row * (int64_t)r.channels; }
    float* matrix(float* state, int64_t head) const {
        return state + (r.conv_kernel - 1) * (int64_t)r.channels + head * ((r.value_width + 15) / 16) * r.key_width * 16;
    }
    bool is_recorded(int32_t row) const { return row >= first + s.num_whole; }
    int32_t slot(int32_t row) const { return s.first_slot + row - first - s.num_whole; }
};

INLINE Recalled recalled(const RecurrentCall& c, const ForerunRecurrence& r, const ForerunModel& m, const ForerunRows& rows,
                         int32_t layer, int64_t sequence) {
    const ForerunState& s = rows.states[sequence];
    return {c, r, s, m.record_size, c.first[sequence], c.first[sequence + 1], layer < *s.folded ? 0 : s.num_pending};
}

// The last inputs of the convolution, the latest first: of committed rows.
FN void committed_inputs(const Recalled& q, int64_t count, const float** found) {
    int64_t i = 0;
    for (int32_t p = q.num_pending - 1; i < count && p >= 0; i++, p--) found[i] = q.record(q.s.pending[p]);
    for (int64_t row = q.r.conv_kernel - 2; i < count; i++, row--) found[i] = q.state() + row * q.r.channels;
}
// And of the rows that a row follows.
FN void inputs_before(const Recalled& q, int32_t row, int64_t count, const float** found) {
    int64_t i = 0;
    int32_t behind = row;  // the row behind those without records that are on the path
    if (q.is_recorded(row)) {
        for (int32_t slot = q.s.parents[q.slot(row)]; i < count && slot >= 0; i++, slot = q.s.parents[slot])
            found[i] = slot < q.s.first_slot ? q.record(slot) : q.raw(q.first + q.s.num_whole + slot - q.s.first_slot);
        behind = q.first + q.s.num_whole;
    }
    for (; i < count && behind > q.first; i++, behind--) found[i] = q.raw(behind - 1);
    committed_inputs(q, count - i, found + i);
}

constexpr int32_t MAX_CONV_KERNEL = 16;

// The first number of the key and query of a head, among all keys or queries.
INLINE int64_t key_of(const ForerunRecurrence& r, int64_t head) {
    return (r.heads_are_tiled ? head % r.key_heads : head / (r.heads / r.key_heads)) * r.key_width;
}

// y = x / |x| * scale
INLINE void to_unit(float* x, int64_t n, float scale) {
    F squares = f_zero();
    for (int64_t i = 0; i < n; i += 16) {
        const F v = get(x + i, n - i);
        squares = f_fma(v, v, squares);
    }
    const F inverse = f_set(scale / __builtin_sqrtf(sum_lanes(squares) + 1e-6f));
    for (int64_t i = 0; i < n; i += 16) put(x + i, f_mul(get(x + i, n - i), inverse), n - i);
}

// How much of its state a row forgets, and how much it writes.
FN void rates_of(const ForerunRecurrence& r, const float* steps, float* decays, float* betas) {
    for (int64_t h = 0; h < r.heads; h++) {
        const float x = steps[h] * r.step_scale + r.dt_bias[h];
        float step = x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
        step = step < r.time_step_min ? r.time_step_min : step > r.time_step_max ? r.time_step_max : step;
        decays[h] = __builtin_expf(r.A[h] * step);
        betas[h] = r.in_proj_b.out_features ? r.beta_scale / (1.0f + __builtin_expf(-betas[h])) : step;
    }
}

// The convolution of a row, and what its state takes of it, which goes to its record too.
FN void convolve_row(const Recalled& q, int32_t t) {
    const RecurrentCall& c = q.c;
    const ForerunRecurrence& r = q.r;
    const int64_t wide = r.channels, back = r.conv_kernel - 1;
    const float* before[MAX_CONV_KERNEL];
    inputs_before(q, t, back, before);
    const float* raw = c.raw + t * wide;
    float* after = c.after + t * wide;
    for (int64_t i = 0; i < wide; i += 16) {
        const int64_t rest = wide - i;
        F y = r.conv1d_bias ? get(r.conv1d_bias + i, rest) : f_zero();
        for (int64_t k = 0; k < back; k++)
            y = f_fma(get(before[back - 1 - k] + i, rest), get(r.conv1d + k * wide + i, rest), y);
        y = f_fma(get(raw + i, rest), get(r.conv1d + back * wide + i, rest), y);
        put(after + i, r.kind == FORERUN_SHORT_CONVOLUTION ? y : f_silu(y), rest);
    }
    float *decays = c.decays + t * r.heads, *betas = c.betas + t * r.heads;
    if (r.kind != FORERUN_SHORT_CONVOLUTION) rates_of(r, c.steps + t * r.heads, decays, betas);
    if (r.kind == FORERUN_DELTA_RULE)
        for (int64_t h = 0; h < r.key_heads; h++) {
            to_unit(after + r.query_start + h * r.key_width, r.key_width, 1.0f / __builtin_sqrtf((float)r.key_width));
            to_unit(after + r.key_start + h * r.key_width, r.key_width, 1.0f);
        }
    if (!q.is_recorded(t)) return;
    float* to = q.record(q.slot(t));
    __builtin_memcpy(to, raw, wide * sizeof(float));
    if (!r.heads) return;
    __builtin_memcpy(to + wide, after, wide * sizeof(float));
    __builtin_memcpy(to + 2 * wide, decays, r.heads * sizeof(float));
    __builtin_memcpy(to + 2 * wide + r.heads, betas, r.heads * sizeof(float));
}

// Columns of one head's state, [C][key_width][16], take in a row: its key, the C * 16 values, of which `room` are there. y:
// what the row reads, if ANSWERS.
template <int C, bool ANSWERS>
FN void take_in(const ForerunRecurrence& r, float* tile, const float* query, const float* key, const float* value,
                float decay, float beta, int64_t room, F* y) {
    const int64_t n = r.key_width;
    F given[C], sum[C], other[C];
    EACH_BLOCK given[c] = get(value + 16 * c, room - 16 * c);
    if (r.kind == FORERUN_DELTA_RULE) {
        EACH_BLOCK sum[c] = other[c] = f_zero();
        int64_t i = 0;
        for (; i + 2 <= n; i += 2) {
            EACH_BLOCK sum[c] = f_fma_at(f_load(tile + (c * n + i) * 16), key + i, sum[c]);
            EACH_BLOCK other[c] = f_fma_at(f_load(tile + (c * n + i + 1) * 16), key + i + 1, other[c]);
        }
        if (i < n) EACH_BLOCK sum[c] = f_fma_at(f_load(tile + (c * n + i) * 16), key + i, sum[c]);
        EACH_BLOCK given[c] = f_sub(given[c], f_mul(f_add(sum[c], other[c]), f_set(decay)));
    }
    EACH_BLOCK given[c] = f_mul(given[c], f_set(beta));
    const F kept = f_set(decay);
    EACH_BLOCK sum[c] = other[c] = f_zero();
    for (int64_t i = 0; i < n; i++)
        EACH_BLOCK {
            float* at = tile + (c * n + i) * 16;
            const F s = f_fma_at(given[c], key + i, f_mul(f_load(at), kept));
            f_store(at, s);
            if (ANSWERS && i % 2) other[c] = f_fma_at(s, query + i, other[c]);
            if (ANSWERS && i % 2 == 0) sum[c] = f_fma_at(s, query + i, sum[c]);
        }
    if (ANSWERS) EACH_BLOCK y[c] = f_add(sum[c], other[c]);
}

// The same of a record.
template <int C> FN void replay(const Recalled& q, int32_t slot, int64_t head, int64_t column, float* tile) {
    const ForerunRecurrence& r = q.r;
    const float *after = q.record(slot) + r.channels, *rates = after + r.channels + head;
    const float* key = after + r.key_start + key_of(r, head);
    const float* value = after + r.value_start + head * r.value_width + column;
    take_in<C, false>(r, tile, nullptr, key, value, rates[0], rates[r.heads], r.value_width - column, nullptr);
}

// The columns of one head, C * 16 from `column` on, through all rows of a sequence.
template <int C> FN void scan_columns(const Recalled& q, int64_t head, int64_t column, float* tile, float* out) {
    const ForerunRecurrence& r = q.r;
    const int64_t wide = r.channels, room = r.value_width - column, bytes = C * 16 * (int64_t)r.key_width * sizeof(float);
    const int64_t key = key_of(r, head), value = r.value_start + head * r.value_width + column;
    float *kept = q.matrix(q.state(), head) + column * r.key_width, *tip = nullptr;
    if (q.s.num_whole) tip = q.matrix(q.tip(), head) + column * r.key_width;
    __builtin_memcpy(tile, kept, bytes);
    for (int32_t p = 0; p < q.num_pending; p++) replay<C>(q, q.s.pending[p], head, column, tile);
    if (q.num_pending) __builtin_memcpy(kept, tile, bytes);
    int32_t at = -1;  // the slot whose state the tile is; -1: that of the row before all slots
    for (int32_t t = q.first; t < q.last; t++) {
        const bool is_recorded = q.is_recorded(t);
        const int32_t from = is_recorded ? q.s.parents[q.slot(t)] : -1;
        if (from != at) {
            std::vector<int32_t> path;
            for (int32_t slot = from; slot >= 0; slot = q.s.parents[slot]) path.push_back(slot);
            __builtin_memcpy(tile, tip ? tip : kept, bytes);
            for (auto slot = path.rbegin(); slot != path.rend(); slot++) replay<C>(q, *slot, head, column, tile);
        }
        at = is_recorded ? q.slot(t) : -1;
        const float *after = q.c.after + t * wide, *rates = q.c.decays + t * r.heads + head;
        F y[C];
        take_in<C, true>(r, tile, after + r.query_start + key, after + r.key_start + key, after + value, *rates,
                         q.c.betas[t * r.heads + head], room, y);
        if (r.D) EACH_BLOCK y[c] = f_fma_at(get(after + value + 16 * c, room - 16 * c), r.D + head, y[c]);
        float* to = out + (t * (int64_t)r.heads + head) * r.value_width + column;
        EACH_BLOCK put(to + 16 * c, y[c], room - 16 * c);
        if (t == q.first + q.s.num_whole - 1) __builtin_memcpy(tip, tile, bytes);
    }
}

// The inputs that later rows' convolutions read: behind the rows without records, and behind the committed ones.
FN void keep_inputs(const Recalled& q) {
    const int64_t back = q.r.conv_kernel - 1, wide = q.r.channels;
    const float* before[MAX_CONV_KERNEL];
    if (q.s.num_whole) {
        const int32_t last = q.first + q.s.num_whole - 1;
        before[0] = q.raw(last);
        inputs_before(q, last, back - 1, before + 1);
        for (int64_t i = 0; i < back; i++) __builtin_memcpy(q.tip() + (back - 1 - i) * wide, before[i], wide * sizeof(float));
    }
    if (!q.num_pending) return;
    committed_inputs(q, back, before);
    for (int64_t i = back - 1; i >= 0; i--)  // what moves to an earlier place is read before it is written over
        __builtin_memmove(q.state() + (back - 1 - i) * wide, before[i], wide * sizeof(float));
}

// x *= silu(gate * scale)
INLINE void multiply_silu(const float* gate, float scale, int64_t n, float* x) {
    for (int64_t i = 0; i < n; i += 16) {
        const F g = f_mul(get(gate + i, n - i), f_set(scale));
        put(x + i, f_mul(get(x + i, n - i), f_silu(g)), n - i);
    }
}

// Gate and norm of what a row has read, in place.
FN void gate_row(const ForerunRecurrence& r, const float* gate, float* x) {
    const int64_t wide = r.in_proj_z.out_features;
    if (r.gates_first || !r.norm) multiply_silu(gate, r.gate_scale, wide, x);
    if (!r.norm) return;
    for (int64_t i = 0; i < wide; i += r.normed_width) rms_norm(x + i, r.norm + i, r.norm_eps, r.normed_width, x + i);
    if (!r.gates_first) multiply_silu(gate, r.gate_scale, wide, x);
}

// The rows of `in` through a recurrence, up to the product that follows, which reads `out`.
FN void recurrent_rows(const RecurrentCall& c, const ForerunRecurrence& r, const ForerunModel& m, const ForerunRows& rows,
                       int32_t layer, const Input& in, const Input& out, forerun::Member& member) {
    const int64_t n = rows.num_rows, sequences = (int64_t)c.first.size() - 1, wide = r.channels;
    const bool is_short = r.kind == FORERUN_SHORT_CONVOLUTION;
    product_rows(r.in_proj_qkv, in, n, nullptr, c.raw, member);
    product_rows(r.in_proj_z, in, n, nullptr, c.gates, member);
    if (r.in_proj_b.out_features) product_rows(r.in_proj_b, in, n, nullptr, c.betas, member);
    if (r.in_proj_a.out_features) product_rows(r.in_proj_a, in, n, nullptr, c.steps, member);
    if (is_short) {
        for (const auto [first, last] : member.parts(n))
            for (int64_t i = first * wide; i < last * wide; i += 16) {
                const int64_t rest = last * wide - i;
                put(c.raw + i, f_mul(get(c.raw + i, rest), get(c.betas + i, rest)), rest);
            }
    }
    for (const int64_t t : member.each(n))
        convolve_row(recalled(c, r, m, rows, layer, rows.sequence[t]), (int32_t)t);
    const int64_t parts = is_short ? 0 : (r.value_width + COLUMNS - 1) / COLUMNS, each = r.heads * parts + 1;
    float* tile = c.tiles + member.index() * c.tile;
    for (const int64_t u : member.each(sequences * each)) {
        const Recalled q = recalled(c, r, m, rows, layer, u / each);
        const int64_t head = u % each / (parts ? parts : 1), column = u % each % (parts ? parts : 1) * COLUMNS;
        if (u % each == each - 1)
            keep_inputs(q);
        else if (r.value_width - column > 16)
            scan_columns<2>(q, head, column, tile, out.x);
        else
            scan_columns<1>(q, head, column, tile, out.x);
    }
    for (const int64_t t : member.each(n)) {
        float *x = out.x + t * out.width, *gate = c.gates + t * out.width;
        if (!is_short) {
            gate_row(r, gate, x);
            continue;
        }
        for (int64_t i = 0; i < wide; i += 16)
            put(x + i, f_mul(get(c.after + t * wide + i, wide - i), get(gate + i, wide - i)), wide - i);
    }
}
