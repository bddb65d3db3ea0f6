// The most probable tokens of rows of logits. Included once for each instruction set.

// The first place of the largest of x; -1 if one of them is not finite.
FN int64_t first_largest(const float* x, int64_t n) {
    F most = f_set(-__builtin_inff()), spoilt = f_zero();  // NaN where a number was not finite
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const F v = f_load(x + i);
        most = f_max(most, v);
        spoilt = f_fma(v, f_zero(), spoilt);
    }
    float lane[16];
    f_store(lane, most);
    float top = lane[0], nothing = sum_lanes(spoilt);
    for (int j = 1; j < 16; j++) top = lane[j] > top ? lane[j] : top;
    for (; i < n; i++) {
        top = x[i] > top ? x[i] : top;
        nothing += x[i] * 0.0f;
    }
    if (!(nothing == 0.0f)) return -1;
    for (i = 0; x[i] != top;) i++;
    return i;
}

// The probability of the largest of logits x, by softmax.
FN float share_of_largest(const float* x, int64_t n, float top) {
    const F shift = f_set(top);
    F sum = f_zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sum = f_add(sum, f_exp(f_sub(f_load(x + i), shift)));
    float lane[16], total = sum_lanes(sum);
    if (i < n) {
        f_store(lane, f_exp(f_sub(f_load_n(x + i, (int)(n - i)), shift)));
        for (int64_t j = 0; j < n - i; j++) total += lane[j];
    }
    return 1.0f / total;
}

static void argmax(const float* logits, int64_t n, int64_t width, int64_t stride, int64_t* picked, float* probabilities) {
    for (int64_t t = 0; t < n; t++) {
        const float* row = logits + t * stride;
        picked[t] = first_largest(row, width);
        if (!probabilities) continue;
        probabilities[t] = picked[t] < 0 ? 0.0f : share_of_largest(row, width, row[picked[t]]);
    }
}

// The largest of 128 numbers, where none is NaN.
FN float largest_of_part(const float* x) {
    F most = f_load(x);
    for (int64_t i = 16; i < 128; i += 16) most = f_max(most, f_load(x + i));
    float lane[16];
    f_store(lane, most);
    float top = lane[0];
    for (int j = 1; j < 16; j++) top = lane[j] > top ? lane[j] : top;
    return top;
}

FN void topk(const float* logits, int64_t n, int64_t width, int64_t count, int64_t* found) {
    for (int64_t t = 0; t < n; t++) {
        const float* row = logits + t * width;
        int64_t* best = found + t * count;
        for (int64_t i = 0, size = 0; i < width;) {
            if (size == count && i + 128 <= width && !(largest_of_part(row + i) > row[best[count - 1]])) {
                i += 128;
                continue;
            }
            for (const int64_t end = i + 128 < width ? i + 128 : width; i < end; i++) {
                if (size == count && !(row[i] > row[best[count - 1]])) continue;
                int64_t at = size < count ? size++ : count - 1;
                for (; at > 0 && row[i] > row[best[at - 1]]; at--) best[at] = best[at - 1];
                best[at] = i;
            }
        }
    }
}
