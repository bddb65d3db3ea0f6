// Attention with one latent of each position. Included once for each instruction set.
//
// Queries are brought to the latents, whatever the number of rows, so that a row's bits are those of any other forward. A
// head's products read rows of one head, which stand behind one another.

static void plan_latent(LatentCall& s, const ForerunLayer& layer) {
    const ForerunLatent& l = *layer.latent;
    s.rank = l.expand->in_features;
    s.entry_width = l.entry.out_features;
    s.plain_width = l.absorb->in_features;
    s.entering.add({&layer.query});
    s.absorbing.add({l.absorb});
    s.expanding.add({l.expand});
}

static void want_latent(forerun::Workspace& space, LatentCall& s, int64_t n, const ForerunModel& m) {
    const int64_t pairs = n * m.num_heads;
    forerun::plan_input(space, s.entry, n, s.entry_width, s.entering);
    forerun::plan_input(space, s.plain, pairs, s.plain_width, s.absorbing);
    forerun::plan_input(space, s.attended, pairs, s.rank, s.expanding);
    space.want(s.entry.x, n * s.entry_width);
    space.want(s.plain.x, pairs * s.plain_width);
    space.want(s.attended.x, pairs * s.rank);
    space.want(s.sums, pairs * s.rank);
}

// What is rotated of the queries of row t, and what is not; norm and rotate its key, and write it with its latent.
template <class E> FN void place_latent(const LayersCall& c, const ForerunLayer& layer, const Attention& a, int32_t t) {
    const ForerunModel& m = *c.model;
    const ForerunLatent& l = *layer.latent;
    const Input& plain = c.latent.plain;
    const int64_t rank = c.latent.rank, wide = layer.key_width, turned = wide - rank, n = c.rows->num_rows;
    const Angles angles = angles_of(*c.rows, layer, t);
    const float scale = query_scale(m, *c.rows, t);
    for (int64_t h = 0; h < m.num_heads; h++) {
        const float* query = c.queries + (t * m.num_heads + h) * layer.head_dim;
        rotate_head(angles, query, turned, scale, c.rotated + (t * m.num_heads + h) * wide);
        float* to = plain.x + (h * n + t) * plain.width;
        for (int64_t i = 0; i < plain.width; i++) to[i] = query[turned + i] * scale;
        prepare(plain, h * n + t, 0.0f);
    }
    float* key = c.keys + t * wide;
    rotate_head(angles, key, turned, 1.0f, key);
    rms_norm(key + turned, l.norm, l.eps, rank, key + turned);
    write_row<E>(a, t, key, key + turned);
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
    const Input& entry = c.latent.entry;
    const int64_t n = c.rows->num_rows;
    product_rows(layer.key, in, n, nullptr, c.keys, member);
    if (!l.entry.out_features) return product_rows(layer.query, in, n, nullptr, c.queries, member);
    product_rows(l.entry, in, n, nullptr, entry.x, member);
    const float limit = forerun::largest_code({&layer.query});
    for (const int64_t t : member.each(n)) {
        float* x = entry.x + t * entry.width;
        rms_norm(x, l.entry_norm, l.eps, entry.width, x);
        prepare(entry, t, limit);
    }
    product_rows(layer.query, entry, n, nullptr, c.queries, member);
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
    products_by_head(l.absorb, heads, s.plain, n, c.rotated + wide - s.rank, heads * wide, wide, member);
    IN_CACHE_FORMAT(m.cache_format, attend, a, member, c.team->threads, member_scratch(plan, member));
    for (const int64_t u : member.each(n * heads)) {
        const int64_t to = u % heads * n + u / heads;
        __builtin_memcpy(s.attended.x + to * s.rank, s.sums + u * s.rank, s.rank * sizeof(float));
        prepare(s.attended, to, 0.0f);
    }
    const int64_t width = l.expand->out_features;
    products_by_head(l.expand, heads, s.attended, n, c.attended.x, heads * width, width, member);
}
