// Codes of weights as bytes, four inputs of 16 outputs at a time, and their scales. Included once for each instruction set.

// Ask for what lies so many bytes beyond the weights that are read now.
INLINE void ahead(int64_t distance, const void* p) {
    __builtin_prefetch((const char*)p + distance);
}

template <int KIND> struct Codes {
    static constexpr forerun::Layout L = forerun::layout_of(KIND);
    // Values of all 8 bits: signed, or where bytes are multiplied unsigned, with a BIAS.
    static constexpr bool SIGNED = L.low == 8 || L.table == forerun::IQ4;
    static constexpr int TABLE_ZERO = SIGNED ? BIAS : 16;  // added to what a table holds
    static constexpr int ZERO = SIGNED ? BIAS : L.table ? TABLE_ZERO : L.zero;  // a power of 2, or none
    static constexpr int MOST = SIGNED ? 255 : L.table ? 28 : (1 << (L.low + L.high)) - 1;

    // Those of inputs 4 f .. 4 f + 3 of a group; the lines that they begin are asked for early.
    template <int f> INLINE W fours(const uint8_t* p, int64_t soon) {
        if constexpr (L.low == 8) {
            ahead(soon, p + 64 * f);
            return w_biased(w_load(p + 64 * f));
        } else {
            const W bytes = w_load(p + 64 * (f / 2));
            if (f % 2 == 0) ahead(soon, p + 32 * f);
            const W low = f % 2 ? w_high4(bytes) : w_low4(bytes);
            if constexpr (L.table != nullptr) {
                return w_of_table<TABLE_ZERO>(L.table, low);
            } else if constexpr (L.high != 0) {
                constexpr int plane = 256 + 64 * (f * L.high / 8), shift = f * L.high % 8;
                if (shift == 0) ahead(soon, p + plane);
                return w_or(low, w_bits<shift - 4, ((1 << L.high) - 1) << 4>(w_load(p + plane)));
            } else {
                return low;
            }
        }
    }
};

// The scales of 16 outputs, PART 1 of the second half of a group; d: of the super-block.
template <int KIND, int PART> INLINE F scales_of(const uint8_t* group, F d) {
    constexpr forerun::Layout L = forerun::layout_of(KIND);
    const uint8_t* behind = group + L.codes();
    if constexpr (L.scales == forerun::Scales::halves) return f_half((const uint16_t*)behind);
    if constexpr (L.scales == forerun::Scales::exponents) return f_half_powers(behind);
    if constexpr (L.has_zeros()) return d;
    return f_mul(d, f_load((const int8_t*)behind + 16 * PART));
}
template <int KIND> INLINE F minima_of(const uint8_t* group, F m) {
    constexpr forerun::Layout L = forerun::layout_of(KIND);
    const uint8_t* behind = group + L.codes();
    if constexpr (L.scales == forerun::Scales::halves) return f_half((const uint16_t*)(behind + 32));
    return f_mul(m, f_load((const int8_t*)behind + 16));
}
