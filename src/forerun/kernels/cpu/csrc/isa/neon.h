// Sixteen lanes as four registers of four, by NEON of ARM64, where NEON_DOTPROD is defined with products of four bytes, and
// where NEON_I8MM is too with those of bytes with and without sign, and of eight bytes of two rows. Included in a namespace,
// as isa/avx512.h. bfloat16 becomes float by shifts: what bfdot and bfmmla round depends on the processor (FEAT_EBF16).
#if defined(NEON_I8MM)
#define INLINE static inline __attribute__((always_inline, target("arch=armv8.2-a+dotprod+i8mm")))
#define FN static __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#elif defined(NEON_DOTPROD)
#define INLINE static inline __attribute__((always_inline, target("arch=armv8.2-a+dotprod")))
#define FN static __attribute__((target("arch=armv8.2-a+dotprod")))
#else
#define INLINE static inline __attribute__((always_inline))
#define FN static
#endif
#define EACH_QUARTER _Pragma("GCC unroll 4") for (int q = 0; q < 4; q++)

struct F { float32x4_t v[4]; };
struct I { int32x4_t v[4]; };
struct W { uint8x16_t v[4]; };  // 64 bytes: of each output four; or words, of a pair of inputs those of the first come first
typedef int32_t Pair __attribute__((may_alias));
constexpr int MAX_ROWS = 6;  // whose sums stay in registers
constexpr int INTEGER_ROWS = MAX_ROWS;
template <class E> constexpr int PAIRED_ROWS = 2;  // of floats, with two sums each
constexpr int TILE = 6;  // sums of attention that do

INLINE F f_set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE F f_zero() { return f_set(0.0f); }
INLINE F f_load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
INLINE F f_load_n(const float* p, int n) {
    float padded[16] = {};
    __builtin_memcpy(padded, p, n * sizeof(float));
    return f_load(padded);
}
INLINE void f_store(float* p, F x) { EACH_QUARTER vst1q_f32(p + 4 * q, x.v[q]); }
INLINE void f_store_n(float* p, F x, int n) {
    float padded[16];
    f_store(padded, x);
    __builtin_memcpy(p, padded, n * sizeof(float));
}
INLINE F f_of_bits(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
    return {vreinterpretq_f32_u32(a), vreinterpretq_f32_u32(b), vreinterpretq_f32_u32(c), vreinterpretq_f32_u32(d)};
}
INLINE F f_load(const uint16_t* bfloat16) {
    const uint16x8_t a = vld1q_u16(bfloat16), b = vld1q_u16(bfloat16 + 8);
    return f_of_bits(vshll_n_u16(vget_low_u16(a), 16), vshll_high_n_u16(a, 16), vshll_n_u16(vget_low_u16(b), 16),
                     vshll_high_n_u16(b, 16));
}
// Of sixteen pairs of bfloat16, the first and the second numbers.
INLINE F f_firsts(const uint16_t* pairs) {
    F x;
    EACH_QUARTER x.v[q] = vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(pairs + 8 * q)), 16));
    return x;
}
INLINE F f_seconds(const uint16_t* pairs) {
    const uint32x4_t mask = vdupq_n_u32(0xffff0000);
    F x;
    EACH_QUARTER x.v[q] = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(pairs + 8 * q)), mask));
    return x;
}
INLINE F f_half(const uint16_t* float16) {
    F x;
    EACH_QUARTER x.v[q] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(float16 + 4 * q)));
    return x;
}
// 2^(p - 128)
INLINE F f_half_powers(const uint8_t* p) {
    const uint8x16_t all = vld1q_u8(p);
    const uint16x8_t a = vmovl_u8(vget_low_u8(all)), b = vmovl_high_u8(all);
    const uint32x4_t powers[4] = {vmovl_u16(vget_low_u16(a)), vmovl_high_u16(a), vmovl_u16(vget_low_u16(b)), vmovl_high_u16(b)};
    F x;
    EACH_QUARTER {
        const uint32x4_t bits = vmaxq_u32(vshlq_n_u32(powers[q], 23), vdupq_n_u32(1 << 22));
        x.v[q] = vmulq_n_f32(vreinterpretq_f32_u32(bits), 0.5f);
    }
    return x;
}
INLINE F f_fma(F x, F y, F z) {
    EACH_QUARTER z.v[q] = vfmaq_f32(z.v[q], x.v[q], y.v[q]);
    return z;
}
// weight * *x + sum
INLINE F f_fma_at(F weight, const float* x, F sum) {
    EACH_QUARTER sum.v[q] = vfmaq_n_f32(sum.v[q], weight.v[q], *x);
    return sum;
}
INLINE F f_add(F x, F y) {
    EACH_QUARTER x.v[q] = vaddq_f32(x.v[q], y.v[q]);
    return x;
}
INLINE F f_sub(F x, F y) {
    EACH_QUARTER x.v[q] = vsubq_f32(x.v[q], y.v[q]);
    return x;
}
INLINE F f_mul(F x, F y) {
    EACH_QUARTER x.v[q] = vmulq_f32(x.v[q], y.v[q]);
    return x;
}
INLINE F f_div(F x, F y) {
    EACH_QUARTER x.v[q] = vdivq_f32(x.v[q], y.v[q]);
    return x;
}
// y where either is NaN, which fmax and fmin of this processor are not.
INLINE F f_max(F x, F y) {
    EACH_QUARTER y.v[q] = vbslq_f32(vcgtq_f32(x.v[q], y.v[q]), x.v[q], y.v[q]);
    return y;
}
INLINE F f_min(F x, F y) {
    EACH_QUARTER y.v[q] = vbslq_f32(vcltq_f32(x.v[q], y.v[q]), x.v[q], y.v[q]);
    return y;
}
INLINE F f_round(F x) {
    EACH_QUARTER x.v[q] = vrndnq_f32(x.v[q]);
    return x;
}
INLINE I f_int(F x) {  // to nearest, ties to even
    I y;
    EACH_QUARTER y.v[q] = vcvtnq_s32_f32(x.v[q]);
    return y;
}
INLINE F f_power_of_2(F n) {
    const I powers = f_int(n);
    EACH_QUARTER n.v[q] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(powers.v[q], vdupq_n_s32(127)), 23));
    return n;
}
INLINE I f_magnitude_bits(F x) {
    I y;
    EACH_QUARTER y.v[q] = vandq_s32(vreinterpretq_s32_f32(x.v[q]), vdupq_n_s32(0x7fffffff));
    return y;
}
INLINE I i_set(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
INLINE I i_zero() { return i_set(0); }
// All lanes: x times N, a power of 2 or 0.
template <int N> INLINE I i_times(int32_t x) { return i_set(N * x); }
INLINE I i_add(I x, I y) {
    EACH_QUARTER x.v[q] = vaddq_s32(x.v[q], y.v[q]);
    return x;
}
INLINE I i_mul(I x, int32_t y) {
    EACH_QUARTER x.v[q] = vmulq_n_s32(x.v[q], y);
    return x;
}
INLINE I i_bytes(const int8_t* p) {
    const int8x16_t all = vld1q_s8(p);
    const int16x8_t a = vmovl_s8(vget_low_s8(all)), b = vmovl_high_s8(all);
    return {vmovl_s16(vget_low_s16(a)), vmovl_high_s16(a), vmovl_s16(vget_low_s16(b)), vmovl_high_s16(b)};
}
INLINE I i_max(I x, I y) {
    EACH_QUARTER x.v[q] = vmaxq_s32(x.v[q], y.v[q]);
    return x;
}
INLINE F i_float(I x) {
    F y;
    EACH_QUARTER y.v[q] = vcvtq_f32_s32(x.v[q]);
    return y;
}
INLINE F f_load(const int8_t* p) { return i_float(i_bytes(p)); }
INLINE int32_t i_most(I x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.v[0], x.v[1]), vmaxq_s32(x.v[2], x.v[3]))); }
INLINE int32_t i_total(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3]))); }
INLINE int16x8_t i_words(int32x4_t x, int32x4_t y) { return vmovn_high_s32(vmovn_s32(x), y); }
INLINE void i_store_bytes(int8_t* p, I x) {
    vst1q_s8(p, vmovn_high_s16(vmovn_s16(i_words(x.v[0], x.v[1])), i_words(x.v[2], x.v[3])));
}
// sum[r] += p[0..15] * x[r * stride]
template <int R, class E> INLINE void fma_rows(const E* p, const float* x, int64_t stride, F* sum) {
    const F weight = f_load(p);
    EACH_ROW sum[r] = f_fma_at(weight, x + r * stride, sum[r]);
}

INLINE W w_load(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}; }
constexpr int BIAS = 0;  // of signed codes, which are multiplied as they are
INLINE W w_biased(W x) { return x; }
// Of eight codes of 4 bits of each output, 0..15, the first and the last four, as bytes.
INLINE W w_low4(W x) {
    EACH_QUARTER x.v[q] = vandq_u8(x.v[q], vdupq_n_u8(15));
    return x;
}
INLINE W w_high4(W x) {
    EACH_QUARTER x.v[q] = vshrq_n_u8(x.v[q], 4);
    return x;
}
INLINE W w_or(W x, W y) {
    EACH_QUARTER x.v[q] = vorrq_u8(x.v[q], y.v[q]);
    return x;
}
// The bits of each byte that are in MASK once it is shifted to the right, or to the left if SHIFT is negative.
template <int SHIFT, int MASK> INLINE W w_bits(W x) {
    EACH_QUARTER {
        if constexpr (SHIFT > 0) x.v[q] = vshrq_n_u8(x.v[q], SHIFT);
        if constexpr (SHIFT < 0) x.v[q] = vshlq_n_u8(x.v[q], -SHIFT);
        x.v[q] = vandq_u8(x.v[q], vdupq_n_u8(MASK));
    }
    return x;
}
// ZERO + what a table holds for each byte, 0..15.
template <int ZERO> INLINE W w_of_table(const int8_t* table, W places) {
    const uint8x16_t values = vaddq_u8(vreinterpretq_u8_s8(vld1q_s8(table)), vdupq_n_u8(ZERO));
    EACH_QUARTER places.v[q] = vqtbl1q_u8(values, places.v[q]);
    return places;
}

// code_dots: lane o of sum[r] is that of the products of 4 FOURS codes of a group, from the fours FIRST on, and inputs, for
// rows that lie `next` apart. totals: [R] minus the sums of these inputs, `step` apart. word_dots adds those of a group and
// inputs of 16 bits, as i_store_words has written them.
#define WORD_DOTS
#if defined(NEON_DOTPROD)
// Sixteen numbers x as their upper bytes, with sign, and behind them the lower ones: x is 256 times one plus the other.
INLINE void i_store_words(int16_t* p, I x) {
    const int16x8_t a = i_words(x.v[0], x.v[1]), b = i_words(x.v[2], x.v[3]);
    vst1q_s8((int8_t*)p, vshrn_high_n_s16(vshrn_n_s16(a, 8), b, 8));
    vst1q_s8((int8_t*)p + 16, vmovn_high_s16(vmovn_s16(a), b));
}

// Inputs 16 LINE .. 16 LINE + 15 of a row lie STEP LINE bytes from its first.
template <int R, class C, int STEP, int f, int END>
INLINE void add_fours(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, I* sum) {
    const W codes = C::template fours<f>(p, soon);
    EACH_ROW {
        const int8x16_t inputs = vld1q_s8(x + r * next + f / 4 * STEP);
        EACH_QUARTER sum[r].v[q] = vdotq_laneq_s32(sum[r].v[q], vreinterpretq_s8_u8(codes.v[q]), inputs, f % 4);
    }
    if constexpr (f + 1 < END) add_fours<R, C, STEP, f + 1, END>(p, soon, x, next, sum);
}
// The same with inputs without sign. Codes with sign are multiplied without where the processor cannot do otherwise: 128
// more each.
template <int R, class C, int f, int END>
INLINE void add_lower(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, I* sum) {
    const W codes = C::template fours<f>(p, soon);
    EACH_ROW {
        const uint8x16_t inputs = vld1q_u8((const uint8_t*)x + r * next + f / 4 * 32);
        EACH_QUARTER {
#if defined(NEON_I8MM)
            sum[r].v[q] = vsudotq_laneq_s32(sum[r].v[q], vreinterpretq_s8_u8(codes.v[q]), inputs, f % 4);
#else
            const uint8x16_t four = C::SIGNED ? veorq_u8(codes.v[q], vdupq_n_u8(128)) : codes.v[q];
            const uint32x4_t before = vreinterpretq_u32_s32(sum[r].v[q]);
            sum[r].v[q] = vreinterpretq_s32_u32(vdotq_laneq_u32(before, four, inputs, f % 4));
#endif
        }
    }
    if constexpr (f + 1 < END) add_lower<R, C, f + 1, END>(p, soon, x, next, sum);
}
template <int R, class C> INLINE void word_dots(const uint8_t* p, int64_t soon, const int16_t* words, int64_t next, I* sum) {
    const int8_t* x = (const int8_t*)words;
    I part[R];
    EACH_ROW part[r] = i_zero();
    add_fours<R, C, 32, 0, 8>(p, soon, x, 2 * next, part);
    EACH_ROW EACH_QUARTER part[r].v[q] = vshlq_n_s32(part[r].v[q], 8);
#if !defined(NEON_I8MM)
    if constexpr (C::SIGNED) EACH_ROW {
        const uint8_t* lower = (const uint8_t*)x + 2 * r * next + 16;
        const int32_t total = vaddlvq_u8(vld1q_u8(lower)) + vaddlvq_u8(vld1q_u8(lower + 32));
        part[r] = i_add(part[r], i_set(-128 * total));
    }
#endif
    add_lower<R, C, 0, 8>(p, 0, x + 16, 2 * next, part);
    EACH_ROW sum[r] = i_add(sum[r], part[r]);
}

#if defined(NEON_I8MM)
// Of so many rows pairs are multiplied: of fewer, bringing eight codes of an output together costs more than it gains, and
// more have no registers left for it.
constexpr int IN_PAIRS = 4;
// sum: of each pair of rows, of two outputs after two, those of the first with both rows, then those of the second.
template <int R, class C, int f, int END>
INLINE void add_pairs(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, int32x4_t (*sum)[8]) {
    const W first = C::template fours<f>(p, soon), second = C::template fours<f + 1>(p, soon);
    EACH_QUARTER {
        const int32x4_t a = vreinterpretq_s32_u8(first.v[q]), b = vreinterpretq_s32_u8(second.v[q]);
        const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(a, b)), high = vreinterpretq_s8_s32(vzip2q_s32(a, b));
        EACH_ROW {
            const int8_t *one = x + 2 * r * next + 4 * f, *other = one + next;
            const int8x16_t inputs = vcombine_s8(vld1_s8(one), vld1_s8(other));
            sum[r][2 * q] = vmmlaq_s32(sum[r][2 * q], low, inputs);
            sum[r][2 * q + 1] = vmmlaq_s32(sum[r][2 * q + 1], high, inputs);
        }
    }
    if constexpr (f + 2 < END) add_pairs<R, C, f + 2, END>(p, soon, x, next, sum);
}
template <int R, class C, int FIRST, int FOURS>
INLINE void pair_dots(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, I* sum) {
    int32x4_t part[R][8];
    EACH_ROW EACH_QUARTER part[r][2 * q] = part[r][2 * q + 1] = vdupq_n_s32(0);
    add_pairs<R, C, FIRST, FIRST + FOURS>(p, soon, x, next, part);
    EACH_ROW EACH_QUARTER {
        const int32x4_t one = vuzp1q_s32(part[r][2 * q], part[r][2 * q + 1]);
        const int32x4_t other = vuzp2q_s32(part[r][2 * q], part[r][2 * q + 1]);
        sum[2 * r].v[q] = vaddq_s32(sum[2 * r].v[q], one);
        sum[2 * r + 1].v[q] = vaddq_s32(sum[2 * r + 1].v[q], other);
    }
}
#endif
template <int R, class C, int FIRST, int FOURS>
INLINE void code_dots(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, const int32_t* totals, int64_t step, I* sum) {
    EACH_ROW sum[r] = i_times<C::ZERO>(totals[r * step]);
#if defined(NEON_I8MM)
    if constexpr (R == IN_PAIRS) return pair_dots<R / 2, C, FIRST, FOURS>(p, soon, x, next, sum);
#endif
    add_fours<R, C, 16, FIRST, FIRST + FOURS>(p, soon, x, next, sum);
}
#else
// The middle two of each four change places, so that pairs are those of w_low8, w_high8 and w_code4.
INLINE void i_store_words(int16_t* p, I x) {
    for (int i = 0; i < 4; i += 2) {
        const int64x2_t even = vreinterpretq_s64_s32(vuzp1q_s32(x.v[i], x.v[i + 1]));
        const int64x2_t odd = vreinterpretq_s64_s32(vuzp2q_s32(x.v[i], x.v[i + 1]));
        const int32x4_t first = vreinterpretq_s32_s64(vzip1q_s64(even, odd));
        vst1q_s16(p + 4 * i, i_words(first, vreinterpretq_s32_s64(vzip2q_s64(even, odd))));
    }
}
// Of the halves of each output's four bytes, the first of outputs 0..7 and 8..15, then the second.
INLINE W w_halves(W x) {
    uint16x8_t half[4];
    EACH_QUARTER half[q] = vreinterpretq_u16_u8(x.v[q]);
    return {vreinterpretq_u8_u16(vuzp1q_u16(half[0], half[1])), vreinterpretq_u8_u16(vuzp1q_u16(half[2], half[3])),
            vreinterpretq_u8_u16(vuzp2q_u16(half[0], half[1])), vreinterpretq_u8_u16(vuzp2q_u16(half[2], half[3]))};
}
INLINE W w_low8(W x) {
    x = w_halves(x);
    EACH_QUARTER {
        const int16x8_t upper = vshlq_n_s16(vreinterpretq_s16_u8(x.v[q]), 8);
        x.v[q] = vreinterpretq_u8_s16(vshrq_n_s16(upper, 8));
    }
    return x;
}
INLINE W w_high8(W x) {
    x = w_halves(x);
    EACH_QUARTER x.v[q] = vreinterpretq_u8_s16(vshrq_n_s16(vreinterpretq_s16_u8(x.v[q]), 8));
    return x;
}
template <int PLACE> INLINE W w_code4(W x) {
    x = w_halves(x);
    EACH_QUARTER {
        uint16x8_t moved = vreinterpretq_u16_u8(x.v[q]);
        if constexpr (PLACE > 0) moved = vshrq_n_u16(moved, 4 * PLACE);
        x.v[q] = vreinterpretq_u8_u16(vandq_u16(moved, vdupq_n_u16(15)));
    }
    return x;
}
// Lane o: sum + the codes of its pair times x[0] and x[1].
INLINE I dot(I sum, W codes, const int16_t* x) {
    const int16x4_t pair = vreinterpret_s16_s32(vdup_n_s32(*(const Pair*)x));
    for (int half = 0; half < 2; half++) {
        const int16x8_t first = vreinterpretq_s16_u8(codes.v[half]), second = vreinterpretq_s16_u8(codes.v[half + 2]);
        int32x4_t &low = sum.v[2 * half], &high = sum.v[2 * half + 1];
        low = vmlal_lane_s16(low, vget_low_s16(first), pair, 0);
        high = vmlal_high_lane_s16(high, first, pair, 0);
        low = vmlal_lane_s16(low, vget_low_s16(second), pair, 1);
        high = vmlal_high_lane_s16(high, second, pair, 1);
    }
    return sum;
}
template <int R, class C> INLINE void word_dots(const uint8_t* p, int64_t soon, const int16_t* x, int64_t next, I* sum) {
    constexpr int EACH = C::SIGNED ? 4 : 8;  // inputs of a line
    for (int k = 0; k < 32; k += EACH, p += 64) {
        const W words = w_load(p);
        __builtin_prefetch((const char*)p + soon);
        if constexpr (C::SIGNED) {
            const W low = w_low8(words), high = w_high8(words);
            EACH_ROW sum[r] = dot(sum[r], low, x + r * next + k);
            EACH_ROW sum[r] = dot(sum[r], high, x + r * next + k + 2);
        } else {
            const W a = w_code4<0>(words), b = w_code4<1>(words), c = w_code4<2>(words), d = w_code4<3>(words);
            EACH_ROW sum[r] = dot(sum[r], a, x + r * next + k);
            EACH_ROW sum[r] = dot(sum[r], b, x + r * next + k + 4);
            EACH_ROW sum[r] = dot(sum[r], c, x + r * next + k + 2);
            EACH_ROW sum[r] = dot(sum[r], d, x + r * next + k + 6);
        }
    }
}

constexpr int WORD_ROWS = 2;  // whose sums in words stay in registers
// Add the products of codes and inputs to words, in which END - f fours of them fit: of each four, four words follow each
// other.
template <int R, class C, int f, int END>
INLINE void add_fours(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, int16x8_t (*sum)[8]) {
    const W codes = C::template fours<f>(p, soon);
    EACH_ROW {
        const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(*(const Pair*)(x + r * next + 4 * f)));
        EACH_QUARTER {
            const int8x16_t bytes = vreinterpretq_s8_u8(codes.v[q]);
            sum[r][2 * q] = vmlal_s8(sum[r][2 * q], vget_low_s8(bytes), vget_low_s8(four));
            sum[r][2 * q + 1] = vmlal_high_s8(sum[r][2 * q + 1], bytes, four);
        }
    }
    if constexpr (f + 1 < END) add_fours<R, C, f + 1, END>(p, soon, x, next, sum);
}
template <int R, class C, int f, int END> INLINE void add_runs(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, I* sum) {
    constexpr int FIT = 32767 / (127 * (C::SIGNED ? 128 : C::MOST)), LAST = f + FIT < END ? f + FIT : END;
    int16x8_t words[R][8];
    EACH_ROW EACH_QUARTER words[r][2 * q] = words[r][2 * q + 1] = vdupq_n_s16(0);
    add_fours<R, C, f, LAST>(p, soon, x, next, words);
    EACH_ROW EACH_QUARTER {
        const int32x4_t one = vpaddlq_s16(words[r][2 * q]), other = vpaddlq_s16(words[r][2 * q + 1]);
        sum[r].v[q] = vaddq_s32(sum[r].v[q], vpaddq_s32(one, other));
    }
    if constexpr (LAST < END) add_runs<R, C, LAST, END>(p, soon, x, next, sum);
}
template <int R, class C, int FIRST, int FOURS>
INLINE void code_dots(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, const int32_t* totals, int64_t step, I* sum) {
    constexpr int SOME = WORD_ROWS;
    if constexpr (R > SOME) {
        code_dots<SOME, C, FIRST, FOURS>(p, soon, x, next, totals, step, sum);
        code_dots<R - SOME, C, FIRST, FOURS>(p, 0, x + SOME * next, next, totals + SOME * step, step, sum + SOME);
    } else {
        EACH_ROW sum[r] = i_times<C::ZERO>(totals[r * step]);
        add_runs<R, C, FIRST, FIRST + FOURS>(p, soon, x, next, sum);
    }
}
#endif
