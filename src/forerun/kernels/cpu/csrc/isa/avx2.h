// Sixteen lanes as two halves, by AVX2 with FMA, and where AVX_VNNI is defined with products of bytes. Included in a
// namespace, as isa/avx512.h.
#if defined(AVX_VNNI)
#define INSTRUCTIONS "avxvnni,avx2,fma,f16c"
#else
#define INSTRUCTIONS "avx2,fma,f16c"
#endif
#define INLINE static inline __attribute__((always_inline, target(INSTRUCTIONS)))
#define FN static __attribute__((target(INSTRUCTIONS)))

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct W { __m256i a, b; };
constexpr int MAX_ROWS = 4;      // whose sums stay in registers
constexpr int INTEGER_ROWS = 6;  // the same of codes: sums of a group, not of all inputs
template <class E> constexpr int PAIRED_ROWS = sizeof(E) == 4 ? 3 : 2;  // of floats, with two sums each
constexpr int TILE = 6;          // sums of attention that do

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
INLINE __m256 eight(const float* p) { return _mm256_loadu_ps(p); }
INLINE __m256 eight(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE __m256 eight(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE F f_load(const uint16_t* bfloat16) { return {eight(bfloat16), eight(bfloat16 + 8)}; }
INLINE F f_load(const int8_t* p) { return {eight(p), eight(p + 8)}; }
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
// 2^(p - 128)
INLINE __m256 half_powers(const uint8_t* p) {
    const __m256i powers = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 23);
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_max_epu32(powers, _mm256_set1_epi32(1 << 22))), _mm256_set1_ps(0.5f));
}
INLINE F f_half_powers(const uint8_t* p) { return {half_powers(p), half_powers(p + 8)}; }
INLINE F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F f_fma_at(F weight, const float* x, F sum) { return f_fma(weight, f_set(*x), sum); }
// sum[r] += p[0..15] * x[r * stride]. Few rows share registers with other blocks' sums: there one half follows the other.
template <int R, class E> INLINE void fma_rows(const E* p, const float* x, int64_t stride, F* sum) {
    const __m256 a = eight(p);
    if (R <= 3) EACH_ROW sum[r].a = _mm256_fmadd_ps(a, _mm256_set1_ps(x[r * stride]), sum[r].a);
    const __m256 b = eight(p + 8);
    if (R <= 3) EACH_ROW sum[r].b = _mm256_fmadd_ps(b, _mm256_set1_ps(x[r * stride]), sum[r].b);
    if (R > 3) EACH_ROW sum[r] = f_fma_at({a, b}, x + r * stride, sum[r]);
}
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
// All lanes: x times N, a power of 2 or 0.
template <int N> INLINE I i_times(int32_t x) {
    const __m256i all = _mm256_slli_epi32(_mm256_set1_epi32(x), N ? __builtin_ctz(N) : 0);
    return N ? I{all, all} : i_zero();
}
INLINE I i_add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I i_mul(I x, int32_t y) {
    const __m256i all = _mm256_set1_epi32(y);
    return {_mm256_mullo_epi32(x.a, all), _mm256_mullo_epi32(x.b, all)};
}
INLINE I i_bytes(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
INLINE I i_max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
INLINE F i_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE int32_t i_most(I x) {
    const __m256i eight = _mm256_max_epi32(x.a, x.b);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 1)));
}
INLINE int32_t i_total(I x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 1)));
}
INLINE __m256i words_of(I x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), _MM_SHUFFLE(3, 1, 2, 0)); }
INLINE void i_store_words(int16_t* p, I x) {
    const __m256i words = _mm256_shufflelo_epi16(words_of(x), _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256((__m256i*)p, _mm256_shufflehi_epi16(words, _MM_SHUFFLE(3, 1, 2, 0)));
}
INLINE void i_store_bytes(int8_t* p, I x) {
    const __m256i words = words_of(x);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
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
// Keep a sum in its register. Without this, GCC computes all products of an unrolled loop first, and adds what it spilled.
INLINE __m256i pinned(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}
INLINE I dot(I sum, W codes, const int16_t* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    const __m256i two = _mm256_set1_epi32(pair);
    return {pinned(_mm256_add_epi32(sum.a, _mm256_madd_epi16(codes.a, two))),
            pinned(_mm256_add_epi32(sum.b, _mm256_madd_epi16(codes.b, two)))};
}

INLINE __m256i four_bytes(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
// Of eight codes of 4 bits of each output, 0..15, the first and the last four, as bytes.
INLINE W w_low4(W x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
INLINE W w_high4(W x) { return w_low4({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
INLINE W w_or(W x, W y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
// The bits of each byte that are in MASK once it is shifted to the right, or to the left if SHIFT is negative.
template <int SHIFT, int MASK> INLINE __m256i bits_of(__m256i x) {
    const __m256i moved = SHIFT > 0 ? _mm256_srli_epi16(x, SHIFT > 0 ? SHIFT : 0) : _mm256_slli_epi16(x, SHIFT < 0 ? -SHIFT : 0);
    return _mm256_and_si256(moved, _mm256_set1_epi8(MASK));
}
template <int SHIFT, int MASK> INLINE W w_bits(W x) { return {bits_of<SHIFT, MASK>(x.a), bits_of<SHIFT, MASK>(x.b)}; }
// ZERO + what a table holds for each byte, 0..15.
template <int ZERO> INLINE W w_of_table(const int8_t* table, W places) {
    const __m128i sixteen = _mm_add_epi8(_mm_loadu_si128((const __m128i*)table), _mm_set1_epi8((char)ZERO));
    const __m256i values = _mm256_broadcastsi128_si256(sixteen);
    return {_mm256_shuffle_epi8(values, places.a), _mm256_shuffle_epi8(values, places.b)};
}
// Lane o of code_dots: the products of 4 FOURS codes of a group, from the fours FIRST on, and inputs, for rows that lie
// `next` apart. totals: [R] minus the sums of these inputs, `step` apart.
#if defined(AVX_VNNI)
constexpr int BIAS = 128;  // of signed codes, which are multiplied as bytes without sign
INLINE W w_biased(W x) {
    const __m256i bias = _mm256_set1_epi8((char)BIAS);
    return {_mm256_xor_si256(x.a, bias), _mm256_xor_si256(x.b, bias)};
}
template <int R, class C, int f, int END> INLINE void add_fours(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, I* sum) {
    const W codes = C::template fours<f>(p, soon);
    EACH_ROW {
        const __m256i four = four_bytes(x + r * next + 4 * f);
        sum[r] = {_mm256_dpbusd_avx_epi32(sum[r].a, codes.a, four), _mm256_dpbusd_avx_epi32(sum[r].b, codes.b, four)};
    }
    if constexpr (f + 1 < END) add_fours<R, C, f + 1, END>(p, soon, x, next, sum);
}
template <int R, class C, int FIRST, int FOURS>
INLINE void code_dots(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, const int32_t* totals, int64_t step, I* sum) {
    EACH_ROW sum[r] = i_times<C::ZERO>(totals[r * step]);
    add_fours<R, C, FIRST, FIRST + FOURS>(p, soon, x, next, sum);
}
#else
constexpr int BIAS = 0;  // of signed codes, whose sign goes to the input
INLINE W w_biased(W x) { return x; }
INLINE I i_of_pairs(W words) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(words.a, ones), _mm256_madd_epi16(words.b, ones)};
}
// Add the products of pairs of codes without sign and inputs to words, in which END - f fours of them fit. Both halves take
// one broadcast of inputs.
template <int R, class C, int f, int END> INLINE void add_pairs(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, W* sum) {
    const W codes = C::template fours<f>(p, soon);
    EACH_ROW {
        const __m256i four = four_bytes(x + r * next + 4 * f);
        sum[r] = {pinned(_mm256_add_epi16(sum[r].a, _mm256_maddubs_epi16(codes.a, four))),
                  pinned(_mm256_add_epi16(sum[r].b, _mm256_maddubs_epi16(codes.b, four)))};
    }
    if constexpr (f + 1 < END) add_pairs<R, C, f + 1, END>(p, soon, x, next, sum);
}
// Of codes whose products do not fit a word twice: 128 * 127 is the most, twice.
template <int R, class C, int f, int END> INLINE void add_signed(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, I* sum) {
    const W bytes = C::template fours<f>(p, soon), sizes = {_mm256_abs_epi8(bytes.a), _mm256_abs_epi8(bytes.b)};
    EACH_ROW {
        const __m256i four = four_bytes(x + r * next + 4 * f);
        sum[r] = i_add(sum[r], i_of_pairs({_mm256_maddubs_epi16(sizes.a, _mm256_sign_epi8(four, bytes.a)),
                                           _mm256_maddubs_epi16(sizes.b, _mm256_sign_epi8(four, bytes.b))}));
        sum[r] = {pinned(sum[r].a), pinned(sum[r].b)};
    }
    if constexpr (f + 1 < END) add_signed<R, C, f + 1, END>(p, soon, x, next, sum);
}
template <int R, class C, int f, int END> INLINE void add_runs(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, I* sum) {
    constexpr int FIT = 32767 / (2 * 127 * C::MOST), LAST = f + FIT < END ? f + FIT : END;
    W words[R];
    EACH_ROW words[r] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    add_pairs<R, C, f, LAST>(p, soon, x, next, words);
    EACH_ROW sum[r] = i_add(sum[r], i_of_pairs(words[r]));
    if constexpr (LAST < END) add_runs<R, C, LAST, END>(p, soon, x, next, sum);
}
template <int R, class C, int FIRST, int FOURS>
INLINE void code_dots(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, const int32_t* totals, int64_t step, I* sum) {
    EACH_ROW sum[r] = i_times<C::ZERO>(totals[r * step]);
    if constexpr (C::SIGNED)
        add_signed<R, C, FIRST, FIRST + FOURS>(p, soon, x, next, sum);
    else
        add_runs<R, C, FIRST, FIRST + FOURS>(p, soon, x, next, sum);
}
#endif
