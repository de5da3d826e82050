"""The .colibri file as numpy structs and size arithmetic: the Python twin of include/colibri_format.h.

Only numbers and layouts live here, no reading or writing. Sizes are bytes, counts are Python integers (no overflow).
"""

from __future__ import annotations

import numpy as np

VERSION_FULL = 0x0200
PARAMS_VERSION = 1
ALIGNMENT = 64
EXPERT_ALIGNMENT = 2 * 1024 * 1024  # of a layer's experts, if they take at least this much
SMALL_EXPERT_ALIGNMENT = 4096
EXPERT_STRIDE_ALIGNMENT = 4096
TILE_ROWS = 16
TILE_K = 128
MAX_ROTATION = 4096
MAX_EOS = 8

# Storage types (header.dtype, entry.dtype). The C API's COLIBRI_DTYPE_* are these plus one.
F32, F16, BF16, Q8, Q4, BYTES = 0, 1, 2, 3, 4, 16
DTYPE_NAMES = {F32: "f32", F16: "f16", BF16: "bf16", Q8: "q8", Q4: "q4"}
DTYPE_CODES = {name: code for code, name in DTYPE_NAMES.items()}
QUANTISED = (Q8, Q4)  # rotated integers with row scales
ITEM_SIZE = {F32: 4, F16: 2, BF16: 2}  # of the types that rows (of the embedding) can have
TILE_BYTES = {F32: 8192, F16: 4096, BF16: 4096, Q8: 2048, Q4: 1088}  # 16 rows x 128 k

# Roles (entry.role).
EMBEDDING, FINAL_NORM, HEAD, ROPE_INV_FREQ = 1, 2, 3, 4
ATTN_NORM, ATTN_QKV, ATTN_QKV_BIAS, ATTN_Q_NORM, ATTN_K_NORM, ATTN_OUT, ATTN_OUT_BIAS = range(16, 23)
MLP_NORM, ROUTER, EXPERTS, SHARED_EXPERT, SHARED_GATE, DENSE_MLP = range(32, 38)
TOKENIZER, CHAT_TEMPLATE, METADATA = 64, 65, 66
ROLE_NAMES = {
    EMBEDDING: "embedding", FINAL_NORM: "final_norm", HEAD: "head", ROPE_INV_FREQ: "rope_inv_freq",
    ATTN_NORM: "attn_norm", ATTN_QKV: "attn_qkv", ATTN_QKV_BIAS: "attn_qkv_bias", ATTN_Q_NORM: "attn_q_norm",
    ATTN_K_NORM: "attn_k_norm", ATTN_OUT: "attn_out", ATTN_OUT_BIAS: "attn_out_bias", MLP_NORM: "mlp_norm",
    ROUTER: "router", EXPERTS: "experts", SHARED_EXPERT: "shared_expert", SHARED_GATE: "shared_gate",
    DENSE_MLP: "dense_mlp", TOKENIZER: "tokenizer", CHAT_TEMPLATE: "chat_template", METADATA: "metadata",
}  # fmt: skip

QK_NORM_NONE, QK_NORM_HEAD, QK_NORM_WIDTH = 0, 1, 2
ROPE_TABLE, ROPE_DYNAMIC = 0, 1
ROUTER_SOFTMAX = 0
LAYER_DENSE, LAYER_MOE = 0, 1

HEADER = np.dtype([
    ("magic", "S4"), ("version", "<u2"), ("num_layers", "<u2"), ("num_experts", "<u2"), ("top_k", "<u2"),
    ("hidden_size", "<u2"), ("intermediate_size", "<u2"), ("dtype", "<u2"), ("reserved0", "<u2", (3,)),
    ("file_size", "<u8"), ("directory_offset", "<u8"), ("directory_size", "<u8"), ("checksum", "<u4"),
    ("num_entries", "<u4"), ("reserved1", "<u8"),
])  # fmt: skip

PARAMS = np.dtype([
    ("params_size", "<u4"), ("params_version", "<u4"), ("vocab_size", "<u4"), ("hidden_size", "<u4"),
    ("num_layers", "<u4"), ("num_heads", "<u4"), ("num_kv_heads", "<u4"), ("head_dim", "<u4"),
    ("rotary_dim", "<u4"), ("max_position", "<u4"), ("attention_kind", "<u4"), ("norm_kind", "<u4"),
    ("qk_norm", "<u4"), ("rope_kind", "<u4"), ("rope_original_max", "<u4"), ("router_kind", "<u4"),
    ("norm_topk", "<u4"), ("num_experts", "<u4"), ("top_k", "<u4"), ("moe_intermediate", "<u4"),
    ("shared_intermediate", "<u4"), ("shared_gate", "<u4"), ("dense_intermediate", "<u4"), ("activation", "<u4"),
    ("tied_embeddings", "<u4"), ("bos_token", "<i4"), ("num_eos", "<u4"), ("eos_token", "<i4", (MAX_EOS,)),
    ("pad_token", "<i4"), ("rms_norm_eps", "<f4"), ("rope_theta", "<f4"), ("rope_factor", "<f4"),
    ("rope_attention_factor", "<f4"), ("clip_qkv", "<f4"), ("attention_scale", "<f4"), ("routed_scale", "<f4"),
    ("embedding_scale", "<f4"), ("residual_scale", "<f4"), ("logit_scale", "<f4"), ("model_type", "S32"),
    ("reserved", "u1", (296,)),
])  # fmt: skip

LAYER = np.dtype([("kind", "<u4"), ("window", "<u4"), ("reserved", "<u4", (2,))])

ENTRY = np.dtype([
    ("role", "<u2"), ("dtype", "<u2"), ("layer", "<u4"), ("rows", "<u4"), ("k", "<u4"), ("count", "<u4"),
    ("reserved0", "<u4"), ("offset", "<u8"), ("size", "<u8"), ("stride", "<u8"), ("checksum", "<u4"),
    ("reserved1", "<u4"), ("reserved2", "<u8"),
])  # fmt: skip

assert (HEADER.itemsize, PARAMS.itemsize, LAYER.itemsize, ENTRY.itemsize) == (64, 512, 16, 64)


def pad(n: int, to: int) -> int:
    """The least multiple of `to` that is not less than n."""
    return -(-n // to) * to


def block_bytes(dtype: int, k: int) -> int:
    """Bytes of one block of 16 rows, scales not counted."""
    return pad(k, TILE_K) // TILE_K * TILE_BYTES[dtype]


def matrix_bytes(dtype: int, rows: int, k: int) -> int:
    """Bytes of a tiled matrix [rows][k], with the row scales of q8 and q4."""
    blocks = pad(rows, TILE_ROWS) // TILE_ROWS
    return blocks * (block_bytes(dtype, k) + (TILE_ROWS * 4 if dtype in QUANTISED else 0))


def mlp_bytes(dtype: int, intermediate: int, hidden: int) -> int:
    """Bytes of a gated MLP: gate and up in alternating blocks, then down."""
    return matrix_bytes(dtype, 2 * pad(intermediate, TILE_ROWS), hidden) + matrix_bytes(dtype, hidden, intermediate)


def vector_bytes(length: int) -> int:
    """Bytes of an f32 vector, padded."""
    return pad(length, TILE_K) * 4
