"""Compare libcolibri's speed with that of other engines, on models of equal shape and size, in one run on one machine.

    python tools/bench_peers.py OUTDIR                                    what is installed, every shape, q8 and q4
    python tools/bench_peers.py OUTDIR --shapes fine --types q8 --threads 1,2 --plot speed.png --json speed.json
    python tools/bench_peers.py OUTDIR --isa auto,avx2 --llama-python avx512=A/python --llama-python avx2=B/python
    python tools/bench_peers.py OUTDIR --no-speed --tail --busy           other measurements alone

OUTDIR receives the models and keeps them: for each shape a random Mixtral checkpoint in bfloat16, a .colibri file and
a GGUF file for each type (q8 beside Q8_0, q4 beside Q4_0; the router stays in float32 in both). What is there already
is used again. "fine" is 2048 wide with 64 experts of 1024, top-8, 8 layers (7 GB as a checkpoint); "coarse" is 4096
wide with 8 experts of 14336, top-2, 2 layers (6.5 GB); "tiny" is for tests.

Each engine runs in a process of its own, holds its model in memory without mapping it (libcolibri maps its file), and
waits between its turns; rounds go through all engines in turn, the first round is not counted, and the table shows
the median with the least and greatest of the others. Prefill is one call with all tokens and the logits of the last;
decoding feeds tokens one by one, behind --depth others, each with its logits. Tokens are the same for all engines. At
the start of each table the engines' logits are compared. The machine's own read bandwidth and int8 rate are measured
in the same run by `colibri-bench --limits`; "of read" is weight bytes per token (counted by libcolibri, computed from
the shape for others) times tokens/s over the bandwidth, "of int8 peak" is operations with weights over the peak.

Peers: llama.cpp needs the package gguf to write its files, and llama-cpp-python in this environment or in those that
--llama-python names (several builds may run side by side); transformers needs torch and transformers (bfloat16;
"transformers-f32" is float32); kt-kernel (one MoE layer in int8, with --layer) needs kt-kernel and torch. PyTorch's
router stands beside ours with --router. The plot needs matplotlib. `pip install "libcolibri[bench]"` brings gguf and
matplotlib.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import colibri
from peers import files, measuring, report
from peers.gguf_file import BITS, TYPES
from peers.limits import Limits, LimitsError, build_bench
from peers.measuring import Settings, Subject, Team
from peers.processes import WorkerError, processors
from peers.shapes import SHAPES, Shape

PEERS = ("llama.cpp", "transformers", "transformers-f32", "kt-kernel")
GB = 1 << 30
PACKAGE = str(Path(colibri.__file__).parents[1])
INT8_PEAK = {"avx512": "avx512_vnni", "avx2": "avx2", "ref": "portable"}  # of builds by these names; else the best


class Run:
    """One run of the tool: its options, its files, and what it found."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.notes: list[str] = []
        self.failed = False
        self.bench: Path | None = options["bench"]
        self.settings = Settings(
            threads=options["threads"] or sorted({1, processors()}),
            rounds=options["rounds"],
            prompts=[options["prompt_tokens"]] + ([4096] if options["long"] else []),
            decode_tokens=options["decode_tokens"],
            depth=options["depth"],
            tail_tokens=options["tail_tokens"],
        )
        self.result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": {"processor": processor_name(), "cpu": cpu_info(), "processors": processors()},
            "settings": vars(self.settings),
            **{key: [] for key in ("speed", "busy", "tail", "layer", "router")},
            "notes": self.notes,
        }

    def note(self, text: str) -> None:
        """Say something once, on stderr and in the JSON."""
        if text not in self.notes:
            self.notes.append(text)
            click.echo(f"note: {text}", err=True)

    def add(self, section: str, value: dict[str, Any], text: str) -> None:
        """A finished part: print it, and save all there is."""
        self.result[section].append(value)
        click.echo(text)
        if self.options["json"]:
            self.options["json"].write_text(json.dumps(self.result, indent=1) + "\n")

    # ---- Who takes part

    def wants(self, peer: str, module: str, python: str = sys.executable) -> bool:
        """Whether a peer takes part: asked for and there. One that was named and is not there is an error."""
        named = self.options["peers"]
        if peer not in (PEERS if named is None else named):
            return False
        if has_module(python, module):
            return True
        if named is not None:
            raise click.ClickException(f"{peer}: {python} has no module {module}")
        self.note(f"{peer}: skipped: {module} is not installed")
        return False

    def colibris(self, shape: Shape, dtype: str, room: int) -> list[Subject]:
        """libcolibri, once for each instruction set."""
        path = files.colibri_file(self.folder, shape, dtype)
        memory = path.stat().st_size + GB
        threads = self.settings.threads[0]
        return [
            Subject(
                "libcolibri" if isa == "auto" else f"libcolibri {isa}",
                "libcolibri",
                sys.executable,
                {"engine": "libcolibri", "model": str(path), "isa": isa, "threads": threads, "room": room},
                memory=memory,
                peak=INT8_PEAK.get(isa, ""),
                path=PACKAGE,
            )
            for isa in self.options["isa"]
        ]

    def llamas(self, shape: Shape, dtype: str, room: int) -> list[Subject]:
        """llama.cpp, once for each build."""
        builds = self.options["llama_python"] or [("", sys.executable)]
        builds = [(label, python) for label, python in builds if self.wants("llama.cpp", "llama_cpp", python)]
        if not builds:
            return []
        if self.options["peers"] is None and importlib.util.find_spec("gguf") is None:
            self.note("llama.cpp: skipped: gguf is not installed")
            return []
        path = files.gguf_file(self.folder, shape, dtype)
        options = {"engine": "llama.cpp", "model": str(path), "threads": self.settings.threads[0], "room": room}
        return [
            Subject(
                f"llama.cpp {label}".strip(),
                "llama.cpp",
                python,
                options,
                memory=path.stat().st_size + GB,
                bits=BITS[dtype],
                peak=INT8_PEAK.get(label, ""),
            )
            for label, python in builds
        ]

    def transformers(self, shape: Shape) -> list[Subject]:
        """transformers in the types asked for."""
        subjects = []
        for peer, dtype, size in (("transformers", "bfloat16", 2), ("transformers-f32", "float32", 4)):
            if peer == "transformers-f32" and self.options["peers"] is None:
                continue  # twice the memory and time: only on request
            if not self.wants(peer, "transformers") or not self.wants(peer, "torch"):
                continue
            options = {"engine": "transformers", "dtype": dtype, "threads": self.settings.threads[0]}
            options["model"] = str(files.checkpoint(self.folder, shape))
            memory = size * shape.parameters + GB
            subjects.append(Subject(peer, "transformers", sys.executable, options, memory=memory, bits=8.0 * size))
        return subjects

    def teams(self, shape: Shape, dtype: str, room: int, peers: bool = True) -> list[list[Subject]]:
        """Who is measured together."""
        subjects = self.colibris(shape, dtype, room) + self.llamas(shape, dtype, room)
        subjects += self.transformers(shape) if peers else []
        teams, refused = measuring.batches(subjects, measuring.free_memory())
        for text in refused:
            self.note(text)
        return teams

    # ---- Measurements

    def limits(self) -> Limits:
        """The machine's, measured now."""
        if self.bench is None:
            self.bench = build_bench(self.folder)
        return Limits(self.bench, max(self.settings.threads), self.options["buffer_mb"])

    def speed(self, shape: Shape, dtype: str) -> None:
        """One table."""
        settings = self.settings
        room = max(*settings.prompts, settings.depth + settings.decode_tokens) + 8
        teams = self.teams(shape, dtype, room)
        limits = self.limits()
        group: dict[str, Any] = {"shape": shape.name, "type": dtype, "gguf_type": TYPES[dtype], "limits": limits.values}
        group |= {"engines": {}, "agreement": {}, "results": [], "ratios": []}
        for number, subjects in enumerate(teams):
            with Team(subjects, self.note) as team:
                group["engines"] |= team.about()
                group["agreement"] |= measuring.agreement(team, shape)
                for threads in settings.threads:
                    results = measuring.speed(team, shape, settings, threads, limits)
                    group["ratios"] += measuring.ratios(results)
                    ours = len(self.options["isa"]) if number else 0
                    group["results"] += results[ours:]  # the first team's figures of libcolibri stand in the table
        group["results"].sort(key=lambda result: result["threads"])
        self.add("speed", group, report.speed_text(group))

    def beside(self, section: str, shape: Shape, dtype: str) -> None:
        """Decoding beside busy processes, or the times of single tokens."""
        tokens = measuring.TAIL_PIECE if section == "tail" else self.settings.decode_tokens
        measure = measuring.tail if section == "tail" else measuring.busy
        value: dict[str, Any] = {"shape": shape.name, "type": dtype, "results": []}
        for number, subjects in enumerate(self.teams(shape, dtype, tokens + 8, peers=False)):
            with Team(subjects, self.note) as team:
                for threads in self.settings.threads:
                    results = measure(team, shape, self.settings, threads)
                    value["results"] += results[len(self.options["isa"]) if number else 0 :]
        value["results"].sort(key=lambda result: result["threads"])
        self.add(section, value, report.tail_text(value) if section == "tail" else report.busy_text(value))

    def layer(self, shape: Shape, dtype: str) -> None:
        """One MoE layer, with kt-kernel where it is."""
        sizes = list(self.settings.layer_tokens)
        value: dict[str, Any] = {"shape": shape.name, "type": dtype, "results": []}
        python = self.options["kt_python"] or sys.executable
        kt = dtype == "q8" and self.wants("kt-kernel", "kt_kernel", python)
        for threads in self.settings.threads:
            subjects = self.colibris(shape, dtype, max(sizes))
            if kt:
                options = {"engine": "kt-kernel", "threads": threads, "room": max(sizes), "top_k": shape.top_k}
                options |= {"experts": shape.experts, "hidden": shape.hidden, "inter": shape.inter}
                subjects.append(Subject("kt-kernel", "kt-kernel", python, options))
            with Team(subjects, self.note) as team:
                value["engines"] = team.about()
                value["results"] += measuring.calls(team, "layer", sizes, self.settings, threads)
        about = "; ".join(f"{label}: {text}" for label, text in value["engines"].items())
        title = f"{shape.name}, {dtype}: one MoE layer (libcolibri with its router, kt-kernel without; {about})"
        self.add("layer", value, report.calls_text(title, value["results"]))

    def router(self) -> None:
        """Our router and PyTorch's."""
        shape = SHAPES["router"]
        value: dict[str, Any] = {"results": []}
        subjects = self.colibris(shape, "q8", 1024)
        if has_module(sys.executable, "torch"):
            options = {"engine": "torch", "threads": 1, "top_k": shape.top_k}
            options |= {"experts": shape.experts, "hidden": shape.hidden}
            subjects.append(Subject("PyTorch", "torch", sys.executable, options))
        else:
            self.note("PyTorch's router: skipped: torch is not installed")
        with Team(subjects, self.note) as team:
            for threads in self.settings.threads:
                value["results"] += measuring.calls(team, "route", [1, 1024], self.settings, threads)
        sizes = f"{shape.hidden} × {shape.experts}, top-{shape.top_k}"
        self.add("router", value, report.calls_text(f"router, {sizes}, called from Python", value["results"]))

    def attempt(self, measure: Any, *arguments: Any) -> None:
        """Measure; an engine that fails costs its table and not those that follow."""
        try:
            measure(*arguments)
        except WorkerError as error:
            self.failed = True
            self.note(f"no table: {error}")

    def all(self) -> None:
        """What was asked for."""
        options = self.options
        for shape in (SHAPES[name] for name in options["shapes"]):
            for dtype in options["types"]:
                if options["speed"]:
                    self.attempt(self.speed, shape, dtype)
                for section in ("busy", "tail"):
                    if options[section]:
                        self.attempt(self.beside, section, shape, dtype)
                if options["layer"]:
                    self.attempt(self.layer, shape, dtype)
        if options["router"]:
            self.attempt(self.router)
        if options["plot"] and self.result["speed"]:
            report.plot(options["plot"], self.result["speed"])
        if self.failed:
            raise click.ClickException("some measurements failed; see the notes")


def cpu_info() -> str:
    """What libcolibri detected."""
    from colibri import _ffi

    return str(_ffi.lib().colibri_cpu_info().decode())


def processor_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def has_module(python: str, module: str) -> bool:
    """Whether an environment's Python finds a module."""
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise click.ClickException(f"cannot run {python}: {error.strerror}") from None


# ---- The command line


class Words(click.ParamType):
    """Words between commas, out of some."""

    name = "list"

    def __init__(self, known: tuple[str, ...], may_be_none: bool = False) -> None:
        self.known, self.may_be_none = known, may_be_none

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Text to a list."""
        if isinstance(value, list):
            return value
        words = [word.strip() for word in value.split(",")]
        if words == ["none"] and self.may_be_none:
            return []
        for word in words:
            if word not in self.known:
                self.fail(f"{word!r} is none of {', '.join(self.known)}", param, ctx)
        return words


class Numbers(click.ParamType):
    """Positive whole numbers between commas."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Text to a list."""
        if isinstance(value, list):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() and 0 < int(part) <= 256 for part in parts):
            self.fail(f"{value!r} is no list of numbers from 1 to 256", param, ctx)
        return list(dict.fromkeys(int(part) for part in parts))


def labelled(_ctx: Any, _param: Any, values: tuple[str, ...]) -> list[tuple[str, str]]:
    """LABEL=PATH, or a path alone."""
    pairs = [value.split("=", 1) if "=" in value else ["", value] for value in values]
    return [(label, python) for label, python in pairs]


FILE = click.Path(dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)


@click.command(help=__doc__.replace("\n\n", "\n\n\b\n") if __doc__ else None)
@click.argument("outdir", type=click.Path(file_okay=False, path_type=Path))
@click.option("--shapes", type=Words(tuple(SHAPES)), default=["fine", "coarse"], help="fine,coarse,tiny [fine,coarse]")
@click.option("--types", type=Words(tuple(TYPES)), default=["q8", "q4"], help="q8,q4,bf16,f16,f32 [q8,q4]")
@click.option("--threads", type=Numbers(), help="numbers of threads [1 and one per processor]")
@click.option(
    "--peers", type=Words(PEERS, True), help=f"{','.join(PEERS)} or none [those installed, without transformers-f32]"
)
@click.option("--isa", type=Words(("auto", "ref", "avx2", "avx512", "amx", "neon")), default=["auto"],
              help="instruction sets of libcolibri, each a row [auto]")  # fmt: skip
@click.option("--llama-python", multiple=True, callback=labelled, metavar="[LABEL=]PATH",
              help="a Python that has llama-cpp-python; may be given several times [this one]")  # fmt: skip
@click.option("--kt-python", metavar="PATH", help="a Python that has kt-kernel [this one]")
@click.option("--rounds", type=COUNT, default=5, show_default=True, help="of each measurement, after one more")
@click.option("--prompt-tokens", type=COUNT, default=512, show_default=True, help="of prefill")
@click.option("--long", is_flag=True, help="prefill 4096 tokens too")
@click.option("--decode-tokens", type=COUNT, default=64, show_default=True, help="decoded in a round")
@click.option(
    "--depth", type=click.IntRange(min=0), default=0, show_default=True, help="tokens before the decoded ones"
)
@click.option("--speed/--no-speed", default=True, help="the tables of prefill and decode [on]")
@click.option("--busy", is_flag=True, help="decode beside one busy process per core, libcolibri and llama.cpp")
@click.option("--tail", is_flag=True, help="times of single tokens, libcolibri and llama.cpp")
@click.option("--tail-tokens", type=COUNT, default=2000, show_default=True, help="of --tail")
@click.option("--layer", is_flag=True, help="one MoE layer alone with 1, 32, 128 and 512 tokens, beside kt-kernel")
@click.option("--router", is_flag=True, help="one router, beside PyTorch's")
@click.option("--bench", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="colibri-bench, for the machine's limits [compiled into OUTDIR]")  # fmt: skip
@click.option("--buffer-mb", type=COUNT, help="that it reads [1024, if memory is there]")
@click.option("--plot", type=FILE, help="write a plot, as its name's ending says")
@click.option("--json", type=FILE, help="write all figures, after each table")
def main(outdir: Path, **options: Any) -> None:
    if options["plot"] and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib")
    try:
        outdir.mkdir(parents=True, exist_ok=True)
        for file in (options["json"], options["plot"]):
            if file is not None and not (
                file.absolute().parent.is_dir() and os.access(file.absolute().parent, os.W_OK)
            ):
                raise click.ClickException(f"{file} cannot be written")  # now, not after an hour
        Run(outdir.absolute(), options).all()
    except (colibri.ColibriError, LimitsError, WorkerError, OSError) as error:
        raise click.ClickException(" ".join(str(error).split())) from None


if __name__ == "__main__":
    main()
