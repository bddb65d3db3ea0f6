// Layers of a decoder. Included once for each instruction set.

// Queries, keys and values of `in`, and attention: what the product that follows reads is c.attended.x.
FN void attention_behind_norm(const LayersCall& c, int32_t index, const Input& in, forerun::Member& member) {
    const ForerunModel& m = *c.model;
    const ForerunLayer& layer = m.layers[index];
    if (layer.latent) return latent_attention(c, index, in, member);
    const int64_t n = c.rows->num_rows, kv = layer.key.out_features;
    const int threads = c.team->threads;
    const int64_t q_blocks = (layer.query.out_features + 15) / 16, kv_blocks = (layer.key.out_features + 15) / 16;
    for (const int64_t u : member.each(q_blocks + kv_blocks + (layer.value.out_features ? kv_blocks : 0))) {
        const int64_t v = u - q_blocks - kv_blocks;
        if (u < q_blocks)
            linear_blocks(layer.query, in, n, u, u + 1, nullptr, c.queries, layer.query.out_features);
        else if (v < 0)
            linear_blocks(layer.key, in, n, u - q_blocks, u - q_blocks + 1, nullptr, c.keys, kv);
        else
            linear_blocks(layer.value, in, n, v, v + 1, nullptr, c.values, kv);
    }
    const ForerunAttention shape = layer_attention(m, index);
    const Attending& plan = layer.window ? c.windowed : c.plain;
    const Attention a = attention_of(&shape, c.rows, plan, c.rotated, c.attended.x);
    for (const int64_t t : member.each(n))
        IN_CACHE_FORMAT(m.cache_format, place_row, c, layer, a, (int32_t)t);
    IN_CACHE_FORMAT(m.cache_format, attend, a, member, threads, member_scratch(plan, member));
    if (!layer.attention_gate.out_features) return;
    product_rows(layer.attention_gate, in, n, nullptr, c.gates, member);
    for (const int64_t t : member.each(n)) {
        const int64_t gates = layer.attention_gate.out_features, width = layer.out.in_features;
        multiply_sigmoid(c.gates + t * gates, gates, c.attended.x + t * width, width);
    }
}

// The keys and values of `in` alone, norm and rotation of keys included.
FN void keys_behind_norm(const LayersCall& c, int32_t index, const Input& in, forerun::Member& member) {
    const ForerunModel& m = *c.model;
    const ForerunLayer& layer = m.layers[index];
    const int64_t n = c.rows->num_rows;
    product_rows(layer.key, in, n, nullptr, c.keys, member);
    product_rows(layer.value, in, n, nullptr, c.values, member);
    const ForerunAttention shape = layer_attention(m, index);
    const Attention a = attention_of(&shape, c.rows, c.plain, nullptr, nullptr);
    for (const int64_t t : member.each(n))
        IN_CACHE_FORMAT(m.cache_format, place_keys, c, layer, a, (int32_t)t);
}

static inline float or_one(float scale) { return scale ? scale : 1.0f; }

// The largest code that the first products of a feed-forward layer take.
INLINE float feeding_limit(const ForerunLayer& layer) {
    const bool has_gate = layer.gate.out_features;
    const float most = forerun::largest_code({has_gate ? &layer.gate : &layer.up, &layer.up});
    if (!layer.experts) return most;
    const float theirs = experts_limit(*layer.experts);
    return most < theirs ? most : theirs;
}

// The feed-forward layer of c.x up to the product that gives it back, and all of its experts.
FN void gated_rows(const LayersCall& c, int32_t index, forerun::Member& member) {
    const ForerunModel& m = *c.model;
    const ForerunLayer& layer = m.layers[index];
    const int64_t n = c.rows->num_rows, width = layer.up.out_features;
    norm_rows(m, c.x, layer.mlp_norm, layer.mlp_bias, feeding_limit(layer), c.normed, n, member);
    for (const auto [first, last] : member.parts((width + 15) / 16))
        gated_blocks(layer.gate, layer.up, m.activation, layer.activation_params, or_one(m.activation_scale), c.normed, n,
                     first, last, c.gated.x, width);
    if (layer.experts) expert_rows(c.experts, *layer.experts, m, index, c.x, c.normed, n, member);
}

// Whether what a layer adds to the residual is normed or scaled before.
static inline bool has_branch(const ForerunModel& m, const float* norm, float scale) {
    return norm || or_one(m.residual_scale) * or_one(scale) != 1.0f;
}

// c.x += a product of `in`, if there is one, and what experts give, normed by `norm` if there is one, and scaled, by the
// model's factor and this one. layer_scalar: c.x is multiplied by it then; or null.
FN void add_rows(const LayersCall& c, const ForerunLinear& w, const Input& in, const float* norm, float factor,
                 forerun::Member& member, const ForerunExperts* experts = nullptr, const float* layer_scalar = nullptr) {
    const ForerunModel& m = *c.model;
    const int64_t n = c.rows->num_rows, wide = m.hidden;
    if (w.out_features) prepare_rows(w, in, n, member);
    if (!experts && !layer_scalar && !has_branch(m, norm, factor)) return product_rows(w, in, n, c.x, c.x, member);
    product_rows(w, in, n, nullptr, c.branch, member);
    const F scale = f_set(or_one(m.residual_scale) * or_one(factor)), whole = f_set(layer_scalar ? *layer_scalar : 1.0f);
    for (const int64_t t : member.each(n)) {
        float *y = c.branch + t * wide, *x = c.x + t * wide;
        for (int64_t i = 0; !w.out_features && i < wide; i++) y[i] = 0.0f;
        if (experts) add_experts(c.experts, *experts, m, t, y);
        norm_row(m, y, norm, nullptr, wide, y);
        for (int64_t i = 0; i < wide; i += 16) {
            const F sum = f_fma(get(y + i, wide - i), scale, get(x + i, wide - i));
            put(x + i, f_mul(sum, whole), wide - i);
        }
    }
}

// Add what the layer makes of the rows' per_layer_inputs.
FN void add_per_layer_inputs(const LayersCall& c, int32_t index, forerun::Member& member) {
    const ForerunModel& m = *c.model;
    const ForerunLayer& layer = m.layers[index];
    const int64_t n = c.rows->num_rows, width = layer.per_layer_input_gate.out_features;
    const Input gated = of_width(c.gated, width);
    norm_rows(m, c.x, nullptr, nullptr, forerun::largest_code({&layer.per_layer_input_gate}), c.normed, n, member);
    for (const auto [first, last] : member.parts((width + 15) / 16))
        gated_blocks({}, layer.per_layer_input_gate, m.activation, layer.activation_params, 1.0f, c.normed, n, first, last,
                     gated.x, width);
    for (const int64_t t : member.each(n)) {
        const float* given = c.rows->per_layer_inputs + (t * m.num_layers + index) * width;
        for (int64_t i = 0; i < width; i++) gated.x[t * width + i] *= given[i];
    }
    add_rows(c, layer.per_layer_projection, gated, layer.post_per_layer_input_norm, 1.0f, member, nullptr,
             layer.layer_scalar);
}

// A layer from its queries, keys and values on, which read `in`; the residual, and what comes out, is c.x.
FN void layer_behind_norm(const LayersCall& c, int32_t index, const Input& in, forerun::Member& member) {
    const ForerunModel& m = *c.model;
    const ForerunLayer& layer = m.layers[index];
    const ForerunRecurrence* r = layer.recurrence;
    const bool attends = layer.query.out_features, feeds = layer.up.out_features || layer.experts;
    if (r)
        recurrent_rows(c.recurrent, *r, m, *c.rows, index, in, c.remembered, member);
    if (attends) attention_behind_norm(c, index, in, member);
    if (m.is_parallel) gated_rows(c, index, member);
    if (r) add_rows(c, r->out_proj, c.remembered, layer.attention_norm, r->out_scale, member);
    const Input attended = of_width(c.attended, layer.out.in_features);
    if (attends) add_rows(c, layer.out, attended, layer.attention_norm, m.attention_scale, member);
    if (!m.is_parallel && feeds) gated_rows(c, index, member);
    const Input gated = of_width(c.gated, layer.up.out_features);
    const float* layer_scalar = layer.per_layer_input_gate.out_features ? nullptr : layer.layer_scalar;
    if (feeds) add_rows(c, layer.down, gated, layer.feed_norm, layer.feed_scale, member, layer.experts, layer_scalar);
    if (layer.per_layer_input_gate.out_features) add_per_layer_inputs(c, index, member);
}

// The largest code that queries, keys and values take.
INLINE float entering_limit(const ForerunLayer& layer) {
    const bool has_q_a = layer.latent && layer.latent->q_a_proj.out_features;
    const ForerunLinear& query = has_q_a ? layer.latent->q_a_proj : layer.query;
    const float most = forerun::largest_code({&query, &layer.key, &layer.value, &layer.attention_gate});
    const ForerunRecurrence* r = layer.recurrence;
    if (!r) return most;
    const float recurrent = forerun::largest_code({&r->in_proj_qkv, &r->in_proj_z, &r->in_proj_b, &r->in_proj_a});
    return most < recurrent ? most : recurrent;
}

FN void one_layer(const LayersCall& c, int32_t index, forerun::Member& member) {
    const ForerunModel& m = *c.model;
    const ForerunLayer& layer = m.layers[index];
    if (layer.query.out_features || layer.recurrence)
        norm_rows(m, c.x, layer.input_norm, layer.input_bias, entering_limit(layer), c.normed, c.rows->num_rows,
                  member);
    layer_behind_norm(c, index, c.normed, member);
}

// Write what enters this layer to c.states, if it is one of c.output_layers.
FN void keep_hidden_states(const LayersCall& c, int32_t layer, forerun::Member& member) {
    const ForerunModel& m = *c.model;
    int32_t at = 0;
    while (at < c.num_output_layers && c.output_layers[at] != layer) at++;
    if (at == c.num_output_layers) return;
    for (const int64_t t : member.each(c.rows->num_rows)) {
        const float* x = c.x + t * m.hidden;
        float* to = c.states + (t * c.num_output_layers + at) * m.hidden;
        if (layer == m.num_layers) norm_row(m, x, m.norm, m.norm_bias, m.hidden, to);
        for (int64_t i = 0; layer < m.num_layers && i < m.hidden; i++) to[i] = x[i];
    }
}

FN void forward_layers_body(void* data) {
    LayersCall& c = *(LayersCall*)data;
    forerun::Member member(*c.team);
    for (int32_t layer = c.first; layer < c.last; layer++) {
        keep_hidden_states(c, layer, member);
        one_layer(c, layer, member);
    }
    if (c.last == c.model->num_layers) keep_hidden_states(c, c.last, member);
}

// Wish for what layers work in.
static void plan_layers(forerun::Workspace& space, LayersCall& c) {
    const ForerunModel* m = c.model;
    const ForerunRows* rows = c.rows;
    const int threads = c.team->threads;
    const int64_t n = rows->num_rows;
    const auto more = [](int64_t& most, int64_t size) { most = size > most ? size : most; };
    forerun::Forms normed, attended, gated, remembered;
    const ForerunLayer *plain = nullptr, *windowed = nullptr;  // all of each are alike
    bool branch = false;
    int64_t recalled = 0, fed = 0, attended_width = 0, queries = 0, rotated = 0, keys = 0, values = 0, gates = 0;
    for (int32_t i = c.first; i < c.last; i++) {
        const ForerunLayer& l = m->layers[i];
        for (const ForerunLinear* w :
             {&l.query, &l.key, &l.value, &l.up, &l.gate, &l.attention_gate, &l.per_layer_input_gate})
            if (w->out_features) normed.add({w});
        if (const ForerunRecurrence* r = l.recurrence) {
            normed.add({&r->in_proj_qkv, &r->in_proj_z, &r->in_proj_b, &r->in_proj_a});
            remembered.add({&r->out_proj});
            recalled = r->out_proj.in_features;
            plan_recurrence(c.recurrent, *r);
            branch |= has_branch(*m, l.attention_norm, r->out_scale);
        }
        if (const ForerunExperts* e = l.experts) {
            normed.add({&e->router, &e->shared_expert_gate});
            plan_experts(c.experts, *e);
            normed.add({e->gate, e->up});
            branch = true;
        }
        if (l.latent) {
            normed.add({&l.latent->q_a_proj});
            plan_latent(c.latent, l);
        }
        more(fed, l.up.out_features);
        more(fed, l.per_layer_input_gate.out_features);
        more(gates, l.attention_gate.out_features);
        branch |= l.layer_scalar || l.post_per_layer_input_norm || has_branch(*m, l.feed_norm, l.feed_scale);
        branch |= has_branch(*m, l.attention_norm, m->attention_scale);
        attended.add({&l.out});
        gated.add({&l.down});
        if (l.per_layer_projection.out_features) gated.add({&l.per_layer_projection});
        if (!l.query.out_features) continue;
        (l.window ? windowed : plain) = &l;
        more(attended_width, l.out.in_features);
        more(queries, l.query.out_features);
        more(rotated, (int64_t)m->num_heads * l.key_width);
        more(keys, (int64_t)l.num_kv_heads * l.key_width);
        more(values, (int64_t)l.num_kv_heads * l.value_width);
    }
    for (const ForerunLayer* l : {plain, windowed})
        if (l)
            plan_attention(space, l->window ? c.windowed : c.plain, *rows, l->window, m->num_heads / l->num_kv_heads,
                           l->num_kv_heads, l->value_width, threads);
    forerun::plan_input(space, c.normed, n, m->hidden, normed);
    forerun::plan_input(space, c.attended, n, attended_width, attended);
    forerun::plan_input(space, c.gated, n, fed, gated);
    space.want(c.normed.x, n * m->hidden);
    space.want(c.attended.x, n * attended_width);
    space.want(c.gated.x, n * fed);
    if (c.experts.num_experts_per_tok) want_experts(space, c.experts, n, m->hidden, m->num_layers);
    if (branch) space.want(c.branch, n * m->hidden);
    if (gates) space.want(c.gates, n * gates);
    if (c.latent.kv_lora_rank) want_latent(space, c.latent, n, *m);
    if (rows->states) find_sequences(c.recurrent, *rows);  // they pass layers that are not recurrent, too
    if (recalled) {
        forerun::plan_input(space, c.remembered, n, recalled, remembered);
        space.want(c.remembered.x, n * recalled);
        want_recurrence(space, c.recurrent, *rows, threads);
    }
    space.want(c.queries, n * queries);
    space.want(c.rotated, n * rotated);
    space.want(c.keys, n * keys);
    space.want(c.values, n * values);
}

static void forward_layers(const ForerunModel* m, const ForerunRows* rows, int32_t first, int32_t last, float* x,
                           const int32_t* output_layers, int32_t num_output_layers, float* states, int threads) {
    forerun::Workspace& space = forerun::workspace();
    forerun::Team team(threads);
    LayersCall c{};
    c.model = m;
    c.rows = rows;
    c.first = first;
    c.last = last;
    c.x = x;
    c.output_layers = output_layers;
    c.num_output_layers = num_output_layers;
    c.states = states;
    c.team = &team;
    plan_layers(space, c);
    space.allocate();
    forerun::run_in_parallel(forward_layers_body, &c, team);
    for (int32_t s = 0; rows->states && s <= rows->sequence[rows->num_rows - 1]; s++) {
        int32_t& folded = *rows->states[s].folded;
        if (rows->states[s].num_pending && first <= folded && last > folded) folded = last;
    }
}
