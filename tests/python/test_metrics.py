"""Session.metrics: text that Prometheus reads, and that says what Session.stats says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import colibri
import numpy as np
import pytest
from colibri import _ffi

parser = pytest.importorskip("prometheus_client.parser")
IDS = [5, 17, 200, 3, 99, 42, 7]


def families(text: str) -> dict[str, Any]:
    found = list(parser.text_string_to_metric_families(text))
    assert len({family.name for family in found}) == len(found)  # each begins once
    return {family.name: family for family in found}


def value(all_families: dict[str, Any], name: str, **labels: str) -> float:
    """The one sample of a name with these labels."""
    family = next(all_families[n] for n in (name, name.removesuffix("_total")) if n in all_families)
    (sample,) = [s for s in family.samples if s.name == name and s.labels == labels]
    return sample.value


@pytest.fixture
def session(tiny_model: Path) -> colibri.Session:
    with colibri.Session(tiny_model, max_seq_len=64, num_threads=2) as made:
        made.forward(IDS)
        for token in (1, 2, 3):
            made.forward([token])
        yield made


def test_form(session: colibri.Session) -> None:
    """Names, units, HELP and TYPE as Prometheus asks for, checked on the text itself as the parser forgives a lot."""
    text = session.metrics()
    assert text.endswith("\n") and text.isascii() and "\n\n" not in text
    seen: set[str] = set()
    kind = name = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in seen and re.fullmatch(r"colibri_[a-z0-9_]+", name) and line.endswith("."), line
            seen.add(name)
        elif line.startswith("# TYPE "):
            _, _, typed, kind = line.split()
            assert typed == name and kind in ("counter", "gauge", "histogram")
            assert (kind == "counter") == name.endswith("_total")
        else:
            sample = re.fullmatch(r'([a-z0-9_]+)(\{(?:[a-z_]+="[^"\\]*",?)+\})? (-?[0-9]+(?:\.[0-9]+)?)', line)
            assert sample, line
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert sample[1] in [name + suffix for suffix in suffixes], line
    assert not re.search(r"_(ns|ms|us|kb|mb)(_|$|\b)", " ".join(seen))


def test_types_and_labels(session: colibri.Session) -> None:
    found = families(session.metrics())
    kinds = {name: family.type for name, family in found.items()}
    assert all(family.documentation for family in found.values())
    assert kinds["colibri_infer_duration_seconds"] == kinds["colibri_expert_read_duration_seconds"] == "histogram"
    assert kinds["colibri_expert_tokens"] == kinds["colibri_cache_hits"] == kinds["colibri_read_bytes"] == "counter"
    assert kinds["colibri_workspace_bytes"] == kinds["colibri_expert_place"] == "gauge"
    isa = session.stats()["isa"]
    assert value(found, "colibri_build_info", version=colibri.version(), isa=isa) == 1
    assert value(found, "colibri_residency_info", residency="map", hugepage_size="0") == 1
    for name, family in found.items():
        if name.startswith("colibri_expert_") and family.type != "histogram":
            labels = [(int(s.labels["layer"]), int(s.labels["expert"])) for s in family.samples]
            assert labels == [(layer, expert) for layer in range(2) for expert in range(8)]
            assert all(s.labels.keys() == {"layer", "expert"} for s in family.samples)


def test_values_are_those_of_stats(session: colibri.Session) -> None:
    found, stats = families(session.metrics()), session.stats()
    for name, expected in (
        ("threads", 2), ("workspace_bytes", stats["workspace_bytes"]), ("kv_cache_bytes", stats["kv_bytes"]),
        ("weight_bytes_total", stats["weight_bytes"]), ("cache_hits_total", 0), ("numa_nodes", 0),
        ("last_infer_seconds", stats["last_infer_ns"] / 1e9), ("capacity_dropped_total", 0),
    ):  # fmt: skip
        assert value(found, f"colibri_{name}") == pytest.approx(expected, rel=1e-12)
    assert value(found, "colibri_tokens_total", phase="prompt") == 7
    assert value(found, "colibri_tokens_total", phase="decode") == 3
    for stage in ("attention", "router", "experts", "head"):
        assert value(found, "colibri_stage_seconds_total", stage=stage) == stats[f"{stage}_ns"] / 1e9
    members = {"tokens": 1, "calls": 1, "hits": 1, "misses": 1, "bytes_read": 1, "load_ns": 1e9, "compute_ns": 1e9}
    for member, scale in {**members, "merge_ns": 1e9, "place": 1, "node": 1}.items():
        name = {"bytes_read": "read_bytes"}.get(member, member).replace("_ns", "_seconds")
        name = f"colibri_expert_{name}" + ("" if member in ("place", "node") else "_total")
        for (layer, expert), number in np.ndenumerate(stats[f"expert_{member}"]):
            shown = value(found, name, layer=str(layer), expert=str(expert))
            assert shown == pytest.approx(float(number) / scale, rel=1e-12)


@pytest.mark.parametrize("name", ["infer_duration_seconds", "expert_read_duration_seconds"])
def test_histograms(session: colibri.Session, name: str) -> None:
    family = families(session.metrics())[f"colibri_{name}"]
    buckets = [(s.labels["le"], s.value) for s in family.samples if s.name.endswith("_bucket")]
    assert [float(le) for le, _ in buckets] == [*(2**i / 1e6 for i in range(_ffi.COLIBRI_HISTOGRAM - 1)), float("inf")]
    counts = [count for _, count in buckets]
    assert counts == sorted(counts) and buckets[-1][0] == "+Inf"
    (total,) = (s.value for s in family.samples if s.name.endswith("_sum"))
    (count,) = (s.value for s in family.samples if s.name.endswith("_count"))
    assert count == counts[-1]
    stats = session.stats()
    if name.startswith("infer"):
        assert count == stats["infer_calls"] == 4 and total == pytest.approx(stats["infer_ns"] / 1e9, rel=1e-12)
        assert np.array_equal(stats["infer_histogram"], np.diff([0, *counts]).astype(np.uint64))
    single = np.diff([0, *counts])
    upper = [float(le) for le, _ in buckets]
    low = sum(n * (le / 2 if i else 0) for i, (n, le) in enumerate(zip(single[:-1], upper[:-1], strict=True)))
    high = sum(n * le for n, le in zip(single[:-1], upper[:-1], strict=True))
    assert low <= total and (single[-1] or total <= high + 1e-9)  # the sum is what the buckets allow


def test_counters_grow_and_reset(session: colibri.Session) -> None:
    def counters() -> dict[tuple[str, str], float]:
        found = families(session.metrics()).values()
        return {(s.name, str(s.labels)): s.value for f in found if f.type != "gauge" for s in f.samples}

    before = counters()
    session.forward([1, 2, 3])
    after = counters()
    assert after.keys() == before.keys() and all(after[key] >= before[key] for key in before)
    for name in (
        "colibri_tokens_total",
        "colibri_infer_duration_seconds_count",
        "colibri_expert_compute_seconds_total",
    ):
        assert sum(v for k, v in after.items() if k[0] == name) > sum(v for k, v in before.items() if k[0] == name)
    session.stats_reset()
    assert not any(counters().values())
    assert value(families(session.metrics()), "colibri_threads") == 2


def test_dense_layers_are_left_out(tmp_path: Path) -> None:
    import tiny

    tiny.save(tmp_path / "checkpoint", tiny.qwen2_moe())
    colibri.convert(tmp_path / "checkpoint", tmp_path / "m.colibri", dtype="f32")
    with colibri.Session(tmp_path / "m.colibri", max_seq_len=8) as session:
        session.forward([1, 2])
        found, stats = families(session.metrics()), session.stats()
    assert {int(s.labels["layer"]) for s in found["colibri_expert_tokens"].samples} == {1, 3}
    assert (stats["expert_place"] == np.array([[-1], [1], [-1], [1]])).all()
    assert stats["expert_tokens"].any(axis=1).tolist() == [False, True, False, True]
