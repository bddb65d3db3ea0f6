// Attention with one latent of each position. Included once for each instruction set.
//
// Queries are brought to the latents, whatever the number of rows, so that a row's bits are those of any other forward. A
// head's products read rows of one head, which stand behind one another.

static void plan_latent(LatentCall& s, const ForerunLayer& layer) {
    const ForerunLatent& l = *layer.latent;
    s.kv_lora_rank = l.v_b_proj->in_features;
    s.q_lora_rank = l.q_a_proj.out_features;
    s.qk_nope_head_dim = l.k_b_proj->in_features;
    s.reads_q_a.add({&layer.query});
    s.reads_q_nope.add({l.k_b_proj});
    s.reads_attended.add({l.v_b_proj});
}

static void want_latent(forerun::Workspace& space, LatentCall& s, int64_t n, const ForerunModel& m) {
    const int64_t pairs = n * m.num_heads;
    forerun::plan_input(space, s.q_a, n, s.q_lora_rank, s.reads_q_a);
    forerun::plan_input(space, s.q_nope, pairs, s.qk_nope_head_dim, s.reads_q_nope);
    forerun::plan_input(space, s.attended, pairs, s.kv_lora_rank, s.reads_attended);
    space.want(s.q_a.x, n * s.q_lora_rank);
    space.want(s.q_nope.x, pairs * s.qk_nope_head_dim);
    space.want(s.attended.x, pairs * s.kv_lora_rank);
    space.want(s.sums, pairs * s.kv_lora_rank);
}

// What is rotated of the queries of row t, and what is not; norm and rotate its key, and write it with its latent.
template <class E> FN void place_latent(const LayersCall& c, const ForerunLayer& layer, const Attention& a, int32_t t) {
    const ForerunModel& m = *c.model;
    const ForerunLatent& l = *layer.latent;
    const Input& q_nope = c.latent.q_nope;
    const int64_t rank = c.latent.kv_lora_rank, wide = layer.key_width, rope_dim = wide - rank, n = c.rows->num_rows;
    const CosSin cos_sin = cos_sin_of(*c.rows, layer, t);
    const float scale = query_scale(m, *c.rows, t);
    for (int64_t h = 0; h < m.num_heads; h++) {
        const float* query = c.queries + (t * m.num_heads + h) * layer.head_dim;
        rotate_head(cos_sin, query, rope_dim, scale, c.rotated + (t * m.num_heads + h) * wide);
        float* to = q_nope.x + (h * n + t) * q_nope.width;
        for (int64_t i = 0; i < q_nope.width; i++) to[i] = query[rope_dim + i] * scale;
        prepare(q_nope, h * n + t, 0.0f);
    }
    float* key = c.keys + t * wide;
    rotate_head(cos_sin, key, rope_dim, 1.0f, key);
    rms_norm(key + rope_dim, l.kv_a_layernorm, l.eps, rank, key + rope_dim);
    write_row<E>(a, t, key, key + rope_dim);
}

// Products of each head's rows with its own weights. in: [heads][rows]; out: row t of head h at out + t * stride + h * apart.
FN void products_by_head(const ForerunLinear* w, int64_t heads, const Input& in, int64_t n, float* out, int64_t stride,
                         int64_t apart, forerun::Member& member) {
    const int64_t blocks = (w->out_features + 15) / 16;
    for (const int64_t u : member.each(heads * blocks)) {
        const int64_t h = u / blocks, b = u % blocks;
        linear_blocks(w[h], from_row(in, h * n), n, b, b + 1, nullptr, out + h * apart, stride);
    }
}

// Queries and keys of `in`: c.queries, of which nothing is rotated yet, and c.keys.
FN void latent_products(const LayersCall& c, const ForerunLayer& layer, const Input& in, forerun::Member& member) {
    const ForerunLatent& l = *layer.latent;
    const Input& q_a = c.latent.q_a;
    const int64_t n = c.rows->num_rows;
    product_rows(layer.key, in, n, nullptr, c.keys, member);
    if (!l.q_a_proj.out_features) return product_rows(layer.query, in, n, nullptr, c.queries, member);
    product_rows(l.q_a_proj, in, n, nullptr, q_a.x, member);
    const float limit = forerun::largest_code({&layer.query});
    for (const int64_t t : member.each(n)) {
        float* x = q_a.x + t * q_a.width;
        rms_norm(x, l.q_a_layernorm, l.eps, q_a.width, x);
        prepare(q_a, t, limit);
    }
    product_rows(layer.query, q_a, n, nullptr, c.queries, member);
}

// `attention_behind_norm` of a layer with latents.
FN void latent_attention(const LayersCall& c, int32_t index, const Input& in, forerun::Member& member) {
    const ForerunModel& m = *c.model;
    const ForerunLayer& layer = m.layers[index];
    const ForerunLatent& l = *layer.latent;
    const LatentCall& s = c.latent;
    const int64_t n = c.rows->num_rows, heads = m.num_heads, wide = layer.key_width;
    latent_products(c, layer, in, member);
    const ForerunAttention shape = layer_attention(m, index);
    const Attending& plan = layer.window ? c.windowed : c.plain;
    const Attention a = attention_of(&shape, c.rows, plan, c.rotated, s.sums);
    for (const int64_t t : member.each(n))
        IN_CACHE_FORMAT(m.cache_format, place_latent, c, layer, a, (int32_t)t);
    products_by_head(l.k_b_proj, heads, s.q_nope, n, c.rotated + wide - s.kv_lora_rank, heads * wide, wide, member);
    IN_CACHE_FORMAT(m.cache_format, attend, a, member, c.team->threads, member_scratch(plan, member));
    for (const int64_t u : member.each(n * heads)) {
        const int64_t to = u % heads * n + u / heads;
        __builtin_memcpy(s.attended.x + to * s.kv_lora_rank, s.sums + u * s.kv_lora_rank, s.kv_lora_rank * sizeof(float));
        prepare(s.attended, to, 0.0f);
    }
    const int64_t width = l.v_b_proj->out_features;
    products_by_head(l.v_b_proj, heads, s.attended, n, c.attended.x, heads * width, width, member);
}
