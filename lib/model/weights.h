/* weights.h: the directory as named, typed pointers: what the forward pass works with. Immutable and shared. */
#ifndef COLI_WEIGHTS_H
#define COLI_WEIGHTS_H

#include "model/format.h"

/* A tiled matrix [rows][k]. */
typedef struct coli_matrix {
    const uint8_t *tiles;  /* [rows padded / 16] blocks */
    const float *scale;    /* q8, q4: [rows padded], else NULL */
    uint64_t block_bytes;
    uint32_t dtype;        /* COLIBRI_FILE_* */
    uint32_t rows, k;      /* unpadded; rows 0: absent */
} coli_matrix_t;

/* A gated MLP: gate_up has 2 * pad16(intermediate) rows in alternating blocks, down has hidden rows. */
typedef struct coli_mlp {
    coli_matrix_t gate_up, down;
    uint32_t intermediate; /* unpadded */
    uint64_t bytes;        /* of weights and scales */
} coli_mlp_t;

typedef struct coli_layer {
    const float *attn_norm;                 /* [pad128(hidden)] */
    coli_matrix_t qkv, out;
    const float *qkv_bias, *out_bias;       /* or NULL */
    const float *q_norm, *k_norm;           /* or NULL */
    const float *mlp_norm;
    uint32_t window;                        /* 0: full attention */
    bool is_moe;
    coli_matrix_t router;                   /* f32 [num_experts][hidden] */
    const uint8_t *experts;                 /* expert e at experts + e * expert_stride; NULL: in the file alone */
    uint64_t experts_offset;                /* of expert 0 in the file */
    uint64_t expert_stride;
    uint32_t expert_dtype;
    bool has_shared;
    coli_mlp_t shared;
    coli_matrix_t shared_gate;              /* f32 [1][hidden]; rows 0: no gate */
    coli_mlp_t dense;                       /* of a dense layer */
} coli_layer_t;

typedef struct coli_weights {
    const colibri_file_params *params;
    uint32_t head_dim_padded;               /* pad16 */
    uint32_t q_rows, kv_rows;               /* num_heads * D, num_kv_heads * D */
    const uint8_t *embedding;               /* row-major */
    uint64_t embedding_stride;              /* bytes */
    uint32_t embedding_dtype;
    const float *final_norm;
    coli_matrix_t head;
    const float *rope_inv_freq;             /* [rotary_dim / 2], NULL with dynamic RoPE */
    coli_layer_t *layers;                   /* [num_layers] */
    bool quantised_experts, quantised_others; /* is any routed expert, any other matrix q8 or q4? */
} coli_weights_t;

/* An opened model: colibri_model_t. */
struct colibri_model_t {
    coli_file_t file;                       /* open as long as the model is: what is mapped, whatever its name leads to by now.
                                               Handle -1: none, the bytes are the caller's memory */
    coli_file_map_t map;                    /* or that memory */
    coli_directory_t directory;
    coli_weights_t weights;
    const struct coli_tokenizer *tokenizer; /* NULL: the file has none. Its tables are the directory's bytes */
    char *path;                             /* for messages */
    uint64_t num_parameters, active_bytes;  /* as colibri_model_info_t has them */
    _Atomic int32_t references;
    _Atomic uint32_t guarded;               /* 1: a session asked for guard_mapping and it is in effect */
    _Atomic uint32_t memory_locked;         /* 1: a session has locked that memory (a mapping's locks go with it) */
    _Atomic uint32_t lost;                  /* 1: guarded pages could not be read: the weights are no longer the file's */
};

/* Where the payload of an entry lies in memory. */
typedef const uint8_t *(*coli_address_fn)(const void *context, uint32_t entry);
/* View the directory (already checked) as weights at these addresses (NULL: of the mapping); `layers` has room for num_layers.
 * Cannot fail. */
void coli_weights_view(const coli_directory_t *directory, coli_address_fn address, const void *context, coli_layer_t *layers,
                       coli_weights_t *weights);
/* Unpadded parameters of all tensors, and the weight bytes (scales included) of products one decoded token takes part in. */
void coli_weights_totals(const coli_directory_t *directory, uint64_t *num_parameters, uint64_t *active_bytes);
/* The MLP at an address, as stored in COLIBRI_ROLE_EXPERTS, _SHARED_EXPERT, _DENSE_MLP. */
coli_mlp_t coli_mlp_view(const uint8_t *data, uint32_t dtype, uint32_t intermediate, uint32_t hidden);

/* map -> format -> weights -> tokenizer; one reference. *model stays untouched on failure. (model.c) */
colibri_status_t coli_model_open(const char *path, colibri_model_t **model);
/* The same from the caller's memory. */
colibri_status_t coli_model_open_memory(const void *data, size_t size, colibri_model_t **model);
void coli_model_retain(colibri_model_t *model);
void coli_model_release(colibri_model_t *model); /* drops one reference */

#endif
