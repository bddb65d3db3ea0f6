// Products of bfloat16 by AMX tiles of up to 16 rows. Their order of additions is their own, so a weight that has tiles is
// multiplied in no other way, whatever the number of rows. (Tiles of bytes have the bits of byte_groups, and gain a tenth:
// the scale of every 32 inputs is what takes the time.) Included in blocks.h.

constexpr int64_t TILE_ROWS = 16;

INLINE bool has_tiles(const ForerunLinear& w) { return w.kind == FORERUN_BFLOAT16 && w.in_features % 32 == 0; }

// y: [BT][RT * 16][16], sums of RT * 16 rows and one block of each of BT weights, in steps of 32 inputs, each of which adds
// even and odd inputs apart, then both to the sum.
template <int RT, int BT>
INLINE void tile_sums(const uint16_t* w, const uint16_t* other, int64_t soon, const uint16_t* x, int64_t stride,
                      int64_t steps, float* y) {
    _tile_zero(0);
    if (RT > 1) _tile_zero(1);
    if (BT > 1) _tile_zero(2);
    if (RT > 1 && BT > 1) _tile_zero(3);
    for (int64_t k = 0; k < steps; k++) {
        const uint16_t *first = w + 512 * k, *second = other + 512 * k;
        for (int line = 0; RT == 1 && line < 16; line++) {
            ahead(soon, first + 32 * line);
            if (BT > 1) ahead(soon, second + 32 * line);
        }
        _tile_loadd(4, x + 32 * k, 2 * stride);
        _tile_loadd(6, first, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (RT > 1) _tile_loadd(5, x + TILE_ROWS * stride + 32 * k, 2 * stride);
        if (RT > 1) _tile_dpbf16ps(1, 5, 6);
        if (BT > 1) _tile_loadd(7, second, 64);
        if (BT > 1) _tile_dpbf16ps(2, 4, 7);
        if (RT > 1 && BT > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, y, 64);
    if (RT > 1) _tile_stored(1, y + 256, 64);
    if (BT > 1) _tile_stored(2, y + RT * 256, 64);
    if (RT > 1 && BT > 1) _tile_stored(3, y + RT * 256 + 256, 64);
}

// A block of a weight, or none.
struct Block {
    const ForerunLinear* w;
    int64_t at;
    const uint16_t* pairs() const { return (const uint16_t*)w->packed + at * 16 * (int64_t)w->in_features; }
};

// The sums of rows from `row` on, of n, for one or two blocks, [blocks][apart][16]; returns how many rows there are. Tiles
// of 16 rows may reach beyond the last one (Input::SPARE_ROWS), tiles of fewer do not.
INLINE int64_t tile_rows(const Block& a, const Block& b, const Input& in, int64_t row, int64_t n, float* y, int64_t& apart) {
    const int64_t left = n - row, stride = in.groups * 32, steps = in.groups;
    const int64_t soon = forerun::prefetch_distance(FORERUN_BFLOAT16, n);
    const uint16_t *x = in.bfloat16 + row * stride, *first = a.pairs();
    apart = left > TILE_ROWS ? 2 * TILE_ROWS : TILE_ROWS;
    if (left > TILE_ROWS)
        b.w ? tile_sums<2, 2>(first, b.pairs(), soon, x, stride, steps, y) : tile_sums<2, 1>(first, first, soon, x, stride, steps, y);
    else
        b.w ? tile_sums<1, 2>(first, b.pairs(), soon, x, stride, steps, y) : tile_sums<1, 1>(first, first, soon, x, stride, steps, y);
    return left < apart ? left : apart;
}

INLINE F biased(const Block& b, F y) { return b.w->bias ? f_add(y, f_load(b.w->bias + 16 * b.at)) : y; }

FN void linear_tiles(const ForerunLinear& w, const Input& in, int64_t n, int64_t first, int64_t last,
                     const float* residual, float* out, int64_t stride) {
    alignas(64) float y[2 * 2 * 256];
    int64_t apart;
    use_tiles(n < TILE_ROWS ? (int)n : (int)TILE_ROWS);
    for (int64_t block = first; block < last; block += 2) {
        const bool two = block + 1 < last;
        const Block blocks[2] = {{&w, packed_block(w, block)}, {two ? &w : nullptr, two ? packed_block(w, block + 1) : 0}};
        for (int64_t row = 0, rows; row < n; row += rows) {
            rows = tile_rows(blocks[0], blocks[1], in, row, n, y, apart);
            for (int b = 0; b < 2 && blocks[b].w; b++)
                for (int64_t r = 0; r < rows; r++) {
                    const int64_t at = (row + r) * stride + 16 * (block + b), room = w.out_features - 16 * (block + b);
                    const F sum = biased(blocks[b], f_load(y + (b * apart + r) * 16));
                    put(out + at, residual ? f_add(get(residual + at, room), sum) : sum, room);
                }
        }
    }
    _tile_release();
}

FN void gated_tiles(const ForerunLinear& gate, const ForerunLinear& up, int32_t activation, const float* params,
                    float scale, const Input& in, int64_t n, int64_t first, int64_t last, float* out, int64_t stride) {
    alignas(64) float y[2 * 2 * 256];
    int64_t apart;
    use_tiles(n < TILE_ROWS ? (int)n : (int)TILE_ROWS);
    for (int64_t block = first; block < last; block++) {
        const Block partner{&up, block}, gates{gate.out_features ? &gate : nullptr, block};
        for (int64_t row = 0, rows; row < n; row += rows) {
            rows = tile_rows(partner, gates, in, row, n, y, apart);
            for (int64_t r = 0; r < rows; r++) {
                const F u = biased(partner, f_load(y + r * 16));
                const F g = gates.w ? biased(gates, f_load(y + (apart + r) * 16)) : u;
                put(out + (row + r) * stride + 16 * block, gated(g, u, gate.out_features, activation, params, scale),
                    up.out_features - 16 * block);
            }
        }
    }
    _tile_release();
}
