// Mixtures of experts. Included once for each instruction set.
//
// The rows of a step that share an expert read it together. What a row's experts give is added in the order of the row's own
// scores, so that its bits depend on no other row.

// What the mixtures of one forward share.
struct ExpertsCall {
    int64_t count = 0, top = 0, width = 0;  // the most of all layers
    forerun::Forms entering, leaving;
    bool floats = false;  // products read the rows themselves
    float *scores, *ranks;  // [rows][count]; with what is added for the choice
    int32_t* chosen;        // [rows][top], experts
    float* shares;          // [rows][top], what their results are multiplied by
    int32_t* places;        // [rows][top], where among the rows of `given`
    int32_t* active;        // [count], the experts that rows are given to, rising
    int32_t* starts;        // [count + 1], the first row of each of these in `given`, and the end
    int32_t* num_active;    // [layers]: a thread that comes late still counts the blocks of a layer that others have left
    int32_t* next;          // [count], in which rows are sorted
    float* switches;        // [rows]
    float* parts;           // [rows * top][hidden], what experts give
    Input given, inner;     // rows * top: rows as experts read them, and as their last products do
};

static void plan_experts(ExpertsCall& c, const ForerunExperts& e) {
    const auto more = [](int64_t& most, int64_t size) { most = size > most ? size : most; };
    more(c.count, e.count);
    more(c.top, e.top);
    more(c.width, e.width);
    for (const ForerunLinear* w : {e.gate, e.up}) {
        if (w->out_features) c.entering.add({w});
        c.floats |= w->out_features && w->kind < FORERUN_INT8;
    }
    c.leaving.add({e.down});
}

static void want_experts(forerun::Workspace& space, ExpertsCall& c, int64_t n, int64_t hidden, int64_t layers) {
    const int64_t pairs = n * c.top;
    space.want(c.scores, n * c.count);
    space.want(c.ranks, n * c.count);
    space.want(c.chosen, pairs);
    space.want(c.shares, pairs);
    space.want(c.places, pairs);
    space.want(c.active, c.count);
    space.want(c.starts, c.count + 1);
    space.want(c.num_active, layers);
    space.want(c.next, c.count);
    space.want(c.switches, n);
    space.want(c.parts, pairs * hidden);
    forerun::plan_input(space, c.given, pairs, hidden, c.entering);
    forerun::plan_input(space, c.inner, pairs, c.width, c.leaving);
    c.given.x = nullptr;
    if (c.floats) space.want(c.given.x, pairs * hidden);
    space.want(c.inner.x, pairs * c.width);
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
    const int64_t n = e.count;
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

// Of ranks [count], leave those of the groups whose largest one or two have the largest sums.
INLINE void leave_groups(const ForerunExperts& e, float* ranks) {
    const int32_t size = e.count / e.groups;
    float sums[MOST_GROUPS];
    int32_t best[2], kept[MOST_GROUPS];
    for (int32_t g = 0; g < e.groups; g++) {
        const int32_t added = size > 1 ? e.best : 1;
        largest_places(ranks + g * size, size, added, best);
        sums[g] = ranks[g * size + best[0]] + (added > 1 ? ranks[g * size + best[1]] : 0.0f);
    }
    largest_places(sums, e.groups, e.groups, kept);
    for (int32_t k = e.top_groups; k < e.groups; k++)
        for (int32_t i = 0; i < size; i++) ranks[kept[k] * size + i] = -__builtin_inff();
}

// The share of the k-th of the chosen experts: that of a softmax of the scores near its own, without those before it.
INLINE float near_share(const ForerunExperts& e, const float* x, const int32_t* chosen, int32_t k) {
    const float own = x[chosen[k]];
    float sum = 0.0f, each[16];
    for (int32_t i = 0; i < e.count; i++) {
        const float size = x[i] < 0.0f ? -x[i] : x[i];
        bool is_left = !((own - x[i]) / (size > own ? size : own) > e.distance);
        for (int32_t j = 0; j < k; j++) is_left &= chosen[j] != i;
        if (!is_left) continue;
        put(each, f_exp(f_set(x[i] - own)), 16);
        sum += each[0];
    }
    return 1.0f / sum;
}

// Choose the experts of row t, whose scores lie in c.scores.
FN void choose(const ExpertsCall& c, const ForerunExperts& e, int64_t t) {
    float *scores = c.scores + t * e.count, *ranks = c.ranks + t * e.count, *shares = c.shares + t * e.top, sum = 0.0f;
    int32_t* chosen = c.chosen + t * e.top;
    score(e, scores);
    for (int32_t i = 0; i < e.count; i++) ranks[i] = scores[i] + (e.bias ? e.bias[i] : 0.0f);
    if (e.groups) leave_groups(e, ranks);
    largest_places(ranks, e.count, e.top, chosen);
    const bool is_near = e.scoring == FORERUN_SPARSEMIXER;
    for (int32_t k = 0; k < e.top; k++) sum += shares[k] = is_near ? near_share(e, scores, chosen, k) : scores[chosen[k]];
    if (!(sum > e.least_sum)) sum = sum != sum ? sum : e.least_sum;
    for (int32_t k = 0; k < e.top; k++) shares[k] = (e.adds_to_one ? shares[k] / sum : shares[k]) * e.scale;
    for (int32_t k = 0; e.share_scales && k < e.top; k++) shares[k] *= e.share_scales[chosen[k]];
}

// Give each expert's rows places behind one another.
static void sort_rows(const ExpertsCall& c, const ForerunExperts& e, int32_t layer, int64_t n) {
    int32_t* next = c.next;
    for (int32_t expert = 0; expert < e.count; expert++) next[expert] = 0;
    for (int64_t i = 0; i < n * e.top; i++) next[c.chosen[i]]++;
    int32_t found = 0, start = 0;
    for (int32_t expert = 0; expert < e.count; expert++) {
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
    for (int64_t i = 0; i < n * e.top; i++) c.places[i] = next[c.chosen[i]]++;
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

// What the experts of the rows of `in` give: c.parts, and the switch of the layer's own feed-forward layer. x: the residual, of
// which norms of experts' own make these rows anew.
FN void expert_rows(const ExpertsCall& c, const ForerunExperts& e, const ForerunModel& m, int32_t layer, const float* x,
                    const Input& in, int64_t n, forerun::Member& member) {
    const Input given = of_width(c.given, m.hidden), inner = of_width(c.inner, e.width);
    if (e.router_norm) norm_rows(m, x, e.router_norm, nullptr, 0.0f, in, n, member);
    product_rows(e.router, in, n, nullptr, c.scores, member);
    if (e.norm) norm_rows(m, x, e.norm, nullptr, experts_limit(e), in, n, member);
    if (e.shared_switch.out_features) product_rows(e.shared_switch, in, n, nullptr, c.switches, member);
    for (const int64_t t : member.each(n)) choose(c, e, t);
    for ([[maybe_unused]] const int64_t only : member.each(1)) sort_rows(c, e, layer, n);
    for (const int64_t t : member.each(n))
        for (int32_t k = 0; k < e.top; k++) copy_row(in, t, given, c.places[t * e.top + k]);
    const int64_t active = c.num_active[layer], inner_blocks = (e.width + 15) / 16, blocks = (m.hidden + 15) / 16;
    for (auto [first, last] : member.parts(active * inner_blocks))
        for (Span s; first < last; first += s.last - s.first) {
            s = span_of(c, inner_blocks, first, last);
            gated_blocks(e.gate[s.expert], e.up[s.expert], m.activation, e.curve, 1.0f, from_row(given, s.row), s.rows,
                         s.first, s.last, inner.x + s.row * e.width, e.width);
        }
    prepare_rows(*e.down, inner, n * e.top, member);
    for (auto [first, last] : member.parts(active * blocks))
        for (Span s; first < last; first += s.last - s.first) {
            s = span_of(c, blocks, first, last);
            linear_blocks(e.down[s.expert], from_row(inner, s.row), s.rows, s.first, s.last, nullptr,
                          c.parts + s.row * m.hidden, m.hidden);
        }
}

// y [hidden] of row t, what the layer's own feed-forward layer gives, times its switch, and what the row's experts give, which
// is added up in the place of the first where it is normed.
FN void add_experts(const ExpertsCall& c, const ForerunExperts& e, const ForerunModel& m, int64_t t, float* y) {
    const int64_t hidden = m.hidden;
    if (e.shared_switch.out_features) multiply_sigmoid(c.switches + t, 1, y, hidden);
    if (e.shared_norm) rms_norm(y, e.shared_norm, m.eps, hidden, y);
    float* sum = e.mixed_norm ? c.parts + c.places[t * e.top] * hidden : y;
    for (int32_t k = 0; k < e.top; k++) {
        const float* part = c.parts + c.places[t * e.top + k] * hidden;
        const F share = f_set(c.shares[t * e.top + k]);
        for (int64_t i = 0; i < hidden; i += 16)
            put(sum + i, f_fma(get(part + i, hidden - i), share, sum == part ? f_zero() : get(sum + i, hidden - i)), hidden - i);
    }
    if (sum == y) return;
    rms_norm(sum, e.mixed_norm, m.eps, hidden, sum);
    for (int64_t i = 0; i < hidden; i += 16) put(y + i, f_add(get(sum + i, hidden - i), get(y + i, hidden - i)), hidden - i);
}
