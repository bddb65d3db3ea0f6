// What the threads of a call of forerun_forward_layers share. Included once for each instruction set.

// What layers with latents work in.
struct LatentCall {
    int64_t kv_lora_rank = 0, q_lora_rank = 0, qk_nope_head_dim = 0;
    forerun::Forms reads_q_a, reads_q_nope, reads_attended;
    Input q_a;       // [rows], what queries are made of
    Input q_nope;    // [heads][rows], what is not rotated of queries
    Input attended;  // [heads][rows], sums of latents
    float* sums;     // [rows][heads][kv_lora_rank], the same as attention gives them
};

struct LayersCall {
    // what the caller gives
    const ForerunModel* model;
    const ForerunRows* rows;
    int32_t first, last;  // layers
    float* x;             // [rows][hidden], the residual
    const int32_t* output_layers;
    int32_t num_output_layers;
    float* states;  // [rows][num_output_layers][hidden]
    forerun::Team* team;

    // what the layers work in, one after the other
    Attending plain, windowed;  // groups differ where a window hides slots
    Input normed;               // [rows], what the first products of a layer, and of its feed-forward layer, read
    float *queries, *keys, *values;
    float* rotated;    // queries as attention reads them
    Input attended;    // [rows], what attention gives
    float* gates;      // of what attention gives
    Input gated;       // [rows], what the last product of a feed-forward layer reads
    Input remembered;  // [rows], what the last product of a recurrence reads
    float* branch;     // what is added to the residual, where it is normed or scaled before
    RecurrentCall recurrent;
    ExpertsCall experts;
    LatentCall latent;
};
