"""Where weights live, load balancing, profiles and metrics as options: of Session, of the Python commands, of the C
tools. Good values work and show in the figures; bad ones are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import colibri
import numpy as np
import pytest
import test_tools
from test_cli import Runner, run  # noqa: F401 - a fixture
from test_metrics import families, value
from test_tools import Tool, bench, infer, tools  # noqa: F401 - fixtures

IDS = [5, 17, 200, 3, 99, 42, 7]
MODES: list[dict[str, Any]] = [
    {}, {"residency": "map"}, {"residency": "lock"}, {"residency": "huge"}, {"hugepage_size": 2 << 20},
    {"residency": "stream"}, {"expert_cache_size": 3}, {"residency": "stream", "expert_cache_size": 1 << 20},
    {"numa_policy": "interleave"}, {"numa_policy": "0-1:0"}, {"numa_policy": "none"}, {"guard_mapping": True},
    {"load_balancing_strategy": "none"},
]  # fmt: skip


def session(path: Path, **options: Any) -> colibri.Session:
    return colibri.Session(path, max_seq_len=64, num_threads=2, **options)


def decode(made: colibri.Session) -> np.ndarray:
    """Logits of a prompt and of 20 tokens run one by one."""
    return np.concatenate([made.forward(IDS), *(made.forward([token]) for token in range(20, 40))])


# ---- Session


@pytest.mark.parametrize("options", MODES, ids=str)
def test_the_same_bits_everywhere(tiny_model: Path, options: dict[str, Any]) -> None:
    with session(tiny_model) as plain, session(tiny_model, **options) as other:
        assert np.array_equal(decode(plain), decode(other))
        stats = other.stats()
    size = options.get("expert_cache_size")
    default = "stream" if size else "huge" if "hugepage_size" in options else "map"
    asked = options.get("residency") or default
    assert stats["residency"] in ((asked, "map") if asked == "lock" else (asked,))  # a lock may be refused
    places = {colibri.PLACES[int(code)] for code in stats["expert_place"].ravel()}
    allowed = {"map": {"mapped"}, "lock": {"locked"}, "huge": {"memory"}, "stream": {"disk", "cached", "pinned"}}
    assert places <= allowed[stats["residency"]]
    nodes = options.get("numa_policy", "none") != "none"
    assert (stats["expert_node"] >= 0).all() if nodes else (stats["expert_node"] == -1).all()
    assert stats["guarded"] in ((True, False) if options.get("guard_mapping") else (False,))
    assert (stats["expert_hits"] + stats["expert_misses"] == stats["expert_calls"]).all()
    if stats["residency"] != "stream":
        assert stats["cache_experts"] == stats["read_bytes"] == 0 and not stats["expert_misses"].any()


def test_stream_figures(tiny_model: Path) -> None:
    with session(tiny_model, expert_cache_size=4) as s:
        decode(s)
        stats, found = s.stats(), families(s.metrics())
        s.stats_reset()
        after = s.stats()
    assert stats["cache_experts"] == 4 and stats["cache_misses"] > 0
    assert stats["cache_hits"] == stats["expert_hits"].sum() and stats["cache_misses"] == stats["expert_misses"].sum()
    assert stats["read_bytes"] == stats["expert_bytes_read"].sum() > 0
    assert stats["read_bytes_ahead"] <= stats["read_bytes"] and stats["cache_hits_ahead"] <= stats["cache_hits"]
    assert stats["ahead_correct"] <= stats["ahead_predicted"] and stats["ahead_predicted"] > 0
    cached = np.isin(stats["expert_place"], [k for k, v in colibri.PLACES.items() if v in ("cached", "pinned")])
    assert 0 < cached.sum() <= 4
    assert stats["cache_pinned"] == sum(colibri.PLACES[int(code)] == "pinned" for code in stats["expert_place"].ravel())
    # reads are one histogram: buckets, count and sum are of the same reads
    name = "colibri_expert_read_duration_seconds"
    samples = {s.name: s.value for s in found[name].samples if s.name in (f"{name}_sum", f"{name}_count")}
    assert samples[f"{name}_count"] == stats["read_histogram"].sum() > 0
    assert samples[f"{name}_sum"] == pytest.approx(stats["expert_load_ns"].sum() / 1e9, rel=1e-9)
    limits = 2.0 ** np.arange(28) / 1e6
    counts = stats["read_histogram"].astype(float)
    assert (counts[1:] * limits[:-1]).sum() <= samples[f"{name}_sum"]
    assert counts[-1] or samples[f"{name}_sum"] <= (counts * limits).sum()
    assert value(found, "colibri_residency_info", residency="stream", hugepage_size=str(stats["hugepage_size"])) == 1
    assert value(found, "colibri_cache_experts") == 4
    assert value(found, "colibri_cache_misses_total") == stats["cache_misses"]
    assert after["cache_hits"] == after["cache_misses"] == 0 and after["cache_experts"] == 4
    assert np.array_equal(after["expert_place"], stats["expert_place"])  # the cache itself stays


def test_capacity_figures(tiny_model: Path) -> None:
    for strategy, counted, other in (("soft_capacity", "moved", "dropped"), ("hard_capacity", "dropped", "moved")):
        with session(tiny_model, load_balancing_strategy=strategy, capacity_factor=0.5) as s:
            s.forward(IDS)
            stats, found = s.stats(), families(s.metrics())
        assert stats[f"capacity_{counted}"] > 0 and (strategy == "soft_capacity" or not stats[f"capacity_{other}"])
        assert value(found, f"colibri_capacity_{counted}_total") == stats[f"capacity_{counted}"]


def test_profile(tiny_model: Path, textless_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "use profile é"
    with session(tiny_model) as s:
        decode(s)
        s.save_profile(path)
        used = s.stats()["expert_tokens"]
    with session(tiny_model, expert_cache_size=4, expert_profile=path) as s:
        there = s.stats()["expert_place"] >= colibri._ffi.COLIBRI_PLACE_CACHED
    assert there.sum() == 4 and used[there].mean() > used[~there].mean()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    with pytest.raises(colibri.InvalidArgumentError, match="another model"):
        session(textless_model, expert_profile=path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(colibri.ColibriError, match="cut short"):
        session(tiny_model, expert_profile=path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"residency": "disk"}, "'stream'"), ({"residency": 1}, "residency"), ({"expert_cache_size": -1}, "between"),
        ({"expert_cache_size": 1}, "at least 2"), ({"expert_cache_size": "5"}, "integer"),
        ({"expert_cache_size": 5, "residency": "map"}, "expert_cache_size"), ({"expert_cache_size": 2**64}, "between"),
        ({"hugepage_size": 4096}, "2097152"), ({"hugepage_size": 2 << 20, "residency": "stream"}, "hugepage_size"),
        ({"numa_policy": "both"}, "interleave"), ({"numa_policy": "0:0"}, "layer 1"),
        ({"numa_policy": 5}, "numa_policy"),
        ({"numa_policy": "nöne"}, "numa_policy"), ({"numa_policy": "none\0"}, "numa_policy"),
        ({"load_balancing_strategy": "x"}, "soft_capacity"), ({"capacity_factor": 1.0}, "load_balancing_strategy"),
        ({"load_balancing_strategy": "soft_capacity", "capacity_factor": -1}, "between"),
        ({"load_balancing_strategy": "soft_capacity", "capacity_factor": float("nan")}, "between"),
        ({"expert_profile": ""}, "path"), ({"expert_profile": 7}, "path"), ({"expert_profile": "a\0b"}, "path"),
        ({"guard_mapping": 2}, "between"), ({"guard_mapping": "yes"}, "integer"),
        ({"expert_cache": 7}, "'expert_cache'"),
    ],
    ids=str,
)  # fmt: skip
def test_refused(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(colibri.InvalidArgumentError) as caught:
        session(tiny_model, **options)
    assert words in str(caught.value)


def test_files_that_are_not_there(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(colibri.NotFoundError):
        session(tiny_model, expert_profile=tmp_path / "none")
    with pytest.raises(colibri.FormatError):
        session(tiny_model, expert_profile=tiny_model)
    with session(tiny_model) as s:
        with pytest.raises(colibri.IoError):
            s.save_profile(tmp_path / "no" / "profile")
        for bad in ("", "a\0", 7):
            with pytest.raises(colibri.InvalidArgumentError):
                s.save_profile(bad)
        s.close()
        for call in (s.metrics, lambda: s.save_profile(tmp_path / "x")):
            with pytest.raises(colibri.ColibriError):
                call()


# ---- The Python commands and the C tools, which take the same options


def needs_tools(function: Any) -> Any:
    for mark in test_tools.pytestmark:
        function = mark(function)
    return function


GOOD = [
    (["--residency", "map"], "residency: map, ordinary pages"),
    (["--residency", "huge"], "residency: huge"),
    (["--hugepage-size", "2M"], "residency: huge"),
    (["--residency=stream"], "residency: stream"),
    (["--expert-cache-size", "5"], "cache: 5 experts"),
    (["--expert-cache-size", "1M"], "residency: stream"),
    (["--expert-cache-size=2MiB", "--residency", "stream"], "residency: stream"),
    (["--numa-policy", "interleave"], ", memory nodes: "),
    (["--guard-mapping"], "residency: map"),
    (["--load-balancing-strategy", "hard_capacity", "--capacity-factor", "0.5"], "dropped"),
]
WRONG = [
    (["--residency", "disk"], "'disk'"), (["--residency", ""], "--residency"), (["--residency"], "--residency"),
    (["--expert-cache-size", "x"], "KiB"), (["--expert-cache-size", "4MB"], "KiB"),
    (["--expert-cache-size", ""], "KiB"), (["--expert-cache-size", "-4"], "KiB"),
    (["--expert-cache-size", "4 M"], "KiB"), (["--expert-cache-size", "4m"], "KiB"),
    (["--expert-cache-size", "512K"], "1048576"), (["--expert-cache-size", "18446744073709551616"], "64 bits"),
    (["--expert-cache-size", "17179869184G"], "64 bits"), (["--hugepage-size", "2MiBs"], "KiB"),
    (["--capacity-factor", "-1"], "--capacity-factor"), (["--capacity-factor", "1025"], "--capacity-factor"),
    (["--load-balancing-strategy", "hard"], "'hard'"), (["--metrics", "-"], "--metrics"), (["--no-such"], "--no-such"),
]  # fmt: skip
REFUSED = [  # by the library
    (["--expert-cache-size", "1"], "at least 2"),
    (["--expert-cache-size", "9", "--residency", "map"], "expert_cache_size"),
    (["--hugepage-size", "4K"], "2097152"), (["--hugepage-size", "1G", "--residency", "stream"], "hugepage_size"),
    (["--numa-policy", "both"], "interleave"), (["--capacity-factor", "1"], "load_balancing_strategy"),
    (["--expert-profile", "no-such-file"], "no-such-file"),
]  # fmt: skip


@needs_tools
@pytest.mark.parametrize(("options", "words"), GOOD, ids=str)
def test_good(infer: Tool, run: Runner, tiny_model: Path, options: list[str], words: str) -> None:  # noqa: F811
    plain = run("run", "the inn on the hill", "-m", tiny_model, "--max-tokens", 9)[0]
    out, err = run("run", "the inn on the hill", "-m", tiny_model, "--max-tokens", 9, "--verbose", *options)
    tool_out, tool_err = infer(
        "--model", tiny_model, "--prompt", "the inn on the hill", "--max-tokens", 9, "--verbose", *options
    )
    assert words in err and words in tool_err and out == tool_out
    assert out == plain or "hard_capacity" in options
    tables = [text[text.index("layer expert") :].splitlines() for text in (err, tool_err)]
    for table in tables:
        assert len(table) == 17 and len({len(line.split()) for line in table[1:]}) == 1
    counts = [[line.split()[:3] for line in table[1:]] for table in tables]  # layer, expert, tokens
    assert counts[0] == counts[1]


@needs_tools
@pytest.mark.parametrize(("options", "words"), WRONG, ids=str)
def test_wrong(infer: Tool, run: Runner, tiny_model: Path, options: list[str], words: str) -> None:  # noqa: F811
    assert words in run.fails("run", "the", "-m", tiny_model, *options, status=2)
    assert words in infer.fails("--model", tiny_model, "--prompt", "the", *options, status=2)


@needs_tools
@pytest.mark.parametrize(("options", "words"), REFUSED, ids=str)
def test_ill_fitting(infer: Tool, run: Runner, tiny_model: Path, options: list[str], words: str) -> None:  # noqa: F811
    assert words in run.fails("run", "the", "-m", tiny_model, *options)
    assert words in infer.fails("--model", tiny_model, "--prompt", "the", *options, status=1)


@needs_tools
def test_files(infer: Tool, run: Runner, tiny_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """--metrics and --save-profile write whole files in place of old ones, or leave those alone."""
    written = []
    for name, command in (
        ("p", lambda *more: run("run", "the inn", "-m", tiny_model, "--max-tokens", 5, *more)),
        ("c", lambda *more: infer("--model", tiny_model, "--prompt", "the inn", "--max-tokens", 5, *more)),
    ):
        metrics, profile = tmp_path / f"{name} é.prom", tmp_path / f"{name}.use"
        metrics.write_text("old")
        command("--metrics", metrics, "--save-profile", profile)
        found = families(metrics.read_text(encoding="utf-8"))
        assert value(found, "colibri_tokens_total", phase="decode") == 4  # the last new token is not run
        written.append(profile.read_bytes())
        command("--expert-profile", profile, "--residency", "stream")
    assert written[0] == written[1]  # the same tokens, the same use
    assert len(list(tmp_path.iterdir())) == 4  # nothing beside them
    for option in ("--metrics", "--save-profile"):
        for target in (tmp_path / "no" / "file", tmp_path):
            line = run("run", "the", "-m", tiny_model, "--max-tokens", 2, option, target, status=1)[1].splitlines()[-1]
            assert line.startswith("colibri: error: cannot write ") and str(target) in line
            options = ["--model", tiny_model, "--prompt", "the", "--max-tokens", 2, option, target]
            line = infer(*options, status=1)[1].splitlines()[-1]
            assert line.startswith("colibri-infer: error: cannot write ") and str(target) in line
    assert len(list(tmp_path.iterdir())) == 4


@needs_tools
@pytest.mark.parametrize("options", [[], ["--residency", "stream", "--expert-cache-size", "6"]], ids=str)
def test_bench(bench: Tool, run: Runner, tiny_model: Path, options: list[str]) -> None:  # noqa: F811
    """Both benchmarks tell where the weights were, under the same names."""
    sizes = ["--prompt-tokens", 20, "--gen-tokens", 5, "--repeat", 1, "--threads", 1]
    tool = json.loads(bench("--model", tiny_model, *sizes, "--json", *options)[0])
    python = json.loads(run("bench", "-m", tiny_model, *sizes, "--json", *options)[0])
    assert tool.keys() == python.keys() and tool["cache"].keys() == python["cache"].keys()
    for result in (tool, python):
        assert result["residency"] == ("stream" if options else "map") and result["hugepage_pool"] is False
        cache = result["cache"]
        assert cache["experts"] == (6 if options else 0)
        if options:
            assert cache["hits"] + cache["misses"] == 5 * 2 * 2
            assert cache["hit_rate"] == pytest.approx(cache["hits"] / 20, abs=1e-6) and cache["read_bytes"] > 0
        else:
            assert cache["hit_rate"] is None and cache["read_bytes"] == 0
    text = bench("--model", tiny_model, *sizes, *options)[0], run("bench", "-m", tiny_model, *sizes, *options)[0]
    assert all(f"residency: {'stream' if options else 'map'}" in one for one in text)
