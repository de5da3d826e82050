"""Measuring: prefill and decode speed of a session, the figures of ``colibri bench`` and ``colibri-bench``."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from .model import token_array

if TYPE_CHECKING:
    from .session import Session


def prompt_ids(count: int, vocab: int) -> list[int]:
    """`count` token ids below `vocab`, the same everywhere: the top bits of a linear congruential generator."""
    ids, state = [], 1
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        ids.append((state >> 33) % vocab)
    return ids


def percentile(values: list[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` % of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


_RESIDENCY = (
    "residency",
    "hugepage_size",
    "hugepage_bytes",
    "hugepage_pool",
    "direct_io",
    "numa_nodes",
    "memory_short",
)


def cache_figures(stats: dict[str, Any]) -> dict[str, Any]:
    """What the cache of experts did, from ``Session.stats()``. Shares are None where nothing was counted."""

    def share(part: str, whole: int) -> float | None:
        return stats[part] / whole if whole else None

    return {
        **{name: stats[f"cache_{name}"] for name in ("experts", "pinned", "hits", "misses", "hits_ahead")},
        "hit_rate": share("cache_hits", stats["cache_hits"] + stats["cache_misses"]),
        "ahead_accuracy": share("ahead_correct", stats["ahead_predicted"]),
        "repeat_accuracy": share("repeat_correct", stats["ahead_predicted"]),
        **{name: stats[name] for name in ("read_bytes", "read_bytes_ahead", "read_wait_ns")},
    }


def measure(session: Session, prompt_tokens: int, gen_tokens: int, repeat: int) -> dict[str, Any]:
    """Run a prompt and then single tokens through slot 0, `repeat` times.

    Returns:
        ``prefill_tokens_per_s`` and ``decode_tokens_per_s`` of the best round; ``decode_ms`` with p50, p90, p99 and
        max over all rounds; ``weight_bytes_per_token`` and ``weight_gb_per_s`` of decoding; the session's
        ``num_threads`` and ``isa``, ``residency`` and what goes with it; ``cache``: of the last round's decoding.
    """
    ids = prompt_ids(prompt_tokens + gen_tokens, session.model.config["vocab_size"])
    times: list[float] = []
    prefill = decode = float("inf")
    weight_bytes = 0
    for _ in range(repeat):
        session.reset()
        begin = time.perf_counter()
        session.forward(token_array(ids[:prompt_tokens]))
        prefill = min(prefill, time.perf_counter() - begin)
        session.stats_reset()
        begin = time.perf_counter()
        for token in ids[prompt_tokens:]:
            start = time.perf_counter()
            session.forward([token])
            times.append(1e3 * (time.perf_counter() - start))
        decode = min(decode, time.perf_counter() - begin)
        weight_bytes = session.stats()["weight_bytes"]
    stats = session.stats()
    return {
        "prompt_tokens": prompt_tokens,
        "gen_tokens": gen_tokens,
        "repeat": repeat,
        "num_threads": stats["num_threads"],
        "isa": stats["isa"],
        "prefill_tokens_per_s": prompt_tokens / prefill,
        "decode_tokens_per_s": gen_tokens / decode,
        "decode_ms": {
            "p50": percentile(times, 50),
            "p90": percentile(times, 90),
            "p99": percentile(times, 99),
            "max": max(times),
        },
        **{name: stats[name] for name in _RESIDENCY},
        "cache": cache_figures(stats),
        "weight_bytes_per_token": weight_bytes // gen_tokens,
        "weight_gb_per_s": weight_bytes / decode / 1e9,
    }
