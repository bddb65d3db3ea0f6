// Products alone, and the loops that the threads of a team share. Included once for each instruction set.

// Bring the rows that a product reads into bfloat16 or codes, if there is room for them.
FN void prepare_rows(const ForerunLinear& w, const Input& in, int64_t n, forerun::Member& member) {
    if (!in.bfloat16 && !in.codes && !in.bytes) return;
    const float limit = forerun::largest_code({&w});
    int64_t first, last;
    member.open(n);
    while (member.claim(first, last))
        for (int64_t t = first; t < last; t++) prepare(in, t, limit);
    member.close();
}

// Norm rows of x into an input's floats, which may be the same, and bring them into bfloat16 or codes up to `limit`, if it
// has room for them.
FN void norm_rows(const float* x, const float* weight, float eps, float limit, const Input& in, int64_t n,
                  forerun::Member& member) {
    int64_t first, last;
    member.open(n);
    while (member.claim(first, last))
        for (int64_t t = first; t < last; t++) {
            rms_norm(x + t * in.width, weight, eps, in.width, in.x + t * in.width);
            prepare(in, t, limit);
        }
    member.close();
}

// out = residual + product; residual may be null, or out.
FN void product_rows(const ForerunLinear& w, const Input& in, int64_t n, const float* residual, float* out,
                     forerun::Member& member) {
    int64_t first, last;
    member.open((w.out + 15) / 16);
    while (member.claim(first, last)) linear_blocks(w, in, n, first, last, residual, out, w.out);
    member.close();
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
    forerun::plan_input(space, call.in, n, w->in, {w});
    space.allocate();
    call.in.x = const_cast<float*>(x);
    forerun::run_in_parallel(linear_body, &call, threads);
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
    norm_rows(c.x, c.model->norm, c.model->eps, forerun::largest_code({&c.model->head}), c.in, c.n, member);
    if (c.logits) product_rows(c.model->head, c.in, c.n, nullptr, c.logits, member);
}

static void head(const ForerunModel* model, int64_t n, float* x, float* logits, int threads) {
    forerun::Workspace& space = forerun::workspace();
    forerun::Team team(threads);
    HeadCall call{model, {}, n, x, logits, &team};
    forerun::plan_input(space, call.in, n, model->hidden, {&model->head});
    space.allocate();
    call.in.x = x;
    forerun::run_in_parallel(head_body, &call, threads);
}
