"""The converter against an independent reader of the format: every family, every spelling, every fault. Needs only
numpy.

Where the C library is not built, the numpy packer of reference_pack.py stands in for it: these tests are about which
bytes go where, and about what is refused. test_pack_matches_reference compares the two.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import reference_pack
import tiny
from colibri import _ffi, _lib
from colibri.convert import (
    ConversionError,
    ConversionWarning,
    api,
    convert,
    families,
    format_summary,
    layout,
    numbers,
    pack,
    writer,
)
from colibri.convert.config import Config
from colibri.convert.rope import read_rope
from reference_reader import BF16, F16, F32, Q4, Q8, File, integers, matrix_bytes, pad

HAVE_LIBRARY = _lib.library_path().is_file()


@pytest.fixture(autouse=True)
def packer(monkeypatch):
    if not HAVE_LIBRARY:
        monkeypatch.setattr(pack, "pack_matrix", reference_pack.pack_matrix)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


def run(folder: Path, dtype: str = "f32", **options) -> File:
    """Convert, and read back with the independent reader."""
    target = folder.parent / "out.colibri"
    convert(folder, target, dtype, **options)
    return File(target)


def refuse(folder: Path, match: str, **options) -> str:
    """The conversion fails with a sentence that matches, and leaves nothing behind."""
    before = sorted(os.listdir(folder.parent))
    with pytest.raises(ConversionError, match=match) as caught:
        convert(folder, folder.parent / "out.colibri", **{"dtype": "f32", **options})
    assert sorted(os.listdir(folder.parent)) == before
    return str(caught.value)


def padded_heads(x: np.ndarray, dim: int) -> np.ndarray:
    """Rows in heads of dim -> heads of dim padded to 16."""
    heads = x.reshape(-1, dim, *x.shape[1:])
    out = np.zeros((len(heads), -(-dim // 16) * 16, *x.shape[1:]), x.dtype)
    out[:, :dim] = heads
    return out.reshape(-1, *x.shape[1:])


def check_tensors(file: File, config: dict, tensors: dict, same=np.testing.assert_array_equal) -> None:
    """Every tensor of the checkpoint is in the file, where and as the format says."""
    dim, family = tiny.head_dim(config), config["model_type"]
    embedding = tensors["model.embed_tokens.weight"]
    same(file.embedding(), embedding)
    same(file.matrix("head"), tensors.get("lm_head.weight", embedding))
    np.testing.assert_array_equal(file.vector("final_norm"), tensors["model.norm.weight"])
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        a = p + "self_attn."
        same(
            file.matrix("attn_qkv", layer),
            np.concatenate([padded_heads(tensors[f"{a}{x}_proj.weight"], dim) for x in "qkv"]),
        )
        same(file.matrix("attn_out", layer), padded_heads(tensors[a + "o_proj.weight"].T.copy(), dim).T)
        for role, name in (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            np.testing.assert_array_equal(file.vector(role, layer), tensors[f"{p}{name}.weight"])
        assert (("attn_qkv_bias", layer) in file.entries) == (a + "q_proj.bias" in tensors)
        assert (("attn_out_bias", layer) in file.entries) == (a + "o_proj.bias" in tensors)
        if a + "q_proj.bias" in tensors:
            biases = np.concatenate([padded_heads(tensors[f"{a}{x}_proj.bias"], dim) for x in "qkv"])
            np.testing.assert_array_equal(file.vector("attn_qkv_bias", layer), biases)
        if a + "o_proj.bias" in tensors:
            np.testing.assert_array_equal(file.vector("attn_out_bias", layer), tensors[a + "o_proj.bias"])
        for x in "qk":
            assert ((f"attn_{x}_norm", layer) in file.entries) == (family in ("qwen3_moe", "olmoe"))
            if family in ("qwen3_moe", "olmoe"):
                want = padded_heads(tensors[f"{a}{x}_norm.weight"], dim)
                np.testing.assert_array_equal(file.vector(f"attn_{x}_norm", layer), want)
        check_mlps(file, config, tensors, layer, same)


def check_mlps(file: File, config: dict, tensors: dict, layer: int, same) -> None:
    block = f"model.layers.{layer}." + ("block_sparse_moe." if config["model_type"] == "mixtral" else "mlp.")
    names = ("w1", "w3", "w2") if config["model_type"] == "mixtral" else ("gate_proj", "up_proj", "down_proj")

    def check(found, prefix: str) -> None:
        for part, name in zip(found, names, strict=True):
            same(part, tensors[f"{prefix}{name}.weight"])

    sparse = tiny.is_sparse(config, layer)
    assert file.layers[layer][0] == int(sparse)
    assert (("dense_mlp", layer) in file.entries) == (not sparse) and (("experts", layer) in file.entries) == sparse
    if not sparse:
        check(file.mlps("dense_mlp", layer)[0], block)
        return
    np.testing.assert_array_equal(file.matrix("router", layer), tensors[block + "gate.weight"])
    found = file.mlps("experts", layer)
    assert len(found) == tiny.num_experts(config)
    for expert, parts in enumerate(found):
        check(parts, f"{block}experts.{expert}.")
    for shared in ("shared_expert.", "shared_experts."):
        if f"{block}{shared}gate_proj.weight" in tensors:
            check(file.mlps("shared_expert", layer)[0], block + shared)
    assert (("shared_gate", layer) in file.entries) == (config["model_type"] == "qwen2_moe")
    if config["model_type"] == "qwen2_moe":
        np.testing.assert_array_equal(file.matrix("shared_gate", layer), tensors[block + "shared_expert_gate.weight"])


# ---- Every family


@pytest.mark.parametrize("case", tiny.CASES)
@pytest.mark.parametrize("packed", [False, True], ids=["one_by_one", "packed"])
def test_all_tensors_arrive(folder, case, packed):
    config = tiny.CASES[case]
    tiny.save(folder, config, packed=packed, shards=3 if packed else 1)
    check_tensors(run(folder), config, tiny.weights(config))


@pytest.mark.parametrize("case", ["mixtral_odd", "qwen2_moe", "olmoe"])
@pytest.mark.parametrize("dtype, code, tolerance", [("q8", Q8, 0.012), ("q4", Q4, 0.1)])
def test_quantised_is_close(folder, case, dtype, code, tolerance):
    config = tiny.CASES[case]
    tiny.save(folder, config)
    file = run(folder, dtype)
    assert file.header["dtype"] == code and file.entries["router", 1]["dtype"] == F32
    assert file.entries["embedding", 0]["dtype"] == F16

    def close(found: np.ndarray, want: np.ndarray) -> None:
        assert np.linalg.norm(found - want) <= tolerance * np.linalg.norm(want)

    check_tensors(file, config, tiny.weights(config), close)


@pytest.mark.parametrize("dtype, other", [("q4", "q8"), ("q8", "q4"), ("q4", "f32"), ("f16", "q4"), ("q8", "source")])
def test_other_dtype(folder, dtype, other):
    """Routed experts in one type, all other matrices in another; the embedding is never quantised."""
    config = tiny.CASES["qwen2_moe"]
    tiny.save(folder, config, dtype="BF16")
    file = run(folder, dtype, other_dtype=other)
    code, others = layout.DTYPE_CODES[dtype], layout.DTYPE_CODES.get(other, BF16)
    assert file.header["dtype"] == code
    for (role, _), entry in file.entries.items():
        if role == "experts":
            assert entry["dtype"] == code
        elif role in ("attn_qkv", "attn_out", "shared_expert", "dense_mlp", "head"):
            assert entry["dtype"] == others
    assert file.entries["embedding", 0]["dtype"] == (BF16 if others in (Q8, Q4) else others)
    about = json.loads(file.bytes_of("metadata"))
    assert (about["dtype"], about["other_dtype"]) == (dtype, "bf16" if other == "source" else other)
    assert about["scale_rule"] == "least_squares"
    assert run(folder, dtype, other_dtype=dtype).data == run(folder, dtype).data


def test_bits_of_q4():
    """17 bytes for 32 weights and a scale a row."""
    for rows, k in ((1024, 2048), (2048, 1024), (14336, 4096)):
        size = layout.matrix_bytes(layout.Q4, rows, k)
        assert size == matrix_bytes(Q4, rows, k) and 8 * size == rows * k * 4.25 + 32 * rows <= 4.3 * rows * k


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype, code", [("f32", F32), ("f16", F16), ("bf16", BF16), ("q8", Q8), ("q4", Q4)])
def test_source_and_stored_types(folder, source, dtype, code):
    config = tiny.mixtral(num_hidden_layers=1, num_local_experts=2)
    tensors = {n: t.clip(-2, 2) for n, t in tiny.weights(config).items()}
    tiny.save(folder, config, tensors, dtype=source)
    file = run(folder, dtype)
    src = {"F32": F32, "F16": F16, "BF16": BF16}[source]
    kept = np.frombuffer(tiny.encode(tensors["model.embed_tokens.weight"], source), numbers.NUMPY_TYPE[src])
    want = numbers.to_f32(kept, src)
    embedding = code if code not in (Q8, Q4) else {F32: F16}.get(src, src)
    assert file.entries["embedding", 0]["dtype"] == embedding and file.entries["experts", 0]["dtype"] == code
    want = reference_pack.widen(reference_pack.narrow(want, embedding), embedding)
    np.testing.assert_array_equal(file.embedding().reshape(-1), want)


def test_dtype_source_keeps_the_type(folder):
    tiny.save(folder, tiny.CASES["mixtral"], dtype="BF16")
    assert run(folder, "source").header["dtype"] == BF16


def test_params(folder):
    config = tiny.CASES["mixtral_odd"]
    tiny.save(folder, config)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9], "pad_token_id": 0}')
    file = run(folder)
    want = {
        "vocab_size": 101,
        "hidden_size": 72,
        "num_layers": 2,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 20,
        "rotary_dim": 20,
        "max_position": 64,
        "qk_norm": 0,
        "norm_topk": 1,
        "num_experts": 5,
        "top_k": 3,
        "moe_intermediate": 40,
        "shared_intermediate": 0,
        "dense_intermediate": 0,
        "bos_token": 1,
        "eos_token": [7, 9, 2],
        "pad_token": 0,
        "model_type": "mixtral",
        "routed_scale": 1.0,
        "clip_qkv": 0.0,
        "tied_embeddings": 0,
        "rope_theta": 10000.0,
    }
    assert {name: file.params[name] for name in want} == want
    assert file.params["attention_scale"] == pytest.approx(20**-0.5) and file.layers == [(1, 3), (1, 3)]
    header = {n: file.header[n] for n in ("num_layers", "num_experts", "top_k", "hidden_size", "intermediate_size")}
    assert list(header.values()) == [2, 5, 3, 72, 40]
    about = json.loads(file.bytes_of("metadata"))
    assert about["source"] == "checkpoint" and about["source_dtype"] == "f32"


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_same_input_same_bytes(folder, dtype):
    tiny.save(folder, tiny.CASES["qwen2_moe"])
    first = run(folder, dtype, num_threads=1).data
    assert run(folder, dtype, num_threads=3).data == first


def test_family_flags(folder):
    cases = {
        "qwen2_moe": {
            "norm_topk": 0,
            "shared_gate": 1,
            "shared_intermediate": 40,
            "dense_intermediate": 56,
            "moe_intermediate": 24,
        },
        "qwen2_moe_window": {"norm_topk": 1},
        "qwen3_moe": {"norm_topk": 1, "qk_norm": 1, "head_dim": 32, "dense_intermediate": 0},
        "qwen3_moe_odd": {"norm_topk": 0, "dense_intermediate": 56},
        "olmoe": {"qk_norm": 2, "clip_qkv": np.float32(0.6), "norm_topk": 0},
        "deepseek": {"shared_intermediate": 40, "shared_gate": 0, "norm_topk": 0, "dense_intermediate": 56},
        "deepseek_odd": {"shared_intermediate": 20, "norm_topk": 1},
        "deepseek_top1": {"norm_topk": 0, "shared_intermediate": 0, "dense_intermediate": 0},
    }
    for case, want in cases.items():
        tiny.save(folder, tiny.CASES[case])
        params = run(folder).params
        assert {name: params[name] for name in want} == want, case


def test_windows(folder):
    wanted = {
        "qwen2_moe": [0, 0, 0, 0],
        "qwen2_moe_window": [4, 0, 4, 0],
        "qwen2_moe_types": [0, 4],
        "qwen3_moe_odd": [5, 5],
        "mixtral": [0, 0],
    }
    for case, want in wanted.items():
        tiny.save(folder, tiny.CASES[case])
        assert [window for _, window in run(folder).layers] == want, case


# ---- cases 1 to 10


@pytest.mark.parametrize("suffix", ["experts.gate_up_proj", "experts.down_proj", "gate.weight"])
def test_renamed_tensor_is_named(folder, suffix):
    config = tiny.CASES["qwen3_moe"]
    tensors = tiny.weights(config, packed=True)
    name = f"model.layers.1.mlp.{suffix}"
    tensors[name + "X"] = tensors.pop(name)
    tiny.save(folder, config, tensors)
    message = refuse(folder, "missing")
    assert f'"{name}"' in message and f'"{name}X"' in message


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe_odd", "olmoe_bias", "deepseek_odd"])
def test_every_tensor_is_needed_and_used(folder, case):
    config = tiny.CASES[case]
    tensors = tiny.weights(config)
    for name in list(tensors)[::17] + [n for n in tensors if ".0." in n and ".experts." not in n]:
        left = {n: t for n, t in tensors.items() if n != name}
        tiny.save(folder, config, left)
        assert f'"{name}"' in refuse(folder, "missing")
    tiny.save(folder, config, {**tensors, "model.layers.0.self_attn.extra.weight": np.zeros(3, np.float32)})
    refuse(folder, 'model.layers.0.self_attn.extra.weight" of the checkpoint would not be used')


def test_rotary_buffers_are_ignored(folder):
    config = tiny.CASES["mixtral"]
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    tiny.save(folder, config, {**tiny.weights(config), **extra})
    run(folder)


def test_wrong_shape_is_named(folder):
    config = tiny.CASES["mixtral"]
    tensors = tiny.weights(config)
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-1]
    tiny.save(folder, config, tensors)
    message = refuse(folder, "shape")
    assert name in message and "[31, 64]" in message and "[32, 64]" in message


def test_num_local_experts_spelling(folder):  # case 2
    tiny.save(folder, tiny.CASES["qwen3_moe_local"])
    file = run(folder)
    assert file.params["num_experts"] == 4 and [kind for kind, _ in file.layers] == [1, 1]
    tiny.save(folder, {**tiny.CASES["qwen3_moe_local"], "num_experts": 5})
    refuse(folder, "num_experts is 5 but num_local_experts is 4")


def test_index_decides(folder):  # case 3
    config = tiny.CASES["mixtral"]
    tensors = tiny.weights(config)
    tiny.save(folder, config, shards=2)
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    second = "model-00002-of-00002.safetensors"
    (folder / second).rename(folder / "x.safetensors")
    index["weight_map"] = {n: "x.safetensors" if f == second else f for n, f in index["weight_map"].items()}
    index_path.write_text(json.dumps(index))
    check_tensors(run(folder), config, tensors)

    stray = {"model.norm.weight": np.full(64, 5, np.float32)}
    tiny.write_safetensors(folder / "model-00002-of-00002.safetensors", stray)
    with pytest.warns(ConversionWarning, match="model-00002-of-00002.safetensors was ignored"):
        check_tensors(run(folder), config, tensors)

    (folder / "x.safetensors").unlink()
    refuse(folder, "x.safetensors is missing")


def test_repeated_tensor_in_another_shard(folder):
    config = tiny.CASES["mixtral"]
    tiny.save(folder, config, shards=2)
    first = "model-00001-of-00002.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    part = {n: t for n, t in tiny.weights(config).items() if index["weight_map"][n] == first}
    name = next(n for n, f in index["weight_map"].items() if f != first)
    tiny.write_safetensors(folder / first, {**part, name: np.zeros((2, 2), np.float32)})
    with pytest.warns(ConversionWarning, match=name):
        check_tensors(run(folder), config, tiny.weights(config))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", "..", "a\0b", "\ud800"])
def test_index_names_stay_in_the_folder(folder, name):
    tiny.save(folder, tiny.CASES["mixtral"], shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    refuse(folder, "no plain file name")


def test_index_names_that_cannot_be_files(folder):
    tiny.save(folder, tiny.CASES["mixtral"], shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    refuse(folder, "is missing from")


def test_names_for_terminals(folder):
    """A tensor's name may not break a sentence, nor command a terminal."""
    config = tiny.CASES["mixtral"]
    for name in ("a\nb", "\x1b[2J", "\ud800"):
        tiny.save(folder, config, {**tiny.weights(config), name: np.zeros(3, np.float32)})
        assert refuse(folder, "would not be used").isprintable()
        index = {"weight_map": {name: "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert refuse(folder, "would not be used").isprintable()
        (folder / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_dangling_link_is_not_absence(folder, name):
    """A half-downloaded snapshot: its links lead nowhere."""
    tiny.save(folder, tiny.CASES["mixtral"])
    (folder / name).symlink_to(folder / "blob")
    refuse(folder, f"{name}: cannot be read")


def test_window_of_qwen3(folder):
    """Absent is 4096, null is none."""
    config = tiny.qwen3_moe(use_sliding_window=True)
    for changed, want in ((config, 0), ({n: v for n, v in config.items() if n != "sliding_window"}, 4096)):
        tiny.save(folder, changed)
        assert [window for _, window in run(folder).layers] == [want, want]


def test_window_longer_than_any_text(folder):
    tiny.save(folder, tiny.mixtral(sliding_window=2**31 - 1))
    assert [window for _, window in run(folder).layers] == [2**30, 2**30]


def test_names_of_another_layout(folder):
    """Thousands of tensors that all have another prefix: a sentence within seconds."""
    config = tiny.qwen3_moe(num_hidden_layers=8, num_experts=128, hidden_size=4, moe_intermediate_size=1)
    tensors = {n.replace("model.", "model.language_model.", 1): t for n, t in tiny.weights(config).items()}
    tiny.save(folder, config, tensors)
    assert '"model.language_model.embed_tokens.weight"' in refuse(folder, "more are missing and tensors")


def test_two_conversions_to_one_file(folder):
    """At the same time, in one process: both succeed, the file is whole, nothing stays behind."""
    tiny.save(folder, tiny.CASES["mixtral"])
    want, met = run(folder).data, threading.Barrier(2)

    def meet(done: int, total: int) -> None:
        if done == total:
            met.wait(60)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run, folder, "f32", progress=meet) for _ in range(2)]:
            assert future.result().data == want
    assert sorted(os.listdir(folder.parent)) == ["checkpoint", "out.colibri"]


def test_tied_embeddings(folder):  # case 4
    config = tiny.CASES["mixtral_tied"]
    tensors = tiny.weights(config)
    embedding = tensors["model.embed_tokens.weight"]
    for extra, head in (
        ({}, embedding),
        ({"lm_head.weight": embedding}, embedding),
        ({"lm_head.weight": -embedding}, -embedding),
    ):
        tiny.save(folder, config, {**tensors, **extra})
        file = run(folder)
        np.testing.assert_array_equal(file.matrix("head"), head)
        np.testing.assert_array_equal(file.embedding(), embedding)
    tiny.save(folder, config, {("lm_head.weight" if "embed" in n else n): t for n, t in tensors.items()})
    np.testing.assert_array_equal(run(folder).embedding(), embedding)


def test_untied_without_head(folder):
    config = tiny.CASES["mixtral"]
    tiny.save(folder, config, {n: t for n, t in tiny.weights(config).items() if n != "lm_head.weight"})
    assert '"lm_head.weight"' in refuse(folder, "missing")


def test_head_dim(folder):  # case 5
    tiny.save(folder, tiny.mixtral(head_dim=32))
    file = run(folder)
    assert file.params["head_dim"] == 32 and file.entries["attn_qkv", 0]["rows"] == 128 + 64 + 64
    assert file.entries["attn_out", 0]["k"] == 128
    tiny.save(folder, tiny.mixtral(head_dim=None))
    assert run(folder).params["head_dim"] == 16
    tiny.save(folder, tiny.mixtral(head_dim=15))
    refuse(folder, "head_dim 15 is odd")


def test_sparse_layers(folder):  # case 6
    tiny.save(folder, tiny.qwen2_moe())
    assert [kind for kind, _ in run(folder).layers] == [0, 1, 0, 1]
    config = tiny.qwen2_moe(mlp_only_layers=[3])
    tiny.save(folder, config)
    file = run(folder)
    assert [kind for kind, _ in file.layers] == [0, 1, 0, 0]
    assert (file.params["shared_intermediate"], file.params["moe_intermediate"]) == (40, 24)


def test_all_layers_dense(folder):
    config = tiny.qwen3_moe(mlp_only_layers=[0, 1])
    tiny.save(folder, config)
    params = run(folder).params
    assert [params[n] for n in ("num_experts", "top_k", "moe_intermediate", "dense_intermediate")] == [0, 0, 0, 56]


def test_vocabulary_larger_than_embedding(folder):
    config = tiny.CASES["mixtral"]
    tiny.save(folder, {**config, "vocab_size": 102}, tiny.weights(config))
    refuse(folder, "embed_tokens")


def test_rounding():  # case 10
    def f32(*bits: int) -> np.ndarray:
        return np.array(bits, np.uint32).view(np.float32)

    bf16 = numbers.f32_to_bf16(f32(0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001, 0xFF800001, 0x007FFFFF, 0x80000000))
    assert [hex(x) for x in bf16] == ["0x3f80", "0x3f82", "0x7f80", "0x7fc0", "0xffc0", "0x80", "0x8000"]
    f16 = numbers.f32_to_f16(np.array([2.0**-15, 2.0**-24, 65504, 65520], np.float32))
    assert f16.view(np.uint16).tolist() == [0x0200, 0x0001, 0x7BFF, 0x7C00]
    every = np.arange(65536, dtype=np.uint16)
    assert numbers.convert(every, BF16, BF16) is every
    finite = every[(every & 0x7F80) != 0x7F80]
    np.testing.assert_array_equal(numbers.f32_to_bf16(numbers.bf16_to_f32(finite)), finite)


# ---- case 13: hostile JSON, and other faults of the folder


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "generation_config.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize(
    "text", ["[" * 10000, '{"a":' * 10000, "{", "", "[]", "\xff"], ids=["[[", "{{", "{", "", "[]", "latin1"]
)
def test_bad_json(folder, name, text):
    tiny.save(folder, tiny.CASES["mixtral"], shards=2)
    (folder / name).write_bytes(text.encode("latin1"))
    refuse(folder, name)


def test_folder_faults(folder, tmp_path):
    tiny.save(folder, tiny.CASES["mixtral"])
    with pytest.raises(ConversionError, match="no such folder"):
        convert(tmp_path / "absent" / "deeper", tmp_path / "o")
    with pytest.raises(ConversionError, match="is a file"):
        convert(folder / "config.json", tmp_path / "o")
    (folder / "model.safetensors").unlink()
    refuse(folder, "neither model.safetensors nor")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refuse(folder, "safetensors first")
    (folder / "config.json").unlink()
    refuse(folder, "config.json")
    os.mkfifo(folder / "config.json")
    refuse(folder, "not a regular file")
    with pytest.raises(ConversionError, match="no such folder"):
        convert("y" * 300, tmp_path / "o")


def test_hub_name_without_huggingface_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConversionError, match="pip install huggingface_hub"):
        convert("owner/model", tmp_path / "o")


@pytest.mark.parametrize(
    "change, match",
    [
        ({"model_type": "llama"}, "'llama' is not supported.*deepseek.*mixtral"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -64}, "hidden_size must be"),
        ({"hidden_size": "64"}, "hidden_size must be"),
        ({"hidden_size": True}, "hidden_size must be"),
        ({"hidden_size": 65}, "no multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        ({"num_local_experts": 0}, "num_local_experts must be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be"),
        ({"sliding_window": 0}, "sliding_window must be"),
        ({"vocab_size": 2**40}, "vocab_size must be an integer from 1 to"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be an integer from 1 to 65535"),
        ({"num_hidden_layers": 65535}, "99996 more are missing, at least"),
        ({"hidden_size": 65536, "head_dim": 16}, "at most 65535"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be"),
        ({"eos_token_id": "x"}, "eos_token_id must be"),
    ],
)
def test_config_faults(folder, change, match):
    config = tiny.CASES["mixtral"]
    tiny.save(folder, {**config, **change}, tiny.weights(config))
    refuse(folder, match)


@pytest.mark.parametrize(
    "change, match", [({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"), ({"kv_lora_rank": 512}, "kv_lora_rank")]
)
def test_deepseek_faults(folder, change, match):
    tiny.save(folder, tiny.deepseek(**change))
    refuse(folder, match)


def test_special_tokens_outside_the_vocabulary(folder):
    tiny.save(folder, tiny.mixtral(eos_token_id=[2, 500], bos_token_id=101))
    with pytest.warns(ConversionWarning, match="(500|101) was ignored"):
        params = run(folder).params
    assert params["eos_token"] == [2] and params["bos_token"] == -1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
    ],
)
@pytest.mark.skipif(not HAVE_LIBRARY, reason="the C packer makes this check")
def test_not_finite_weight_is_named(folder, name, dtype, bad):
    config = tiny.mixtral(head_dim=20)  # padded to 32 inside the file
    tensors = tiny.weights(config)
    tensors[name].reshape(-1)[37] = bad
    tiny.save(folder, config, tensors)
    message = refuse(folder, "NaN or infinite", dtype=dtype)
    row, column = divmod(37, tensors[name].shape[-1])
    assert f'"{name}"' in message and f"row {row}, column {column}" in message


@pytest.mark.skipif(not HAVE_LIBRARY, reason="the C packer makes this check")
def test_f16_overflow_is_named(folder):
    config = tiny.mixtral(head_dim=20)  # padded to 32 inside the file
    tensors = tiny.weights(config)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"):
        tiny.save(folder, config, {**tensors, name: np.where(tensors[name] == tensors[name][3, 5], 7e4, tensors[name])})
        message = refuse(folder, "does not fit f16", dtype="f16")
        assert f'"{name}"' in message and "row 3, column 5" in message


def test_dtype_faults(folder):
    tiny.save(folder, tiny.CASES["mixtral"])
    refuse(folder, "^dtype 'int8' is unknown", dtype="int8")
    refuse(folder, "^dtype None is unknown", dtype=None)
    refuse(folder, "^other_dtype 'int4' is unknown", other_dtype="int4")
    refuse(folder, "scale_rule", scale_rule="best")
    refuse(folder, "num_threads", num_threads=0)


# ---- case 32: safetensors


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list, start: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    {
        "empty": b"",
        "7 bytes": bytes(7),
        "huge header": safetensors({}, length=2**63),
        "header longer than the file": safetensors({}, length=3),
        "offsets reversed": safetensors({"a": entry([2], 8, 0)}, bytes(8)),
        "negative offset": safetensors({"a": entry([2], -8, 0)}, bytes(8)),
        "shape larger than its bytes": safetensors({"a": entry([1000, 1000], 0, 4)}, bytes(4)),
        "shape product beyond 64 bits": safetensors({"a": entry([2**62, 4], 0, 0)}),
        "end past the file": safetensors({"a": entry([4], 0, 16)}, bytes(8)),
        "trailing bytes": safetensors({"a": entry([2], 0, 8)}, bytes(12)),
        "overlap": safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        "hole": safetensors({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
        "duplicate key": safetensors(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            bytes(4),
        ),
        "unknown dtype": safetensors({"a": entry([1], 0, 4, "F5")}, bytes(4)),
        "float shape": safetensors({"a": entry([1.0], 0, 4)}, bytes(4)),
        "boolean shape": safetensors({"a": entry([True], 0, 4)}, bytes(4)),
        "shape is no list": safetensors({"a": entry(4, 0, 16)}, bytes(16)),  # type: ignore[arg-type]
        "no offsets": safetensors({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
        "entry is no object": safetensors({"a": 3}),
        "header is a list": safetensors([1]),
        "header is not JSON": safetensors(b"{" * 20),
        "deep header": safetensors(b'{"a":' * 10000),
    }.items(),
    ids=lambda item: item[0],
)
def test_bad_safetensors(folder, content):
    tiny.save(folder, tiny.CASES["mixtral"])
    (folder / "model.safetensors").write_bytes(content[1])
    refuse(folder, "model.safetensors")


def test_empty_tensor_is_legal(folder):
    (folder).mkdir()
    path = folder / "x.safetensors"
    path.write_bytes(safetensors({"a": entry([0, 4], 0, 0), "b": entry([1], 0, 4)}, bytes(4)))
    from colibri.convert.safetensors_file import SafetensorsFile

    file = SafetensorsFile(path)
    assert file.tensors["a"].shape == (0, 4) and file.tensors["b"].end - file.tensors["b"].start == 4
    file.close()


def test_integer_weights_are_refused(folder):
    config = tiny.mixtral(num_hidden_layers=1)
    tiny.save(folder, config)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"F32", "shape": [64]', b'"I32", "shape": [64]', 1))
    refuse(folder, "is I32")


# ---- Writing


def test_failure_keeps_the_old_file(folder, monkeypatch):
    tiny.save(folder, tiny.CASES["mixtral"])
    target = folder.parent / "out.colibri"
    target.write_bytes(b"old")

    def full(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_reserve", full)
    refuse(folder, "no space is left")
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interruption_leaves_nothing(folder, error):
    tiny.save(folder, tiny.CASES["mixtral"])

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        convert(folder, folder.parent / "out.colibri", progress=stop)
    assert os.listdir(folder.parent) == ["checkpoint"]


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits are POSIX")
@pytest.mark.skipif(not HAVE_LIBRARY, reason="runs the installed package in a new process")
def test_file_size_limit(folder):
    tiny.save(folder, tiny.CASES["mixtral"])
    script = (
        "import resource, sys, colibri; resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n"
        "try: colibri.convert(sys.argv[1], sys.argv[2])\nexcept colibri.ConversionError as e: print(e)"
    )
    command = [sys.executable, "-c", script, str(folder), str(folder.parent / "out.colibri")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "cannot be written" in done.stdout, done.stderr
    assert os.listdir(folder.parent) == ["checkpoint"]


def test_targets(folder, tmp_path):
    tiny.save(folder, tiny.CASES["mixtral"])
    for target, match in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "x", "no such folder"),
        (folder / "model.safetensors", "part of the checkpoint"),
    ):
        with pytest.raises(ConversionError, match=match):
            convert(folder, target, "f32")
    os.mkfifo(tmp_path / "pipe")
    (folder / "generation_config.json").write_text("{}")
    for target, match in (
        (tmp_path / ("x" * 300), "cannot be written"),
        (tmp_path / "a\0b", "is no name of a file"),
        (tmp_path / "pipe", "is a device or a pipe"),
        (folder / "generation_config.json", "part of the checkpoint"),
    ):
        with pytest.raises(ConversionError, match=match):
            convert(folder, target, "f32")
    assert (tmp_path / "pipe").is_fifo() and (folder / "generation_config.json").read_text() == "{}"
    convert(folder, tmp_path / ("\u6f22" * 85), "f32")  # 255 bytes
    link = tmp_path / "link.colibri"
    link.symlink_to(tmp_path / "real.colibri")
    convert(folder, link, "f32")
    assert link.is_symlink() and (tmp_path / "real.colibri").is_file()


def test_summary(folder):
    tiny.save(folder, tiny.CASES["mixtral"])
    calls: list[tuple[int, int]] = []
    target = folder.parent / "out.colibri"
    summary = convert(folder, target, "q8", progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1]
    assert summary.file_bytes == target.stat().st_size and summary.tensors == len(tiny.weights(tiny.CASES["mixtral"]))
    assert summary.source_bytes == 4 * summary.parameters
    text = format_summary(summary)
    assert "mixtral, q8, " in text and str(target) in text
    if HAVE_LIBRARY:
        assert 0 < summary.errors["experts"] < 0.02 and "experts 0." in text
        mixed = convert(folder, target, "q4", other_dtype="q8")
        assert 0.05 < mixed.errors["experts"] < 0.1 and 0 < mixed.errors["attn_qkv"] < 0.02
        assert "mixtral, q4 experts, else q8, " in format_summary(mixed)


def test_no_warnings_normally(folder):
    tiny.save(folder, tiny.CASES["mixtral"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(folder)


# ---- Chat template


@pytest.mark.parametrize(
    "template, want",
    [
        ("{{ x }}é", "{{ x }}é"),
        ([{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": ["default"], "template": "t"}, {"name": "default", "template": "d"}, 3], "d"),
        (None, None),
    ],
)
def test_chat_template(folder, template, want):
    tiny.save(folder, tiny.CASES["mixtral"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    file = run(folder)
    found = file.bytes_of("chat_template").decode() if ("chat_template", 0) in file.entries else None
    assert found == want
    (folder / "chat_template.jinja").write_text("from file")
    assert run(folder).bytes_of("chat_template") == b"from file"


def test_template_tokens(folder):
    """As the tokenizer's settings spell them, the newer file before the older."""
    tiny.save(folder, tiny.CASES["mixtral"])
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    assert json.loads(run(folder).bytes_of("metadata"))["template_tokens"] == {}
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<b>", "eos_token": "<e>", "x_token": 3}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<E>"}, "pad_token": null}')
    want = {"bos_token": "<b>", "eos_token": "<E>", "pad_token": ""}
    assert json.loads(run(folder).bytes_of("metadata"))["template_tokens"] == want
    (folder / "tokenizer_config.json").write_text('{"eos_token": 7}')
    refuse(folder, "tokenizer_config.json: eos_token must be a string")


# ---- RoPE


def rope(config: dict, dim: int = 16):
    return read_rope(Config(config), dim, 64, 10000.0)


def test_rope_spellings():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.5}
    spellings = [
        {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **scaling}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "yarn", **scaling}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **scaling}},
        {
            "layer_types": ["full_attention"],
            "rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 500.0, **scaling}},
        },
    ]
    found = [rope(s) for s in spellings]
    assert {(r.kind, r.theta, r.attention_factor) for r in found} == {("yarn", 500.0, 1.5)}
    for r in found:
        np.testing.assert_array_equal(r.inv_freq, found[0].inv_freq)
    differing = {"a": {"rope_type": "default", "rope_theta": 1.0}, "b": {"rope_type": "default", "rope_theta": 2.0}}
    with pytest.raises(ConversionError, match="layers differ"):
        rope({"rope_parameters": differing})


def test_rope_values():
    plain = rope({})
    np.testing.assert_allclose(plain.inv_freq, 10000.0 ** (-np.arange(8) / 8), rtol=1e-6)
    assert plain.inv_freq.dtype == np.float32 and plain.inv_freq[0] == 1
    linear = rope({"rope_scaling": {"type": "linear", "factor": 2.0}})
    np.testing.assert_array_equal(linear.inv_freq, plain.inv_freq / 2)
    dynamic = rope({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert dynamic.inv_freq is None and (dynamic.factor, dynamic.original_max) == (2.0, 64)
    yarn = rope({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}})
    assert yarn.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    np.testing.assert_allclose(yarn.inv_freq[[0, -1]], [1, plain.inv_freq[-1] / 4], rtol=1e-6)


def test_dynamic_rope_has_no_table(folder):
    tiny.save(folder, tiny.mixtral(rope_scaling={"type": "dynamic", "factor": 2.0}))
    file = run(folder)
    assert ("rope_inv_freq", 0) not in file.entries
    assert (file.params["rope_kind"], file.params["rope_factor"], file.params["rope_original_max"]) == (1, 2.0, 64)


# ---- The C packer


@pytest.mark.skipif(not HAVE_LIBRARY, reason="the C library is not built")
@pytest.mark.parametrize("src", [F32, F16, BF16])
@pytest.mark.parametrize("dst", [F32, F16, BF16, Q8, Q4])
@pytest.mark.parametrize("rows, k", [(1, 1), (16, 128), (17, 129), (40, 300)])
def test_pack_matches_reference(src, dst, rows, k):
    values = reference_pack.narrow(tiny.values("w", (rows, k), 1.0), src)
    blocks, scales = reference_pack.tiles(reference_pack.widen(values, src), dst)
    out, found_scales = pack.aligned_bytes(2 * blocks.size), np.zeros((len(blocks), 2, 16), np.float32)
    out[:] = 0
    scale = found_scales[:, 1] if dst in (Q8, Q4) else None
    stride = 2 * blocks.shape[1]
    pack.pack_matrix(values, src, out, dst, "max", block_stride=stride, scale=scale, scale_stride=32)
    found = out.reshape(len(blocks), 2, -1)
    assert not found[:, 1].any() and not found_scales[:, 0].any()
    if dst not in (Q8, Q4):
        np.testing.assert_array_equal(found[:, 0], blocks)
        return
    np.testing.assert_allclose(found_scales[:, 1], scales, rtol=1e-6)
    shape = (16 * len(blocks), pad(k, 128))
    got, want = (integers(data.tobytes(), dst, *shape).astype(int) for data in (found[:, 0], blocks))
    assert np.abs(got - want).max() <= (1 if dst == Q8 else 4 * 7) and np.mean(got != want) < 0.01


def test_library_constants():
    assert [_ffi.COLIBRI_DTYPE_F32 - 1, _ffi.COLIBRI_DTYPE_Q8 - 1, _ffi.COLIBRI_DTYPE_Q4 - 1] == [F32, Q8, Q4]


# ---- Random damage


def test_damaged_headers_never_crash(folder):
    """Bytes of the header changed at random: refused, or harmless."""
    config = tiny.mixtral(num_hidden_layers=1, num_local_experts=2)
    tiny.save(folder, config)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    random = np.random.default_rng(1)
    for _ in range(150):
        damaged = bytearray(data)
        for at in random.integers(0, header, random.integers(1, 4)):
            damaged[at] = random.choice(list(b'0123456789[]{},:"F-\xff'))
        path.write_bytes(damaged)
        with warnings.catch_warnings(), contextlib.suppress(ConversionError):
            warnings.simplefilter("ignore")
            convert(folder, folder.parent / "out.colibri", "f32", num_threads=1)


VALUES = [None, 0, -1, 1, 3, 2**31, 2**63, 2**200, 1.5, 1e400, float("nan"), "", "x", True, [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("case", ["mixtral_llama3", "qwen2_moe_types", "qwen3_moe_yarn", "olmoe", "deepseek"])
def test_any_value_of_any_setting(case):
    """Every setting gets every kind of value: a ConversionError, or parameters that are numbers."""
    config = tiny.CASES[case]
    paths = [(name,) for name in [*config, "layer_types", "rope_parameters", "rope_scaling", "head_dim"]]
    paths += [("rope_parameters", name) for name in config.get("rope_parameters") or {}]
    for path in paths:
        for value in VALUES:
            changed = json.loads(json.dumps(config))
            place = changed
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = value
            with contextlib.suppress(ConversionError):
                spec = families.describe(Config(changed))
                params = api._params(spec, {"bos": -1, "pad": -1, "eos": []})
                assert all(np.isfinite(params[name]) for name in params.dtype.names if params.dtype[name].kind == "f")
                assert spec.rope.inv_freq is None or np.isfinite(spec.rope.inv_freq).all()
