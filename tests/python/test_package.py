"""The Python package: models, sessions, generation, errors, lifetimes, chat templates."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import colibri
import conftest
import numpy as np
import pytest
from colibri import errors

IDS = [5, 17, 200, 3, 99, 42, 7]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> colibri.Model:
    return colibri.Model(tiny_model)


def session(model: colibri.Model, **options: object) -> colibri.Session:
    return colibri.Session(model, **{"max_seq_len": 64, "num_threads": 2, **options})


# ---- Package


def test_names() -> None:
    for name in colibri.__all__:
        assert getattr(colibri, name) is not None or name == "demo_path"
    assert colibri.__version__ == colibri.version()
    assert colibri.build_info() and colibri.cpu_info() is not None
    assert colibri.isa_supported("ref") and not colibri.isa_supported("no such")
    with pytest.raises(AttributeError):
        _ = colibri.no_such_name


def test_importing_is_light() -> None:
    code = "import sys, colibri; print('numpy' in sys.modules, callable(colibri.convert), colibri.Session.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "Session"]


def test_convert_stays_callable_beside_its_package() -> None:
    code = "import colibri.convert.api, colibri; colibri.convert('/no such', 'x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConversionError" in done.stderr


def test_missing_library(tmp_path: Path) -> None:
    code = "import colibri\ntry: colibri.version()\nexcept colibri.ColibriError as e: print(e)"
    environment = {**os.environ, "COLIBRI_LIBRARY": str(tmp_path / "none.so")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "pip install" in done.stdout and done.stderr == ""
    (tmp_path / "none.so").write_bytes(b"no library")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "cannot be loaded" in done.stdout


# ---- Models


def test_config(model: colibri.Model, tiny_models: dict[str, Path]) -> None:
    config = model.config
    expected = {
        "model_type": "mixtral", "dtype": "q8", "vocab_size": 270, "hidden_size": 64, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, "num_experts": 8, "top_k": 2, "moe_intermediate_size": 48, "bos_token": 0,
        "eos_tokens": [1], "max_position": 512, "has_tokenizer": True, "has_chat_template": True,
        "file_size": tiny_models["q8"].stat().st_size,
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    config["eos_tokens"].append(5)
    assert model.config["eos_tokens"] == [1]
    assert colibri.Model(tiny_models["f32"]).config["dtype"] == "f32"
    assert "mixtral q8" in repr(model)


def test_tensors_metadata_verify(model: colibri.Model) -> None:
    tensors = list(model.tensors())
    experts = [t for t in tensors if t["role"] == "experts"]
    assert [t["layer"] for t in experts] == [0, 1]
    assert all(t["count"] == 8 and t["rows"] == 48 and t["k"] == 64 and t["dtype"] == "q8" for t in experts)
    assert all(0 < t["offset"] < t["offset"] + t["size"] <= model.config["file_size"] for t in tensors)
    assert {"embedding", "head", "tokenizer"} <= {t["role"] for t in tensors}
    assert model.metadata["model_type"] == "mixtral"
    model.verify()


def test_damaged_file(tiny_model: Path, tmp_path: Path) -> None:
    data = bytearray(tiny_model.read_bytes())
    last = max(colibri.Model(tiny_model).tensors(), key=lambda t: t["offset"])
    data[last["offset"]] ^= 1
    damaged = tmp_path / "damaged.colibri"
    damaged.write_bytes(data)
    with pytest.raises(colibri.ChecksumError, match="metadata"):
        colibri.Model(damaged).verify()
    for size in (0, 1, 64, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:size])
        with pytest.raises(colibri.FormatError):
            colibri.Model(damaged)


@pytest.mark.parametrize("path", ["", "a\0b", None, 5, b"\xff\0"])
def test_bad_path(path: object) -> None:
    with pytest.raises(colibri.InvalidArgumentError):
        colibri.Model(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(colibri.NotFoundError) as caught:
        colibri.Model(tmp_path / "none.colibri")
    assert "none.colibri" in str(caught.value)
    assert caught.value.status == 6 and caught.value.__cause__ is None and caught.value.__context__ is None


def test_path_with_other_letters(tiny_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "Загрузки 模型.colibri"
    copy.write_bytes(tiny_model.read_bytes())
    assert colibri.Model(str(copy)).config["vocab_size"] == 270


# ---- Text


def test_tokenize(model: colibri.Model) -> None:
    assert model.tokenize("the</s>") == [0, 259, 1]
    assert 1 not in model.tokenize("the</s>", special=False) and model.tokenize("", special=False) == []
    text = "Some \n text: héllo 模 🦙\u200d"
    ids = model.tokenize(text)
    assert all(type(token) is int for token in ids) and model.detokenize(ids) == text
    assert model.detokenize(ids, special=True) == "<s>" + text
    assert model.detokenize(np.array(ids, np.int64)) == text
    assert model.detokenize([]) == "" and model.detokenize([269]) == ""
    assert model.tokenize(text.encode()) == ids


def test_tokenize_strange_text(model: colibri.Model) -> None:
    assert model.detokenize(model.tokenize(b"a\xf0b")) == "a\ufffdb"
    assert model.detokenize(model.tokenize("a\udcf0b")) == "a\ufffdb"  # a byte of a command line that was not UTF-8
    assert model.detokenize(model.tokenize("a\ud800b")).startswith("a\ufffd")
    assert model.detokenize(model.tokenize("a\0b")) == "a\0b"
    for text in (None, 5, ["a"]):
        with pytest.raises(colibri.InvalidArgumentError):
            model.tokenize(text)


@pytest.mark.parametrize(
    ("ids", "error"),
    [([-1], "TokenError"), ([270], "TokenError"), ([2**31], "TokenError"), ([2**70], "TokenError"),
     ([1.5], "InvalidArgumentError"), (["a"], "InvalidArgumentError"), ("text", "InvalidArgumentError"),
     (5, "InvalidArgumentError"), (None, "InvalidArgumentError")],
)  # fmt: skip
def test_bad_ids(model: colibri.Model, ids: object, error: str) -> None:
    with pytest.raises(getattr(errors, error)):
        model.detokenize(ids)
    with session(model) as s, pytest.raises(getattr(errors, error)):
        s.forward(ids)
    assert s.closed
    if isinstance(ids, list):
        with pytest.raises(getattr(errors, error)):
            colibri.TextStream(model).feed(ids[0])


def test_stream_gives_whole_characters(model: colibri.Model) -> None:
    stream = colibri.TextStream(model)
    pieces = [stream.feed(token) for token in model.tokenize("🦙é")]
    assert [piece for piece in pieces if piece] == ["🦙", "é"] and stream.end() == ""
    assert stream.feed(model.tokenize("🦙", special=False)[0]) == "" and stream.end() == "\ufffd"
    assert stream.feed(np.int64(model.tokenize("x", special=False)[0])) == "x"
    with pytest.raises(colibri.TokenError):
        stream.feed(2**32 - 1)  # not -1, which ends the text


def test_no_tokenizer(textless_model: Path) -> None:
    model = colibri.Model(textless_model)
    assert model.config["has_tokenizer"] is False and model.chat_template is None
    s = session(model)
    for call in (lambda: model.tokenize("a"), lambda: model.detokenize([1]), lambda: s.generate("a")):
        with pytest.raises(colibri.NoTokenizerError):
            call()
    assert s.forward(IDS).shape == (7, 270) and 0 <= s.sample() < 270


# ---- Forward passes


def test_outputs(model: colibri.Model) -> None:
    every = session(model).forward(IDS)
    assert every.shape == (7, 270) and every.dtype == np.float32 and np.isfinite(every).all()
    last = session(model, outputs="last").forward(IDS)
    assert last.shape == (1, 270) and np.array_equal(last[0], every[-1])
    assert session(model, outputs="hidden").forward(IDS).shape == (7, 64)
    assert np.array_equal(session(model, num_threads=1, isa="ref").forward(np.array(IDS)), every)


def test_appending_is_the_same(model: colibri.Model) -> None:
    every = session(model).forward(IDS)
    s = session(model)
    parts = [s.forward(IDS[:3]), s.forward(IDS[3:4]), s.forward(IDS[4:])]
    assert np.array_equal(np.concatenate(parts), every) and s.length() == 7 and s.tokens() == IDS
    s.truncate(0, 4)
    assert s.length(0) == 4 and s.tokens() == IDS[:4] and np.array_equal(s.forward(IDS[4:]), every[4:])
    s.reset()
    assert s.length() == 0 and np.array_equal(s.forward(IDS), every)


def test_batch(model: colibri.Model) -> None:
    alone = session(model).forward(IDS)
    s = session(model, max_batch_size=3)
    first = s.forward_batch([IDS[:2], [], [9, 9, 9]])
    second = s.forward_batch([IDS[2:], IDS])
    assert [r.shape for r in first] == [(2, 270), (0, 270), (3, 270)]
    assert np.array_equal(np.concatenate([first[0], second[0]]), alone) and np.array_equal(second[1], alone)
    assert [s.length(i) for i in range(3)] == [7, 7, 3]
    last = session(model, max_batch_size=2, outputs="last").forward_batch([IDS, []])
    assert np.array_equal(last[0], alone[-1:]) and last[1].shape == (0, 270)


def test_kv_dtypes(model: colibri.Model) -> None:
    logits = {}
    for kv_dtype in ("f32", "f16", "q8"):
        with colibri.Session(model, max_seq_len=64, kv_dtype=kv_dtype) as session:
            logits[kv_dtype] = session.forward(list(range(1, 41)))
    for kv_dtype, limit in (("f16", 0.01), ("q8", 0.1)):
        error = np.linalg.norm(logits[kv_dtype] - logits["f32"]) / np.linalg.norm(logits["f32"])
        assert 0 < error < limit


@pytest.mark.parametrize(
    ("option", "error"),
    [({"max_batch_size": 0}, "InvalidArgumentError"), ({"max_seq_len": 0}, "InvalidArgumentError"),
     ({"max_seq_len": -1}, "InvalidArgumentError"), ({"max_batch_size": 5000}, "InvalidArgumentError"),
     ({"max_batch_size": "2"}, "InvalidArgumentError"), ({"num_threads": 257}, "InvalidArgumentError"),
     ({"outputs": "some"}, "InvalidArgumentError"), ({"isa": "sse9"}, "InvalidArgumentError"),
     ({"isa": 3}, "InvalidArgumentError"), ({"isa": "neon"}, "IsaError"), ({"top_k": 9}, "InvalidArgumentError"),
     ({"top_k": -1}, "InvalidArgumentError"), ({"kv_dtype": "q4"}, "InvalidArgumentError"),
     ({"activation_bits": 7}, "InvalidArgumentError"), ({"dtype": "f32"}, "UnsupportedError"),
     ({"no_such_option": 1}, "InvalidArgumentError"), ({"isa": "amx"}, "IsaError")],
)  # fmt: skip
def test_bad_options(model: colibri.Model, option: dict[str, object], error: str) -> None:
    if error == "IsaError" and colibri.isa_supported(str(option["isa"])):
        pytest.skip(f"this machine has {option['isa']}")
    with pytest.raises(getattr(errors, error)) as caught:
        session(model, **option)
    assert next(iter(option)) in str(caught.value) or error in ("IsaError", "UnsupportedError")


def test_bad_calls_change_nothing(model: colibri.Model) -> None:
    s = session(model, max_seq_len=10)
    every = s.forward(IDS)
    for ids, error in (
        ([], "InvalidArgumentError"),
        ([1, -1], "TokenError"),
        ([270], "TokenError"),
        ([1] * 4, "SlotFullError"),
    ):
        with pytest.raises(getattr(errors, error)):
            s.forward(ids)
    for call in (lambda: s.truncate(0, 8), lambda: s.truncate(1, 0), lambda: s.length(-1), lambda: s.sample(1)):
        with pytest.raises(colibri.InvalidArgumentError):
            call()
    with pytest.raises(colibri.InvalidArgumentError):
        s.forward_batch([IDS, IDS])
    for batch in (None, 3, [1, 2], "text"):
        with pytest.raises(colibri.InvalidArgumentError):
            s.forward_batch(batch)
    assert s.length() == 7
    assert np.array_equal(s.forward([4]), session(model).forward([*IDS, 4])[7:]) and every.shape == (7, 270)


def test_log(model: colibri.Model) -> None:
    lines: list[tuple[str, str]] = []
    session(model, log=lambda level, text: lines.append((level, text))).close()
    assert lines and all(level in ("info", "warning") for level, _ in lines)

    def fail(level: str, text: str) -> None:
        raise KeyError(text)

    with pytest.raises(KeyError):
        session(model, log=fail)


def test_cancel(model: colibri.Model) -> None:
    s = session(model)
    s.cancel()
    with pytest.raises(colibri.CancelledError):
        s.forward(IDS)
    assert s.length() == 0 and s.forward(IDS).shape == (7, 270)


def test_cancel_between_layers_and_logits(model: colibri.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are in their slots, their logits are not out: a cancelled call still changes nothing."""
    s = session(model, max_batch_size=2)
    s.forward_batch([IDS, [1]])
    infer = s._infer

    def infer_and_cancel(*arguments: object) -> object:
        result = infer(*arguments)
        s.cancel()
        return result

    with monkeypatch.context() as patch, pytest.raises(colibri.CancelledError):
        patch.setattr(s, "_infer", infer_and_cancel)
        s.forward_batch([[1, 2, 3], [4, 5]])
    assert s.length(0) == 7 and s.length(1) == 1 and s.tokens(1) == [1]
    alone = session(model)
    alone.forward(IDS)
    assert np.array_equal(s.forward([4, 5]), alone.forward([4, 5]))


@pytest.mark.parametrize("outputs", ["all", "last"])
def test_not_finite_slot(tiny_model: Path, tmp_path: Path, outputs: str) -> None:
    """A NaN in one token's embedding: its slot fails and stays as it was, the others go on."""
    data = bytearray(tiny_model.read_bytes())
    embedding = next(t for t in colibri.Model(tiny_model).tensors() if t["role"] == "embedding")
    row = embedding["size"] // embedding["rows"]
    data[embedding["offset"] + 42 * row : embedding["offset"] + 42 * row + 2] = b"\xff\x7e"  # f16 NaN
    path = tmp_path / "nan.colibri"
    path.write_bytes(data)
    s = session(colibri.Model(path), max_batch_size=3, outputs=outputs)
    s.forward_batch([[1, 2], [3], [4]])
    with pytest.raises(colibri.NotFiniteError) as caught:
        s.forward_batch([[5, 6], [7, 42], [8]])
    assert caught.value.slots == [1]
    assert [s.tokens(i) for i in range(3)] == [[1, 2, 5, 6], [3], [4, 8]]
    assert [s.length(i) for i in range(3)] == [4, 1, 2]
    results = caught.value.results
    expected = session(colibri.Model(path), outputs=outputs).forward([1, 2, 5, 6])
    assert np.array_equal(results[0][-1], expected[-1]) and not results[1].any()
    with pytest.raises(colibri.NotFiniteError):
        s.generate([42], max_new_tokens=2)


# ---- Sampling and generation


def test_sample(model: colibri.Model) -> None:
    s = session(model)
    logits = s.forward(IDS)[-1]
    assert s.sample() == int(logits.argmax())
    draws = [s.sample(0, temperature=1.0, seed=seed) for seed in range(40)]
    assert len(set(draws)) > 5 and draws == [s.sample(0, temperature=1.0, seed=seed) for seed in range(40)]
    best = set(np.argsort(logits)[-3:].tolist())
    assert {s.sample(0, temperature=2.0, top_k=3, seed=seed) for seed in range(40)} <= best
    assert s.length() == 7


@pytest.mark.parametrize(
    "setting",
    [{"temperature": -1}, {"temperature": float("nan")}, {"temperature": "hot"}, {"top_k": -1}, {"top_p": 1.5},
     {"min_p": -0.1}, {"repetition_penalty": float("inf")}, {"seed": -1}, {"seed": 2**64}, {"top_k": 1.5}],
)  # fmt: skip
def test_bad_sampling(model: colibri.Model, setting: dict[str, object]) -> None:
    s = session(model)
    s.forward(IDS)
    for call in (lambda: s.sample(0, **setting), lambda: s.generate("a", **setting)):
        with pytest.raises(colibri.InvalidArgumentError, match=next(iter(setting))):
            call()


def test_generate_is_forward_and_sample(model: colibri.Model) -> None:
    s = session(model)
    text = s.generate("the inn", max_new_tokens=12, temperature=0.8, seed=3, stop_at_eos=False)
    done = s.last_generation
    assert done.prompt_tokens == len(model.tokenize("the inn")) and done.finish_reason == "length"
    assert len(done.tokens) == 12 and model.detokenize(done.tokens) == text
    by_hand = session(model, outputs="last")
    by_hand.forward(model.tokenize("the inn"))
    made = []
    for _ in range(12):
        made.append(by_hand.sample(0, temperature=0.8, seed=3))
        by_hand.forward([made[-1]])
    assert tuple(made) == done.tokens
    assert s.generate(model.tokenize("the inn"), 12, 0.8, seed=3, stop_at_eos=False) == text  # the slot was reset
    assert "".join(s.generate("the inn", 12, 0.8, seed=3, stop_at_eos=False, stream=True)) == text


def test_generate_stops_at_the_end_token(model: colibri.Model) -> None:
    s = session(model, max_seq_len=400)
    for seed in range(40):
        s.generate("the", max_new_tokens=300, temperature=1.5, seed=seed)
        if s.last_generation.finish_reason == "eos":
            break
    assert s.last_generation.finish_reason == "eos" and 1 not in s.last_generation.tokens


def test_generate_room(model: colibri.Model) -> None:
    s = session(model, max_seq_len=10)
    s.generate([5, 6, 7], max_new_tokens=8, stop_at_eos=False)
    assert s.length() == 10 and len(s.last_generation.tokens) == 8
    for prompt, count in (([5, 6, 7], 9), ([5] * 11, None), ([5] * 11, 1)):
        with pytest.raises(colibri.SlotFullError, match="max_seq_len"):
            s.generate(prompt, max_new_tokens=count)
    for prompt in ([], [270], None):
        with pytest.raises(colibri.ColibriError):
            s.generate(prompt, max_new_tokens=1)
    s.generate([5] * 8, stop_at_eos=False)
    assert len(s.last_generation.tokens) == 3
    assert s.generate([5, 6], max_new_tokens=0) == ""


def test_generate_keeps(model: colibri.Model) -> None:
    s = session(model, max_batch_size=2)
    first = s.generate(IDS, 4, slot=1, stop_at_eos=False)
    held = s.tokens(1)
    assert held[:7] == IDS and len(held) == 10
    again = s.generate(IDS, 4, slot=1, stop_at_eos=False, keep="prefix")
    assert again == first and s.last_generation.prompt_tokens == 1
    s.truncate(1, 7)
    s.generate([3, 4], 2, slot=1, keep="all", stop_at_eos=False)
    one = s.last_generation.tokens
    s.generate([*IDS, 3, 4], 2, stop_at_eos=False)
    assert s.last_generation.tokens == one and s.tokens(0) == s.tokens(1)
    with pytest.raises(colibri.InvalidArgumentError):
        s.generate(IDS, keep="some")


def test_stopping_a_stream(model: colibri.Model) -> None:
    s = session(model)
    pieces = s.generate("the inn", 50, stream=True, stop_at_eos=False)
    next(pieces)
    pieces.close()
    assert s.last_generation.finish_reason == "stopped" and s.generate("the inn", 5) is not None


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupting_generation(tiny_model: Path) -> None:
    code = (
        "import sys, threading, os, signal, colibri\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored, if the tests run in the background
        "s = colibri.Session(sys.argv[1], max_seq_len=500000, num_threads=1)\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try: s.generate('the', max_new_tokens=400000, stop_at_eos=False)\n"
        "except KeyboardInterrupt: print('interrupted', s.length() > 1, len(s.generate('the', 5)) >= 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["interrupted", "True", "True"], done.stderr


# ---- Routing and statistics


@pytest.mark.parametrize("value", [3, "\udcff", "0\x001", "a" + "é" * 60, "", "0,0", "0-300", "99999"])
def test_affinity_errors(model: colibri.Model, value: object) -> None:
    with pytest.raises(colibri.ColibriError, match="cpu_affinity") as caught:
        session(model, cpu_affinity=value)
    assert isinstance(caught.value, colibri.InvalidArgumentError | colibri.UnsupportedError)


def test_route_tokens(model: colibri.Model) -> None:
    s = session(model, top_k=3)
    hidden = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    ids, weights = s.route_tokens(1, hidden)
    assert ids.shape == weights.shape == (5, 3) and ids.dtype == np.int32
    assert np.allclose(weights.sum(1), 1, atol=1e-6) and (np.diff(weights, axis=1) <= 0).all()
    hidden[2, 3] = np.nan
    with pytest.raises(colibri.NotFiniteError) as caught:
        s.route_tokens(1, hidden)
    partial, _ = caught.value.results
    assert (partial[2] == -1).all() and np.array_equal(partial[[0, 1, 3, 4]], ids[[0, 1, 3, 4]])
    for layer, rows in ((2, hidden), (-1, hidden), (0, hidden[0]), (0, hidden[:, :3]), (0, "x"), (0, hidden[:0])):
        with pytest.raises(colibri.InvalidArgumentError):
            s.route_tokens(layer, rows)


def test_stats(model: colibri.Model) -> None:
    s = session(model, isa="ref", num_threads=1)
    s.forward(IDS)
    s.forward([1])
    stats = s.stats()
    assert (stats["isa"], stats["num_threads"], stats["infer_calls"]) == ("ref", 1, 2)
    assert (stats["prompt_tokens"], stats["decode_tokens"]) == (7, 1)
    assert stats["expert_tokens"].shape == (2, 8) and stats["expert_tokens"].sum() == 2 * 8 * 2
    assert stats["workspace_bytes"] > stats["kv_bytes"] > 0 and stats["infer_ns"] > 0 and stats["weight_bytes"] > 0
    experts = {name: array for name, array in stats.items() if name.startswith("expert_")}
    assert len(experts) == 10 and all(array.shape == (2, 8) and array.flags.c_contiguous for array in experts.values())
    signed = {name for name, array in experts.items() if array.dtype == np.int32}
    assert signed == {"expert_place", "expert_node"} and stats["expert_hits"].dtype == np.uint64
    assert {colibri.PLACES[int(code)] for code in stats["expert_place"].ravel()} == {"mapped"}
    assert stats["residency"] == "map" and stats["guarded"] is False and stats["infer_histogram"].sum() == 2
    assert stats["infer_histogram"].shape == stats["read_histogram"].shape == (28,)
    s.stats_reset()
    assert s.stats()["expert_tokens"].sum() == 0 and s.stats()["infer_calls"] == 0


# ---- Lifetimes


def test_use_after_close(tiny_model: Path) -> None:
    model = colibri.Model(tiny_model)
    with session(model) as s:
        model.close()
        model.close()
        assert s.forward(IDS).shape == (7, 270)  # the session keeps the file
    s.close()
    calls = (s.reset, s.stats, s.cancel, s.length, lambda: s.forward(IDS), lambda: s.generate("a"), model.verify)
    for call in (*calls, lambda: model.tokenize("a"), lambda: list(model.tensors()), lambda: session(model)):
        with pytest.raises(colibri.StateError, match="closed"):
            call()
    assert model.closed and "closed" in repr(model) and "closed" in repr(s)


def test_garbage_is_freed(tiny_model: Path) -> None:
    s = session(colibri.Model(tiny_model))
    model = weakref.ref(s.model)
    gc.collect()
    assert model() is not None
    handle = s._handle
    del s
    gc.collect()
    assert model() is None and handle.closed


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_failed_opens_leak_nothing(tiny_model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.colibri"
    bad.write_bytes(tiny_model.read_bytes()[:5000])
    before = None
    for i in range(1000):
        for path in (bad, tmp_path / "none"):
            with pytest.raises(colibri.ColibriError):
                colibri.Model(path)
        if i == 100:
            before = len(os.listdir("/proc/self/fd")), _resident()
    assert before is not None
    assert len(os.listdir("/proc/self/fd")) <= before[0] and _resident() - before[1] < 2 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork(tiny_model: Path) -> None:
    """In a forked child a session of the parent is an error or works, and the child ends."""
    code = (
        "import os, sys, colibri\n"
        "s = colibri.Session(sys.argv[1], max_seq_len=64, num_threads=2)\n"
        "s.forward([1, 2, 3])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: s.forward([4])\n"
        "    except colibri.ThreadError: pass\n"
        "    sys.exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), s.forward([4]).shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tiny_model)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "7 (1, 270)\n" and done.stderr == ""


def test_model_shared_by_threads(model: colibri.Model) -> None:
    every = session(model).forward(IDS)
    results: list[bool] = []

    def work() -> None:
        with session(model) as own:
            results.append(np.array_equal(own.forward(IDS), every) and model.tokenize("the") == [0, 259])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_session_shared_by_threads(model: colibri.Model) -> None:
    """Calls wait for each other, and closing waits for the running one."""
    s = session(model, max_seq_len=500)
    threads = [threading.Thread(target=s.forward, args=([i],)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert s.length() == 20 and sorted(s.tokens()) == list(range(20))


# ---- Chat


def test_chat_template(model: colibri.Model) -> None:
    pytest.importorskip("jinja2")
    from colibri.chat import ChatTemplate

    template = ChatTemplate(model)
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "b"}]
    assert template.render(messages, add_generation_prompt=False) == "<s>[user]hé\n[assistant]b</s>\n"
    ids = template.tokens(messages)
    assert ids.count(0) == 1 and ids[0] == 0 and ids.count(1) == 1
    with pytest.raises(colibri.InvalidArgumentError, match="Unknown role"):
        template.render([{"role": "tool", "content": "x"}])


def test_chat_template_environment(model: colibri.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    from colibri.chat import ChatTemplate

    def render(text: str, **variables: object) -> str:
        monkeypatch.setattr(colibri.Model, "chat_template", property(lambda _: text))
        return ChatTemplate(model).render([{"role": "user", "content": "x"}], **variables)

    assert render("{{ {'a': 'é<'} | tojson }}") == '{"a": "é<"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert (
        render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}{% break %}\n{% endif %}{% endfor %}") == "x"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}{{ flag }}", flag=1) == "x1"
    for text in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ no_such() }}"):
        with pytest.raises(colibri.InvalidArgumentError):
            render(text)
    for text in ("{% if %}", "{% unknown_tag %}"):
        with pytest.raises(colibri.UnsupportedError):
            render(text)


def test_chat_template_tokens(tmp_path: Path) -> None:
    """The tokenizer's settings and config.json name other tokens: the template's are the tokenizer's."""
    pytest.importorskip("jinja2")
    from colibri.chat import ChatTemplate

    folder = conftest.write_checkpoint(tmp_path / "checkpoint")
    settings = {"bos_token": {"content": "</s>"}, "eos_token": None, "unk_token": "?"}
    template = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    colibri.convert(folder, tmp_path / "m.colibri")
    chat = ChatTemplate(colibri.Model(tmp_path / "m.colibri"))
    assert chat.render([{"role": "user", "content": "x"}]) == "</s>||?|"


def test_chat_needs_a_template(textless_model: Path) -> None:
    from colibri.chat import ChatTemplate

    with pytest.raises(colibri.UnsupportedError, match="no chat template"):
        ChatTemplate(colibri.Model(textless_model))


# ---- The demo model


def test_demo_model() -> None:
    try:
        path = colibri.demo_path()
    except colibri.NotFoundError:
        pytest.skip("this checkout has no demo model")
    assert path.stat().st_size <= 8_000_000
    model = colibri.Model(path)
    assert model.config["model_type"] == "mixtral" and model.config["num_experts"] >= 8 and model.config["top_k"] == 2
    text = session(model, max_seq_len=128).generate("Once upon a time", max_new_tokens=60)
    words = [word.strip(".,!?\"'") for word in text.split()]
    assert len(words) > 25 and sum(word.isalpha() for word in words) > 0.9 * len(words)
