// What is computed row by row: exponentials, norms, and activations in codes. Included once for each instruction set.

// All lanes, in a fixed order.
INLINE float sum_lanes(F a) {
    float lane[16];
    f_store(lane, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

// e^x within two units in the last place; magnitudes beyond 87 count as 87, NaN stays NaN.
INLINE F f_exp(F x) {
    x = f_min(f_set(88.0f), f_max(f_set(-87.0f), x));
    const F n = f_round(f_mul(x, f_set(1.44269504f)));
    F r = f_fma(n, f_set(-0.693359375f), x);
    r = f_fma(n, f_set(2.12194440e-4f), r);
    F y = f_fma(f_set(1.9875691500e-4f), r, f_set(1.3981999507e-3f));
    y = f_fma(y, r, f_set(8.3334519073e-3f));
    y = f_fma(y, r, f_set(4.1665795894e-2f));
    y = f_fma(y, r, f_set(1.6666665459e-1f));
    y = f_fma(y, r, f_set(5.0000001201e-1f));
    y = f_add(f_fma(y, f_mul(r, r), r), f_set(1.0f));
    return f_mul(y, f_power_of_2(n));
}

INLINE F f_silu(F x) { return f_div(x, f_add(f_set(1.0f), f_exp(f_sub(f_zero(), x)))); }
INLINE F f_sigmoid(F x) { return f_div(f_set(1.0f), f_add(f_set(1.0f), f_exp(f_sub(f_zero(), x)))); }

// x Phi(x): the error function as a quotient of polynomials up to 4, where it is 1 in float32 (Eigen).
INLINE F f_gelu(F x) {
    const F z = f_min(f_set(4.0f), f_max(f_set(-4.0f), f_mul(x, f_set(0.70710678f)))), s = f_mul(z, z);
    F p = f_fma(f_set(-2.72614225801306e-10f), s, f_set(2.77068142495902e-08f));
    for (float c : {-2.10102402082508e-06f, -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
                    -1.60960333262415e-02f})
        p = f_fma(p, s, f_set(c));
    F q = f_fma(f_set(-1.45660718464996e-05f), s, f_set(-2.13374055278905e-04f));
    for (float c : {-1.68282697438203e-03f, -7.37332916720468e-03f, -1.42647390514189e-02f}) q = f_fma(q, s, f_set(c));
    return f_mul(f_mul(x, f_set(0.5f)), f_add(f_set(1.0f), f_div(f_mul(z, p), q)));
}

// Its approximation by tanh, which is x / (1 + e^-2u).
INLINE F f_gelu_tanh(F x) {
    const F u = f_mul(x, f_fma(f_set(0.0713548163f), f_mul(x, x), f_set(1.5957691216f)));
    return f_div(x, f_add(f_set(1.0f), f_exp(f_sub(f_zero(), u))));
}

// alpha x^2 of positive, alpha (e^x - 1 - x) of negative numbers, and beta x.
INLINE F f_xielu(F x, const float* params) {
    const F above = f_max(x, f_zero()), below = f_min(x, f_zero());
    const F bent = f_mul(f_sub(f_sub(f_exp(below), f_set(1.0f)), below), f_set(params[1]));
    return f_fma(f_mul(above, above), f_set(params[0]), f_fma(x, f_set(params[2]), bent));
}

// params: of FORERUN_XIELU.
INLINE F f_activation(F x, int32_t which, const float* params) {
    switch (which) {
    case FORERUN_GELU: return f_gelu(x);
    case FORERUN_GELU_TANH: return f_gelu_tanh(x);
    case FORERUN_RELU: return f_max(x, f_zero());
    case FORERUN_XIELU: return f_xielu(x, params);
    case FORERUN_RELU2: return f_mul(f_max(x, f_zero()), f_max(x, f_zero()));
    default: return f_silu(x);
    }
}

// cap * tanh(x / cap)
INLINE F f_softcap(F x, float cap) {
    const F e = f_exp(f_mul(x, f_set(2.0f / cap)));
    const F tanh = f_sub(f_set(1.0f), f_div(f_set(2.0f), f_add(e, f_set(1.0f))));
    return f_mul(tanh, f_set(cap));
}

// y = x / sqrt(mean(x^2) + eps) * weight. y may be x.
FN void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* y) {
    F squares = f_zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const F v = f_load(x + i);
        squares = f_fma(v, v, squares);
    }
    if (i < n) {
        const F v = f_load_n(x + i, (int)(n - i));
        squares = f_fma(v, v, squares);
    }
    const F inverse = f_set(1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)n + eps));
    for (i = 0; i + 16 <= n; i += 16) f_store(y + i, f_mul(f_mul(f_load(x + i), inverse), f_load(weight + i)));
    if (i < n) {
        const int rest = (int)(n - i);
        f_store_n(y + i, f_mul(f_mul(f_load_n(x + i, rest), inverse), f_load_n(weight + i, rest)), rest);
    }
}

// y = (x - mean) / sqrt(variance + eps) * weight + bias, which may be null. y may be x.
FN void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y) {
    F sums = f_zero(), squares = f_zero();
    const int64_t whole = n / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) sums = f_add(sums, f_load(x + i));
    float sum = sum_lanes(sums), square = 0.0f;
    for (int64_t i = whole; i < n; i++) sum += x[i];
    const float mean = sum / (float)n;
    for (int64_t i = 0; i < whole; i += 16) {
        const F v = f_sub(f_load(x + i), f_set(mean));
        squares = f_fma(v, v, squares);
    }
    for (int64_t i = whole; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
    const F centre = f_set(mean), inverse = f_set(1.0f / __builtin_sqrtf((sum_lanes(squares) + square) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 16) {
        const int rest = n - i < 16 ? (int)(n - i) : 16;
        F v = f_mul(f_mul(f_sub(f_load_n(x + i, rest), centre), inverse), f_load_n(weight + i, rest));
        if (bias) v = f_add(v, f_load_n(bias + i, rest));
        f_store_n(y + i, v, rest);
    }
}

// y = x, by the norm of the model's kind where there is one.
FN void norm_row(const ForerunModel& m, const float* x, const float* weight, const float* bias, int64_t n, float* y) {
    if (!weight) {
        if (x != y) __builtin_memcpy(y, x, n * sizeof(float));
    } else if (m.has_layer_norms)
        layer_norm(x, weight, bias, m.eps, n, y);
    else
        rms_norm(x, weight, m.eps, n, y);
}

// Rows as products read them: floats, for weights in codes whole numbers of 16 or 8 bits, and where there are products of
// bfloat16, these.
struct Input {
#if defined(AVX512_BF16)
    static constexpr bool dots_bfloat16 = true;
#else
    static constexpr bool dots_bfloat16 = false;
#endif
#if defined(AMX)
    static constexpr int64_t SPARE_ROWS = 15;  // behind the last, which a tile reads for nothing
#else
    static constexpr int64_t SPARE_ROWS = 0;
#endif
    float* x;
    int64_t width, stride, groups;
    uint16_t* bfloat16;  // [rows][groups][32], or null; zeros follow the last
    int16_t* codes;  // [rows][groups][32], or null; zeros follow the last; the middle two of each four change places
    float *scales, *sums;  // [rows]; [rows][groups], sums of the codes
    int32_t* totals;       // [rows][groups], the same
    int8_t* bytes;         // codes of 8 bits, [rows][groups][32], or null; zeros follow the last
    float *byte_scales, *byte_sums;  // [rows][groups], and of the codes times the scale
    int32_t *byte_totals, *byte_halves;  // [rows][groups] and [rows][groups][2], minus the sums of 32 and of 16 codes
};

// The same memory for rows of another width, at most that it was planned for.
INLINE Input of_width(Input in, int64_t width) {
    in.width = in.stride = width;
    in.groups = (width + 31) / 32;
    return in;
}

// The rows from this one on.
INLINE Input from_row(Input in, int64_t row) {
    const int64_t at = row * in.groups;
    if (in.x) in.x += row * in.stride;
    if (in.bfloat16) in.bfloat16 += 32 * at;
    if (in.codes) in.codes += 32 * at, in.scales += row, in.sums += at, in.totals += at;
    if (in.bytes) {
        in.bytes += 32 * at;
        in.byte_scales += at;
        in.byte_sums += at;
        in.byte_totals += at;
        in.byte_halves += 2 * at;
    }
    return in;
}

// Row t of `from` as row s of `to`, in each form that `to` has.
FN void copy_row(const Input& from, int64_t t, const Input& to, int64_t s) {
    const Input a = from_row(from, t), b = from_row(to, s);
    const int64_t groups = from.groups;
    if (b.x) __builtin_memcpy(b.x, a.x, from.width * sizeof(float));
    if (b.bfloat16) __builtin_memcpy(b.bfloat16, a.bfloat16, 64 * groups);
    if (b.codes) {
        __builtin_memcpy(b.codes, a.codes, 64 * groups);
        __builtin_memcpy(b.sums, a.sums, groups * sizeof(float));
        __builtin_memcpy(b.totals, a.totals, groups * sizeof(int32_t));
        *b.scales = *a.scales;
    }
    if (!b.bytes) return;
    __builtin_memcpy(b.bytes, a.bytes, 32 * groups);
    __builtin_memcpy(b.byte_scales, a.byte_scales, groups * sizeof(float));
    __builtin_memcpy(b.byte_sums, a.byte_sums, groups * sizeof(float));
    __builtin_memcpy(b.byte_totals, a.byte_totals, groups * sizeof(int32_t));
    __builtin_memcpy(b.byte_halves, a.byte_halves, 2 * groups * sizeof(int32_t));
}

#if defined(AVX512_BF16)
// Row t in bfloat16.
FN void round_row(const Input& in, int64_t t) {
    const float* x = in.x + t * in.stride;
    uint16_t* to = in.bfloat16 + t * in.groups * 32;
    for (int64_t i = 0; i < in.groups * 32; i += 16) {
        const int64_t rest = in.width - i;
        f_store_bfloat16(to + i, rest >= 16 ? f_load(x + i) : rest > 0 ? f_load_n(x + i, (int)rest) : f_zero());
    }
}
#else
INLINE void round_row(const Input&, int64_t) {}
#endif

// The sixteen numbers from x[i] on of a row of n, zeros behind its end.
INLINE F padded_load(const float* x, int64_t i, int64_t n) {
    return n - i >= 16 ? f_load(x + i) : n > i ? f_load_n(x + i, (int)(n - i)) : f_zero();
}

// What turns numbers of a magnitude, given by its bits, into codes up to limit, and back. Scale NaN where one is NaN or
// infinity; inverse 0 there and for zeros.
struct Scale {
    float scale, inverse;
};
INLINE Scale scale_of(int32_t bits, float limit) {
    if (bits < 0 || bits >= 0x7f800000) return {__builtin_nanf(""), 0.0f};
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    const float inverse = limit / magnitude;
    return {magnitude / limit, inverse <= 3.4e38f ? inverse : 0.0f};
}
// The bits of the largest magnitude of a row.
INLINE int32_t largest_bits(const float* x, int64_t n) {
    I largest = i_zero();
    for (int64_t i = 0; i < n; i += 16) largest = i_max(largest, f_magnitude_bits(padded_load(x, i, n)));
    return i_most(largest);
}
// Codes of 16 numbers; those of NaN and infinity, whose inverse is 0, are 0.
INLINE I codes_of(F x, float inverse) { return inverse ? f_int(f_mul(x, f_set(inverse))) : i_zero(); }

// Row t in codes of 8 bits, a scale for each 32.
FN void prepare_bytes(const Input& in, int64_t t) {
    const float* x = in.x + t * in.stride;
    for (int64_t g = 0; g < in.groups; g++) {
        const int64_t at = t * in.groups + g;
        const F a = padded_load(x, 32 * g, in.width), b = padded_load(x, 32 * g + 16, in.width);
        const Scale s = scale_of(i_most(i_max(f_magnitude_bits(a), f_magnitude_bits(b))), 127.0f);
        const I first = codes_of(a, s.inverse), second = codes_of(b, s.inverse);
        i_store_bytes(in.bytes + 32 * at, first);
        i_store_bytes(in.bytes + 32 * at + 16, second);
        in.byte_scales[at] = s.scale;
        const int32_t halves[2] = {i_total(first), i_total(second)}, total = halves[0] + halves[1];
        in.byte_halves[2 * at] = -halves[0];
        in.byte_halves[2 * at + 1] = -halves[1];
        in.byte_totals[at] = -total;
        in.byte_sums[at] = s.scale * (float)total;
    }
}

// Bring row t into bfloat16 and codes, where some weight asks for them: x = scale * code, codes of 16 bits -limit..limit. A
// row with NaN or infinity has scale NaN, and so does whatever is computed of it.
FN void prepare(const Input& in, int64_t t, float limit) {
    if (in.bfloat16) round_row(in, t);
    if (in.bytes) prepare_bytes(in, t);
    if (!in.codes) return;
    const float* x = in.x + t * in.stride;
    int16_t* codes = in.codes + t * in.groups * 32;
    const Scale s = scale_of(largest_bits(x, in.width), limit);
    in.scales[t] = s.scale;
    for (int64_t g = 0; g < in.groups; g++) {
        const I first = codes_of(padded_load(x, 32 * g, in.width), s.inverse);
        const I second = codes_of(padded_load(x, 32 * g + 16, in.width), s.inverse);
        i_store_words(codes + 32 * g, first);
        i_store_words(codes + 32 * g + 16, second);
        const int32_t sum = i_total(i_add(first, second));
        in.totals[t * in.groups + g] = sum;
        in.sums[t * in.groups + g] = (float)sum;
    }
}
