"""From a ModelSpec and a Checkpoint to the list of the file's payloads, in file order. Nothing large is read here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from . import layout, pieces
from .checkpoint import Checkpoint
from .layout import BF16, BYTES, F16, F32, QUANTISED, pad
from .pieces import Piece
from .sources import PaddedHeadColumns, PaddedHeadRows, Source, Stack, TensorRows
from .spec import MlpNames, ModelSpec, PackedNames


@dataclass
class Payload:
    """One entry of the directory; offset and checksum are filled in by the writer."""

    role: int
    dtype: int
    layer: int
    rows: int
    k: int
    size: int
    pieces: Callable[[], Iterator[Piece]]
    count: int = 1
    stride: int = 0
    alignment: int = layout.ALIGNMENT


class Planner:
    """Takes every tensor of the checkpoint once and lays it out. dtype and other are the layout codes of the routed
    experts and of the other matrices.
    """

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, dtype: int, other: int, rule: str) -> None:
        self.spec, self.checkpoint, self.dtype, self.other, self.rule = spec, checkpoint, dtype, other, rule
        self.padded_head = pad(spec.head_dim, layout.TILE_ROWS)
        self.payloads: list[Payload] = []

    def run(self) -> list[Payload]:
        """All payloads but the texts. Raises if a tensor is missing, left over or of another shape."""
        embedding, head = self._ends()
        norm = self._take(self.spec.names.final_norm, (self.spec.hidden_size,))
        self._embedding(embedding)
        self._vector(layout.FINAL_NORM, 0, norm)
        self._rope()
        for layer in range(self.spec.num_layers):
            self._attention(layer)
            self._vector(
                layout.MLP_NORM, layer, self._take(self._at(self.spec.names.mlp_norm, layer), (self.spec.hidden_size,))
            )
            if self.spec.sparse[layer]:
                self._moe(layer)
            else:
                self._mlp(layout.DENSE_MLP, layer, self.spec.names.dense, self.spec.dense_intermediate)
        self._matrix(layout.HEAD, 0, head, self.other)
        self.checkpoint.finish()
        return self.payloads

    # ---- The parts of a model

    def _ends(self) -> tuple[TensorRows | None, TensorRows | None]:
        """Embedding and head. Tied: one may stand for both; if the file has both, each is used as it is."""
        names, shape = self.spec.names, (self.spec.vocab_size, self.spec.hidden_size)
        if self.spec.tied and not self.checkpoint.has(names.head):
            embedding = self._take(names.embedding, shape)
            return embedding, embedding
        if self.spec.tied and not self.checkpoint.has(names.embedding):
            head = self._take(names.head, shape)
            return head, head
        return self._take(names.embedding, shape), self._take(names.head, shape)

    def _embedding(self, source: TensorRows | None) -> None:
        if source is None:
            return
        dtype = self.other
        if dtype in QUANTISED:
            dtype = source.dtype if source.dtype in (F16, BF16) else F16
        stride = pad(source.k * layout.ITEM_SIZE[dtype], layout.ALIGNMENT)
        self._add(layout.EMBEDDING, dtype, 0, source.rows, source.k, source.rows * stride,
                  lambda: pieces.rows_of(source, dtype, stride), stride=stride)  # fmt: skip

    def _rope(self) -> None:
        values = self.spec.rope.inv_freq
        if values is not None:
            self._add(
                layout.ROPE_INV_FREQ,
                F32,
                0,
                1,
                values.size,
                layout.vector_bytes(values.size),
                lambda: pieces.vector(values),
            )

    def _attention(self, layer: int) -> None:
        spec, prefix = self.spec, self._at(self.spec.names.attention, layer)
        hidden, dim, padded = spec.hidden_size, spec.head_dim, self.padded_head
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        norm = self._take(self._at(spec.names.attn_norm, layer), (hidden,))
        weights = [self._take(f"{prefix}{x}_proj.weight", (n * dim, hidden)) for x, n in heads.items()]
        out = self._take(f"{prefix}o_proj.weight", (hidden, spec.num_heads * dim))
        self._vector(layout.ATTN_NORM, layer, norm)
        self._matrix(layout.ATTN_QKV, layer, self._stack([self._pad_rows(w) for w in weights]), self.other)
        if spec.qkv_bias:
            biases = [self._take(f"{prefix}{x}_proj.bias", (n * dim,)) for x, n in heads.items()]
            self._vector(layout.ATTN_QKV_BIAS, layer, self._stack([self._pad_rows(_column(b)) for b in biases]))
        if spec.qk_norm:
            whole = spec.qk_norm == layout.QK_NORM_WIDTH
            for role, x in ((layout.ATTN_Q_NORM, "q"), (layout.ATTN_K_NORM, "k")):
                weight = self._take(f"{prefix}{x}_norm.weight", ((heads[x] if whole else 1) * dim,))
                self._vector(role, layer, self._pad_rows(_column(weight)))
        self._matrix(layout.ATTN_OUT, layer, None if out is None else PaddedHeadColumns(out, dim, padded), self.other)
        if spec.out_bias:
            self._vector(layout.ATTN_OUT_BIAS, layer, self._take(f"{prefix}o_proj.bias", (hidden,)))

    def _moe(self, layer: int) -> None:
        spec, names = self.spec, self.spec.names
        router = self._first_there(names.routers, layer)
        self._matrix(layout.ROUTER, layer, self._take(router, (spec.num_experts, spec.hidden_size)), F32)
        if spec.shared_intermediate:
            self._mlp(layout.SHARED_EXPERT, layer, names.shared, spec.shared_intermediate)
        if spec.shared_gate:
            self._matrix(
                layout.SHARED_GATE, layer, self._take(self._at(names.shared_gate, layer), (1, spec.hidden_size)), F32
            )
        parts = self._experts(layer)
        width, hidden = spec.moe_intermediate, spec.hidden_size
        stride = pad(layout.mlp_bytes(self.dtype, width, hidden), layout.EXPERT_STRIDE_ALIGNMENT)
        size = spec.num_experts * stride
        alignment = layout.EXPERT_ALIGNMENT if size >= layout.EXPERT_ALIGNMENT else layout.SMALL_EXPERT_ALIGNMENT
        self._add(layout.EXPERTS, self.dtype, layer, width, hidden, size,
                  lambda: pieces.experts(parts, self.dtype, self.rule, stride),
                  count=spec.num_experts, stride=stride, alignment=alignment)  # fmt: skip

    def _experts(self, layer: int) -> list:
        """(gate, up, down) of each expert."""
        names = self._expert_names(layer)
        spec, width, hidden = self.spec, self.spec.moe_intermediate, self.spec.hidden_size
        if isinstance(names, MlpNames):
            return [self._take_mlp(names, layer, width, expert) for expert in range(spec.num_experts)]
        gate_up = self._take(self._at(names.gate_up, layer), (spec.num_experts, 2 * width, hidden))
        down = self._take(self._at(names.down, layer), (spec.num_experts, hidden, width))
        if gate_up is None or down is None:
            return []
        return [
            (
                gate_up.slice(2 * e * width, width),
                gate_up.slice((2 * e + 1) * width, width),
                down.slice(e * hidden, hidden),
            )
            for e in range(spec.num_experts)
        ]

    def _expert_names(self, layer: int) -> MlpNames | PackedNames:
        """The spelling of which at least one tensor is there."""
        for names in self.spec.names.experts:
            templates = (
                (names.gate, names.up, names.down) if isinstance(names, MlpNames) else (names.gate_up, names.down)
            )
            if any(self.checkpoint.has(self._at(t, layer, e)) for t in templates for e in range(self.spec.num_experts)):
                return names
        return self.spec.names.experts[0]

    def _mlp(self, role: int, layer: int, names: MlpNames | None, width: int) -> None:
        assert names is not None, "a family that has these MLPs names them"
        gate, up, down = self._take_mlp(names, layer, width)
        size = layout.mlp_bytes(self.other, width, self.spec.hidden_size)
        self._add(role, self.other, layer, width, self.spec.hidden_size, size,
                  lambda: pieces.mlp(gate, up, down, self.other, self.rule))  # fmt: skip

    def _take_mlp(self, names: MlpNames, layer: int, width: int, expert: int = 0) -> tuple:
        hidden = self.spec.hidden_size
        return (
            self._take(self._at(names.gate, layer, expert), (width, hidden)),
            self._take(self._at(names.up, layer, expert), (width, hidden)),
            self._take(self._at(names.down, layer, expert), (hidden, width)),
        )

    # ---- Helpers; a missing tensor is None all the way, and Checkpoint.finish reports it

    def _take(self, name: str, shape: tuple[int, ...]) -> TensorRows | None:
        return self.checkpoint.take(name, shape)

    def _at(self, template: str, layer: int, expert: int = 0) -> str:
        return template.format(layer=layer, expert=expert)

    def _first_there(self, templates: tuple[str, ...], layer: int) -> str:
        names = [self._at(t, layer) for t in templates]
        return next((n for n in names if self.checkpoint.has(n)), names[0])

    def _pad_rows(self, source: Source | None) -> Source | None:
        if source is None or self.padded_head == self.spec.head_dim:
            return source
        return PaddedHeadRows(source, self.spec.head_dim, self.padded_head)

    def _stack(self, sources: list) -> Source | None:
        return None if any(s is None for s in sources) else Stack(sources)

    def _vector(self, role: int, layer: int, source: Source | None) -> None:
        if source is not None:
            length = source.rows * source.k
            self._add(role, F32, layer, 1, length, layout.vector_bytes(length), lambda: pieces.vector_of(source))

    def _matrix(self, role: int, layer: int, source: Source | None, dtype: int) -> None:
        if source is not None:
            size = layout.matrix_bytes(dtype, source.rows, source.k)
            self._add(
                role, dtype, layer, source.rows, source.k, size, lambda: pieces.matrix([source], dtype, self.rule)
            )

    def _add(
        self, role: int, dtype: int, layer: int, rows: int, k: int, size: int, make: Callable, **more: int
    ) -> None:
        self.payloads.append(Payload(role, dtype, layer, rows, k, size, make, **more))


def text_payload(role: int, data: bytes) -> Payload:
    """Tokenizer, chat template or metadata."""
    return Payload(role, BYTES, 0, 1, 0, len(data), lambda: pieces.constant(data))


def _column(source: TensorRows | None) -> Source | None:
    """A vector [n] as [n][1], so that heads are rows."""
    return None if source is None else _Column(source)


class _Column:
    def __init__(self, source: TensorRows) -> None:
        self._source, self.rows, self.k, self.dtype = source, source.k, 1, source.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.ascontiguousarray(self._source.read(0, 1)[0, start:stop, None])

    def locate(self, row: int, column: int) -> tuple[str, int, int]:
        return self._source.locate(0, row)
