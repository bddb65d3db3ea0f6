// The formats of quantized weights, a row each: how 16 outputs and their inputs lie in memory. Who includes this file
// defines FORMAT(name, number, low, high, zero, table, scales, minima, group, wide, has_blocks) before:
//     name, number: of ForerunKind
//     low: bits of a value that lie together, 8 or 4
//     high: bits that lie in planes behind them, 0 to 2
//     zero: the value that stands for 0 or for the minimum; values of 8 bits are signed, and theirs is 0
//     table: what values stand for, or nullptr
//     scales: one of Scales (layouts.h), where the scales are
//     minima: whether minima follow them
//     group: inputs that share a scale
//     wide: how activations of 16 bits are multiplied: none, one_sum over all inputs, or groups
//     has_blocks: whether weights are packed from blocks of a GGUF file (block_packing.h)
// Sizes below are those of a group of 32 inputs and 16 outputs. docs/kernels.md shows two of them.

// [in / 4][16][4] signed bytes; one scale per output
FORMAT(INT8, 2, 8, 0, 0, nullptr, by_output, false, 32, one_sum, false)
// [8][16][4] signed bytes, 16 float16 scales; GGUF's Q8_0
FORMAT(INT8_GROUPS, 3, 8, 0, 0, nullptr, halves, false, 32, groups, true)
// [4][16][4] bytes, 16 float16 scales; low halves of bytes are of inputs 0..3 of eight, high ones of 4..7; Q4_0
FORMAT(INT4_GROUPS, 4, 4, 0, 8, nullptr, halves, false, 32, groups, true)
// the same, and 16 float16 minima behind the scales; Q4_1
FORMAT(INT4_MINIMA, 5, 4, 0, 0, nullptr, halves, true, 32, groups, true)

// GGUF's other types. The low four bits lie as above, then the fifth bits [16][4] of inputs f, f + 4, ... (bit f of a byte
// is of the f-th four inputs), or the fifth and sixth [2][16][4], two of each four in a byte; then scales and minima.

// 16 float16 scales
FORMAT(Q5_0, 6, 4, 1, 16, nullptr, halves, false, 32, none, true)
// 16 float16 scales, 16 minima
FORMAT(Q5_1, 7, 4, 1, 0, nullptr, halves, true, 32, none, true)
// before eight groups 16 float16 scales and 16 minima, negative; behind each 16 bytes by which the scale is multiplied, and
// 16 for the minimum
FORMAT(Q4_K, 8, 4, 0, 0, nullptr, two_levels, true, 32, none, true)
// the same with 5 bits
FORMAT(Q5_K, 9, 4, 1, 0, nullptr, two_levels, true, 32, none, true)
// before eight groups 16 float16 scales; behind each 2 * 16 signed bytes, for each 16 inputs
FORMAT(Q6_K, 10, 4, 2, 32, nullptr, two_levels, false, 16, none, true)
// 16 float16 scales
FORMAT(IQ4_NL, 11, 4, 0, 0, IQ4, halves, false, 32, none, true)
// before eight groups 16 float16 scales; behind each 16 signed bytes
FORMAT(IQ4_XS, 12, 4, 0, 0, IQ4, two_levels, false, 32, none, true)
// 16 bytes, exponents of scales
FORMAT(MXFP4, 13, 4, 0, 0, E2M1, exponents, false, 32, none, true)

// Of checkpoints with a whole zero for each group: 16 float16 scales and 16 signed bytes, the zeros, then the `span` groups
// of 32 inputs that share them. What they give is multiplied by a scale per output.
FORMAT(INT4_ZEROS, 14, 4, 0, 0, nullptr, zeros, false, 32, groups, false)
FORMAT(INT8_ZEROS, 15, 8, 0, 0, nullptr, zeros, false, 32, groups, false)

#undef FORMAT
