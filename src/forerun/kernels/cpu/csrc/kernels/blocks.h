// Layers of products: blocks of sixteen outputs of all rows. Included once for each instruction set.

INLINE void put(float* at, F y, int64_t room) {
    if (room >= 16)
        f_store(at, y);
    else
        f_store_n(at, y, (int)room);
}
INLINE F get(const float* at, int64_t room) { return room >= 16 ? f_load(at) : f_load_n(at, (int)room); }

// x [n] times the sigmoid of gates, of which there are n, or one for each head.
INLINE void multiply_sigmoid(float* gates, int64_t count, float* x, int64_t n) {
    for (int64_t i = 0; i < count; i += 16) {
        const F gate = f_sigmoid(get(gates + i, count - i));
        if (count == n)
            put(x + i, f_mul(get(x + i, n - i), gate), n - i);
        else
            put(gates + i, gate, count - i);
    }
    const int64_t width = n / count;
    for (int64_t h = 0; count < n && h < count; h++, x += width)
        for (int64_t i = 0; i < width; i += 16) put(x + i, f_mul(get(x + i, width - i), f_set(gates[h])), width - i);
}

// What a gate and its partner give; without a gate g is the partner. params: of f_activation.
INLINE F gated(F g, F u, bool has_gate, int32_t activation, const float* params, float scale) {
    if (activation == FORERUN_CLAMPED_SWIGLU) {
        const F limit = f_set(params[1]);
        g = f_min(limit, g);
        u = f_min(limit, f_max(f_sub(f_zero(), limit), u));
        return f_mul(f_mul(g, f_sigmoid(f_mul(g, f_set(params[0])))), f_add(u, f_set(1.0f)));
    }
    const F y = f_activation(f_mul(g, f_set(scale)), activation, params);
    return has_gate ? f_mul(y, u) : y;
}

// Where a block of outputs lies in the packed weight.
INLINE int64_t packed_block(const ForerunLinear& w, int64_t block) { return w.blocks ? w.blocks[block] : block; }

#if defined(AMX)
#include "tiles.h"
#endif

// out = residual + product, for blocks first..last; residual may be null, or out.
FN void linear_blocks(const ForerunLinear& w, const Input& in, int64_t n, int64_t first, int64_t last,
                      const float* residual, float* out, int64_t stride) {
#if defined(AMX)
    if (has_tiles(w)) return linear_tiles(w, in, n, first, last, residual, out, stride);
#endif
    F y[INTEGER_ROWS];
    const int64_t once = rows_at_once(w, n);
    for (int64_t block = first; block < last; block++) {
        const int64_t room = w.out_features - 16 * block;
        for (int64_t row = 0; row < n; row += once) {
            const int64_t rows = n - row < once ? n - row : once;
            products(w, in, packed_block(w, block), row, rows, y);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t at = (row + r) * stride + 16 * block;
                put(out + at, residual ? f_add(get(residual + at, room), y[r]) : y[r], room);
            }
        }
    }
}

// out = activation(gate * scale) * up, or without a gate activation(up * scale), for blocks first..last. params: of
// f_activation.
FN void gated_blocks(const ForerunLinear& gate, const ForerunLinear& up, int32_t activation, const float* params,
                     float scale, const Input& in, int64_t n, int64_t first, int64_t last, float* out, int64_t stride) {
#if defined(AMX)
    if (has_tiles(up) && (!gate.out_features || has_tiles(gate)))
        return gated_tiles(gate, up, activation, params, scale, in, n, first, last, out, stride);
#endif
    F g[INTEGER_ROWS], u[INTEGER_ROWS];
    const bool has_gate = gate.out_features;
    const int64_t of_gate = rows_at_once(has_gate ? gate : up, n), of_up = rows_at_once(up, n);
    const int64_t once = of_gate < of_up ? of_gate : of_up;
    for (int64_t block = first; block < last; block++) {
        for (int64_t row = 0; row < n; row += once) {
            const int64_t rows = n - row < once ? n - row : once;
            if (has_gate) products(gate, in, block, row, rows, g);
            products(up, in, block, row, rows, u);
            for (int64_t r = 0; r < rows; r++) {
                const F y = gated(has_gate ? g[r] : u[r], u[r], has_gate, activation, params, scale);
                put(out + (row + r) * stride + 16 * block, y, up.out_features - 16 * block);
            }
        }
    }
}
