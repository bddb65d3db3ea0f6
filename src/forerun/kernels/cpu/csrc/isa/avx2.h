// Sixteen lanes as two halves, by AVX2 with FMA. Included in a namespace, as isa/avx512.h.
#define INLINE static inline __attribute__((always_inline, target("avx2,fma,f16c")))
#define FN static __attribute__((target("avx2,fma,f16c")))

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct W { __m256i a, b; };
constexpr int MAX_ROWS = 4;  // whose sums stay in registers

INLINE F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE F f_load_n(const float* p, int n) {
    float padded[16] = {};
    __builtin_memcpy(padded, p, n * sizeof(float));
    return f_load(padded);
}
INLINE void f_store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
INLINE void f_store_n(float* p, F x, int n) {
    float padded[16];
    f_store(padded, x);
    __builtin_memcpy(p, padded, n * sizeof(float));
}
INLINE __m256 eight_bfloat16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE F f_load(const uint16_t* bfloat16) { return {eight_bfloat16(bfloat16), eight_bfloat16(bfloat16 + 8)}; }
INLINE F f_firsts(const uint16_t* p) {
    const __m256i *at = (const __m256i*)p;
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(at), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(at + 1), 16))};
}
INLINE F f_seconds(const uint16_t* p) {
    const __m256i *at = (const __m256i*)p, mask = _mm256_set1_epi32((int)0xffff0000);
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(at), mask)),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(at + 1), mask))};
}
INLINE F f_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F f_fma_at(F weight, const float* x, F sum) { return f_fma(weight, f_set(*x), sum); }
INLINE F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F f_sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE __m256 nearest(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F f_round(F x) { return {nearest(x.a), nearest(x.b)}; }
INLINE __m256 power_of_2(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE F f_power_of_2(F n) { return {power_of_2(n.a), power_of_2(n.b)}; }
INLINE I f_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE I f_magnitude_bits(F x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}

INLINE I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I i_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I i_add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I i_max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
INLINE F i_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE void i_store(int32_t* p, I x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
INLINE void i_store_words(int16_t* p, I x) {
    int32_t wide[16];
    i_store(wide, x);
    for (int i = 0; i < 16; i++) p[i] = (int16_t)wide[i];
}

INLINE W w_load(const uint8_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
INLINE W w_low8(W x) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(x.a, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(x.b, 8), 8)};
}
INLINE W w_high8(W x) { return {_mm256_srai_epi16(x.a, 8), _mm256_srai_epi16(x.b, 8)}; }
template <int PLACE> INLINE W w_code4(W x) {
    const __m256i mask = _mm256_set1_epi16(15);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4 * PLACE), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4 * PLACE), mask)};
}
INLINE I dot(I sum, W codes, const int16_t* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    const __m256i two = _mm256_set1_epi32(pair);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(codes.a, two)),
            _mm256_add_epi32(sum.b, _mm256_madd_epi16(codes.b, two))};
}
