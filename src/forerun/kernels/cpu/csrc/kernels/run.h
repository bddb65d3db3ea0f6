// Products alone, and the loops that the threads of a team share. Included once for each instruction set.

// Bring the rows that a product reads into bfloat16 or codes, if there is room for them.
FN void prepare_rows(const ForerunLinear& w, const Input& in, int64_t n, forerun::Member& member) {
    if (!in.bfloat16 && !in.codes && !in.bytes) return;
    const float limit = forerun::largest_code({&w});
    for (const int64_t t : member.each(n)) prepare(in, t, limit);
}

// Norm rows of x into an input's floats, which may be the same, and bring them into bfloat16 or codes up to `limit`, if it
// has room for them.
FN void norm_rows(const ForerunModel& m, const float* x, const float* weight, const float* bias, float limit,
                  const Input& in, int64_t n, forerun::Member& member) {
    for (const int64_t t : member.each(n)) {
        norm_row(m, x + t * in.width, weight, bias, in.width, in.x + t * in.width);
        prepare(in, t, limit);
    }
}

// out = residual + product; residual may be null, or out.
FN void product_rows(const ForerunLinear& w, const Input& in, int64_t n, const float* residual, float* out,
                     forerun::Member& member) {
    for (const auto [first, last] : member.parts((w.out_features + 15) / 16))
        linear_blocks(w, in, n, first, last, residual, out, w.out_features);
}

struct LinearCall {
    const ForerunLinear* w;
    Input in;
    int64_t n;
    const float* residual;
    float* out;
    forerun::Team* team;
};

FN void linear_body(void* data) {
    LinearCall& c = *(LinearCall*)data;
    forerun::Member member(*c.team);
    prepare_rows(*c.w, c.in, c.n, member);
    product_rows(*c.w, c.in, c.n, c.residual, c.out, member);
}

static void linear(const ForerunLinear* w, const float* x, int64_t n, const float* residual, float* out, int threads) {
    forerun::Workspace& space = forerun::workspace();
    forerun::Team team(threads);
    LinearCall call{w, {}, n, residual, out, &team};
    forerun::plan_input(space, call.in, n, w->in_features, {w});
    space.allocate();
    call.in.x = const_cast<float*>(x);
    forerun::run_in_parallel(linear_body, &call, team);
}

struct ReadCall {
    const uint64_t* addresses;
    const int64_t* bytes;
    int64_t n, distance;
    forerun::Team* team;
};

// Read weights as products do, and compute nothing.
FN void read_body(void* data) {
    ReadCall& c = *(ReadCall*)data;
    forerun::Member member(*c.team);
    constexpr int64_t LINE = 64, LINES = 4, UNIT = 64 * LINES * LINE;
    for (int64_t i = 0; i < c.n; i++) {
        const int64_t whole = c.bytes[i] / (LINES * LINE) * LINES * LINE;
        if (!whole) continue;
        const uint8_t* from = (const uint8_t*)c.addresses[i];
        W all[LINES] = {w_load(from), w_load(from), w_load(from), w_load(from)};
        for (const auto [first, last] : member.parts((whole + UNIT - 1) / UNIT)) {
            const uint8_t* end = from + (last * UNIT < whole ? last * UNIT : whole);
            for (const uint8_t* p = from + first * UNIT; p < end; p += LINES * LINE) {
                for (int line = 0; line < LINES; line++) ahead(c.distance, p + LINE * line);
                for (int line = 0; line < LINES; line++) all[line] = w_or(all[line], w_load(p + LINE * line));
            }
        }
        asm volatile("" ::"m"(all));  // or else nothing would be read
    }
}

static void read(const uint64_t* addresses, const int64_t* bytes, int64_t n, int64_t distance, int threads) {
    forerun::Team team(threads);
    ReadCall call{addresses, bytes, n, distance, &team};
    forerun::run_in_parallel(read_body, &call, team);
}

// The logits of rows that are normed.
FN void logit_rows(const ForerunModel& m, const Input& in, int64_t n, float* logits, forerun::Member& member) {
    const int64_t out = m.head.out_features;
    product_rows(m.head, in, n, nullptr, logits, member);
    if (!m.logit_scale && !m.logit_softcap) return;
    for (const auto [first, last] : member.parts((out + 255) / 256))
        for (int64_t t = 0; t < n; t++)
            for (int64_t i = first * 256; i < last * 256 && i < out; i += 16) {
                float* at = logits + t * out + i;
                F y = get(at, out - i);
                if (m.logit_scale) y = f_mul(y, f_set(m.logit_scale));
                if (m.logit_softcap) y = f_softcap(y, m.logit_softcap);
                put(at, y, out - i);
            }
}

struct HeadCall {
    const ForerunModel* model;
    Input in;
    int64_t n;
    float *x, *logits;
    forerun::Team* team;
};

FN void head_body(void* data) {
    HeadCall& c = *(HeadCall*)data;
    forerun::Member member(*c.team);
    const ForerunModel& m = *c.model;
    norm_rows(m, c.x, m.norm, m.norm_bias, forerun::largest_code({&m.head}), c.in, c.n, member);
    if (c.logits) logit_rows(m, c.in, c.n, c.logits, member);
}

static void head(const ForerunModel* model, int64_t n, float* x, float* logits, int threads) {
    forerun::Workspace& space = forerun::workspace();
    forerun::Team team(threads);
    HeadCall call{model, {}, n, x, logits, &team};
    forerun::plan_input(space, call.in, n, model->hidden, {&model->head});
    space.allocate();
    call.in.x = x;
    forerun::run_in_parallel(head_body, &call, team);
}
