// Attention alone, and the entry points of one instruction set. Included once for each.

struct AttentionCall {
    const ForerunRows* rows;
    Attention attention;
    Attending plan;
    const float *key, *value, *query;
    float* rotated;
    forerun::Team* team;
};

FN void attention_body(void* data) {
    AttentionCall& c = *(AttentionCall*)data;
    forerun::Member member(*c.team);
    const ForerunAttention& s = *c.attention.shape;
    const int64_t each = s.num_heads / s.num_kv_heads, n = c.rows->num_rows;
    float* scratch = c.plan.scratch + member.index() * c.plan.scratch_size;
    for (const int64_t t : member.each(n)) {
        for (int64_t h = 0; h < s.num_heads; h++)
            for (int64_t d = 0; d < s.key_width; d++)
                c.rotated[((h / each * n + t) * each + h % each) * s.key_width + d] =
                    c.query[(t * s.num_heads + h) * s.key_width + d] * s.scale;
        const float *key = c.key + t * s.num_kv_heads * s.key_width, *value = c.value + t * s.num_kv_heads * s.value_width;
        IN_CACHE_FORMAT(s.cache_format, write_row, c.attention, (int32_t)t, key, value);
    }
    IN_CACHE_FORMAT(s.cache_format, attend, c.attention, member, c.team->threads, scratch);
}

static void attention(const ForerunAttention* shape, const ForerunRows* rows, const float* query, const float* key,
                      const float* value, float* out, int threads) {
    forerun::Workspace& space = forerun::workspace();
    forerun::Team team(threads);
    AttentionCall c{rows, {}, {}, key, value, query, nullptr, &team};
    plan_attention(space, c.plan, *rows, shape->window, shape->num_heads / shape->num_kv_heads, shape->num_kv_heads,
                   shape->value_width, threads);
    space.want(c.rotated, (int64_t)rows->num_rows * shape->num_heads * shape->key_width);
    space.allocate();
    c.attention = attention_of(shape, rows, c.plan, c.rotated, out);
    forerun::run_in_parallel(attention_body, &c, team);
}

static const Entries ENTRIES{linear, forward_layers, head, attention, eagle, fuse, context, greedy_chains, argmax, read,
                             topk};
