#!/usr/bin/env python3
"""A day of decoding in minutes: a million calls of infer on one session. Does anything grow, does anything slow down?

    python tools/soak.py MODEL [--calls 1000000] [--residency map lock huge stream] [--expert-cache N] [--threads N]
                         [--json]

Each call decodes one token of one sequence, which begins anew when it is full; one sequence in 997, the first among
them, begins with a prompt of 16 tokens. Memory (resident set), descriptors and threads are looked at a hundred times
on the way, between calls. Printed for each residency: what they were after the first tenth, at the end and at most, and
the median and 99th percentile of a call's time (with Python's part of it) in the first and in the last tenth. Linux;
needs numpy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import colibri
import numpy as np

LOOKS = 100
LENGTH = 256  # tokens of a sequence
RESIDENCIES = ("map", "lock", "huge", "stream")


@dataclass(frozen=True)
class Look:
    """What the process holds."""

    resident: int  # bytes
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Result:
    """One residency: after the first tenth, at the end, the most between; microseconds of a call in the first and last
    tenth.
    """

    residency: str
    calls: int
    early: Look
    late: Look
    most: Look
    first_p50: float
    first_p99: float
    last_p50: float
    last_p99: float


def look() -> Look:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    folders = (os.listdir(f"/proc/self/{name}") for name in ("fd", "task"))
    descriptors, threads = (len(entries) for entries in folders)
    return Look(pages * os.sysconf("SC_PAGESIZE"), descriptors, threads)


def soak(model: Path, residency: str, calls: int, expert_cache: int | None, threads: int | None) -> Result:
    """Run so many calls on a new session."""
    times = np.zeros(calls, np.float32)  # written once before: its pages are there
    times[:] = -1
    looks: list[Look] = []
    every = max(calls // LOOKS, 1)
    cache = expert_cache if residency == "stream" else None
    with colibri.Session(
        model,
        max_seq_len=LENGTH,
        num_threads=threads,
        outputs="last",
        residency=residency,  # type: ignore[arg-type]
        expert_cache_size=cache,
    ) as session:
        vocab = session.model.config["vocab_size"]
        length = sequence = 0
        token = 1
        for call in range(calls):
            if length == LENGTH:
                session.reset()
                length, sequence = 0, sequence + 1
            tokens = [token] if length or sequence % 997 else [(token + i) % vocab for i in range(16)]
            start = time.perf_counter_ns()
            logits = session.forward(tokens)
            times[call] = (time.perf_counter_ns() - start) / 1000
            length += len(tokens)
            token = (int(logits[-1].argmax()) + call) % vocab  # not the same few again and again
            if call % every == every - 1:
                looks.append(look())
    tenth = max(calls // 10, 1)
    settled = looks[len(looks) // 10 :]
    most = Look(*(max(getattr(one, name) for one in settled) for name in ("resident", "descriptors", "threads")))
    percentiles = [float(np.percentile(part, p)) for part in (times[:tenth], times[-tenth:]) for p in (50, 99)]
    return Result(residency, calls, settled[0], settled[-1], most, *percentiles)


def line(result: Result) -> str:
    """For people."""
    held = ", ".join(f"{look.resident / 1e6:.2f} MB" for look in (result.early, result.late, result.most))
    counts = f"{result.early.descriptors} -> {result.late.descriptors}"
    threads = f"{result.early.threads} -> {result.late.threads}"
    return (
        f"{result.residency}: {result.calls} calls\n"
        f"  resident after a tenth, at the end, at most: {held}\n"
        f"  descriptors {counts}, threads {threads}\n"
        f"  first tenth: p50 {result.first_p50:.1f} us, p99 {result.first_p99:.1f} us\n"
        f"  last tenth:  p50 {result.last_p50:.1f} us, p99 {result.last_p99:.1f} us"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Many calls of infer: does anything grow or slow down?")
    parser.add_argument("model", type=Path)
    parser.add_argument("--calls", type=int, default=1_000_000, help="at least 1000")
    parser.add_argument("--residency", nargs="+", choices=RESIDENCIES, default=list(RESIDENCIES))
    parser.add_argument("--expert-cache", type=int, help="of stream: experts, or bytes")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.calls < 1000:
        parser.error("--calls takes at least 1000")
    results = []
    for residency in arguments.residency:
        result = soak(arguments.model, residency, arguments.calls, arguments.expert_cache, arguments.threads)
        if not arguments.json:
            print(line(result), flush=True)
        results.append(result)
    if arguments.json:
        print(json.dumps(results, default=vars, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
