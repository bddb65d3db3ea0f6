// Rotary position embedding: queries and keys of a row are normed, rotated by its position, and written where attention
// reads them. Included once for each instruction set.

// Rotate the pairs (i, half + i) of 2 * half numbers by the angles of a position, times scale. y may be x.
INLINE void rotate(const float* x, const float* cos, const float* sin, int64_t half, float scale, float* y) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        y[i] = (a * cos[i] - b * sin[i]) * scale;
        y[i + half] = (b * cos[i] + a * sin[i]) * scale;
    }
}

// The angles of a row in a layer.
struct CosSin {
    const float *cos, *sin;  // null: nothing is rotated
    int64_t rotated;               // numbers of a head
};
INLINE CosSin cos_sin_of(const ForerunRows& r, const ForerunLayer& layer, int32_t t) {
    const int64_t rotated = layer.rotated;
    if (layer.rope < 0) return {nullptr, nullptr, 0};
    const int64_t at = (int64_t)(r.rope_by_slot ? r.slot : r.position)[t] * (rotated / 2);
    if (layer.rope == 1) return {r.other_cos + at, r.other_sin + at, rotated};
    return {r.cos + at, r.sin + at, rotated};
}

// What the queries of a row are multiplied by.
INLINE float query_scale(const ForerunModel& m, const ForerunRows& r, int32_t t) {
    if (!m.query_growth) return m.scale;
    const int32_t position = (r.rope_by_slot ? r.slot : r.position)[t];
    return m.scale * (1.0f + m.query_growth * __builtin_logf((float)(1 + position / m.query_period)));
}

// The numbers of a head, rotated as far as they are, times scale. y may be x.
INLINE void rotate_head(const CosSin& a, const float* x, int64_t width, float scale, float* y) {
    if (a.rotated) rotate(x, a.cos, a.sin, a.rotated / 2, scale, y);
    for (int64_t i = a.rotated; i < width; i++) y[i] = x[i] * scale;
}

// Norm and rotate a head, in whichever order, times scale. y may be x.
INLINE void norm_and_rotate(const ForerunModel& m, const CosSin& a, const float* norm, int64_t width, float* x,
                            float scale, float* y) {
    if (norm && m.norms_rotated) {
        rotate_head(a, x, width, 1.0f, x);
        rms_norm(x, norm, m.eps, width, x);
        for (int64_t i = 0; i < width; i++) y[i] = x[i] * scale;
        return;
    }
    if (norm) rms_norm(x, norm, m.eps, width, x);
    rotate_head(a, x, width, scale, y);
}

// Norm and rotate the keys of row t, and write them with its values.
template <class E> FN void place_keys(const LayersCall& c, const ForerunLayer& layer, const Attention& a, int32_t t) {
    const ForerunModel& m = *c.model;
    const int64_t width = layer.head_dim, heads = layer.num_kv_heads;
    const CosSin cos_sin = cos_sin_of(*c.rows, layer, t);
    float *keys = c.keys + t * heads * width, *values = c.values + t * heads * width;
    if (!layer.value.out_features) __builtin_memcpy(values, keys, heads * width * sizeof(float));
    const bool is_wide = layer.key_norm && m.has_wide_norms;
    if (is_wide) rms_norm(keys, layer.key_norm, m.eps, heads * width, keys);
    for (int64_t h = 0; h < heads; h++) {
        float *k = keys + h * width, *v = values + h * width;
        norm_and_rotate(m, cos_sin, is_wide ? nullptr : layer.key_norm, width, k, 1.0f, k);
        if (layer.value_norm) rms_norm(v, layer.value_norm, m.eps, width, v);
    }
    write_row<E>(a, t, keys, values);
}

// Norm and rotate the queries of row t too, from c.queries to c.rotated.
template <class E> FN void place_row(const LayersCall& c, const ForerunLayer& layer, const Attention& a, int32_t t) {
    const ForerunModel& m = *c.model;
    const int64_t width = layer.head_dim, each = m.num_heads / layer.num_kv_heads;
    const CosSin cos_sin = cos_sin_of(*c.rows, layer, t);
    const float scale = query_scale(m, *c.rows, t);
    float* queries = c.queries + t * m.num_heads * width;
    const bool is_wide = layer.query_norm && m.has_wide_norms;
    if (is_wide) rms_norm(queries, layer.query_norm, m.eps, m.num_heads * width, queries);
    for (int64_t h = 0; h < m.num_heads; h++) {
        float* to = c.rotated + ((h / each * c.rows->num_rows + t) * each + h % each) * width;
        norm_and_rotate(m, cos_sin, is_wide ? nullptr : layer.query_norm, width, queries + h * width, scale, to);
    }
    if (layer.key.out_features) place_keys<E>(c, layer, a, t);
}
