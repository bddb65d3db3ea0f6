// What a block head computes beside layers: the keys and values of its context, and greedy chains. Included once for each
// instruction set.

struct ContextCall {
    const float *norm, *states;
    LayersCall layers;
};

FN void context_body(void* data) {
    ContextCall& call = *(ContextCall*)data;
    LayersCall& c = call.layers;
    const ForerunModel& m = *c.model;
    const int64_t n = c.rows->num_rows;
    forerun::Member member(*c.team);
    float limit = 32767;  // the products of all layers read the same rows
    for (int32_t i = c.first; i < c.last; i++) {
        const float least = forerun::largest_code({&m.layers[i].key, &m.layers[i].value});
        limit = least < limit ? least : limit;
    }
    norm_rows(m, call.states, call.norm, nullptr, limit, c.normed, n, member);
    for (int32_t i = c.first; i < c.last; i++) keys_behind_norm(c, i, c.normed, member);
}

static void context(const ForerunModel* m, const float* norm, const ForerunRows* rows, const float* states, int threads) {
    forerun::Workspace& space = forerun::workspace();
    forerun::Team team(threads);
    ContextCall call{};
    call.norm = norm;
    call.states = states;
    LayersCall& c = call.layers;
    c.model = m;
    c.rows = rows;
    c.last = m->num_layers;
    c.team = &team;
    const int64_t n = rows->num_rows, narrow = (int64_t)m->layers->num_kv_heads * m->layers->head_dim;
    forerun::Forms forms;
    for (int32_t i = 0; i < m->num_layers; i++) forms.add({&m->layers[i].key, &m->layers[i].value});
    forerun::plan_input(space, c.normed, n, m->hidden, forms);
    space.want(c.normed.x, n * m->hidden);
    space.want(c.keys, n * narrow);
    space.want(c.values, n * narrow);
    space.allocate();
    forerun::run_in_parallel(context_body, &call, team);
}

struct ChainsCall {
    const ForerunLinear* after;
    const float *before, *logits;
    const int64_t *token_ids, *last, *lengths;
    int64_t chains, longest;
    int64_t* picked;
    forerun::Team* team;
    Input in;         // of each chain, what the token before its next one gives
    float* sums;      // [chains][out]
    int64_t* starts;  // [chains], rows of logits
};

// The first place of the largest of x[i] += y[i]; -1 if one of them is not finite.
FN int64_t largest_sum(float* x, const float* y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) f_store(x + i, f_add(f_load(y + i), f_load(x + i)));
    for (; i < n; i++) x[i] = y[i] + x[i];
    return first_largest(x, n);
}

// Chains go on beyond their ends, unread, so that the units of every loop are the same for all threads.
FN void chains_body(void* data) {
    ChainsCall& c = *(ChainsCall*)data;
    forerun::Member member(*c.team);
    const int64_t rank = c.after->in_features, out = c.after->out_features;
    const float limit = forerun::largest_code({c.after});
    for (int64_t depth = 0; depth < c.longest; depth++) {
        for (const int64_t t : member.each(c.chains)) {
            if (depth >= c.lengths[t]) continue;
            const int64_t token = depth ? c.picked[c.starts[t] + depth - 1] : c.last[t];
            if (token >= 0) __builtin_memcpy(c.in.x + t * rank, c.before + token * rank, rank * sizeof(float));
            prepare(c.in, t, limit);
        }
        product_rows(*c.after, c.in, c.chains, nullptr, c.sums, member);
        for (const int64_t t : member.each(c.chains)) {
            if (depth >= c.lengths[t]) continue;
            int64_t* picked = c.picked + c.starts[t] + depth;
            const bool ended = depth && picked[-1] < 0;
            const int64_t best = ended ? -1 : largest_sum(c.sums + t * out, c.logits + (c.starts[t] + depth) * out, out);
            *picked = best < 0 ? -1 : c.token_ids[best];
        }
    }
}

static void greedy_chains(const ForerunLinear* after, const float* before, const int64_t* token_ids, const float* logits,
                          const int64_t* last, const int64_t* lengths, int64_t chains, int64_t* picked, int threads) {
    forerun::Workspace& space = forerun::workspace();
    forerun::Team team(threads);
    ChainsCall c{after, before, logits, token_ids, last, lengths, chains, 0, picked, &team, {}, nullptr, nullptr};
    forerun::plan_input(space, c.in, chains, after->in_features, {after});
    space.want(c.in.x, chains * after->in_features);
    space.want(c.sums, chains * after->out_features);
    space.want(c.starts, chains);
    space.allocate();
    for (int64_t t = 0, start = 0; t < chains; start += lengths[t++]) {
        c.starts[t] = start;
        c.longest = lengths[t] > c.longest ? lengths[t] : c.longest;
    }
    forerun::run_in_parallel(chains_body, &c, team);
}
