/* colibri_format.h: the .colibri file, version 0x0200, as C structs. This header is the specification.
 *
 * All integers are little-endian, all floats IEEE 754. Offsets count bytes from the start of the file. Every struct here
 * has the same layout under every ABI (natural alignment, no implicit padding; asserted at the end of this file).
 *
 *   0                 colibri_file_header          64 bytes
 *   directory_offset  colibri_file_params          512 bytes    \
 *                     colibri_file_layer           [num_layers]  |  "the directory": directory_size bytes, contiguous
 *                     colibri_file_entry           [num_entries] /
 *   entry.offset      payloads, each 64-byte aligned, none overlapping, all inside file_size
 *
 * Order. The directory comes before every payload. Entries stand in ascending order of offset (so payloads do not overlap if
 * each ends before the next begins), and the entries of one role in ascending order of layer. Gaps are allowed.
 *
 * Limits. num_layers 1 ... 65535; vocab_size at most 2^24; hidden_size and moe_intermediate at most 65535;
 * shared_intermediate, dense_intermediate and num_heads * D (see Heads) at most 131072; head_dim at most 1024; num_experts
 * at most 65535; max_position, rope_original_max and window at most 2^30; tokenizer, chat template and metadata at most
 * COLIBRI_FILE_MAX_BYTES each. Floats are finite; eps, the attention factor and
 * all scales are positive. Flags are 0 or 1. bos_token and pad_token are -1 or an id below vocab_size, eos_token[i] with
 * i < num_eos is an id.
 *
 * Presence. Roles that are not called optional are there exactly when the parameters speak of them: per layer the norms,
 * qkv and out; in MoE layers router and experts, with shared_intermediate the shared expert, with shared_gate its gate; in
 * dense layers the dense MLP. num_experts, top_k, moe_intermediate, shared_intermediate are 0 if no layer is a MoE layer,
 * dense_intermediate is 0 if none is dense. Norms, biases, router and shared gate are f32; embedding f32, f16 or bf16; the
 * other matrices f32, f16, bf16, q8 or q4; the experts have header.dtype (0 ... 4, also if there are none).
 *
 * A reader must treat every number as hostile: check it against the file's real size with arithmetic that cannot overflow,
 * and refuse unknown versions, roles marked required, dtypes, non-zero reserved bytes and duplicate (role, layer) pairs.
 *
 * Version 0x0100 ("bare") shares the first 18 bytes of the header; there all later header bytes are zero and row-major
 * weights follow at byte 64 with no directory.
 *
 * --- Tiles -----------------------------------------------------------------------------------------------------------
 * A matrix W[rows][k] (y = W x) is stored in blocks of 16 rows; a block is a sequence of 64-byte steps over k:
 *     f32        step = 16 rows x 1 k     element (r, c) of a block at  (c * 16 + r) * 4
 *     f16, bf16  step = 16 rows x 2 k     element (r, c) of a block at  ((c / 2) * 32 + r * 2 + c % 2) * 2
 *     q8         step = 16 rows x 4 k     element (r, c) of a block at  (c / 4) * 64 + r * 4 + c % 4
 * A block of a q4 matrix is a sequence of pieces of 16 rows x 128 k, 1088 bytes each: 64 bytes of integer scales, then 16
 * steps of 16 rows x 8 k:
 *     scales     uint32 r of the 16 belongs to row r; its nibble g (bits 4g ... 4g + 3) is the scale s, 0 ... 7, of the
 *                piece's k 16g ... 16g + 15. The nibble's top bit is 0; readers ignore it.
 *     step j     byte r * 4 + i: low nibble = row r, k 8j + i; high nibble = row r, k 8j + 4 + i    (i < 4, k in the piece)
 *     nibble n   means q = level[n] * s, level = -18 -14 -11 -9 -7 -5 -3 -1 1 3 5 7 9 11 14 18 (of the integer levels that
 *                s = 7 keeps within 127, those with the least squared error for Gaussian weights, s chosen for every 16). So
 *                the low nibbles of a step are one q8 step and the high nibbles the next, exactly.
 * rows is padded to a multiple of 16 and k to a multiple of 128, both with zeros. After the blocks of a q8 or q4 matrix
 * follow its row scales, f32 [rows padded]. So with R = pad16(rows), K = pad128(k):
 *     matrix bytes = R * K * (4 | 2 | 1 | 17/32) + (q8, q4 ? R * 4 : 0)        always a multiple of 64
 * q8 and q4 hold integers q (in q8 -127 ... 127) of the rotated matrix: every row, cut into parts of B = the largest power
 * of two that divides K, at most 4096, is multiplied by the B x B Hadamard matrix (Sylvester order, entries +1 and -1) and
 * divided by B; W ~ row_scale * q. The reader multiplies its activations by the same Hadamard matrix (not divided).
 *
 * --- Heads -----------------------------------------------------------------------------------------------------------
 * head_dim is padded to D = pad16(head_dim) inside the file: head h of q, k or v occupies rows h * D ... h * D + head_dim - 1,
 * the rows up to (h + 1) * D are zero; the o projection's k and the biases and whole-width norms follow the same pattern.
 *
 * --- MLPs ------------------------------------------------------------------------------------------------------------
 * A gated MLP (expert, shared expert or dense layer) of intermediate size I on hidden size H is one contiguous piece:
 *     gate_up  matrix of 2 * pad16(I) rows, k = H: 16-row blocks of gate and up alternate (gate 0, up 0, gate 1, up 1, ...);
 *              in q8 and q4 its row scales follow in the same alternating block order
 *     down     matrix of H rows, k = I
 * In a COLIBRI_ROLE_EXPERTS entry expert e of the layer lies at offset + e * stride.
 */
#ifndef COLIBRI_FORMAT_H
#define COLIBRI_FORMAT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLIBRI_FILE_MAGIC "COLI"            /* 43 4F 4C 49 */
#define COLIBRI_FILE_VERSION_BARE 0x0100
#define COLIBRI_FILE_VERSION_FULL 0x0200
#define COLIBRI_FILE_PARAMS_VERSION 1
#define COLIBRI_FILE_ALIGNMENT 64            /* of every payload */
#define COLIBRI_FILE_EXPERT_ALIGNMENT 2097152 /* of a layer's experts, if they take at least this much; else 4096 */
#define COLIBRI_FILE_EXPERT_STRIDE_ALIGNMENT 4096 /* of entry.stride in COLIBRI_ROLE_EXPERTS */
#define COLIBRI_FILE_MAX_BYTES 1073741824u   /* of a payload that is bytes */
#define COLIBRI_TILE_ROWS 16
#define COLIBRI_TILE_K 128                   /* k is padded to a multiple of this */
#define COLIBRI_MAX_ROTATION 4096
#define COLIBRI_Q4_PIECE 1088                /* bytes of 16 rows x 128 k in q4 */
#define COLIBRI_MAX_EOS 8

/* Storage types, as in header.dtype and entry.dtype. (The API's COLIBRI_DTYPE_* are these plus one: there 0 is "default".) */
#define COLIBRI_FILE_F32 0
#define COLIBRI_FILE_F16 1
#define COLIBRI_FILE_BF16 2
#define COLIBRI_FILE_Q8 3
#define COLIBRI_FILE_Q4 4                    /* 4.25 bits: 16 levels times an integer scale for 16 k of a row */
#define COLIBRI_FILE_BYTES 16                /* entry.dtype of tokenizer, chat template and metadata */

typedef struct colibri_file_header {
    uint8_t magic[4];          /*  0 */
    uint16_t version;          /*  4 */
    uint16_t num_layers;       /*  6 */
    uint16_t num_experts;      /*  8 */
    uint16_t top_k;            /* 10 experts per token */
    uint16_t hidden_size;      /* 12 */
    uint16_t intermediate_size;/* 14 of one routed expert */
    uint16_t dtype;            /* 16 of the experts */
    uint16_t reserved0[3];     /* 18 zero */
    uint64_t file_size;        /* 24 */
    uint64_t directory_offset; /* 32 64-byte aligned */
    uint64_t directory_size;   /* 40 */
    uint32_t checksum;         /* 48 CRC-32 (zlib, ISO-HDLC) of these 64 bytes with this field zero, then the directory */
    uint32_t num_entries;      /* 52 */
    uint64_t reserved1;        /* 56 zero */
} colibri_file_header;

enum { COLIBRI_QK_NORM_NONE = 0, COLIBRI_QK_NORM_HEAD = 1 /* RMSNorm of each head */, COLIBRI_QK_NORM_WIDTH = 2 /* of all heads */ };
enum { COLIBRI_ROPE_TABLE = 0 /* inv_freq tensor as it stands */, COLIBRI_ROPE_DYNAMIC = 1 /* "dynamic NTK", see rope_factor */ };
enum { COLIBRI_ROUTER_SOFTMAX = 0 /* softmax over all experts, then top-k */ };
enum { COLIBRI_LAYER_DENSE = 0, COLIBRI_LAYER_MOE = 1 };

/* Model parameters. Sizes are the model's own (unpadded). */
typedef struct colibri_file_params {
    uint32_t params_size;        /*   0 = 512 */
    uint32_t params_version;     /*   4 = COLIBRI_FILE_PARAMS_VERSION */
    uint32_t vocab_size;         /*   8 rows of the embedding and of the head */
    uint32_t hidden_size;        /*  12 */
    uint32_t num_layers;         /*  16 */
    uint32_t num_heads;          /*  20 */
    uint32_t num_kv_heads;       /*  24 divides num_heads */
    uint32_t head_dim;           /*  28 even */
    uint32_t rotary_dim;         /*  32 leading part of a head that is rotated, even, <= head_dim; halves are paired (i, i + rotary_dim / 2) */
    uint32_t max_position;       /*  36 positions the model was made for */
    uint32_t attention_kind;     /*  40 0: grouped-query attention, causal */
    uint32_t norm_kind;          /*  44 0: RMSNorm, weight * x / sqrt(mean(x^2) + eps) */
    uint32_t qk_norm;            /*  48 COLIBRI_QK_NORM_* */
    uint32_t rope_kind;          /*  52 COLIBRI_ROPE_* */
    uint32_t rope_original_max;  /*  56 dynamic: original max_position_embeddings */
    uint32_t router_kind;        /*  60 COLIBRI_ROUTER_* */
    uint32_t norm_topk;          /*  64 1: the weights of the chosen experts are divided by their sum */
    uint32_t num_experts;        /*  68 0: no layer has experts */
    uint32_t top_k;              /*  72 */
    uint32_t moe_intermediate;   /*  76 of one routed expert */
    uint32_t shared_intermediate;/*  80 0: no shared expert (several are stored as one, concatenated) */
    uint32_t shared_gate;        /*  84 1: the shared expert's output is multiplied by sigmoid(shared_gate . x) */
    uint32_t dense_intermediate; /*  88 of dense layers, 0 if there are none */
    uint32_t activation;         /*  92 0: SiLU, down(silu(gate x) * up x) */
    uint32_t tied_embeddings;    /*  96 for information: the head repeats the embedding */
    int32_t bos_token;           /* 100 -1: none */
    uint32_t num_eos;            /* 104 <= COLIBRI_MAX_EOS */
    int32_t eos_token[COLIBRI_MAX_EOS]; /* 108 tokens that end a generation */
    int32_t pad_token;           /* 140 -1: none */
    float rms_norm_eps;          /* 144 */
    float rope_theta;            /* 148 */
    float rope_factor;           /* 152 dynamic: at position p >= rope_original_max, theta becomes
                                        theta * (factor * (p + 1) / original_max - (factor - 1)) ^ (d / (d - 2)) */
    float rope_attention_factor; /* 156 multiplies cos and sin (yarn), else 1 */
    float clip_qkv;              /* 160 0: none; else q, k, v are clamped to [-clip, clip] before RoPE */
    float attention_scale;       /* 164 of q . k, usually 1 / sqrt(head_dim) */
    float routed_scale;          /* 168 multiplies the chosen experts' weights */
    float embedding_scale;       /* 172 */
    float residual_scale;        /* 176 of both sublayers' outputs */
    float logit_scale;           /* 180 multiplies the logits */
    uint8_t model_type[32];      /* 184 Hugging Face model_type, zero-terminated, for information only */
    uint8_t reserved[296];       /* 216 zero */
} colibri_file_params;

typedef struct colibri_file_layer {
    uint32_t kind;               /*  0 COLIBRI_LAYER_* */
    uint32_t window;             /*  4 0: full attention; else the query at p sees keys p - window + 1 ... p */
    uint32_t reserved[2];        /*  8 zero */
} colibri_file_layer;

/* What a payload is. entry.layer is 0 for the first four and the last group. "vector": f32, padded with zeros to pad128. */
enum {
    COLIBRI_ROLE_EMBEDDING = 1,     /* row-major [vocab][hidden] f32, f16 or bf16; entry.stride = bytes from row to row, 64-aligned */
    COLIBRI_ROLE_FINAL_NORM = 2,    /* vector [hidden] */
    COLIBRI_ROLE_HEAD = 3,          /* matrix [vocab][hidden] */
    COLIBRI_ROLE_ROPE_INV_FREQ = 4, /* vector [rotary_dim / 2]; not with COLIBRI_ROPE_DYNAMIC */

    COLIBRI_ROLE_ATTN_NORM = 16,    /* vector [hidden] */
    COLIBRI_ROLE_ATTN_QKV = 17,     /* matrix [(num_heads + 2 num_kv_heads) * D][hidden]: all q heads, all k heads, all v heads */
    COLIBRI_ROLE_ATTN_QKV_BIAS = 18,/* vector, optional */
    COLIBRI_ROLE_ATTN_Q_NORM = 19,  /* vector [D] or [num_heads * D], with qk_norm */
    COLIBRI_ROLE_ATTN_K_NORM = 20,  /* vector [D] or [num_kv_heads * D] */
    COLIBRI_ROLE_ATTN_OUT = 21,     /* matrix [hidden][num_heads * D] */
    COLIBRI_ROLE_ATTN_OUT_BIAS = 22,/* vector [hidden], optional */

    COLIBRI_ROLE_MLP_NORM = 32,     /* vector [hidden] */
    COLIBRI_ROLE_ROUTER = 33,       /* f32 matrix [num_experts][hidden] */
    COLIBRI_ROLE_EXPERTS = 34,      /* num_experts MLPs, count = num_experts, rows = moe_intermediate, k = hidden */
    COLIBRI_ROLE_SHARED_EXPERT = 35,/* one MLP, rows = shared_intermediate, k = hidden */
    COLIBRI_ROLE_SHARED_GATE = 36,  /* f32 matrix [1][hidden] */
    COLIBRI_ROLE_DENSE_MLP = 37,    /* one MLP, rows = dense_intermediate, k = hidden */

    COLIBRI_ROLE_TOKENIZER = 64,    /* bytes, see lib/model/tokenizer.h; optional */
    COLIBRI_ROLE_CHAT_TEMPLATE = 65,/* UTF-8 Jinja text; optional */
    COLIBRI_ROLE_METADATA = 66      /* UTF-8 JSON object: where the file came from; optional */
};

typedef struct colibri_file_entry {
    uint16_t role;             /*  0 COLIBRI_ROLE_* */
    uint16_t dtype;            /*  2 COLIBRI_FILE_* */
    uint32_t layer;            /*  4 */
    uint32_t rows;             /*  8 unpadded; vectors: 1; bytes: 1 */
    uint32_t k;                /* 12 unpadded; vectors: their length; bytes: 0 */
    uint32_t count;            /* 16 number of MLPs in an EXPERTS entry, else 1 */
    uint32_t reserved0;        /* 20 zero */
    uint64_t offset;           /* 24 64-byte aligned */
    uint64_t size;             /* 32 of the whole payload in bytes (EXPERTS: count * stride; bytes: 1 or more) */
    uint64_t stride;           /* 40 EXPERTS: bytes from expert to expert, at least one MLP; EMBEDDING: from row to row,
                                     pad64(hidden * element size); else 0 */
    uint32_t checksum;         /* 48 CRC-32 of the payload's `size` bytes */
    uint32_t reserved1;        /* 52 zero */
    uint64_t reserved2;        /* 56 zero */
} colibri_file_entry;

#if defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
_Static_assert(sizeof(colibri_file_header) == 64, "header");
_Static_assert(sizeof(colibri_file_params) == 512, "params");
_Static_assert(sizeof(colibri_file_layer) == 16, "layer");
_Static_assert(sizeof(colibri_file_entry) == 64, "entry");
#endif

#ifdef __cplusplus
}
#endif
#endif
