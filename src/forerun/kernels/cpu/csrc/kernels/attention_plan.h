// What attention is given: the rows of a forward in groups, memory to work in, and the shape of a layer. Included once for
// each instruction set.

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

// The attention of a layer of the model.
INLINE ForerunAttention layer_attention(const ForerunModel& m, int32_t index) {
    const ForerunLayer& l = m.layers[index];
    return {l.kv_offset, m.num_heads, l.num_kv_heads, l.key_width, l.value_width, m.page, m.cache_format,
            l.window, 0, m.scale, m.softcap, l.sinks};
}
