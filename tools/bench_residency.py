"""Measure what the residency modes are worth on this machine: the disk, decoding with too little memory, decoding with
enough of it, and look-ahead.

    python tools/bench_residency.py OUTDIR                            the fine shape in q8; all sections
    python tools/bench_residency.py OUTDIR --model M.colibri --only disk,limit --limit 1.5G --json residency.json
    python tools/bench_residency.py OUTDIR --llama-python A/python    llama.cpp beside it

OUTDIR receives the shape's files as in bench_peers.py and keeps them; --model takes another file. Sections:

disk    reads of one expert's size, at random, from the model file: past the page cache (O_DIRECT) with 1, 2, 4 and 8
        at a time, and through a page cache that holds nothing of it. Threads and preadv; libcolibri takes no part.
limit   decoding in a memory cgroup of --limit (root makes it; else this part is left out): libcolibri's map, stream
        with a cache of --cache of the experts, the same begun with a profile, and llama.cpp with its mmap on the same
        shape in Q8_0; stream without a limit too. Each measurement has a new process, a new group and a page cache
        without the file; --warmup tokens come before those that count. The disk is measured between any two.
        "Needed" are the experts that were not in memory, or only because look-ahead had read them (misses and hits
        ahead). The disk allows needed bytes / its rate as the least time for a token; "of disk" is that time over the
        measured one. "Read" is all that came from the disk (stream: as it counts, others: as the system does), "in
        vain" what of it was not needed, "disk busy" the time that the rate would take for it, "waiting" the share of
        the threads' time.
memory  decoding with the whole model in memory: map, lock, huge with pages of 2M, and of 1G where a pool has them. The
        first round is not counted. Page faults are the process's during all counted tokens. Beside it the read
        bandwidth with and without huge pages (`colibri-bench --limits`).
ahead   the demo model, streamed, on the tokens of --text or of stories it wrote: how many of the experts that
        look-ahead expects are chosen, and how many would be by "the same as the last token"; what a cache of several
        sizes makes of it.

Tables show medians of --rounds interleaved rounds with the least and greatest.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import colibri
from bench_peers import PACKAGE, Words, cpu_info, has_module, labelled, processor_name
from colibri import _ffi
from colibri.bench import cache_figures, percentile, prompt_ids
from peers import cgroup, disk, files
from peers.limits import Limits, LimitsError, build_bench
from peers.measuring import Subject, Team, free_memory, spread
from peers.processes import Worker, WorkerError, processors
from peers.report import number, table, with_range
from peers.shapes import SHAPES, Shape

SECTIONS = ("disk", "limit", "memory", "ahead")
DEPTHS = (1, 2, 4, 8)
GB = 1 << 30
HUGE_POOL = Path("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages")
LIMIT_SECONDS = 60.0  # a process that swaps or thrashes ends its round after so long
PROFILE_TOKENS = 256
CHECK_TOKENS = 16
AHEAD_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
STORY = "Once upon a time"


def bar(answer: dict[str, Any], expert_bytes: int, rate: float, threads: int) -> dict[str, float | None]:
    """One measurement beside what a disk of `rate` bytes per second allows. Figures by token; None: not known.

    `answer` is a worker's of "decode". Modes other than stream do not know which experts were missing.
    """
    tokens, seconds, figures = len(answer["times"]), sum(answer["times"]), answer["figures"]
    token_seconds = seconds / tokens
    result: dict[str, float | None] = {"tokens_per_s": 1 / token_seconds, "disk_rate": rate}
    streamed = figures.get("residency") == _ffi.COLIBRI_RESIDENCY_STREAM
    needed = (figures["cache_misses"] + figures["cache_hits_ahead"]) / tokens if streamed else None
    read = figures["read_bytes"] if streamed else answer.get("disk_bytes")
    read = None if read is None else read / tokens
    result |= {"needed": needed, "read_bytes": read, "needed_bytes": None, "disk_allows": None, "of_disk": None}
    result |= {"vain": None, "waiting": None, "disk_busy": None if read is None else read / rate / token_seconds}
    if needed is not None and read is not None:
        floor = needed * expert_bytes / rate
        result |= {"needed_bytes": needed * expert_bytes, "of_disk": floor / token_seconds}
        result["disk_allows"] = 1 / floor if floor else None
        result["vain"] = max(0.0, 1 - needed * expert_bytes / read) if read else 0.0
        result["waiting"] = figures["read_wait_ns"] / 1e9 / (threads * seconds)
    return result


def spreads(rounds: list[dict[str, float | None]]) -> dict[str, Any]:
    """The spread of each figure over the rounds; None where a round does not know it."""
    columns = {name: [one[name] for one in rounds] for name in rounds[0]}
    return {
        name: spread([value for value in values if value is not None]) if None not in values else None
        for name, values in columns.items()
    }


def matching(config: dict[str, Any]) -> Shape | None:
    """The shape that a model has, to have a GGUF file like it."""
    for shape in SHAPES.values():
        wanted = {
            "hidden_size": shape.hidden,
            "moe_intermediate_size": shape.inter,
            "num_experts": shape.experts,
            "top_k": shape.top_k,
            "num_layers": shape.layers,
            "num_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "vocab_size": shape.vocab,
        }
        if all(config[name] == value for name, value in wanted.items()):
            return shape
    return None


def pages(figures: dict[str, Any]) -> str:
    """What pages a session's weights lie on, from its stats."""
    size = figures["hugepage_size"]
    if not size:
        return "ordinary"
    kind = "pool" if figures["hugepage_pool"] else "transparent"
    return f"{size >> 20}M {kind}, {figures['hugepage_bytes'] / 1e9:.2f} GB"


class Run:
    """One run of the tool: its options, its model, and what it found."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options, self.failed = folder, options, False
        self.threads: int = options["threads"] or processors()
        self.notes: list[str] = []
        self._disk: tuple[disk.Disk, dict[str, Any]] | None = None
        self._path: Path | None = options["model"]
        names = ("limit", "cache", "rounds", "tokens", "warmup", "memory_tokens", "ahead_tokens", "disk_seconds")
        self.result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": {"processor": processor_name(), "cpu": cpu_info(), "processors": processors()},
            "settings": {"threads": self.threads, **{name: options[name] for name in names}},
            "notes": self.notes,
        }

    def note(self, text: str) -> None:
        """Say something once, on stderr and in the JSON."""
        if text not in self.notes:
            self.notes.append(text)
            click.echo(f"note: {text}", err=True)

    def add(self, section: str, value: dict[str, Any], text: str) -> None:
        """A finished section: print it, and save all there is."""
        self.result[section] = value
        click.echo(f"## {text}\n")
        if self.options["json"]:
            self.options["json"].write_text(json.dumps(self.result, indent=1) + "\n")

    @property
    def path(self) -> Path:
        """The model file, written if there is none."""
        if self._path is None:
            self._path = files.colibri_file(self.folder, SHAPES[self.options["shape"]], "q8")
        return self._path

    def describe(self) -> str:
        """The model in words, and in the JSON."""
        with colibri.Model(self.path) as model:
            self.config = model.config
            self.experts = disk.extents(model)
        if not self.experts:
            raise click.ClickException(f"{self.path} has no experts")
        self.expert_bytes = max(place.size for place in self.experts)
        self.cache = max(2, round(self.options["cache"] * len(self.experts)))
        about = {"path": str(self.path), "bytes": self.config["file_size"], "dtype": self.config["dtype"]}
        self.result["model"] = about | {"experts": len(self.experts), "expert_bytes": self.expert_bytes}
        return (
            f"{self.path.name}: {about['bytes'] / 1e9:.2f} GB, {about['dtype']}, {len(self.experts)} experts of "
            f"{self.expert_bytes / 1e6:.2f} MB, {self.config['num_layers']} layers, top-{self.config['top_k']}; "
            f"threads: {self.threads}"
        )

    # ---- Disk

    def measured_disk(self) -> tuple[disk.Disk, dict[str, Any]]:
        """The disk's rates, measured once."""
        if self._disk is None:
            source, seconds = disk.Disk(self.path, self.experts), self.options["disk_seconds"]
            if not source.direct:
                self.note(f"{self.path}: no O_DIRECT here: reads go through the page cache")
            rates: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
            buffered: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
            for _ in range(self.options["rounds"]):
                for depth in DEPTHS:
                    rates[depth].append(source.rate(depth, seconds))
                    buffered[depth].append(source.rate(depth, seconds, direct=False))
            best = max(DEPTHS, key=lambda depth: statistics.median(rates[depth]))
            value: dict[str, Any] = {"direct": source.direct, "best_depth": best}
            value["rates"] = {str(depth): spread(rates[depth]) for depth in DEPTHS}
            value["buffered"] = {str(depth): spread(buffered[depth]) for depth in DEPTHS}
            self._disk = source, value
        return self._disk

    def disk(self) -> None:
        """Its table."""
        _, value = self.measured_disk()
        in_gb = lambda figures: with_range({name: figures[name] / 1e9 for name in ("median", "min", "max")})  # noqa: E731
        rows = [
            [str(depth), in_gb(value["rates"][str(depth)]), in_gb(value["buffered"][str(depth)])] for depth in DEPTHS
        ]
        direct = "past the page cache" if value["direct"] else "as they can be had"
        title = (
            f"Disk: random reads of {self.expert_bytes / 1e6:.2f} MB, GB/s; best with {value['best_depth']} at a time"
        )
        self.add("disk", value, f"{title}\n\n{table(['at a time', direct, 'cold page cache'], rows)}")

    # ---- Under a limit

    def colibri_subject(self, label: str, residency: str, room: int, **more: Any) -> Subject:
        """A session of libcolibri in a residency."""
        options = {"engine": "libcolibri", "model": str(self.path), "threads": self.threads, "room": room}
        return Subject(label, "libcolibri", sys.executable, {**options, "residency": residency, **more}, path=PACKAGE)

    def llamas(self, room: int) -> list[Subject]:
        """llama.cpp with its default, mmap; a note where it cannot take part."""
        named = self.options["llama_python"]
        builds = []
        for label, python in named or [("", sys.executable)]:
            if has_module(python, "llama_cpp"):
                builds.append((label, python))
            elif named:
                raise click.ClickException(f"llama.cpp: {python} has no module llama_cpp")
        if not builds:
            self.note("llama.cpp: skipped: llama_cpp is not installed")
            return []
        shape = matching(self.config)
        if shape is None:
            self.note("llama.cpp: skipped: the model is of no shape that a GGUF file can be written for")
            return []
        if not files.gguf_path(self.folder, shape, "q8").is_file() and importlib.util.find_spec("gguf") is None:
            self.note("llama.cpp: skipped: gguf is not installed")
            return []
        path = files.gguf_file(self.folder, shape, "q8")
        options = {"engine": "llama.cpp", "model": str(path), "threads": self.threads, "room": room, "mmap": True}
        return [
            Subject(f"llama.cpp {label}".strip() + " mmap", "llama.cpp", python, options) for label, python in builds
        ]

    def profile(self, tokens: list[int]) -> Path:
        """How often experts are used by tokens that are not those measured."""
        path = self.folder / f"{self.path.stem}.profile"
        subject = self.colibri_subject("profile", "map", len(tokens))
        worker = Worker(subject.label, subject.python, subject.options, subject.path)
        try:
            worker.ask("decode", tokens=tokens)
            worker.ask("profile", path=str(path))
        finally:
            worker.close()
        return path

    def limited_subjects(self, room: int, profile: Path) -> list[tuple[Subject, int | None]]:
        """Who is measured, with which limit."""
        limit, cache = self.options["limit"], {"expert_cache_size": self.cache}
        share = f"stream {self.cache / len(self.experts):.0%}"
        subjects: list[tuple[Subject, int | None]] = [
            (self.colibri_subject("map", "map", room), limit),
            (self.colibri_subject(share, "stream", room, **cache), limit),
            (self.colibri_subject(f"{share}, profile", "stream", room, expert_profile=str(profile), **cache), limit),
            *((subject, limit) for subject in self.llamas(room)),
            (self.colibri_subject(f"{share}, no limit", "stream", room, **cache), None),
        ]
        try:
            cgroup.make_group(limit).remove()
        except cgroup.GroupError as error:
            self.note(f"decoding under a limit: skipped: {error}")
            subjects = [pair for pair in subjects if pair[1] is None]
        return subjects

    def limited(self, subject: Subject, limit: int | None, warmup: list[int], tokens: list[int]) -> dict[str, Any]:
        """One cold start and its tokens."""
        disk.drop(Path(subject.options["model"]))
        group = cgroup.make_group(limit) if limit is not None else None
        worker = None
        try:
            options = subject.options | ({"cgroup": str(group.procs)} if group else {})
            worker = Worker(subject.label, subject.python, options, subject.path)
            answer = worker.ask("decode", warmup=warmup, tokens=tokens, limit_s=LIMIT_SECONDS)
            return answer | {"about": worker.about, "peak": group.peak() if group else None}
        finally:
            if worker is not None:
                worker.close()
            if group is not None:
                group.remove()

    def limit(self) -> None:
        """Decoding with too little memory."""
        warm, tokens = self.options["warmup"], self.options["tokens"]
        ids = prompt_ids(warm + tokens + PROFILE_TOKENS, self.config["vocab_size"])
        source, rates = self.measured_disk()
        subjects = self.limited_subjects(warm + tokens, self.profile(ids[warm + tokens :]))
        rounds: list[list[dict[str, float | None]]] = [[] for _ in subjects]
        last: list[dict[str, Any]] = [{} for _ in subjects]
        failed: set[int] = set()

        def probe() -> float:
            return source.rate(rates["best_depth"], self.options["disk_seconds"])

        before = probe()
        for round_ in range(self.options["rounds"]):
            for i in ((round_ + j) % len(subjects) for j in range(len(subjects))):
                if i in failed:
                    continue
                try:
                    answer = self.limited(*subjects[i], ids[:warm], ids[warm : warm + tokens])
                except WorkerError as error:
                    failed.add(i)
                    self.failed = True
                    self.note(f"no figures: {error}")
                    continue
                after = probe()
                rounds[i].append(bar(answer, self.expert_bytes, (before + after) / 2, self.threads))
                last[i], before = answer, after
        value: dict[str, Any] = {"cache_experts": self.cache, "tokens": tokens, "warmup": warm, "results": []}
        for (subject, limit), own, answer in zip(subjects, rounds, last, strict=True):
            if own:
                result = {"engine": subject.label, "limit": limit, "about": answer["about"], "peak": answer["peak"]}
                value["results"].append(result | spreads(own) | {"last": answer["figures"]})
        self.add("limit", value, self.limit_text(value))

    def limit_text(self, value: dict[str, Any]) -> str:
        """Its table."""

        def cell(result: dict[str, Any], name: str, show: Callable[[float], str]) -> str:
            return "" if result[name] is None else show(result[name]["median"])

        percent: Callable[[float], str] = lambda x: f"{x:.0%}"  # noqa: E731
        mb: Callable[[float], str] = lambda x: number(x / 1e6)  # noqa: E731
        head = ["", "limit", "tokens/s", "experts needed/token", "read, MB/token", "in vain", "waiting"]
        head += ["disk, GB/s", "disk allows, tokens/s", "of disk", "disk busy"]
        rows = [
            [
                result["engine"],
                "none" if result["limit"] is None else f"{result['limit'] / GB:.3g}G",
                with_range(result["tokens_per_s"]),
                cell(result, "needed", number),
                cell(result, "read_bytes", mb),
                cell(result, "vain", percent),
                cell(result, "waiting", percent),
                cell(result, "disk_rate", lambda x: f"{x / 1e9:.2f}"),
                cell(result, "disk_allows", number),
                cell(result, "of_disk", percent),
                cell(result, "disk_busy", percent),
            ]
            for result in value["results"]
        ]
        title = f"Decoding from disk; the cache has room for {value['cache_experts']} experts of {len(self.experts)}"
        return f"{title}\n\n{table(head, rows)}"

    # ---- Everything in memory

    def memory_subjects(self, room: int) -> list[Subject]:
        """map, lock, and huge with what pages there are, as far as memory goes."""
        subjects = [self.colibri_subject(mode, mode, room) for mode in ("map", "lock")]
        size = self.config["file_size"]
        try:
            pool = int(HUGE_POOL.read_text()) * GB
        except (OSError, ValueError):
            pool = 0
        free = free_memory()
        if free is None or 2 * size + GB < free:
            subjects.append(self.colibri_subject("huge 2M", "huge", room, hugepage_size=2 << 20))
        else:
            self.note(f"huge 2M: skipped: {(2 * size + GB) / 1e9:.1f} GB of memory needed, {free / 1e9:.1f} free")
        if pool > size:
            subjects.append(self.colibri_subject("huge 1G", "huge", room, hugepage_size=GB))
        else:
            self.note("huge 1G: skipped: no pool of such pages that holds the model")
        return subjects

    def memory(self) -> None:
        """Decoding with enough memory."""
        ids = prompt_ids(self.options["memory_tokens"], self.config["vocab_size"])
        subjects = self.memory_subjects(len(ids))
        value: dict[str, Any] = {"tokens": len(ids), "results": []}
        answers: list[list[dict[str, Any]]] = [[] for _ in subjects]
        with Team(subjects, self.note) as team:
            logits = [worker.ask("logits", tokens=ids[:CHECK_TOKENS])["logits"] for worker in team.workers]
            for round_ in range(-1, self.options["rounds"]):  # the first one warms up
                for i in team.turn(round_):
                    answer = team.ask(i, "decode", tokens=ids)
                    if round_ >= 0:
                        answers[i].append(answer)
        rates = [[len(one["times"]) / sum(one["times"]) for one in own] for own in answers]
        for i, (subject, own) in enumerate(zip(subjects, answers, strict=True)):
            times = [seconds for one in own for seconds in one["times"]]
            result = {"engine": subject.label, "pages": pages(own[-1]["figures"]), "tokens_per_s": spread(rates[i])}
            result |= {f"p{percent}_ms": 1e3 * percentile(times, percent) for percent in (50, 99)}
            result["of_map"] = spread([mine / map_ for mine, map_ in zip(rates[i], rates[0], strict=True)])
            for kind in ("minor_faults", "major_faults"):
                result[kind] = sum(one[kind] for one in own) if kind in own[0] else None
            in_effect = own[-1]["figures"]["residency"]
            refused = in_effect != getattr(_ffi, "COLIBRI_RESIDENCY_" + subject.options["residency"].upper())
            if refused:
                self.note(f"{subject.label}: the system refused it (RLIMIT_MEMLOCK): these are figures of map")
            value["results"].append(result | {"refused": refused, "same_logits": logits[i] == logits[0]})
        value["read"] = self.bandwidth()
        self.add("memory", value, self.memory_text(value))

    def bandwidth(self) -> list[dict[str, Any]]:
        """What is read from memory with and without huge pages, GB/s; nothing where it cannot be measured."""
        try:
            program = self.options["bench"] or build_bench(self.folder)
            read: list[dict[str, Any]] = Limits(program, self.threads, self.options["buffer_mb"]).values["read"]
            return read
        except LimitsError as error:
            self.note(f"read bandwidth: skipped: {error}")
            return []

    def memory_text(self, value: dict[str, Any]) -> str:
        """Its table."""
        head = ["", "pages", "tokens/s", "÷ map", "p50, ms", "p99, ms", "minor faults", "major faults", "logits"]
        rows = [
            [
                result["engine"],
                result["pages"],
                with_range(result["tokens_per_s"]),
                f"{result['of_map']['median']:.3f}",
                number(result["p50_ms"]),
                number(result["p99_ms"]),
                *("" if result[kind] is None else str(result[kind]) for kind in ("minor_faults", "major_faults")),
                "same" if result["same_logits"] else "OTHER",
            ]
            for result in value["results"]
        ]
        counted = value["tokens"] * self.options["rounds"]
        lines = [f"Decoding from memory, {counted} tokens each", "", table(head, rows)]
        for one in value["read"]:
            rates = ", ".join(f"{rate:.2f} GB/s with threads: {n}" for n, rate in one["gb_per_s"].items())
            given = f" ({one['huge_bytes'] / 1e9:.2f} GB given)" if one["pages"] == "huge" else ""
            lines.append(f"\nread bandwidth, {one['pages']} pages{given}: {rates}")
        return "\n".join(lines)

    # ---- Look-ahead

    def texts(self, model: colibri.Model) -> list[list[int]]:
        """Token ids to be decoded, in pieces that fit the model."""
        room, wanted = model.config["max_position"], self.options["ahead_tokens"]
        pieces: list[list[int]] = []
        if self.options["text"] is not None:
            ids = model.tokenize(self.options["text"].read_text(encoding="utf-8"))[:wanted]
            pieces = [ids[first : first + room] for first in range(0, len(ids), room)]
        else:
            start = model.tokenize(STORY)
            with colibri.Session(model, max_seq_len=room, num_threads=self.threads, outputs="last") as session:
                while (missing := wanted - sum(map(len, pieces))) > 0:
                    session.generate(start, room - len(start), temperature=0.8, seed=len(pieces), stop_at_eos=False)
                    assert session.last_generation is not None
                    pieces.append([*start, *session.last_generation.tokens][:missing])
        if not any(pieces):
            raise click.ClickException(f"{self.options['text']} holds no text")
        return pieces

    def ahead(self) -> None:
        """Look-ahead of the demo model."""
        with colibri.Model(colibri.demo_path()) as model:
            pieces, config = self.texts(model), model.config
            total = config["num_layers"] * config["num_experts"]
            value: dict[str, Any] = {"tokens": sum(map(len, pieces)), "experts": total, "results": []}
            for share in AHEAD_SHARES:
                figures = self.streamed(model, pieces, max(2, round(share * total)))
                value["results"].append(figures)
        for name in ("ahead_accuracy", "repeat_accuracy", "ahead_predicted"):
            value[name] = value["results"][-1][name]
        self.add("ahead", value, self.ahead_text(value))

    def streamed(self, model: colibri.Model, pieces: list[list[int]], cache: int) -> dict[str, Any]:
        """What a cache of so many experts made of the texts, token by token."""
        options: dict[str, Any] = {"residency": "stream", "expert_cache_size": cache, "outputs": "last"}
        room = max(map(len, pieces))
        with colibri.Session(model, max_seq_len=room, num_threads=self.threads, **options) as session:
            for piece in pieces:
                session.reset()
                for token in piece:
                    session.forward([token])
            stats = session.stats()
        return cache_figures(stats) | {
            name: stats[name] for name in ("ahead_predicted", "ahead_correct", "repeat_correct")
        }

    def ahead_text(self, value: dict[str, Any]) -> str:
        """Its table."""
        rows = []
        for one in value["results"]:
            asked = one["hits"] + one["misses"]
            parts = (one["hits"], one["hits"] - one["hits_ahead"], one["hits_ahead"], one["misses"])
            rows.append(
                [
                    f"{one['experts']} ({one['experts'] / value['experts']:.0%})",
                    *(f"{part / asked:.1%}" for part in parts),
                    *(
                        "" if one[name] is None else f"{one[name]:.1%}"
                        for name in ("ahead_accuracy", "repeat_accuracy")
                    ),
                ]
            )
        head = ["cached experts", "hits", "of before", "of look-ahead", "misses", "expected right", "as last token"]
        source = "--text" if self.options["text"] is not None else "stories it wrote"
        title = f"Look-ahead on the demo model: {value['tokens']} tokens of {source}, {value['experts']} experts"
        return f"{title}\n\n{table(head, rows)}"

    # ---- All

    def all(self) -> None:
        """What was asked for."""
        only = self.options["only"]
        if set(only) != {"ahead"}:
            click.echo(self.describe() + "\n")
        for section in SECTIONS:
            if section in only:
                try:
                    getattr(self, section)()
                except WorkerError as error:
                    self.failed = True
                    self.note(f"no table of {section}: {error}")
        if self.failed:
            raise click.ClickException("some measurements failed; see the notes")


# ---- The command line


class Bytes(click.ParamType):
    """A size such as 1.5G, 600M or 1000000."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Text to bytes."""
        if isinstance(value, int):
            return value
        shift = {"K": 10, "M": 20, "G": 30}.get(value[-1:].upper(), 0)
        try:
            size = float(value[:-1] if shift else value) * (1 << shift)
            if 0 < size < 1 << 62:
                return int(size)
        except ValueError:
            pass
        self.fail(f"{value!r} is no size such as 1.5G or 600M", param, ctx)


IN_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)


@click.command(help=__doc__.replace("\n\n", "\n\n\b\n") if __doc__ else None)
@click.argument("outdir", type=click.Path(file_okay=False, path_type=Path))
@click.option("--only", type=Words(SECTIONS), default=list(SECTIONS), help=f"{','.join(SECTIONS)} [all]")
@click.option("--shape", type=click.Choice(["fine", "coarse", "tiny"]), default="fine", show_default=True)
@click.option("--model", type=IN_FILE, help="a .colibri file instead of the shape's in q8")
@click.option("--threads", type=click.IntRange(1, 256), help="[one per processor]")
@click.option("--rounds", type=COUNT, default=5, show_default=True, help="of each measurement")
@click.option("--limit", type=Bytes(), default="1.5G", show_default=True, help="of memory, in bytes, K, M or G")
@click.option("--cache", type=click.FloatRange(0, 1, min_open=True), default=0.25, show_default=True,
              help="of stream, as a share of the experts")  # fmt: skip
@click.option("--tokens", type=COUNT, default=64, show_default=True, help="decoded under the limit in a round")
@click.option("--warmup", type=click.IntRange(min=0), default=16, show_default=True, help="tokens before them")
@click.option("--memory-tokens", type=click.IntRange(min=CHECK_TOKENS), default=128, show_default=True,
              help="decoded from memory in a round")  # fmt: skip
@click.option("--ahead-tokens", type=click.IntRange(min=2), default=4096, show_default=True, help="of look-ahead")
@click.option("--text", type=IN_FILE, help="UTF-8, for look-ahead [stories that the demo model writes]")
@click.option("--disk-seconds", type=click.FloatRange(0.001, 60), default=0.5, show_default=True,
              help="of one measurement of the disk")  # fmt: skip
@click.option("--llama-python", multiple=True, callback=labelled, metavar="[LABEL=]PATH",
              help="a Python that has llama-cpp-python; may be given several times [this one]")  # fmt: skip
@click.option("--bench", type=IN_FILE, help="colibri-bench, for the read bandwidth [compiled into OUTDIR]")
@click.option("--buffer-mb", type=COUNT, help="that it reads [1024, if memory is there]")
@click.option("--json", type=click.Path(dir_okay=False, path_type=Path), help="write all figures, after each section")
def main(outdir: Path, **options: Any) -> None:
    if not sys.platform.startswith("linux"):
        raise click.ClickException("this tool measures Linux: O_DIRECT, memory cgroups, /proc")
    try:
        outdir.mkdir(parents=True, exist_ok=True)
        file = options["json"]
        if file is not None and not (file.absolute().parent.is_dir() and os.access(file.absolute().parent, os.W_OK)):
            raise click.ClickException(f"{file} cannot be written")  # now, not after an hour
        Run(outdir.absolute(), options).all()
    except (colibri.ColibriError, LimitsError, WorkerError, cgroup.GroupError, OSError, UnicodeError) as error:
        raise click.ClickException(" ".join(str(error).split())) from None


if __name__ == "__main__":
    main()
