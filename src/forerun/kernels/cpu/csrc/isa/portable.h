// Sixteen lanes in vectors of the compiler's, for any processor. Included in a namespace, as isa/avx512.h.
#define INLINE static inline __attribute__((always_inline))
#define FN static

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int16_t W __attribute__((vector_size(64)));
typedef uint16_t V __attribute__((vector_size(64)));
constexpr int MAX_ROWS = 2;  // whose sums stay in registers
constexpr int INTEGER_ROWS = MAX_ROWS;
template <class E> constexpr int PAIRED_ROWS = 1;  // of floats, with two sums each
constexpr int TILE = 2;  // sums of attention that do

INLINE F f_set(float x) { return F{} + x; }
INLINE F f_zero() { return F{}; }
INLINE F f_load_n(const float* p, int n) {
    F x = {};
    __builtin_memcpy(&x, p, n * sizeof(float));
    return x;
}
INLINE F f_load(const float* p) { return f_load_n(p, 16); }
INLINE void f_store_n(float* p, F x, int n) { __builtin_memcpy(p, &x, n * sizeof(float)); }
INLINE void f_store(float* p, F x) { f_store_n(p, x, 16); }
INLINE F f_load(const uint16_t* bfloat16) {
    U bits;
    for (int i = 0; i < 16; i++) bits[i] = (uint32_t)bfloat16[i] << 16;
    return (F)bits;
}
INLINE F f_load(const int8_t* p) {
    F x;
    for (int i = 0; i < 16; i++) x[i] = p[i];
    return x;
}
INLINE F f_firsts(const uint16_t* pairs) {
    U bits;
    for (int i = 0; i < 16; i++) bits[i] = (uint32_t)pairs[2 * i] << 16;
    return (F)bits;
}
INLINE F f_seconds(const uint16_t* pairs) {
    U bits;
    for (int i = 0; i < 16; i++) bits[i] = (uint32_t)pairs[2 * i + 1] << 16;
    return (F)bits;
}
INLINE F f_half(const uint16_t* p) {
    F x;
    for (int i = 0; i < 16; i++) x[i] = half_to_float(p[i]);
    return x;
}
INLINE F f_half_powers(const uint8_t* p) {
    F x;
    for (int i = 0; i < 16; i++) x[i] = half_power(p[i]);
    return x;
}
INLINE F f_fma(F a, F b, F c) { return a * b + c; }
INLINE F f_fma_at(F weight, const float* x, F sum) { return f_fma(weight, f_set(*x), sum); }
// sum[r] += p[0..15] * x[r * stride]
template <int R, class E> INLINE void fma_rows(const E* p, const float* x, int64_t stride, F* sum) {
    const F weight = f_load(p);
    EACH_ROW sum[r] = f_fma_at(weight, x + r * stride, sum[r]);
}
INLINE F f_add(F a, F b) { return a + b; }
INLINE F f_sub(F a, F b) { return a - b; }
INLINE F f_mul(F a, F b) { return a * b; }
INLINE F f_div(F a, F b) { return a / b; }
INLINE F f_max(F a, F b) { return a > b ? a : b; }
INLINE F f_min(F a, F b) { return a < b ? a : b; }
// Adding and taking away 1.5 * 2^23 leaves the nearest integer, ties to even; for magnitudes below 2^22.
INLINE F f_round(F a) { return (a + 12582912.0f) - 12582912.0f; }
INLINE I f_int(F a) { return __builtin_convertvector(f_round(a), I); }
INLINE F f_power_of_2(F n) { return (F)((f_int(n) + 127) << 23); }
INLINE I f_magnitude_bits(F a) { return (I)a & 0x7fffffff; }

INLINE I i_set(int32_t x) { return I{} + x; }
INLINE I i_zero() { return I{}; }
template <int N> INLINE I i_times(int32_t x) { return i_set(N * x); }
INLINE I i_add(I a, I b) { return a + b; }
INLINE I i_mul(I a, int32_t b) { return a * b; }
INLINE I i_bytes(const int8_t* p) {
    I x;
    for (int i = 0; i < 16; i++) x[i] = p[i];
    return x;
}
INLINE I i_max(I a, I b) { return a > b ? a : b; }
INLINE F i_float(I a) { return __builtin_convertvector(a, F); }
INLINE int32_t i_most(I a) {
    int32_t most = a[0];
    for (int i = 1; i < 16; i++) most = a[i] > most ? a[i] : most;
    return most;
}
INLINE int32_t i_total(I a) {
    int32_t total = 0;
    for (int i = 0; i < 16; i++) total += a[i];
    return total;
}
INLINE void i_store_words(int16_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = (int16_t)a[i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i];
}
INLINE void i_store_bytes(int8_t* p, I a) {
    for (int i = 0; i < 16; i++) p[i] = (int8_t)a[i];
}

INLINE W w_load(const uint8_t* p) {
    W x;
    __builtin_memcpy(&x, p, 64);
    return x;
}
INLINE W w_low8(W a) { return (a << 8) >> 8; }
INLINE W w_high8(W a) { return a >> 8; }
template <int PLACE> INLINE W w_code4(W a) { return (W)((V)a >> (4 * PLACE) & 15); }
INLINE I dot(I sum, W codes, const int16_t* x) {
    for (int o = 0; o < 16; o++) sum[o] += (int32_t)codes[2 * o] * x[0] + (int32_t)codes[2 * o + 1] * x[1];
    return sum;
}
constexpr int BIAS = 0;
INLINE W w_biased(W a) { return a; }
INLINE W w_low4(W a) { return a & 0x0f0f; }
INLINE W w_high4(W a) { return (W)((V)a >> 4 & 0x0f0f); }
INLINE W w_or(W a, W b) { return a | b; }
template <int SHIFT, int MASK> INLINE W w_bits(W a) {
    return (W)((SHIFT > 0 ? (V)a >> (SHIFT > 0 ? SHIFT : 0) : (V)a << (SHIFT < 0 ? -SHIFT : 0)) & (uint16_t)(MASK * 0x0101));
}
template <int ZERO> INLINE W w_of_table(const int8_t* table, W places) {
    uint8_t bytes[64];
    __builtin_memcpy(bytes, &places, 64);
    for (int i = 0; i < 64; i++) bytes[i] = (uint8_t)(table[bytes[i]] + ZERO);
    return w_load(bytes);
}
template <int R, class C, int f, int END> INLINE void add_fours(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, I* sum) {
    const W codes = C::template fours<f>(p, soon);
    uint8_t bytes[64];
    __builtin_memcpy(bytes, &codes, 64);
    for (int i = 0; i < 4; i++)
        for (int o = 0; o < 16; o++) {
            const int32_t code = C::SIGNED ? (int8_t)bytes[4 * o + i] : bytes[4 * o + i];
            EACH_ROW sum[r][o] += code * x[r * next + 4 * f + i];
        }
    if constexpr (f + 1 < END) add_fours<R, C, f + 1, END>(p, soon, x, next, sum);
}
template <int R, class C, int FIRST, int FOURS>
INLINE void code_dots(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, const int32_t* totals, int64_t step, I* sum) {
    EACH_ROW sum[r] = i_times<C::ZERO>(totals[r * step]);
    add_fours<R, C, FIRST, FIRST + FOURS>(p, soon, x, next, sum);
}
