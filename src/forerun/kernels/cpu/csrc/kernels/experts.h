// Mixtures of experts. Included once for each instruction set.
//
// The rows of a step that share an expert read it together. What a row's experts give is added in the order of the row's own
// scores, so that its bits depend on no other row.

// What the mixtures of one forward share.
struct ExpertsCall {
    int64_t num_experts = 0, num_experts_per_tok = 0, moe_intermediate_size = 0;  // the most of all layers
    forerun::Forms entering, leaving;
    bool floats = false;         // products read the rows themselves
    float *scores, *scores_for_choice;  // [rows][num_experts], of the router; with e_score_correction_bias
    int32_t* selected_experts;   // [rows][num_experts_per_tok]
    float* routing_weights;      // [rows][num_experts_per_tok], what their results are multiplied by
    int32_t* places;             // [rows][num_experts_per_tok], where among the rows of `given`
    int32_t* active;             // [num_experts], the experts that rows are given to, rising
    int32_t* starts;             // [num_experts + 1], the first row of each of these in `given`, and the end
    int32_t* num_active;         // [layers]: a thread that comes late still counts the blocks of a layer that others have left
    int32_t* next;               // [num_experts], in which rows are sorted
    float* shared_gates;         // [rows]
    float* parts;                // [rows * num_experts_per_tok][hidden], what experts give
    Input given, inner;          // rows * num_experts_per_tok: rows as experts read them, and as their last products do
};

static void plan_experts(ExpertsCall& c, const ForerunExperts& e) {
    const auto more = [](int64_t& most, int64_t size) { most = size > most ? size : most; };
    more(c.num_experts, e.num_experts);
    more(c.num_experts_per_tok, e.num_experts_per_tok);
    more(c.moe_intermediate_size, e.moe_intermediate_size);
    for (const ForerunLinear* w : {e.gate, e.up}) {
        if (w->out_features) c.entering.add({w});
        c.floats |= w->out_features && w->kind < FORERUN_INT8;
    }
    c.leaving.add({e.down});
}

static void want_experts(forerun::Workspace& space, ExpertsCall& c, int64_t n, int64_t hidden, int64_t layers) {
    const int64_t pairs = n * c.num_experts_per_tok;
    space.want(c.scores, n * c.num_experts);
    space.want(c.scores_for_choice, n * c.num_experts);
    space.want(c.selected_experts, pairs);
    space.want(c.routing_weights, pairs);
    space.want(c.places, pairs);
    space.want(c.active, c.num_experts);
    space.want(c.starts, c.num_experts + 1);
    space.want(c.num_active, layers);
    space.want(c.next, c.num_experts);
    space.want(c.shared_gates, n);
    space.want(c.parts, pairs * hidden);
    forerun::plan_input(space, c.given, pairs, hidden, c.entering);
    forerun::plan_input(space, c.inner, pairs, c.moe_intermediate_size, c.leaving);
    c.given.x = nullptr;
    if (c.floats) space.want(c.given.x, pairs * hidden);
    space.want(c.inner.x, pairs * c.moe_intermediate_size);
}

constexpr int32_t MOST_GROUPS = 64;

// The places of the `top` largest of x [count], the largest first, of equal ones the first.
INLINE void largest_places(const float* x, int32_t count, int32_t top, int32_t* found) {
    for (int32_t i = 0; i < count; i++) {
        int32_t at = i < top ? i : top;
        if (at == top && !(x[i] > x[found[top - 1]])) continue;
        for (at = at == top ? top - 1 : at; at && x[i] > x[found[at - 1]]; at--) found[at] = found[at - 1];
        found[at] = i;
    }
}

// What scores of a router are, in place.
INLINE void score(const ForerunExperts& e, float* x) {
    const int64_t n = e.num_experts;
    if (e.scoring == FORERUN_SPARSEMIXER) return;
    if (e.scoring == FORERUN_SIGMOID) {
        for (int64_t i = 0; i < n; i += 16) put(x + i, f_sigmoid(get(x + i, n - i)), n - i);
        return;
    }
    float most = x[0], sum = 0.0f;
    for (int64_t i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int64_t i = 0; i < n; i += 16) put(x + i, f_exp(f_sub(get(x + i, n - i), f_set(most))), n - i);
    for (int64_t i = 0; i < n; i++) sum += x[i];
    for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

// Of scores for the choice [num_experts], leave those of the groups whose largest one or two have the largest sums.
INLINE void leave_groups(const ForerunExperts& e, float* scores) {
    const int32_t size = e.num_experts / e.n_group;
    float sums[MOST_GROUPS];
    int32_t best[2], kept[MOST_GROUPS];
    for (int32_t g = 0; g < e.n_group; g++) {
        const int32_t added = size > 1 ? e.scores_of_group : 1;
        largest_places(scores + g * size, size, added, best);
        sums[g] = scores[g * size + best[0]] + (added > 1 ? scores[g * size + best[1]] : 0.0f);
    }
    largest_places(sums, e.n_group, e.n_group, kept);
    for (int32_t k = e.topk_group; k < e.n_group; k++)
        for (int32_t i = 0; i < size; i++) scores[kept[k] * size + i] = -__builtin_inff();
}

// The routing weight of the k-th of the selected experts: that of a softmax of the scores near its own, without those before
// it.
INLINE float near_weight(const ForerunExperts& e, const float* x, const int32_t* selected, int32_t k) {
    const float own = x[selected[k]];
    float sum = 0.0f, each[16];
    for (int32_t i = 0; i < e.num_experts; i++) {
        const float size = x[i] < 0.0f ? -x[i] : x[i];
        bool is_left = !((own - x[i]) / (size > own ? size : own) > e.distance);
        for (int32_t j = 0; j < k; j++) is_left &= selected[j] != i;
        if (!is_left) continue;
        put(each, f_exp(f_set(x[i] - own)), 16);
        sum += each[0];
    }
    return 1.0f / sum;
}

// Choose the experts of row t, whose scores lie in c.scores.
FN void choose(const ExpertsCall& c, const ForerunExperts& e, int64_t t) {
    const int32_t top = e.num_experts_per_tok;
    float *scores = c.scores + t * e.num_experts, *for_choice = c.scores_for_choice + t * e.num_experts;
    float *weights = c.routing_weights + t * top, sum = 0.0f;
    int32_t* selected = c.selected_experts + t * top;
    score(e, scores);
    const float* bias = e.e_score_correction_bias;
    for (int32_t i = 0; i < e.num_experts; i++) for_choice[i] = scores[i] + (bias ? bias[i] : 0.0f);
    if (e.n_group) leave_groups(e, for_choice);
    largest_places(for_choice, e.num_experts, top, selected);
    const bool is_near = e.scoring == FORERUN_SPARSEMIXER;
    for (int32_t k = 0; k < top; k++) sum += weights[k] = is_near ? near_weight(e, scores, selected, k) : scores[selected[k]];
    if (!(sum > e.least_sum)) sum = sum != sum ? sum : e.least_sum;
    for (int32_t k = 0; k < top; k++)
        weights[k] = (e.norm_topk_prob ? weights[k] / sum : weights[k]) * e.routed_scaling_factor;
    for (int32_t k = 0; e.per_expert_scale && k < top; k++) weights[k] *= e.per_expert_scale[selected[k]];
}

// Give each expert's rows places behind one another.
static void sort_rows(const ExpertsCall& c, const ForerunExperts& e, int32_t layer, int64_t n) {
    int32_t* next = c.next;
    for (int32_t expert = 0; expert < e.num_experts; expert++) next[expert] = 0;
    for (int64_t i = 0; i < n * e.num_experts_per_tok; i++) next[c.selected_experts[i]]++;
    int32_t found = 0, start = 0;
    for (int32_t expert = 0; expert < e.num_experts; expert++) {
        const int32_t rows = next[expert];
        e.num_given[expert] += rows;
        if (rows) {
            c.active[found] = expert;
            c.starts[found++] = start;
        }
        next[expert] = start;
        start += rows;
    }
    c.starts[found] = start;
    c.num_active[layer] = found;
    *e.num_read += found;
    for (int64_t i = 0; i < n * e.num_experts_per_tok; i++) c.places[i] = next[c.selected_experts[i]]++;
}

// Blocks of outputs of one expert, and its rows in `given`.
struct Span {
    int32_t expert;
    int64_t row, rows, first, last;
};

// The first of the blocks first..last of the active experts' products, those of one expert after another's, that are one's.
static Span span_of(const ExpertsCall& c, int64_t blocks, int64_t first, int64_t last) {
    const int64_t at = first / blocks, end = last < (at + 1) * blocks ? last : (at + 1) * blocks;
    return {c.active[at], c.starts[at], c.starts[at + 1] - c.starts[at], first - at * blocks, end - at * blocks};
}

// The largest code that the first products of experts take.
INLINE float experts_limit(const ForerunExperts& e) {
    return e.gate->out_features ? forerun::largest_code({e.gate, e.up}) : forerun::largest_code({e.up});
}

// What the experts of the rows of `in` give: c.parts, and the gate of the layer's own feed-forward layer. x: the residual, of
// which norms of experts' own make these rows anew.
FN void expert_rows(const ExpertsCall& c, const ForerunExperts& e, const ForerunModel& m, int32_t layer, const float* x,
                    const Input& in, int64_t n, forerun::Member& member) {
    const int64_t width = e.moe_intermediate_size, top = e.num_experts_per_tok;
    const Input given = of_width(c.given, m.hidden), inner = of_width(c.inner, width);
    if (e.router_norm) norm_rows(m, x, e.router_norm, nullptr, 0.0f, in, n, member);
    product_rows(e.router, in, n, nullptr, c.scores, member);
    if (e.expert_norm) norm_rows(m, x, e.expert_norm, nullptr, experts_limit(e), in, n, member);
    if (e.shared_expert_gate.out_features) product_rows(e.shared_expert_gate, in, n, nullptr, c.shared_gates, member);
    for (const int64_t t : member.each(n)) choose(c, e, t);
    for ([[maybe_unused]] const int64_t only : member.each(1)) sort_rows(c, e, layer, n);
    for (const int64_t t : member.each(n))
        for (int32_t k = 0; k < top; k++) copy_row(in, t, given, c.places[t * top + k]);
    const int64_t active = c.num_active[layer], inner_blocks = (width + 15) / 16, blocks = (m.hidden + 15) / 16;
    for (auto [first, last] : member.parts(active * inner_blocks))
        for (Span s; first < last; first += s.last - s.first) {
            s = span_of(c, inner_blocks, first, last);
            gated_blocks(e.gate[s.expert], e.up[s.expert], m.activation, e.activation_params, 1.0f, from_row(given, s.row),
                         s.rows, s.first, s.last, inner.x + s.row * width, width);
        }
    prepare_rows(*e.down, inner, n * top, member);
    for (auto [first, last] : member.parts(active * blocks))
        for (Span s; first < last; first += s.last - s.first) {
            s = span_of(c, blocks, first, last);
            linear_blocks(e.down[s.expert], from_row(inner, s.row), s.rows, s.first, s.last, nullptr,
                          c.parts + s.row * m.hidden, m.hidden);
        }
}

// y [hidden] of row t, what the layer's own feed-forward layer gives, times its gate, and what the row's experts give, which
// is added up in the place of the first where it is normed.
FN void add_experts(const ExpertsCall& c, const ForerunExperts& e, const ForerunModel& m, int64_t t, float* y) {
    const int64_t hidden = m.hidden, top = e.num_experts_per_tok;
    if (e.shared_expert_gate.out_features) multiply_sigmoid(c.shared_gates + t, 1, y, hidden);
    if (e.shared_norm) rms_norm(y, e.shared_norm, m.eps, hidden, y);
    float* sum = e.routed_norm ? c.parts + c.places[t * top] * hidden : y;
    for (int32_t k = 0; k < top; k++) {
        const float* part = c.parts + c.places[t * top + k] * hidden;
        const F weight = f_set(c.routing_weights[t * top + k]);
        for (int64_t i = 0; i < hidden; i += 16) {
            const F before = sum == part ? f_zero() : get(sum + i, hidden - i);
            put(sum + i, f_fma(get(part + i, hidden - i), weight, before), hidden - i);
        }
    }
    if (sum == y) return;
    rms_norm(sum, e.routed_norm, m.eps, hidden, sum);
    for (int64_t i = 0; i < hidden; i += 16) put(y + i, f_add(get(sum + i, hidden - i), get(y + i, hidden - i)), hidden - i);
}
