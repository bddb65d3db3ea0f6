// The layer of an EAGLE head with what surrounds it, in one call. Included once for each instruction set.

// y = x, normed where there is a norm.
INLINE void norm_or_copy(const float* x, const float* weight, float eps, int64_t n, float* y) {
    if (weight)
        rms_norm(x, weight, eps, n, y);
    else
        __builtin_memcpy(y, x, n * sizeof(float));
}

struct EagleCall {
    const ForerunEagle* head;
    const float *embeddings, *states;
    const int64_t* wanted;
    int64_t num_wanted;
    float* logits;
    LayersCall layers;
    Input pair, embedding, output;  // [embedding, state] side by side; the embedding alone; what the logits are of
};

// What is added up goes to c.x; the rows that the layer's queries, keys and values read are returned.
FN const Input& enter_layer(const EagleCall& e, const LayersCall& c, forerun::Member& member) {
    const ForerunEagle& h = *e.head;
    const ForerunLayer& layer = h.model.layers[0];
    const int64_t n = c.rows->num_rows, wide = h.embedding_width, state = h.state_width;
    const bool reads_pair = !h.fc.out_features;
    const float eps = h.model.eps, limit = reads_pair ? entering_limit(layer) : forerun::largest_code({&h.fc});
    for (const int64_t t : member.each(n)) {
        float* pair = e.pair.x + t * e.pair.width;
        norm_or_copy(e.embeddings + t * wide, h.embedding_norm, eps, wide, pair);
        norm_or_copy(e.states + t * state, h.state_norm, eps, state, pair + wide);
        prepare(e.pair, t, limit);
        if (h.fc.out_features || !c.x) continue;
        norm_or_copy(h.norm_before_residual ? pair + wide : e.states + t * state, nullptr, eps, state, c.x + t * state);
    }
    if (h.embedding_residual.out_features && c.x) {
        prepare_rows(h.embedding_residual, e.embedding, n, member);
        product_rows(h.embedding_residual, e.embedding, n, c.x, c.x, member);
    }
    if (!h.fc.out_features) return e.pair;
    product_rows(h.fc, e.pair, n, nullptr, c.x, member);
    for (const int64_t t : member.each(n)) {
        norm_or_copy(c.x + t * h.model.hidden, layer.input_norm, eps, h.model.hidden, c.normed.x + t * h.model.hidden);
        prepare(c.normed, t, entering_limit(layer));
    }
    return c.normed;
}

FN void eagle_body(void* data) {
    EagleCall& e = *(EagleCall*)data;
    LayersCall& c = e.layers;
    const ForerunModel& m = e.head->model;
    forerun::Member member(*c.team);
    const Input& in = enter_layer(e, c, member);
    if (!c.x) return keys_behind_norm(c, 0, in, member);
    layer_behind_norm(c, 0, in, member);
    const float limit = forerun::largest_code({&m.head});
    for (const int64_t i : member.each(e.num_wanted)) {
        norm_or_copy(c.x + e.wanted[i] * m.hidden, m.norm, m.eps, m.hidden, e.output.x + i * m.hidden);
        prepare(e.output, i, limit);
    }
    if (e.num_wanted) product_rows(m.head, e.output, e.num_wanted, nullptr, e.logits, member);
    if (!e.head->norm_output) return;
    for (const int64_t t : member.each(c.rows->num_rows))
        rms_norm(c.x + t * m.hidden, m.norm, m.eps, m.hidden, c.x + t * m.hidden);
}

static void eagle(const ForerunEagle* h, const ForerunRows* rows, const float* embeddings, const float* states,
                  const int64_t* wanted, int64_t num_wanted, float* x, float* logits, int threads) {
    forerun::Workspace& space = forerun::workspace();
    forerun::Team team(threads);
    const ForerunModel* m = &h->model;
    EagleCall e{};
    e.head = h;
    e.embeddings = embeddings;
    e.states = states;
    e.wanted = wanted;
    e.num_wanted = num_wanted;
    e.logits = logits;
    e.layers.model = m;
    e.layers.rows = rows;
    e.layers.last = 1;
    e.layers.x = x;
    e.layers.team = &team;
    const int64_t n = rows->num_rows, wide = h->embedding_width + h->state_width;
    plan_layers(space, e.layers);
    const ForerunLayer& layer = m->layers[0];
    forerun::Forms pair;
    h->fc.out_features ? pair.add({&h->fc}) : pair.add({&layer.query, &layer.key, &layer.value});
    forerun::plan_input(space, e.pair, n, wide, pair);
    forerun::plan_input(space, e.embedding, n, h->embedding_width, {&h->embedding_residual});
    forerun::plan_input(space, e.output, num_wanted, m->hidden, {&m->head});
    space.want(e.pair.x, n * wide);
    space.want(e.output.x, num_wanted * m->hidden);
    space.allocate();
    e.embedding.x = const_cast<float*>(embeddings);
    forerun::run_in_parallel(eagle_body, &e, team);
}

struct FuseCall {
    const ForerunLinear* w;
    const float *norms, *x;
    int32_t parts;
    float eps;
    Input in;
    int64_t n;
    float* out;
    forerun::Team* team;
};

FN void fuse_body(void* data) {
    FuseCall& c = *(FuseCall*)data;
    forerun::Member member(*c.team);
    const int64_t width = c.in.width / c.parts;
    const float limit = forerun::largest_code({c.w});
    for (const int64_t t : member.each(c.n)) {
        for (int64_t i = 0; i < c.parts; i++) {
            const int64_t at = t * c.in.width + i * width;
            norm_or_copy(c.x + at, c.norms ? c.norms + i * width : nullptr, c.eps, width, c.in.x + at);
        }
        prepare(c.in, t, limit);
    }
    product_rows(*c.w, c.in, c.n, nullptr, c.out, member);
}

static void fuse(const ForerunLinear* w, const float* norms, int32_t parts, float eps, const float* x, int64_t n,
                 float* out, int threads) {
    forerun::Workspace& space = forerun::workspace();
    forerun::Team team(threads);
    FuseCall call{w, norms, x, parts, eps, {}, n, out, &team};
    forerun::plan_input(space, call.in, n, w->in_features, {w});
    space.want(call.in.x, n * w->in_features);
    space.allocate();
    forerun::run_in_parallel(fuse_body, &call, team);
}
