// Products of up to MAX_ROWS rows (INTEGER_ROWS of those in codes) with a block of sixteen outputs, whose weights are read
// once. A row's result does not depend on the number of rows: float sums run over the inputs (by groups: over the groups)
// in order, each row for itself; integer sums have no order. Included once for each instruction set.

// The numbers of an even input k and of the next, for 16 outputs.
INLINE F even_weights(const float* w, int64_t k) { return f_load(w + 16 * k); }
INLINE F odd_weights(const float* w, int64_t k) { return f_load(w + 16 * k + 16); }
INLINE F even_weights(const uint16_t* w, int64_t k) { return f_firsts(w + 16 * k); }
INLINE F odd_weights(const uint16_t* w, int64_t k) { return f_seconds(w + 16 * k); }

// sum[r] += w times x[r][0..n), of every other input, from the first or the second, in order.
template <int PLACE, class E, int R>
INLINE void every_other(const E* w, int64_t soon, int64_t n, const float* x, int64_t stride, F* sum) {
    F acc[R];
    EACH_ROW acc[r] = sum[r];
    for (int64_t k = 0; k + PLACE < n; k += 2) {
        if (!PLACE) ahead(soon, w + 16 * k);
        if (!PLACE && sizeof(E) == 4) ahead(soon, w + 16 * k + 16);
        const F weight = PLACE ? odd_weights(w, k) : even_weights(w, k);
        EACH_ROW acc[r] = f_fma_at(weight, x + r * stride + k + PLACE, acc[r]);
    }
    EACH_ROW sum[r] = acc[r];
}

// y[r] = w times x[r][0..n): even and odd inputs apart, each in order, so that one sum need not wait for the other; of
// more rows than have registers for both sums, one after the other in runs of 64 inputs.
template <class E, int R> INLINE void float_product(const E* w, int64_t soon, int64_t n, const float* x, int64_t stride, F* y) {
    F even[R], odd[R];
    EACH_ROW even[r] = odd[r] = f_zero();
    int64_t k = 0;
    for (; R <= PAIRED_ROWS<E> && k + 2 <= n; k += 2) {
        const F first = even_weights(w, k), second = odd_weights(w, k);
        ahead(soon, w + 16 * k);
        if (sizeof(E) == 4) ahead(soon, w + 16 * k + 16);
        EACH_ROW even[r] = f_fma_at(first, x + r * stride + k, even[r]);
        EACH_ROW odd[r] = f_fma_at(second, x + r * stride + k + 1, odd[r]);
    }
    for (; k < n; k += 64) {
        const int64_t run = n - k < 64 ? n - k : 64;
        every_other<0, E, R>(w + 16 * k, soon, run, x + k, stride, even);
        every_other<1, E, R>(w + 16 * k, soon, run, x + k, stride, odd);
    }
    EACH_ROW y[r] = f_add(even[r], odd[r]);
}

#if defined(AVX512_BF16)
// The same with rows in bfloat16: two inputs at once, and every other pair apart.
template <int R> INLINE void bfloat16_product(const uint16_t* w, int64_t soon, const Input& in, int64_t row, F* y) {
    const int64_t pairs = (in.width + 1) / 2, stride = in.groups * 32;
    const uint16_t* x = in.bfloat16 + row * stride;
    F sum[R], other[R];
    EACH_ROW sum[r] = other[r] = f_zero();
    int64_t k = 0;
    for (; k + 2 <= pairs; k += 2) {
        const W first = w_load(w + 32 * k), second = w_load(w + 32 * k + 32);
        ahead(soon, w + 32 * k);
        ahead(soon, w + 32 * k + 32);
        EACH_ROW sum[r] = f_dot(sum[r], first, x + r * stride + 2 * k);
        EACH_ROW other[r] = f_dot(other[r], second, x + r * stride + 2 * k + 2);
    }
    if (k < pairs) {
        const W last = w_load(w + 32 * k);
        EACH_ROW sum[r] = f_dot(sum[r], last, x + r * stride + 2 * k);
    }
    EACH_ROW y[r] = f_add(sum[r], other[r]);
}
#endif

// Sums of products of codes over all inputs, as whole numbers.
template <int R> INLINE void int8_sums(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, I* y) {
    const int64_t padded = in.groups * 32, soon = forerun::prefetch_distance(w.kind, R);
    const uint8_t* p = (const uint8_t*)w.packed + block * padded * 16;
    const int16_t* x = in.codes + row * padded;
    I sum[R], other[R];
    EACH_ROW sum[r] = other[r] = i_zero();
#if defined(WORD_DOTS)
    for (int64_t k = 0; k < padded; k += 32, p += 512) word_dots<R, Codes<FORERUN_INT8>>(p, soon, x + k, padded, sum);
#else
    for (int64_t k = 0; k < padded; k += 4, p += 64) {
        const W words = w_load(p), low = w_low8(words), high = w_high8(words);
        ahead(soon, p);
        EACH_ROW sum[r] = dot(sum[r], low, x + r * padded + k);
        EACH_ROW other[r] = dot(other[r], high, x + r * padded + k + 2);
    }
#endif
    EACH_ROW y[r] = i_add(sum[r], other[r]);
}

// One scale per output: whole numbers are added over all inputs.
template <int R> INLINE void int8_product(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, F* y) {
    I sum[R];
    int8_sums<R>(w, in, block, row, sum);
    const F scale = f_load(w.scales + 16 * block);
    EACH_ROW y[r] = f_mul(i_float(sum[r]), f_mul(f_set(in.scales[row + r]), scale));
}

// Scales and zeros of 16 outputs, which a super-block begins with.
struct Shared {
    F scale, minimum;
    I zeros;
};
template <int KIND> INLINE Shared shared_of(const uint8_t* head) {
    constexpr forerun::Layout L = forerun::layout_of(KIND);
    Shared s{f_half((const uint16_t*)head), f_zero(), i_zero()};
    if constexpr (L.minima) s.minimum = f_half((const uint16_t*)head + 16);
    if constexpr (L.has_zeros()) s.zeros = i_bytes((const int8_t*)head + 32);
    return s;
}

// A scale per group of 32 inputs and output, or several groups: whole numbers are added within a group, groups in order.
template <int R, int KIND> INLINE void word_groups(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, F* y) {
    constexpr forerun::Layout L = forerun::layout_of(KIND);
    const int64_t next = in.groups * 32, span = L.has_zeros() ? w.span : 8, soon = forerun::prefetch_distance(KIND, R);
    const uint8_t* p = (const uint8_t*)w.packed + block * L.block(in.groups, span);
    F total[R];
    Shared shared{f_zero(), f_zero(), i_zero()};
    EACH_ROW total[r] = f_zero();
    for (int64_t g = 0, left = 0; g < in.groups; g++, left--, p += L.bytes()) {
        const int64_t at = row * in.groups + g;
        const int16_t* x = in.codes + at * 32;
        I sum[R], other[R];
        if constexpr (L.has_zeros()) {
            if (left == 0) {
                shared = shared_of<KIND>(p);
                left = span;
                p += L.head();
            }
            EACH_ROW sum[r] = i_mul(shared.zeros, -in.totals[at + r * in.groups]);
        } else {
            EACH_ROW sum[r] = L.zero ? i_set(-L.zero * in.totals[at + r * in.groups]) : i_zero();
        }
        EACH_ROW other[r] = i_zero();
#if defined(WORD_DOTS)
        word_dots<R, Codes<KIND>>(p, soon, x, next, sum);
#else
        if constexpr (L.low == 8) {
            for (int k = 0; k < 32; k += 4) {
                const W words = w_load(p + 16 * k), low = w_low8(words), high = w_high8(words);
                ahead(soon, p + 16 * k);
                EACH_ROW sum[r] = dot(sum[r], low, x + r * next + k);
                EACH_ROW other[r] = dot(other[r], high, x + r * next + k + 2);
            }
        } else {
            for (int k = 0; k < 32; k += 8) {
                const W words = w_load(p + 8 * k);
                ahead(soon, p + 8 * k);
                const W a = w_code4<0>(words), b = w_code4<1>(words), c = w_code4<2>(words), d = w_code4<3>(words);
                EACH_ROW sum[r] = dot(sum[r], a, x + r * next + k);
                EACH_ROW other[r] = dot(other[r], b, x + r * next + k + 4);
                EACH_ROW sum[r] = dot(sum[r], c, x + r * next + k + 2);
                EACH_ROW other[r] = dot(other[r], d, x + r * next + k + 6);
            }
        }
#endif
        const F scale = L.has_zeros() ? shared.scale : f_half((const uint16_t*)(p + L.codes()));
        EACH_ROW total[r] = f_fma(scale, i_float(i_add(sum[r], other[r])), total[r]);
        if (!L.minima) continue;
        const F minimum = f_half((const uint16_t*)(p + L.codes() + 32));
        EACH_ROW total[r] = f_fma_at(minimum, in.sums + at + r * in.groups, total[r]);
    }
    EACH_ROW y[r] = f_mul(total[r], f_set(in.scales[row + r]));
    if (L.has_zeros()) EACH_ROW y[r] = f_mul(y[r], f_load(w.scales + 16 * block));
}

// total += float(sum) * scale of W * scale of x for a group of 32 inputs, or for half of it.
template <int R, int KIND, int PART>
INLINE void add_part(const uint8_t* p, int64_t soon, const Shared& shared, const Input& in, int64_t at, F* total) {
    constexpr forerun::Layout L = forerun::layout_of(KIND);
    constexpr int FOURS = L.group / 4;
    I sum[R];
    if constexpr (FOURS == 8)
        code_dots<R, Codes<KIND>, 0, 8>(p, soon, in.bytes + 32 * at, 32 * in.groups, in.byte_totals + at, in.groups, sum);
    else
        code_dots<R, Codes<KIND>, PART * FOURS, FOURS>(p, soon, in.bytes + 32 * at, 32 * in.groups,
                                                       in.byte_halves + 2 * at + PART, 2 * in.groups, sum);
    if constexpr (L.has_zeros()) EACH_ROW sum[r] = i_add(sum[r], i_mul(shared.zeros, in.byte_totals[at + r * in.groups]));
    constexpr bool BY_OUTPUT = L.scales == forerun::Scales::by_output;
    if (!BY_OUTPUT && PART == 0) ahead(soon, p + L.codes());
    const F scale = BY_OUTPUT ? f_zero() : scales_of<KIND, PART>(p, shared.scale);
    EACH_ROW {
        const F product = BY_OUTPUT ? i_float(sum[r]) : f_mul(i_float(sum[r]), scale);
        total[r] = f_fma_at(product, in.byte_scales + at + r * in.groups, total[r]);
    }
}

// Activations of 8 bits with a scale per 32 inputs: whole numbers are added within a group, groups in order, each
// y += float(sum) * scale of W * scale of x, and with minima y += minimum * sum of x. One scale per output is last.
template <int R, int KIND> INLINE void byte_groups(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, F* y) {
    constexpr forerun::Layout L = forerun::layout_of(KIND);
    const int64_t span = L.has_zeros() ? w.span : 8, soon = forerun::prefetch_distance(KIND, R);
    const uint8_t* p = (const uint8_t*)w.packed + block * L.block(in.groups, span);
    F total[R];
    Shared shared{f_zero(), f_zero(), i_zero()};
    EACH_ROW total[r] = f_zero();
    for (int64_t g = 0, left = 0; g < in.groups; g++, left--, p += L.bytes()) {
        const int64_t at = row * in.groups + g;
        if (L.head() && left == 0) {
            shared = shared_of<KIND>(p);
            left = span;
            p += L.head();
        }
        add_part<R, KIND, 0>(p, soon, shared, in, at, total);
        if constexpr (L.group == 16) add_part<R, KIND, 1>(p, soon, shared, in, at, total);
        if (!L.minima) continue;
        const F minimum = minima_of<KIND>(p, shared.minimum);
        EACH_ROW total[r] = f_fma_at(minimum, in.byte_sums + at + r * in.groups, total[r]);
    }
    constexpr bool BY_OUTPUT = L.scales == forerun::Scales::by_output || L.has_zeros();
    EACH_ROW y[r] = BY_OUTPUT ? f_mul(total[r], f_load(w.scales + 16 * block)) : total[r];
}

// Float weights: y[r], r < R, without bias.
template <int R> INLINE void float_weights(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, F* y) {
    const float* x = in.x + row * in.stride;
    const int64_t soon = forerun::prefetch_distance(w.kind, R);
    if (w.kind == FORERUN_FLOAT32) {
        const float* numbers = (const float*)w.packed + block * 16 * (int64_t)w.in_features;
        float_product<float, R>(numbers, soon, w.in_features, x, in.stride, y);
        return;
    }
    const uint16_t* pairs = (const uint16_t*)w.packed + block * 16 * ((int64_t)w.in_features + w.in_features % 2);
#if defined(AVX512_BF16)
    bfloat16_product<R>(pairs, soon, in, row, y);
#else
    float_product<uint16_t, R>(pairs, soon, w.in_features, x, in.stride, y);
#endif
}

// The formats that are multiplied with activations of 16 bits, too.
#define WIDE_none(name)
#define WIDE_one_sum(name) \
    case FORERUN_##name: int8_product<R>(w, in, block, row, y); break;
#define WIDE_groups(name) \
    case FORERUN_##name: word_groups<R, FORERUN_##name>(w, in, block, row, y); break;

// y[r], r < R: outputs 16 block .. 16 block + 15 of rows row .. row + R - 1, bias included.
template <int R> FN void block_product(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, F* y) {
    switch (w.activation_bits == 8 ? -w.kind : w.kind) {
#define FORMAT(name, ...) \
    case -FORERUN_##name: byte_groups<R, FORERUN_##name>(w, in, block, row, y); break;
#include "../weight_formats.h"
#define FORMAT(name, number, low, high, zero, table, scales, minima, group, wide, has_blocks) WIDE_##wide(name)
#include "../weight_formats.h"
    default:
        if constexpr (R <= MAX_ROWS) float_weights<R>(w, in, block, row, y);
    }
    if (w.bias)
        EACH_ROW y[r] = f_add(y[r], f_load(w.bias + 16 * block));
}

// The same for any number of rows up to R.
template <int R = INTEGER_ROWS>
INLINE void products(const ForerunLinear& w, const Input& in, int64_t block, int64_t row, int64_t rows, F* y) {
    if constexpr (R > 1)
        if (rows < R) return products<R - 1>(w, in, block, row, rows, y);
    block_product<R>(w, in, block, row, y);
}

// Of n rows, those that pass a block of weights at once: as few times as registers allow, and nearly as many each time.
INLINE int64_t rows_at_once(const ForerunLinear& w, int64_t n) {
    const int64_t most = w.kind >= FORERUN_INT8 ? INTEGER_ROWS : MAX_ROWS, passes = (n + most - 1) / most;
    return (n + passes - 1) / passes;
}
