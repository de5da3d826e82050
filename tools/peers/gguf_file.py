"""A checkpoint of peers/shapes.py as a GGUF file for llama.cpp, quantised by the PyPI package gguf (of llama.cpp)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .shapes import Checkpoint, Shape

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8": "Q8_0", "q4": "Q4_0"}
"""Our types and the ones of llama.cpp that stand beside them."""

BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8": 8.5, "q4": 4.5}
"""Bits per weight of those: Q8_0 and Q4_0 have a 16-bit scale for every 32."""

_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


def _interleaved(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k in the order of llama.cpp's RoPE for this architecture: pairs that rotate together adjacent."""
    rows, k = matrix.shape
    return np.ascontiguousarray(matrix.reshape(heads, 2, rows // heads // 2, k).swapaxes(1, 2)).reshape(rows, k)


def _metadata(writer: Any, shape: Shape, file_type: Any) -> None:
    writer.add_name(f"{shape.name} of bench_peers")
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inter)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(1000000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("no_vocab")


class _Tensor:
    """One tensor of the file: its name, its size, and how to make its bytes."""

    def __init__(self, name: str, dims: tuple[int, ...], dtype: Any, pieces: Any) -> None:
        self.name, self.dims, self.dtype, self.pieces = name, dims, dtype, pieces


def _tensors(checkpoint: Checkpoint, shape: Shape, dtype: Any, f32: Any) -> list[_Tensor]:
    hidden, inter, kv = shape.hidden, shape.inter, shape.kv_heads * shape.head_dim

    def plain(name: str, source: str, *dims: int, kind: Any = dtype) -> _Tensor:
        return _Tensor(name + ".weight", dims, kind, lambda: [checkpoint[source + ".weight"]])

    def turned(name: str, source: str, rows: int, heads: int) -> _Tensor:
        pieces = lambda: [_interleaved(checkpoint[source + ".weight"], heads)]  # noqa: E731
        return _Tensor(name + ".weight", (rows, hidden), dtype, pieces)

    def stacked(name: str, layer: int, source: str, *dims: int) -> _Tensor:
        pieces = lambda: checkpoint.experts(layer, source, shape.experts)  # noqa: E731
        return _Tensor(name + ".weight", (shape.experts, *dims), dtype, pieces)

    result = [plain("token_embd", "model.embed_tokens", shape.vocab, hidden)]
    for layer in range(shape.layers):
        to, source = f"blk.{layer}.", f"model.layers.{layer}."
        result += [
            plain(to + "attn_norm", source + "input_layernorm", hidden, kind=f32),
            plain(to + "ffn_norm", source + "post_attention_layernorm", hidden, kind=f32),
            turned(to + "attn_q", source + "self_attn.q_proj", hidden, shape.heads),
            turned(to + "attn_k", source + "self_attn.k_proj", kv, shape.kv_heads),
            plain(to + "attn_v", source + "self_attn.v_proj", kv, hidden),
            plain(to + "attn_output", source + "self_attn.o_proj", hidden, hidden),
            plain(to + "ffn_gate_inp", source + "block_sparse_moe.gate", shape.experts, hidden, kind=f32),
        ]
        for name, expert in _EXPERTS.items():
            dims = (hidden, inter) if expert == "w2" else (inter, hidden)
            result.append(stacked(to + name, layer, expert, *dims))
    result.append(plain("output_norm", "model.norm", hidden, kind=f32))
    result.append(plain("output", "lm_head", shape.vocab, hidden))
    return result


def write_gguf(path: Path, folder: Path, shape: Shape, dtype: str) -> None:
    """Write `path` from the checkpoint in `folder`, all matrices but the router in the type.

    The file appears when complete. Needs the package gguf; ImportError if it is not there.
    """
    import gguf

    kind, f32 = gguf.GGMLQuantizationType[TYPES[dtype]], gguf.GGMLQuantizationType.F32
    file_type = {"F32": "ALL_F32"}.get(TYPES[dtype], "MOSTLY_" + TYPES[dtype])
    unfinished = path.with_name(path.name + ".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    _metadata(writer, shape, gguf.LlamaFileType[file_type])
    tensors = _tensors(Checkpoint(folder), shape, kind, f32)
    for tensor in tensors:
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.dtype]
        stored = (*tensor.dims[:-1], tensor.dims[-1] // block * block_bytes)
        writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), math.prod(stored), tensor.dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        pieces = [gguf.quants.quantize(piece, tensor.dtype) for piece in tensor.pieces()]
        writer.write_tensor_data(np.concatenate(pieces) if len(pieces) > 1 else pieces[0])
    writer.close()
    unfinished.rename(path)
