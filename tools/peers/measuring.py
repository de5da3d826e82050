"""Measurements of a team of engines in interleaved rounds, as plain dictionaries for tables and JSON."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colibri.bench import percentile, prompt_ids

from .limits import Limits
from .processes import Worker, busy_neighbours, processors
from .shapes import Shape

SETTLE_SECONDS = 0.1  # a measurement begins once the engines before it have used no processor for so long,
SETTLE_TRIES = 30  # or after so many such pauses
TAIL_PIECE = 200  # tokens of one stretch of the tail: from an empty cache, so that attention stays small beside weights
CHECK_TOKENS = 16


@dataclass
class Subject:
    """An engine with a model: what a worker is started with, and what its figures are compared with."""

    label: str
    engine: str
    python: str
    options: dict[str, Any]
    memory: int = 0
    bits: float = 0.0  # per weight, where the engine does not count what it reads
    peak: str = ""  # the instruction set whose int8 peak is its own; "": the machine's best
    path: str | None = None  # to the packages it needs


@dataclass
class Settings:
    """How much to measure."""

    threads: list[int]
    rounds: int = 5
    prompts: list[int] = field(default_factory=lambda: [512])
    decode_tokens: int = 64
    depth: int = 0
    tail_tokens: int = 2000
    busy_seconds: float = 10.0
    layer_tokens: tuple[int, ...] = (1, 32, 128, 512)


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least, greatest and all of them."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": values}


class Team:
    """Engines that are measured in turn. Those whose turn it is not are watched: they should use no processor."""

    def __init__(self, subjects: list[Subject], note: Callable[[str], None]) -> None:
        self.subjects, self.note, self.workers = subjects, note, []
        self._noted: set[str] = set()
        try:
            for subject in subjects:
                self.workers.append(Worker(subject.label, subject.python, subject.options, subject.path))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all of them."""
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def turn(self, round_: int) -> list[int]:
        """The order of a round: another one begins each time."""
        count = len(self.workers)
        return [(round_ + i) % count for i in range(count)]

    def ask(self, index: int, command: str, **arguments: Any) -> dict[str, Any]:
        """Measure one engine while the others wait."""
        others = [worker for i, worker in enumerate(self.workers) if i != index]
        self._settle(others)
        before, begin = [worker.processor_seconds() for worker in others], time.monotonic()
        answer = self.workers[index].ask(command, **arguments)
        elapsed = time.monotonic() - begin
        for worker, used in zip(others, before, strict=True):
            used = worker.processor_seconds() - used
            if used > 0.03 + 0.05 * elapsed and worker.label not in self._noted:
                self._noted.add(worker.label)
                self.note(f"{worker.label} used {used:.2f} s of processor in {elapsed:.2f} s in which it was idle")
        return answer

    @staticmethod
    def _settle(others: list[Worker]) -> None:
        """Wait until the others' threads have gone to sleep."""
        used = None
        for _ in range(SETTLE_TRIES):
            before, used = used, [worker.processor_seconds() for worker in others]
            if used == before:
                return
            time.sleep(SETTLE_SECONDS)

    def set_threads(self, n: int) -> None:
        """Of every engine."""
        for worker in self.workers:
            worker.ask("threads", n=n)

    def about(self) -> dict[str, str]:
        """What each engine says it is."""
        return {worker.label: worker.about for worker in self.workers}


def agreement(team: Team, shape: Shape) -> dict[str, dict[str, Any]]:
    """How near each engine's logits are to the first one's: |difference| / |logits|, and whether the top token is the
    same. Two engines that compute the same model differ by what their number formats lose.
    """
    ids = prompt_ids(CHECK_TOKENS, shape.vocab)
    logits = [worker.ask("logits", tokens=ids)["logits"] for worker in team.workers]
    first = logits[0]
    length = math.sqrt(sum(x * x for x in first))
    return {
        worker.label: {
            "relative_difference": math.dist(first, own) / length,
            "same_top_token": max(range(len(own)), key=own.__getitem__)
            == max(range(len(first)), key=first.__getitem__),
        }
        for worker, own in zip(team.workers[1:], logits[1:], strict=True)
    }


def speed(team: Team, shape: Shape, settings: Settings, threads: int, limits: Limits) -> list[dict[str, Any]]:
    """Prefill and decode of every engine."""
    ids = prompt_ids(max(settings.prompts) + settings.depth + settings.decode_tokens, shape.vocab)
    prompt, tokens = ids[: settings.depth], ids[settings.depth : settings.depth + settings.decode_tokens]
    team.set_threads(threads)
    prefill: list[dict[int, list[float]]] = [{n: [] for n in settings.prompts} for _ in team.workers]
    decode: list[list[float]] = [[] for _ in team.workers]
    read: list[int | None] = [None] * len(team.workers)
    for round_ in range(-1, settings.rounds):  # the first one warms up
        for i in team.turn(round_):
            for n in settings.prompts:
                rate = n / team.ask(i, "prefill", tokens=ids[:n])["seconds"]
                if round_ >= 0:
                    prefill[i][n].append(rate)
            answer = team.ask(i, "decode", tokens=tokens, prompt=prompt)
            read[i] = answer["weight_bytes"]
            if round_ >= 0:
                decode[i].append(len(answer["times"]) / sum(answer["times"]))
    return [
        _speed_result(subject, shape, threads, limits, prefill[i], decode[i], read[i], len(tokens))
        for i, subject in enumerate(team.subjects)
    ]


def _speed_result(
    subject: Subject, shape: Shape, threads: int, limits: Limits, prefill: dict[int, list[float]], decode: list[float],
    read: int | None, tokens: int,
) -> dict[str, Any]:  # fmt: skip
    per_token = shape.bytes_per_token(subject.bits) if read is None else read / tokens
    isa, peak = limits.int8(threads, subject.peak)
    result: dict[str, Any] = {"engine": subject.label, "threads": threads, "prefill": {}, "decode": spread(decode)}
    for n, rates in prefill.items():
        figures = spread(rates)
        operations = shape.operations(n) * figures["median"] / n
        result["prefill"][str(n)] = {**figures, "t_op_per_s": operations / 1e12, "int8_fraction": operations / peak}
    bandwidth = per_token * result["decode"]["median"]
    result["decode"] |= {"weight_bytes_per_token": per_token, "weight_bytes_counted": read is not None}
    result["decode"] |= {"gb_per_s": bandwidth / 1e9, "read_fraction": bandwidth / limits.read(threads)}
    result |= {"int8_peak": {"isa": isa, "t_op_per_s": peak / 1e12}, "read_gb_per_s": limits.read(threads) / 1e9}
    return result


def ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every libcolibri beside every other engine at as many threads: how many times as fast."""
    pairs = [
        (ours, peer)
        for ours in results
        for peer in results
        if ours["threads"] == peer["threads"]
        and ours["engine"].startswith("libcolibri")
        and not peer["engine"].startswith("libcolibri")
    ]
    return [
        {
            "ours": ours["engine"],
            "peer": peer["engine"],
            "threads": ours["threads"],
            "prefill": {n: ours["prefill"][n]["median"] / peer["prefill"][n]["median"] for n in ours["prefill"]},
            "decode": ours["decode"]["median"] / peer["decode"]["median"],
        }
        for ours, peer in pairs
    ]


def busy(team: Team, shape: Shape, settings: Settings, threads: int) -> list[dict[str, Any]]:
    """Decoding alone and beside one busy process per processor, in turn."""
    ids = prompt_ids(settings.decode_tokens, shape.vocab)
    rates: dict[str, list[list[float]]] = {kind: [[] for _ in team.workers] for kind in ("quiet", "busy")}
    team.set_threads(threads)

    def one(kind: str, round_: int) -> None:
        for i in team.turn(round_):
            times = team.ask(i, "decode", tokens=ids, limit_s=settings.busy_seconds)["times"]
            rates[kind][i].append(len(times) / sum(times))

    for round_ in range(settings.rounds):
        one("quiet", round_)
        with busy_neighbours(processors()):
            one("busy", round_)
    return [
        {
            "engine": subject.label,
            "threads": threads,
            "quiet": spread(rates["quiet"][i]),
            "busy": spread(rates["busy"][i]),
            "kept": statistics.median(rates["busy"][i]) / statistics.median(rates["quiet"][i]),
        }
        for i, subject in enumerate(team.subjects)
    ]


def tail(team: Team, shape: Shape, settings: Settings, threads: int) -> list[dict[str, Any]]:
    """Times of single tokens."""
    ids = prompt_ids(TAIL_PIECE, shape.vocab)
    times: list[list[float]] = [[] for _ in team.workers]
    team.set_threads(threads)
    for round_ in range(-1, -(-settings.tail_tokens // TAIL_PIECE)):
        for i in team.turn(round_):
            piece = ids[: settings.tail_tokens - len(times[i])]
            taken = team.ask(i, "decode", tokens=piece)["times"]
            if round_ >= 0:
                times[i] += taken
    results = []
    for subject, own in zip(team.subjects, times, strict=True):
        points = {f"p{percent}_ms": 1e3 * percentile(own, percent) for percent in (50, 90, 99)}
        shares = {"max_ms": 1e3 * max(own), "p99_over_p50": points["p99_ms"] / points["p50_ms"]}
        results.append({"engine": subject.label, "threads": threads, "tokens": len(own), **points, **shares})
    return results


def calls(team: Team, command: str, sizes: list[int], settings: Settings, threads: int) -> list[dict[str, Any]]:
    """Times of "route" or "layer" for numbers of vectors: each round's median of several calls."""
    team.set_threads(threads)
    rounds: dict[tuple[int, int], list[float]] = {}
    for round_ in range(-1, settings.rounds):
        for i in team.turn(round_):
            for n in sizes:
                repeat = 200 if command == "route" and n == 1 else 10
                value = statistics.median(team.ask(i, command, n=n, repeat=repeat)["times"])
                if round_ >= 0:
                    rounds.setdefault((i, n), []).append(1e3 * value)
    return [
        {"engine": subject.label, "threads": threads, "tokens": n, "ms": spread(rounds[i, n])}
        for i, subject in enumerate(team.subjects)
        for n in sizes
    ]


def free_memory() -> int | None:
    """Bytes that can be had, where /proc says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def batches(subjects: list[Subject], free: int | None) -> tuple[list[list[Subject]], list[str]]:
    """Teams that fit into memory, each with all libcolibris, and a sentence for each engine that fits into none."""
    ours = [subject for subject in subjects if subject.engine == "libcolibri"]
    peers = [subject for subject in subjects if subject.engine != "libcolibri"]
    shared = max((subject.memory for subject in ours), default=0)  # one mapping serves all of them
    teams = [list(ours)]
    refused = []
    for peer in peers:
        if free is not None and shared + peer.memory > free:
            refused.append(
                f"{peer.label}: skipped: {(shared + peer.memory) / 1e9:.1f} GB of memory needed, {free / 1e9:.1f} free"
            )
        elif free is None or shared + peer.memory + sum(other.memory for other in teams[-1][len(ours) :]) <= free:
            teams[-1].append(peer)
        else:
            teams.append([*ours, peer])
    return teams, refused
