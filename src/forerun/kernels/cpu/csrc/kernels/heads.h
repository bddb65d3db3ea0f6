// The heads of attention in a decoder's layers: what a forward works in, the rotation of queries and keys, and their places.
// Included once for each instruction set.

// The rows of one forward in groups, and room for their attention.
struct Attending {
    std::vector<Group> groups;
    int64_t span = 0, parts = 0, room, wide, sums_size, scratch_size = 0;
    float *sums = nullptr, *scratch;
};

// most: rows of a group.
static void group_rows(const ForerunRows& rows, int32_t window, int32_t most, std::vector<Group>& groups) {
    groups.clear();
    for (int32_t row = 0; row < rows.num_rows; row++) {
        const int32_t prefix = rows.prefix[row], length = rows.position[row] + 1;
        const int32_t first = window && length > window ? length - window : 0;
        int32_t end = prefix;
        for (int32_t i = rows.tail_start[row]; i < rows.tail_start[row + 1]; i++)
            end = rows.tail[i] + 1 > end ? rows.tail[i] + 1 : end;
        if (groups.empty() || groups.back().count == most ||
            rows.sequence[groups.back().row] != rows.sequence[row]) {
            groups.push_back({row, 1, prefix, first, first, end, length});
            continue;
        }
        Group& g = groups.back();
        g.count++;
        g.common = prefix < g.common ? prefix : g.common;
        g.first = first > g.first ? first : g.first;
        g.begin = first < g.begin ? first : g.begin;
        g.end = end > g.end ? end : g.end;
        g.longest = length > g.longest ? length : g.longest;
    }
}

// each: heads per key head. width: of values.
static void plan_attention(forerun::Workspace& space, Attending& plan, const ForerunRows& rows, int32_t window,
                           int64_t each, int64_t kv_heads, int64_t width, int threads) {
    const int32_t most = most_rows(each);
    group_rows(rows, window, most, plan.groups);
    for (const Group& g : plan.groups) {
        const int64_t beyond = g.end - g.common, parts = (g.longest + PART - 1) / PART;
        plan.span = beyond > plan.span ? beyond : plan.span;
        plan.parts = parts > plan.parts ? parts : plan.parts;
    }
    plan.span = (plan.span + 15) / 16 * 16 + PART + 32;
    plan.wide = (width + 15) / 16 * 16;
    const int64_t pairs = plan.groups.size() * kv_heads;
    const bool split = threads > 1 && pairs < 4 * threads;
    plan.room = most * each;
    plan.sums_size = plan.room * (plan.parts * plan.wide + 2 * (plan.parts + 16));
    plan.scratch_size = plan.room * plan.span + (split ? 0 : plan.sums_size);
    space.want(plan.scratch, plan.scratch_size * threads);
    if (split) space.want(plan.sums, pairs * plan.sums_size);
}

static Attention attention_of(const ForerunAttention* shape, const ForerunRows* rows, const Attending& plan,
                              const float* query, float* out) {
    return {shape, rows, plan.groups.data(), (int32_t)plan.groups.size(), shape->num_heads / shape->num_kv_heads,
            plan.room, plan.span, plan.parts, plan.wide, plan.sums_size, query, out, plan.sums};
}

// What the calling thread computes attention in.
static float* member_scratch(const Attending& plan, const forerun::Member& member) {
    return plan.scratch + member.index() * plan.scratch_size;
}

// What layers with latents work in.
struct LatentCall {
    int64_t rank = 0, entry_width = 0, plain_width = 0;
    forerun::Forms entering, absorbing, expanding;
    Input entry;     // [rows], what queries are made of
    Input plain;     // [heads][rows], what is not rotated of queries
    Input attended;  // [heads][rows], sums of latents
    float* sums;     // [rows][heads][rank], the same as attention gives them
};

struct LayersCall {
    const ForerunModel* model;
    const ForerunRows* rows;
    int32_t first, last;
    float* x;
    forerun::Team* team;
    Attending plain, windowed;  // groups differ where a window hides slots
    Input normed, mixed, gated;
    float *queries, *keys, *values, *rotated;
    float* branch;  // what is added to the residual, where it is normed or scaled before
    const int32_t* tapped;
    int32_t num_tapped;
    float* states;
    Input remembered;  // what the product behind a recurrence reads
    RecurrentCall recurrent;
    float* gates;  // of what attention gives
    ExpertsCall mixture;
    LatentCall latent;
};

// y may be x.
INLINE void rotate(const float* x, const float* cosines, const float* sines, int64_t half, float scale, float* y) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        y[i] = (a * cosines[i] - b * sines[i]) * scale;
        y[i + half] = (b * cosines[i] + a * sines[i]) * scale;
    }
}

// The angles of a row in a layer.
struct Angles {
    const float *cosines, *sines;  // null: nothing is rotated
    int64_t rotated;               // numbers of a head
};
INLINE Angles angles_of(const LayersCall& c, const ForerunLayer& layer, int32_t t) {
    const ForerunRows& r = *c.rows;
    const int64_t rotated = layer.rotated;
    if (layer.rotation < 0) return {nullptr, nullptr, 0};
    const int64_t at = (int64_t)(r.rotated_by_slot ? r.slot : r.position)[t] * (rotated / 2);
    if (layer.rotation == 1) return {r.other_cosines + at, r.other_sines + at, rotated};
    return {r.cosines + at, r.sines + at, rotated};
}

// What the queries of a row are multiplied by.
INLINE float query_scale(const LayersCall& c, int32_t t) {
    const ForerunModel& m = *c.model;
    if (!m.query_growth) return m.scale;
    const int32_t position = (c.rows->rotated_by_slot ? c.rows->slot : c.rows->position)[t];
    return m.scale * (1.0f + m.query_growth * __builtin_logf((float)(1 + position / m.query_period)));
}

// The numbers of a head, rotated as far as they are, times scale. y may be x.
INLINE void turn(const Angles& a, const float* x, int64_t width, float scale, float* y) {
    if (a.rotated) rotate(x, a.cosines, a.sines, a.rotated / 2, scale, y);
    for (int64_t i = a.rotated; i < width; i++) y[i] = x[i] * scale;
}

// Norm and rotate a head, in whichever order, times scale. y may be x.
INLINE void place_head(const ForerunModel& m, const Angles& a, const float* norm, int64_t width, float* x, float scale,
                       float* y) {
    if (norm && m.norms_rotated) {
        turn(a, x, width, 1.0f, x);
        rms_norm(x, norm, m.eps, width, x);
        for (int64_t i = 0; i < width; i++) y[i] = x[i] * scale;
        return;
    }
    if (norm) rms_norm(x, norm, m.eps, width, x);
    turn(a, x, width, scale, y);
}

// Norm and rotate the keys of row t, and write them with its values.
template <class E> FN void place_keys(const LayersCall& c, const ForerunLayer& layer, const Attention& a, int32_t t) {
    const ForerunModel& m = *c.model;
    const int64_t width = layer.head_dim, heads = layer.num_kv_heads;
    const Angles angles = angles_of(c, layer, t);
    float *keys = c.keys + t * heads * width, *values = c.values + t * heads * width;
    if (!layer.value.out_features) __builtin_memcpy(values, keys, heads * width * sizeof(float));
    const bool is_wide = layer.key_norm && m.has_wide_norms;
    if (is_wide) rms_norm(keys, layer.key_norm, m.eps, heads * width, keys);
    for (int64_t h = 0; h < heads; h++) {
        float *k = keys + h * width, *v = values + h * width;
        place_head(m, angles, is_wide ? nullptr : layer.key_norm, width, k, 1.0f, k);
        if (layer.value_norm) rms_norm(v, layer.value_norm, m.eps, width, v);
    }
    write_row<E>(a, t, keys, values);
}

// The same, and its queries.
template <class E> FN void place_row(const LayersCall& c, const ForerunLayer& layer, const Attention& a, int32_t t) {
    const ForerunModel& m = *c.model;
    const int64_t width = layer.head_dim, each = m.num_heads / layer.num_kv_heads;
    const Angles angles = angles_of(c, layer, t);
    const float scale = query_scale(c, t);
    float* queries = c.queries + t * m.num_heads * width;
    const bool is_wide = layer.query_norm && m.has_wide_norms;
    if (is_wide) rms_norm(queries, layer.query_norm, m.eps, m.num_heads * width, queries);
    for (int64_t h = 0; h < m.num_heads; h++) {
        float* to = c.rotated + ((h / each * c.rows->num_rows + t) * each + h % each) * width;
        place_head(m, angles, is_wide ? nullptr : layer.query_norm, width, queries + h * width, scale, to);
    }
    if (layer.key.out_features) place_keys<E>(c, layer, a, t);
}

// The attention of a layer of the model.
INLINE ForerunAttention layer_attention(const ForerunModel& m, int32_t index) {
    const ForerunLayer& l = m.layers[index];
    return {l.keys_at, m.num_heads, l.num_kv_heads, l.key_width, l.value_width, m.page, m.cache_format,
            l.window, 0, m.scale, m.softcap, l.sinks};
}
