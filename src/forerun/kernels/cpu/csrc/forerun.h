// The C interface: plain structs and functions. forerun/kernels/cpu/header.py reads this
// file, so each field is written here alone.
#pragma once
#include <cstdint>

#define FORERUN_ABI 27

extern "C" {

// How the numbers of a weight lie in memory. Outputs come in blocks of 16; those beyond the last are zero.
enum ForerunKind : int32_t {
    FORERUN_FLOAT32 = 0,   // [out / 16][in][16] float
    FORERUN_BFLOAT16 = 1,  // [out / 16][in / 2, rounded up][16][2] bfloat16: pairs of inputs, the last with zeros
#define FORMAT(name, number, ...) FORERUN_##name = number,
#include "weight_formats.h"
};

// How keys and values lie in a page: numbers, and behind those of a layer, where they are bytes, the scales of its keys and
// then of its values, float [heads][page] each. A byte is its number / scale; the scale is a row's largest number / 127.
enum ForerunCacheFormat : int32_t { FORERUN_CACHE_BFLOAT16 = 0, FORERUN_CACHE_FLOAT32 = 1, FORERUN_CACHE_INT8 = 2 };

// y = x W^T + bias. A product that a layer lacks has out_features 0.
struct ForerunLinear {
    int32_t kind, out_features, in_features;
    int32_t activation_bits;  // of quantized weights: 16, one scale per row; or 8, one per 32 inputs
    const void* packed;
    const float* scales;  // [out, rounded up to 16], FORERUN_INT8 and weights with zeros only
    const float* bias;    // [out, rounded up to 16], or null
    int64_t span;         // groups of 32 inputs that share scales and zeros, of weights with zeros
    const int32_t* blocks;  // [out / 16, rounded up], the packed blocks of 16 that the outputs are of; null: all in order
};

enum ForerunActivation : int32_t {
    FORERUN_SILU = 0,
    FORERUN_GELU = 1,
    FORERUN_GELU_TANH = 2,
    FORERUN_RELU2 = 3,
    FORERUN_RELU = 4,
    FORERUN_XIELU = 5,  // with numbers of each layer
    FORERUN_CLAMPED_SWIGLU = 6,  // g sigmoid(alpha g) (u + 1), g at most, and u in magnitude, a limit of each layer
};

enum ForerunRecurrenceKind : int32_t {
    FORERUN_SHORT_CONVOLUTION = 0,  // nothing but the convolution, of in_proj_qkv times in_proj_b; in_proj_z multiplies it
    FORERUN_DELTA_RULE = 1,         // S = a S + k (v - a S^T k)^T b, keys and queries of unit length
    FORERUN_STATE_SPACE = 2,        // S = a S + k v^T b, and D v is added to what is read
};

// A layer that keeps a state of fixed size instead of keys and values: the last inputs of its convolution, and for each
// head a matrix S [key_width, value_width], of which a row reads S^T q. What it adds stands for an attention's. Names are
// those of Transformers' modules and parameters.
struct ForerunRecurrence {
    ForerunLinear in_proj_qkv;    // [channels], what is convolved: queries, keys and values; or the input itself
    ForerunLinear in_proj_z;      // [heads * value_width], the gate of what is read
    ForerunLinear in_proj_b;      // [heads], beta; of a short convolution [channels]; without it, beta is the step
    ForerunLinear in_proj_a;      // [heads], of which the steps are made
    ForerunLinear out_proj;
    const float* conv1d;          // [conv_kernel][channels], the last of the row itself
    const float* conv1d_bias;     // [channels], or null
    const float *A, *dt_bias;     // [heads]; A is -exp(A_log): step = softplus(in_proj_a + dt_bias), a = exp(A * step)
    const float* D;               // [heads], or null
    const float* norm;            // [heads * value_width], or null
    int64_t state_offset, record_offset;  // floats before this layer's in a state and in a record
    int32_t kind, conv_kernel, channels, heads, key_heads, key_width, value_width;
    int32_t query_start, key_start, value_start;  // channels
    int32_t normed_width;         // numbers that one norm is over
    int32_t gates_first;          // the norm is behind the gate
    int32_t heads_are_tiled;      // head h reads the key head h % key_heads, else h / (heads / key_heads)
    float norm_eps, beta_scale, time_step_min, time_step_max;
    float gate_scale, step_scale;  // of what in_proj_z and in_proj_a give
    float out_scale;               // of what is added to the residual
    int32_t reserved;
};

// What one sequence of a forward has kept in recurrent layers.
struct ForerunState {
    float* state;            // after the committed rows, but for the pending ones
    float* tip;              // where the state after the first num_whole rows of this forward is written
    float* records;          // [slots][record_size], of this forward's other rows and of earlier ones
    const int32_t* parents;  // [slots], the slot that each of these rows follows; -1: none of them
    const int32_t* pending;  // slots of committed rows in order, which `state` is yet to take in
    int32_t* folded;         // [1], the first layers, whose states have taken them in; written by forerun_forward_layers
    int32_t num_pending;
    int32_t num_whole;       // rows of a chain that are kept or dropped together, and have no records
    int32_t first_slot;      // of the row behind them
    int32_t reserved;
};

enum ForerunScoring : int32_t {
    FORERUN_SOFTMAX = 0,
    FORERUN_SIGMOID = 1,
    FORERUN_SPARSEMIXER = 2,  // scores as they are; a routing weight is that of a softmax of those that are left and near
};

// A mixture of experts: a row is given to the num_experts_per_tok experts of its largest scores, the first of equal ones,
// whose results are added times the routing weights, which are the scores. The layer's own gate, up and down are those of an
// expert that every row is given to, the shared one.
struct ForerunExperts {
    ForerunLinear router;              // [num_experts], whose weights are numbers
    ForerunLinear shared_expert_gate;  // [1], whose sigmoid multiplies what the shared expert gives; or none
    const ForerunLinear *gate, *up, *down;  // [num_experts] each, all of one form
    const float* e_score_correction_bias;   // [num_experts], added to scores for the choice alone; or null
    const float* activation_params;    // as a layer's
    int64_t* num_read;                 // to which the experts that rows were given to are added
    int64_t* num_given;                // [num_experts], to which the rows that each was given are added
    int32_t num_experts, num_experts_per_tok, moe_intermediate_size;
    int32_t scoring;                   // ForerunScoring
    int32_t n_group, topk_group;       // experts stand in groups, and are taken of those of the largest sums of
                                       // scores_of_group scores; 0: all
    int32_t norm_topk_prob;            // the scores of the chosen are divided by their sum
    float least_sum;                   // or by this
    float routed_scaling_factor;       // of the scores
    int32_t scores_of_group;           // that are added: 2, or 1
    float distance;                    // of FORERUN_SPARSEMIXER: a score is near if it is less by at most this part of it
    const float *router_norm, *expert_norm;  // [hidden], of the residual as the router and as experts read it; null: they
                                             // read what the shared expert does
    const float *shared_norm, *routed_norm;  // of what the shared expert gives, and of what the others give; or null
    const float* per_expert_scale;     // [num_experts], factors of the routing weights; or null
};

// Attention whose keys and values are made of one latent of each position: all heads have one key, which is what the layer's
// key (kv_a_proj) gives, a rotated part and the latent behind a norm, and one value, the latent. A head's query is multiplied
// with what makes its keys of the latent, and what it attends to with what makes its values: the parts of kv_b_proj.
struct ForerunLatent {
    ForerunLinear q_a_proj;    // [q_lora_rank], of which, behind a norm, queries are made; without it, of the row
    const float *q_a_layernorm, *kv_a_layernorm;  // [q_lora_rank]; [value_width]
    const ForerunLinear *k_b_proj, *v_b_proj;  // [num_heads] each, whose weights are numbers: from what is not rotated of a
                                               // query to the latent's numbers, and from these to a value
    float eps;                 // of both norms
    int32_t reserved;
};

// One layer of a decoder. Where all that is null or 0 in it and in the model is left out, it is one of the Llama family.
struct ForerunLayer {
    const float *input_norm, *mlp_norm;    // before attention and feed-forward layer; null: they read what enters
    const float *query_norm, *key_norm;    // [head_dim], or [heads * head_dim] where norms are wide; or null
    ForerunLinear query, key, value, out;  // without value, values are what key gives; without key, both are
                                           // those of another layer
    ForerunLinear gate, up, down;          // without gate, the activation is up's
    int32_t window, rope;                  // positions that a row sees, 0: all; which of the rows' tables, -1: none
    const float *attention_norm, *feed_norm;  // of what is added to the residual; or null
    const float *input_bias, *mlp_bias;    // of layer norms, or null
    const float* activation_params;        // of FORERUN_XIELU [3]: alpha of positive and of negative numbers, beta; of
                                           // FORERUN_CLAMPED_SWIGLU [2]: alpha and the limit
    ForerunLinear attention_gate;          // [heads * head_dim] or [heads], whose sigmoid multiplies what attention gives;
                                           // or none
    const ForerunRecurrence* recurrence;   // beside attention, or without query instead of it; or null
    int32_t num_kv_heads, head_dim, rotated;  // rotated: numbers of a head that are
    int32_t key_width, value_width;        // as they are kept
    float feed_scale;                      // of what the feed-forward layer adds, besides residual_scale; 0: 1
    const ForerunExperts* experts;         // beside the feed-forward layer, or without up instead of it; or null
    const float* sinks;                    // [num_heads], a further logit of attention; or null
    const ForerunLatent* latent;           // there is no value then; or null
    int64_t kv_offset;                     // bytes of a page before the keys that it reads
    const float* value_norm;               // [head_dim], or null
    const float* layer_scalar;             // [1], of what comes out; or null
    ForerunLinear per_layer_input_gate, per_layer_projection;  // behind the feed-forward layer: the activation of the first,
                                           // times a row's per_layer_inputs, is read by the second, which adds to the
                                           // residual; or none
    const float* post_per_layer_input_norm;  // of what is added
};

struct ForerunModel {
    const ForerunLayer* layers;
    const float *norm;
    ForerunLinear head;
    int32_t num_layers, hidden, num_heads;
    int32_t page, cache_format;  // positions of a page; ForerunCacheFormat
    float eps, scale;
    const float* norm_bias;      // of the final norm, or null
    int32_t activation;          // ForerunActivation
    int32_t has_layer_norms;     // not root-mean-square norms
    int32_t is_parallel;         // attention and feed-forward layer read the same residual
    int32_t has_wide_norms;      // query and key norms are over all heads
    int32_t norms_rotated;       // or behind the rotation
    float softcap;               // of attention scores; 0: none
    float residual_scale;        // of what is added to the residual; 0: 1
    float logit_scale, logit_softcap;  // 0: none
    float query_growth;          // queries are multiplied by 1 + this * log(1 + position / query_period, rounded down); 0: not
    int32_t query_period;
    int64_t record_size;         // floats of all recurrent layers
    float attention_scale;       // of what attention adds to the residual, besides residual_scale; 0: 1
    float activation_scale;      // of what the activation reads; 0: 1
};

// The rows of one forward, as forerun/kernels/partition.py describes them.
struct ForerunRows {
    const int32_t *sequence, *position, *slot, *prefix, *tail_start, *tail;
    const uint64_t* pages;      // addresses
    const int32_t* page_start;  // [sequences + 1]
    const float *cos, *sin;     // [positions, rotated / 2]
    int32_t num_rows;
    int32_t rope_by_slot;       // not by position: rows of a block, whose paths are all as long as that of its last row
    const float *other_cos, *other_sin;  // of layers whose rope is 1
    const ForerunState* states;  // [sequences], or null
    const float* per_layer_inputs;  // [rows][layers][inputs of per_layer_projection], or null
};

// One layer's attention without what surrounds it.
struct ForerunAttention {
    int64_t offset;  // bytes of the layers before it, in a page
    int32_t num_heads, num_kv_heads, key_width, value_width, page, cache_format, window, reserved;
    float scale, softcap;  // 0: none
    const float* sinks;    // [num_heads], or null
};

// The layer of an EAGLE head and what surrounds it, as drafters/models/eagle/config.py says.
struct ForerunEagle {
    ForerunModel model;  // of one layer, whose input_norm may be null, as the final norm
    const float *embedding_norm, *state_norm;  // null: they are read as they are
    ForerunLinear fc;    // from [embedding, state] to what enters the layer; without it, the layer reads the pair
    ForerunLinear embedding_residual;  // of the embedding, which is added to the state; or none
    int32_t embedding_width, state_width;
    int32_t norm_before_residual, norm_output;  // the residual is the normed state; rows are handed on after the final norm
};

int32_t forerun_abi(void);
// The instruction set in use: 8 NEON of ARM64 with products of eight bytes of two rows, 7 NEON with products of four bytes,
// 6 NEON, 5 AVX-512 with products of bfloat16 by tiles, 4 with products of bfloat16, 3 AVX-512 VNNI, 2
// AVX2 with AVX-VNNI, 1 AVX2, 0 portable; and those that the processor has, a bit for each by its number.
int32_t forerun_instructions(void);
int32_t forerun_processor_instructions(void);
int32_t forerun_use_instructions(int32_t which);  // 0, or -1 where the processor or this library lacks it
// The OpenMP runtime's GOMP_parallel, so that its threads are shared; null: threads of this library.
void forerun_use_openmp(void* gomp_parallel);
// How many threads the calls of the calling thread take now, of `most` that they are given: fewer while they wait for one
// that the system does not run.
int32_t forerun_threads(int32_t most);
// Bytes that the calling thread keeps to work in.
int64_t forerun_workspace_bytes(void);

// Bytes from the weights of a kind that are read to those that are asked for, 0 to 2^20, by the rows that they are
// multiplied with: 1, 2, or more. The same bits with any.
int32_t forerun_prefetch_distance(int32_t kind, int64_t rows);
void forerun_set_prefetch_distance(int32_t kind, int64_t rows, int32_t distance);
// Read n packed weights in turn, and compute nothing.
void forerun_read(const uint64_t* addresses, const int64_t* bytes, int64_t n, int64_t distance, int32_t threads);

// span: of weights with zeros.
int64_t forerun_packed_bytes(int32_t kind, int64_t out, int64_t in, int64_t span);
// numbers: float [out, in] for the float kinds, else quantized values uint8 [out, in]; scales: float16 [out, groups]; behind:
// minima like these, or zeros uint8, which count as the quantized values do.
void forerun_pack(int32_t kind, int64_t out, int64_t in, int64_t span, const void* numbers, const uint16_t* scales,
                  const void* behind, void* packed, int32_t threads);
// From the blocks of a GGUF file: Q8_0 by FORERUN_INT8_GROUPS, Q4_0 by FORERUN_INT4_GROUPS, Q4_1 by
// FORERUN_INT4_MINIMA, others by their name. order: [out], the row of the file that is each output; null: all in order.
// Returns the first output + 1 of which a scale is NaN or infinite, else 0.
int64_t forerun_pack_blocks(int32_t kind, int64_t out, int64_t in, const uint8_t* blocks, int64_t row_bytes,
                            const int64_t* order, void* packed, int32_t threads);
// Quantized values of 4 bits from words of eight, the first lowest, to bytes. The word of row r and column c holds inputs 8 r
// to 8 r + 7 of output c, to values [columns, 8 rows]; of_outputs: input r of outputs 8 c to 8 c + 7, in AWQ's order, to values
// [8 columns, rows]. Strides are words.
void forerun_unpack_words(const uint32_t* words, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride,
                          int32_t of_outputs, uint8_t* values, int32_t threads);
// The numbers of some rows, float [n, in].
void forerun_unpack(const ForerunLinear* linear, const int64_t* rows, int64_t n, float* numbers);

// What computes returns 0, or -1 where the system does not give the memory that it works in.

// out: [n, out] = (residual or 0) + x W^T + bias; out may be residual.
int32_t forerun_linear(const ForerunLinear* linear, const float* x, int64_t n, const float* residual, float* out,
                       int32_t threads);
// Layers first..last of x [rows, hidden], in place. states: [rows, num_output_layers, hidden], what enters the layers
// `output_layers`; num_layers stands for what comes out of the last one, after the final norm.
int32_t forerun_forward_layers(const ForerunModel* model, const ForerunRows* rows, int32_t first, int32_t last, float* x,
                               const int32_t* output_layers, int32_t num_output_layers, float* states, int32_t threads);
// The final norm, in place, and logits [n, out].
int32_t forerun_head(const ForerunModel* model, int64_t n, float* x, float* logits, int32_t threads);
// rows of embeddings [rows, embedding_width] and states [rows, state_width]: what the layer gives, x [rows, hidden], and
// logits [num_wanted, out] of the rows `wanted`. x null, where the layer reads the pairs themselves: keys and values alone.
int32_t forerun_eagle(const ForerunEagle* head, const ForerunRows* rows, const float* embeddings, const float* states,
                      const int64_t* wanted, int64_t num_wanted, float* x, float* logits, int32_t threads);
// out: [n, out] = W y, where y are the parts of x [n, in], side by side, normed with norms [in], which may be null.
int32_t forerun_fuse(const ForerunLinear* linear, const float* norms, int32_t parts, float eps, const float* x,
                     int64_t n, float* out, int32_t threads);
// Write the keys and values of all layers of rows of states [rows, hidden], which `norm` norms and no layer computes.
int32_t forerun_context(const ForerunModel* model, const float* norm, const ForerunRows* rows, const float* states,
                        int32_t threads);
// The most probable tokens of chains, each after the one before it: the largest logit plus after(before[token before]).
// lengths: [chains], tokens of each, at least 1; logits [sum of lengths, after->out_features], those of one chain after
// another; before: [tokens, after->in_features]; last: [chains], the token before each chain; token_ids:
// [after->out_features], the token of each logit. picked: [sum of lengths], -1 from a row on whose logits are not all
// finite.
int32_t forerun_greedy_chains(const ForerunLinear* after, const float* before, const int64_t* token_ids,
                              const float* logits, const int64_t* last, const int64_t* lengths, int64_t chains,
                              int64_t* picked, int32_t threads);
// The first place of the largest of the first `width` logits in each of n rows, which lie `stride` apart; -1 where one of
// these is not finite. probabilities: [n] of these places by softmax over `width`; may be null.
void forerun_argmax(const float* logits, int64_t n, int64_t width, int64_t stride, int64_t* picked, float* probabilities);
// found: [n, count], the places of the largest of each of n rows of `width` logits, the largest first, of equal ones the
// first; count is at most width.
void forerun_topk(const float* logits, int64_t n, int64_t width, int64_t count, int64_t* found);
// Copy what lies in slots[0], slots[1], ... (rising) to the slots start, start + 1, ... at or below them, in all layers
// of one sequence. shapes: [layers][3], heads, width of keys and of values; starts: [layers], bytes into a page;
// number_bytes: of a key's or value's number; where it is 1, the scales are copied too.
void forerun_move_slots(const uint64_t* pages, const int32_t* shapes, const int64_t* starts, int32_t layers,
                        int32_t page, int32_t number_bytes, const int64_t* slots, int64_t n, int64_t start);
// query [rows, H, D], key [rows, H_kv, D], value [rows, H_kv, D_v] -> out [rows, H, D_v]; nothing is rotated.
int32_t forerun_attention(const ForerunAttention* attention, const ForerunRows* rows, const float* query,
                          const float* key, const float* value, float* out, int32_t threads);
}
