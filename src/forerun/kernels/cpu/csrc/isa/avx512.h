// Sixteen lanes by AVX-512 with VNNI, and where AVX512_BF16 is defined with products of bfloat16, by tiles where AMX is. Included in a namespace;
// every function is compiled for these instructions alone.
#if defined(AMX)
#define INSTRUCTIONS "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16"
#elif defined(AVX512_BF16)
#define INSTRUCTIONS "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c"
#else
#define INSTRUCTIONS "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"
#endif
#define INLINE static inline __attribute__((always_inline, target(INSTRUCTIONS)))
#define FN static __attribute__((target(INSTRUCTIONS)))

typedef __m512 F;    // 16 floats
typedef __m512i I;   // 16 int32
typedef __m512i W;   // 32 words: of each output the codes of a pair of inputs; or 64 bytes, of four
typedef int32_t Pair __attribute__((may_alias, aligned(2)));
constexpr int MAX_ROWS = 8;  // whose sums stay in registers
constexpr int INTEGER_ROWS = MAX_ROWS;
template <class E> constexpr int PAIRED_ROWS = MAX_ROWS;  // of floats, with two sums each
constexpr int TILE = 8;  // sums of attention that do
// The same of floats, of two blocks. Elsewhere numbers are converted beside the sums at no cost.
#define UNPACKED_TILE 12

INLINE F f_zero() { return _mm512_setzero_ps(); }
INLINE F f_set(float x) { return _mm512_set1_ps(x); }
INLINE F f_load(const float* p) { return _mm512_loadu_ps(p); }
INLINE F f_load_n(const float* p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
INLINE void f_store(float* p, F a) { _mm512_storeu_ps(p, a); }
INLINE void f_store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a); }
INLINE F f_load(const uint16_t* bfloat16) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)bfloat16)), 16));
}
INLINE F f_load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
// Of sixteen pairs of bfloat16, the first and the second numbers.
INLINE F f_firsts(const uint16_t* pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16)); }
INLINE F f_seconds(const uint16_t* pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32((int)0xffff0000)));
}
INLINE F f_half(const uint16_t* float16) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)float16)); }
// 2^(p - 128)
INLINE F f_half_powers(const uint8_t* p) {
    const __m512i powers = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 23);
    return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_max_epu32(powers, _mm512_set1_epi32(1 << 22))), _mm512_set1_ps(0.5f));
}
INLINE F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// weight * *x + sum
INLINE F f_fma_at(F weight, const float* x, F sum) {
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weight), "m"(*x));
    return sum;
}
// sum[r] += p[0..15] * x[r * stride]
template <int R, class E> INLINE void fma_rows(const E* p, const float* x, int64_t stride, F* sum) {
    const F weight = f_load(p);
    EACH_ROW sum[r] = f_fma_at(weight, x + r * stride, sum[r]);
}
INLINE F f_add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F f_div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F f_max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
INLINE F f_min(F a, F b) { return _mm512_min_ps(a, b); }
INLINE F f_round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F f_power_of_2(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE I f_int(F a) { return _mm512_cvtps_epi32(a); }  // to nearest, ties to even
INLINE I f_magnitude_bits(F a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }

INLINE I i_zero() { return _mm512_setzero_si512(); }
INLINE I i_set(int32_t x) { return _mm512_set1_epi32(x); }
// All lanes: x times N, a power of 2 or 0.
template <int N> INLINE I i_times(int32_t x) {
    return N ? _mm512_slli_epi32(_mm512_set1_epi32(x), N ? __builtin_ctz(N) : 0) : i_zero();
}
INLINE I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I i_mul(I a, int32_t b) { return _mm512_mullo_epi32(a, _mm512_set1_epi32(b)); }
INLINE I i_bytes(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I i_max(I a, I b) { return _mm512_max_epi32(a, b); }
INLINE F i_float(I a) { return _mm512_cvtepi32_ps(a); }
INLINE int32_t i_most(I a) { return _mm512_reduce_max_epi32(a); }
INLINE int32_t i_total(I a) { return _mm512_reduce_add_epi32(a); }
// The middle two of each four change places, so that pairs are those of w_low8, w_high8 and w_code4.
INLINE void i_store_words(int16_t* p, I a) {
    const __m256i words = _mm256_shufflelo_epi16(_mm512_cvtepi32_epi16(a), _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256((__m256i*)p, _mm256_shufflehi_epi16(words, _MM_SHUFFLE(3, 1, 2, 0)));
}
INLINE void i_store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }

// Of the bytes of each output, the first and third, and the second and fourth, as words.
INLINE W w_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE W w_low8(W a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }  // signed
INLINE W w_high8(W a) { return _mm512_srai_epi16(a, 8); }
// Of eight codes of 4 bits, 0..15, of each output: 0 and 2, 4 and 6, 1 and 3, 5 and 7, as words.
template <int PLACE> INLINE W w_code4(W a) {
    if (PLACE == 3) return _mm512_srli_epi16(a, 12);
    const W moved = PLACE ? _mm512_srli_epi16(a, 4 * PLACE) : a;
    return _mm512_and_si512(moved, _mm512_set1_epi16(15));
}
// Lane o: sum + code[2 o] x[0] + code[2 o + 1] x[1]. In assembly, because the compiler loads x apart and copies sums
// between registers.
INLINE I dot(I sum, W codes, const int16_t* x) {
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const Pair*)x));
    return sum;
}
// Lane o: sum + the sum of codes[4 o + i] x[i], i < 4; codes are bytes 0..255.
INLINE I dot4(I sum, W codes, const int8_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const Pair*)x));
    return sum;
}
constexpr int BIAS = 128;  // of signed codes, which are multiplied as bytes without sign
INLINE W w_biased(W codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8((char)BIAS)); }
// Of eight codes of 4 bits of each output, 0..15, the first and the last four, as bytes.
INLINE W w_low4(W a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE W w_high4(W a) { return w_low4(_mm512_srli_epi16(a, 4)); }
INLINE W w_or(W a, W b) { return _mm512_or_si512(a, b); }
// The bits of each byte that are in MASK once it is shifted to the right, or to the left if SHIFT is negative.
template <int SHIFT, int MASK> INLINE W w_bits(W a) {
    const W moved = SHIFT > 0 ? _mm512_srli_epi16(a, SHIFT > 0 ? SHIFT : 0) : _mm512_slli_epi16(a, SHIFT < 0 ? -SHIFT : 0);
    return _mm512_and_si512(moved, _mm512_set1_epi8(MASK));
}
// ZERO + what a table holds for each byte, 0..15.
template <int ZERO> INLINE W w_of_table(const int8_t* table, W places) {
    const __m128i values = _mm_add_epi8(_mm_loadu_si128((const __m128i*)table), _mm_set1_epi8((char)ZERO));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), places);
}
template <int R, class C, int f, int END>
INLINE void add_fours(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, I* sum, I* other) {
    const W a = C::template fours<f>(p, soon), b = C::template fours<f + 1>(p, soon);
    EACH_ROW sum[r] = dot4(sum[r], a, x + r * next + 4 * f);
    EACH_ROW other[r] = dot4(other[r], b, x + r * next + 4 * f + 4);
    if constexpr (f + 2 < END) add_fours<R, C, f + 2, END>(p, soon, x, next, sum, other);
}
// Lane o: the products of 4 FOURS codes of a group, from the fours FIRST on, and inputs, for rows that lie `next` apart.
// totals: [R] minus the sums of these inputs, `step` apart.
template <int R, class C, int FIRST, int FOURS>
INLINE void code_dots(const uint8_t* p, int64_t soon, const int8_t* x, int64_t next, const int32_t* totals, int64_t step, I* sum) {
    I other[R];
    EACH_ROW sum[r] = i_times<C::ZERO>(totals[r * step]);
    EACH_ROW other[r] = i_zero();
    add_fours<R, C, FIRST, FIRST + FOURS>(p, soon, x, next, sum, other);
    EACH_ROW sum[r] = i_add(sum[r], other[r]);
}

#if defined(AVX512_BF16)
// Rounded to nearest, ties to even.
INLINE void f_store_bfloat16(uint16_t* p, F a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a)); }
INLINE W w_load(const uint16_t* pairs) { return _mm512_loadu_si512(pairs); }
// Lane o: sum + pairs[2 o] x[0] + pairs[2 o + 1] x[1].
INLINE F f_dot(F sum, W pairs, const uint16_t* x) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(pairs), "m"(*(const Pair*)x));
    return sum;
}
#endif

#if defined(AMX)
// What the eight tiles are: 0 to 3 sums, of up to 16 rows and 16 outputs; 4 and 5 rows, of 32 inputs; 6 and 7 weights of 16
// outputs.
struct alignas(64) Tiles {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
INLINE void use_tiles(int rows) {
    Tiles tiles = {1, 0, {}, {}, {}};
    for (int i = 0; i < 8; i++) {
        tiles.bytes[i] = 64;
        tiles.rows[i] = (uint8_t)(i < 6 ? rows : 16);
    }
    _tile_loadconfig(&tiles);
}
#endif
