// Products of up to MAX_ROWS rows with a block of sixteen outputs, whose weights are read once. A row's result does not
// depend on the number of rows: float sums run over the inputs (by groups: over the groups) in order, each row for
// itself; integer sums have no order. Included once for each instruction set.

// Unrolled, so that sums stay in registers.
#define EACH_ROW _Pragma("GCC unroll 8") for (int r = 0; r < R; r++)

// sum[r] += w [n][16] times x[r][0..n), in order.
template <class E, int R> INLINE void accumulate(const E* w, int64_t n, const float* x, int64_t stride, F* sum) {
    F acc[R];
    EACH_ROW acc[r] = sum[r];
    for (int64_t k = 0; k < n; k++) {
        const F weight = f_load(w + 16 * k);
        EACH_ROW acc[r] = f_fma_at(weight, x + r * stride + k, acc[r]);
    }
    EACH_ROW sum[r] = acc[r];
}

// GROUPS: weights have a scale per group as well, else one per output.
template <int R, bool GROUPS>
INLINE void int8_product(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, F* y) {
    constexpr int SIZE = GROUPS ? 544 : 512;
    const uint8_t* p = (const uint8_t*)w.packed + block * in.groups * SIZE;
    F total[R];
    EACH_ROW total[r] = f_zero();
    for (int64_t g = 0; g < in.groups; g++, p += SIZE) {
        const int64_t at = row * in.groups + g;
        I sum[R];
        EACH_ROW sum[r] = i_set(-DOT8_ZERO * in.totals[at + r * in.groups]);
        for (int j = 0; j < 8; j++) {
            const B8 codes = b_load8(p + 64 * j);
            EACH_ROW sum[r] = dot8(sum[r], codes, in.codes + (at + r * in.groups) * 32 + 4 * j);
        }
        if (GROUPS) {
            const F scale = f_half((const uint16_t*)(p + 512));
            EACH_ROW total[r] = f_fma(f_mul(scale, f_set(in.scales[at + r * in.groups])), i_float(sum[r]), total[r]);
        } else {
            EACH_ROW total[r] = f_fma_at(i_float(sum[r]), in.scales + at + r * in.groups, total[r]);
        }
    }
    const F scale = GROUPS ? f_set(1.0f) : f_load(w.scales + 16 * block);
    EACH_ROW y[r] = GROUPS ? total[r] : f_mul(total[r], scale);
}

template <int R, bool MINIMA>
INLINE void int4_product(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, F* y) {
    constexpr int SIZE = MINIMA ? 320 : 288;
    const uint8_t* p = (const uint8_t*)w.packed + block * in.groups * SIZE;
    F total[R];
    EACH_ROW total[r] = f_zero();
    for (int64_t g = 0; g < in.groups; g++, p += SIZE) {
        const int64_t at = row * in.groups + g;
        I sum[R];
        EACH_ROW sum[r] = MINIMA ? i_zero() : i_set(-8 * in.totals[at + r * in.groups]);
        for (int j = 0; j < 4; j++) {
            const B bytes = b_load(p + 64 * j);
            const B low = b_low(bytes), high = b_high(bytes);
            EACH_ROW {
                const int8_t* x = in.codes + (at + r * in.groups) * 32 + 4 * j;
                sum[r] = dot4(dot4(sum[r], low, x), high, x + 16);
            }
        }
        const F scale = f_half((const uint16_t*)(p + 256));
        EACH_ROW total[r] = f_fma(f_mul(scale, f_set(in.scales[at + r * in.groups])), i_float(sum[r]), total[r]);
        if (!MINIMA) continue;
        const F minimum = f_half((const uint16_t*)(p + 288));
        EACH_ROW total[r] = f_fma_at(minimum, in.sums + at + r * in.groups, total[r]);
    }
    EACH_ROW y[r] = total[r];
}

// y[r], r < R: outputs 16 block .. 16 block + 15 of rows row .. row + R - 1, bias included.
template <int R> FN void block_product(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, F* y) {
    const int64_t first = block * 16 * (int64_t)w.in;
    switch (w.kind) {
    case FORERUN_FLOAT32:
    case FORERUN_BFLOAT16:
        EACH_ROW y[r] = f_zero();
        if (w.kind == FORERUN_FLOAT32)
            accumulate<float, R>((const float*)w.packed + first, w.in, in.x + row * in.stride, in.stride, y);
        else
            accumulate<uint16_t, R>((const uint16_t*)w.packed + first, w.in, in.x + row * in.stride, in.stride, y);
        break;
    case FORERUN_INT8: int8_product<R, false>(w, in, block, row, y); break;
    case FORERUN_INT8_GROUPS: int8_product<R, true>(w, in, block, row, y); break;
    case FORERUN_INT4_GROUPS: int4_product<R, false>(w, in, block, row, y); break;
    case FORERUN_INT4_MINIMA: int4_product<R, true>(w, in, block, row, y); break;
    }
    if (w.bias)
        EACH_ROW y[r] = f_add(y[r], f_load(w.bias + 16 * block));
}

// The same for any number of rows up to R.
template <int R = MAX_ROWS>
INLINE void products(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, int64_t rows, F* y) {
    if constexpr (R > 1)
        if (rows < R) return products<R - 1>(w, in, block, row, rows, y);
    block_product<R>(w, in, block, row, y);
}

INLINE void put(float* at, F y, int64_t room) {
    if (room >= 16)
        f_store(at, y);
    else
        f_store_n(at, y, (int)room);
}
INLINE F get(const float* at, int64_t room) { return room >= 16 ? f_load(at) : f_load_n(at, (int)room); }

// out = residual + product, for blocks first..last; residual may be null, or out.
FN void linear_blocks(const ForerunLinear& w, const Input& in, int64_t n, int64_t first, int64_t last,
                      const float* residual, float* out, int64_t stride) {
    F y[MAX_ROWS];
    for (int64_t block = first; block < last; block++) {
        const int64_t room = w.out - 16 * block;
        for (int64_t row = 0; row < n; row += MAX_ROWS) {
            const int64_t rows = n - row < MAX_ROWS ? n - row : MAX_ROWS;
            products(w, in, block, row, rows, y);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t at = (row + r) * stride + 16 * block;
                put(out + at, residual ? f_add(get(residual + at, room), y[r]) : y[r], room);
            }
        }
    }
}

// out = silu(gate) * up, for blocks first..last.
FN void gated_blocks(const ForerunLinear& gate, const ForerunLinear& up, const Input& in, int64_t n, int64_t first,
                     int64_t last, float* out, int64_t stride) {
    F g[MAX_ROWS], u[MAX_ROWS];
    for (int64_t block = first; block < last; block++) {
        for (int64_t row = 0; row < n; row += MAX_ROWS) {
            const int64_t rows = n - row < MAX_ROWS ? n - row : MAX_ROWS;
            products(gate, in, block, row, rows, g);
            products(up, in, block, row, rows, u);
            for (int64_t r = 0; r < rows; r++)
                put(out + (row + r) * stride + 16 * block, f_mul(f_silu(g[r]), u[r]), gate.out - 16 * block);
        }
    }
}
