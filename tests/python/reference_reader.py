"""Reads a .colibri file by its specification alone (include/colibri_format.h), sharing no code with the package: the
oracle of the converter's tests. Slow and plain on purpose.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ROLES = {
    1: "embedding",
    2: "final_norm",
    3: "head",
    4: "rope_inv_freq",
    16: "attn_norm",
    17: "attn_qkv",
    18: "attn_qkv_bias",
    19: "attn_q_norm",
    20: "attn_k_norm",
    21: "attn_out",
    22: "attn_out_bias",
    32: "mlp_norm",
    33: "router",
    34: "experts",
    35: "shared_expert",
    36: "shared_gate",
    37: "dense_mlp",
    64: "tokenizer",
    65: "chat_template",
    66: "metadata",
}
PARAMS = [
    "params_size",
    "params_version",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rotary_dim",
    "max_position",
    "attention_kind",
    "norm_kind",
    "qk_norm",
    "rope_kind",
    "rope_original_max",
    "router_kind",
    "norm_topk",
    "num_experts",
    "top_k",
    "moe_intermediate",
    "shared_intermediate",
    "shared_gate",
    "dense_intermediate",
    "activation",
    "tied_embeddings",
]
FLOATS = [
    "rms_norm_eps",
    "rope_theta",
    "rope_factor",
    "rope_attention_factor",
    "clip_qkv",
    "attention_scale",
    "routed_scale",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
]
F32, F16, BF16, Q8, Q4, BYTES = 0, 1, 2, 3, 4, 16
ITEM = {F32: 4, F16: 2, BF16: 2, Q8: 1, Q4: 17 / 32}
LEVELS = np.array([-18, -14, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 14, 18])


def pad(n: int, to: int) -> int:
    """Up to a multiple."""
    return (n + to - 1) // to * to


def hadamard(n: int) -> np.ndarray:
    """Sylvester's matrix, entries +1 and -1."""
    h = np.ones((1, 1), np.float64)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def integers(data: bytes, dtype: int, rows: int, k: int) -> np.ndarray:
    """The blocks of a q8 or q4 matrix as integers [rows padded][k padded]."""
    if dtype == Q8:
        q = np.frombuffer(data, np.int8).reshape(rows // 16, k // 4, 16, 4).transpose(0, 2, 1, 3).reshape(rows, k)
        assert q.min() >= -127
        return q
    q = np.empty((rows, k), np.int64)
    for block in range(rows // 16):
        for piece in range(k // 128):
            part = data[(block * (k // 128) + piece) * 1088 :][:1088]
            for r in range(16):
                (scales,) = struct.unpack_from("<I", part, 4 * r)
                for c in range(128):
                    byte = part[64 + c // 8 * 64 + 4 * r + c % 4]
                    scale = scales >> c // 16 * 4 & 15
                    assert scale < 8
                    q[block * 16 + r, piece * 128 + c] = LEVELS[byte >> (4 if c & 4 else 0) & 15] * scale
    return q


def untile(data: bytes, dtype: int, rows: int, k: int) -> np.ndarray:
    """A tiled matrix as float32 [rows padded][k padded]; q8 and q4 are scaled and rotated back."""
    rows, k = pad(rows, 16), pad(k, 128)
    if dtype == F32:
        return np.frombuffer(data, "<f4").reshape(rows // 16, k, 16).transpose(0, 2, 1).reshape(rows, k)
    if dtype in (F16, BF16):
        x = np.frombuffer(data, "<f2" if dtype == F16 else "<u2").reshape(rows // 16, k // 2, 16, 2)
        x = x.transpose(0, 2, 1, 3).reshape(rows, k)
        return x.astype(np.float32) if dtype == F16 else (x.astype(np.uint32) << 16).view(np.float32)
    end = int(rows * k * ITEM[dtype])
    q = integers(data[:end], dtype, rows, k)
    scale = np.frombuffer(data[end:], "<f4")
    block = min(k & -k, 4096)
    return (
        ((q * scale[:, None].astype(np.float64)).reshape(rows, -1, block) @ hadamard(block))
        .reshape(rows, k)
        .astype(np.float32)
    )


def matrix_bytes(dtype: int, rows: int, k: int) -> int:
    """With scales."""
    return int(pad(rows, 16) * (pad(k, 128) * ITEM[dtype] + (4 if dtype in (Q8, Q4) else 0)))


class File:
    """A parsed and checked file: `header`, `params`, `layers` [(kind, window)], `entries` {(role, layer): entry}."""

    def __init__(self, path: Path) -> None:
        self.data = Path(path).read_bytes()
        self._header()
        at = self.header["directory_offset"]
        self._params(self.data[at : at + 512])
        at += 512
        self.layers = []
        for _ in range(self.header["num_layers"]):
            kind, window, *reserved = struct.unpack_from("<4I", self.data, at)
            assert reserved == [0, 0]
            self.layers.append((kind, window))
            at += 16
        self.entries: dict[tuple[str, int], dict[str, Any]] = {}
        self._entries(at)

    def _header(self) -> None:
        names = ("version", "num_layers", "num_experts", "top_k", "hidden_size", "intermediate_size", "dtype")
        magic, *rest = struct.unpack_from("<4s10H3Q2IQ", self.data)
        self.header = dict(zip(names, rest[:7], strict=True))
        assert magic == b"COLI" and rest[7:10] == [0, 0, 0] and rest[15] == 0
        keys = ("file_size", "directory_offset", "directory_size", "checksum", "num_entries")
        self.header.update(zip(keys, rest[10:15], strict=True))
        h = self.header
        assert h["version"] == 0x0200 and h["file_size"] == len(self.data) and h["directory_offset"] % 64 == 0
        assert h["directory_size"] == 512 + 16 * h["num_layers"] + 64 * h["num_entries"]
        blank = self.data[:48] + bytes(4) + self.data[52:64]
        directory = self.data[h["directory_offset"] : h["directory_offset"] + h["directory_size"]]
        assert h["checksum"] == zlib.crc32(directory, zlib.crc32(blank))

    def _params(self, data: bytes) -> None:
        self.params: dict[str, Any] = dict(zip(PARAMS, struct.unpack_from("<25I", data), strict=True))
        bos, num_eos, *eos, pad_token = struct.unpack_from("<iI8ii", data, 100)
        self.params.update(bos_token=bos, eos_token=eos[:num_eos], pad_token=pad_token)
        assert not any(eos[num_eos:]) and not any(data[216:])
        self.params.update(zip(FLOATS, struct.unpack_from("<10f", data, 144), strict=True))
        self.params["model_type"] = data[184:216].rstrip(b"\0").decode()
        assert self.params["params_size"] == 512 and self.params["params_version"] == 1

    def _entries(self, at: int) -> None:
        keys = [
            "role",
            "dtype",
            "layer",
            "rows",
            "k",
            "count",
            "reserved0",
            "offset",
            "size",
            "stride",
            "checksum",
            "reserved1",
            "reserved2",
        ]
        end = at + 64 * self.header["num_entries"]
        last = end
        for position in range(at, end, 64):
            e = dict(zip(keys, struct.unpack_from("<2H5I3Q2IQ", self.data, position), strict=True))
            name = ROLES[e["role"]]
            assert e["offset"] % 64 == 0 and last <= e["offset"] <= len(self.data) - e["size"]
            assert (e["reserved0"], e["reserved1"], e["reserved2"]) == (0, 0, 0) and (
                name,
                e["layer"],
            ) not in self.entries
            assert zlib.crc32(self.data[e["offset"] : e["offset"] + e["size"]]) == e["checksum"]
            last = e["offset"] + e["size"]
            self.entries[name, e["layer"]] = e

    def bytes_of(self, role: str, layer: int = 0) -> bytes:
        """A payload."""
        e = self.entries[role, layer]
        return self.data[e["offset"] : e["offset"] + e["size"]]

    def vector(self, role: str, layer: int = 0) -> np.ndarray:
        """An f32 vector, unpadded; the padding must be zero."""
        e, data = self.entries[role, layer], np.frombuffer(self.bytes_of(role, layer), "<f4")
        assert e["dtype"] == F32 and e["rows"] == 1 and data.size == pad(e["k"], 128) and not data[e["k"] :].any()
        return data[: e["k"]]

    def matrix(self, role: str, layer: int = 0) -> np.ndarray:
        """A matrix as float32 [rows][k]; the padding must be zero."""
        e = self.entries[role, layer]
        return self._matrix(self.bytes_of(role, layer), e["dtype"], e["rows"], e["k"])

    def _matrix(self, data: bytes, dtype: int, rows: int, k: int) -> np.ndarray:
        assert len(data) == matrix_bytes(dtype, rows, k)
        whole = untile(data, dtype, rows, k)
        assert not whole[rows:].any() and (dtype in (Q8, Q4) or not whole[:, k:].any())
        return whole[:rows, :k]

    def embedding(self) -> np.ndarray:
        """float32 [vocab][hidden]."""
        e = self.entries["embedding", 0]
        assert e["stride"] == pad(e["k"] * ITEM[e["dtype"]], 64) and e["size"] == e["rows"] * e["stride"]
        rows = np.frombuffer(self.bytes_of("embedding"), np.uint8).reshape(e["rows"], e["stride"])
        assert not rows[:, e["k"] * ITEM[e["dtype"]] :].any()
        packed = np.ascontiguousarray(rows[:, : e["k"] * ITEM[e["dtype"]]])
        if e["dtype"] == BF16:
            return (packed.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return packed.view("<f4" if e["dtype"] == F32 else "<f2").astype(np.float32)

    def mlps(self, role: str, layer: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(gate [I][H], up [I][H], down [H][I]) of each expert, or of the one MLP."""
        e, data = self.entries[role, layer], self.bytes_of(role, layer)
        width, hidden, dtype = e["rows"], e["k"], e["dtype"]
        top, bottom = matrix_bytes(dtype, 2 * pad(width, 16), hidden), matrix_bytes(dtype, hidden, width)
        stride = e["stride"] or top + bottom
        if role == "experts":
            assert stride == pad(top + bottom, 4096) and e["offset"] % (2 << 20 if e["size"] >= 2 << 20 else 4096) == 0
        assert len(data) == e["count"] * stride
        result = []
        for i in range(e["count"]):
            part = data[i * stride : (i + 1) * stride]
            both = untile(part[:top], dtype, 2 * pad(width, 16), hidden).reshape(-1, 2, 16, pad(hidden, 128))
            gate, up = (both[:, way].reshape(-1, pad(hidden, 128)) for way in (0, 1))
            assert not gate[width:].any() and not up[width:].any() and not any(part[top + bottom :])
            down = self._matrix(part[top : top + bottom], dtype, hidden, width)
            result.append((gate[:width, :hidden], up[:width, :hidden], down))
        return result
