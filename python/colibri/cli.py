"""The command line: ``colibri convert | run | chat | tokenize | inspect | verify | bench | heatmap | web``.

Results go to stdout, everything else to stderr. Exit status: 0 done, 1 failed (one line "colibri: error: …"), 2 wrong
usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import click

import colibri

from ._files import write_whole
from .bench import cache_figures, measure

_PROMPT = "Once upon a time"
_SPAN = 4096  # tokens of a text that are run as one, at most
_DTYPES = ["f32", "f16", "bf16", "q8", "q4", "source"]
_ISAS = ["ref", "avx2", "avx512", "amx", "neon"]
_SHARE = click.FloatRange(0, 1)
_POSITIVE = click.FloatRange(0, 1e30)


# ---- Shared pieces -------------------------------------------------------------------------------------------------


def _model_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "-m", "--model", "model_path", metavar="MODEL", help="A .colibri file; default: the shipped demo model."
    )(function)


class _Size(click.ParamType):
    """A number as the configuration has it, or bytes: with K, M, G, KiB, MiB or GiB, and then at least `least`."""

    name = "size"

    def __init__(self, least: int = 0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+)(?:([KMG])(?:iB)?)?", value, re.ASCII)
        if match is None:
            self.fail(f"{value!r} is not a whole number, or one with K, M, G, KiB, MiB or GiB", param, ctx)
        size = int(match[1]) << {None: 0, "K": 10, "M": 20, "G": 30}[match[2]]
        if size >= 2**64:
            self.fail(f"{value} is more than 64 bits hold", param, ctx)
        if match[2] and size < self.least:
            self.fail(f"{value} is too small; a size in bytes must be at least {self.least}", param, ctx)
        return size


_SETTINGS = (
    "isa", "cpu_affinity", "kv_dtype", "activation_bits", "residency", "expert_cache_size", "hugepage_size",
    "numa_policy", "expert_profile", "guard_mapping", "load_balancing_strategy", "capacity_factor",
)  # fmt: skip


def _session_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of the session, handed to the command as one dictionary of Session's arguments, `settings`."""

    @functools.wraps(function)
    def with_settings(*args: Any, threads: int, experts_per_token: int | None, **options: Any) -> Any:
        settings = {name: options.pop(name) for name in _SETTINGS}
        return function(*args, settings={"num_threads": threads, "top_k": experts_per_token, **settings}, **options)

    command: Callable[..., Any] = with_settings
    for option in (
        click.option("--capacity-factor", type=click.FloatRange(0, 1024), metavar="F", help="Default: 1.25."),
        click.option(
            "--load-balancing-strategy",
            type=click.Choice(["none", "soft_capacity", "hard_capacity"]),
            help="Bounds the tokens of an expert. Changes results.",
        ),
        click.option("--guard-mapping", is_flag=True, help="A model file that is cut short is an error, no signal."),
        click.option("--expert-profile", metavar="FILE", help="Of --save-profile: stream begins with what it names."),
        click.option("--numa-policy", metavar="P", help="none, interleave, or layers and nodes as 0-15:0,16-31:1."),
        click.option("--hugepage-size", type=_Size(), metavar="S", help="Of huge: 2M or 1G.  [default: 2M]"),
        click.option(
            "--expert-cache-size",
            type=_Size(1 << 20),
            metavar="N",
            help="Of stream: experts, or bytes as 512M or 4GiB; default: a quarter of the model's.",
        ),
        click.option(
            "--residency",
            type=click.Choice(["map", "lock", "huge", "stream"]),
            help="Where weights live; default: map, or what goes with the next two options.",
        ),
        click.option(
            "--activation-bits",
            type=click.Choice(["8", "16"]),
            callback=lambda _context, _option, value: int(value) if value else None,
            help="Of q8 and q4 models; default: 8 in routed experts, 16 elsewhere.",
        ),
        click.option(
            "--kv-dtype", type=click.Choice(["f32", "f16", "q8"]), help="Default: f32 for f32 models, else f16."
        ),
        click.option(
            "--affinity", "cpu_affinity", metavar="A", help="Tie threads to CPUs: none, auto, or a list as 0,2,4-7."
        ),
        click.option("--isa", type=click.Choice(_ISAS), metavar="I", help=f"Force one of {', '.join(_ISAS)}."),
        click.option("--experts-per-token", type=click.IntRange(1), metavar="K", help="Default: the model's."),
        click.option(
            "--threads", type=click.IntRange(0, 256), default=0, metavar="T", help="0: one per physical core."
        ),
    ):
        command = option(command)
    return command


def _sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--seed", type=click.IntRange(0, 2**64 - 1), default=0, metavar="S", help="Of the draws.  [default: 0]"
        ),
        click.option("--repetition-penalty", type=_POSITIVE, default=1.0, metavar="R", help="1: none.  [default: 1]"),
        click.option("--min-p", type=_SHARE, default=0.0, metavar="P", help="Drop tokens below P x the likeliest."),
        click.option("--top-p", type=_SHARE, default=1.0, metavar="P", help="Nucleus sampling.  [default: 1]"),
        click.option(
            "--top-k", type=click.IntRange(0), default=0, metavar="K", help="Of K tokens; 0: all.  [default: 0]"
        ),
        click.option(
            "--temperature", type=_POSITIVE, default=0.0, metavar="T", help="0: the likeliest token.  [default: 0]"
        ),
    ):
        function = option(function)
    return function


def _open(model_path: str | None) -> colibri.Model:
    return colibri.Model(model_path if model_path is not None else colibri.demo_path())


def _session(model: colibri.Model, settings: dict[str, Any], verbose: bool = False, **more: Any) -> Any:
    """A session whose log goes to stderr: warnings always, the rest with `verbose`."""

    def log(level: str, message: str) -> None:
        if verbose or level == "warning":
            click.echo(f"{level}: {message}", err=True)

    return colibri.Session(model, outputs="last", log=log, **settings, **more)


def _write(text: str) -> None:
    """To stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens, {tokens / seconds:.1f} tokens/s" if seconds > 0 and tokens else f"{tokens} tokens"


def _report_setting(session: Any) -> None:
    stats = session.stats()
    memory = _bytes(stats["workspace_bytes"])
    click.echo(f"{session.model!r}\n{stats['num_threads']} threads, {stats['isa']}, workspace {memory}", err=True)


def _report_speed(session: Any) -> None:
    done = session.last_generation
    prompt, new = _rate(done.prompt_tokens, done.prompt_seconds), _rate(len(done.tokens), done.seconds)
    click.echo(f"prompt: {prompt}; generation: {new}", err=True)


_COLUMNS = ("tokens", "hits", "misses", "bytes_read", "load_ns", "compute_ns", "merge_ns", "place", "node")


def _residency_lines(stats: dict[str, Any]) -> list[str]:
    """Where the weights are, and what the cache of experts did."""
    pages = "ordinary pages"
    if stats["hugepage_size"]:
        kind = "reserved huge" if stats["hugepage_pool"] else "transparent huge"
        pages = f"{_bytes(stats['hugepage_bytes'])} on {kind} pages of {stats['hugepage_size'] >> 20} MiB"
    parts = [f"residency: {stats['residency']}", pages]
    for name, text in (
        ("direct_io", "reads bypass the page cache"),
        ("memory_short", "the model is larger than memory"),
        ("guarded", "guarded"),
        ("numa_nodes", f"memory nodes: {stats['numa_nodes']}"),
    ):
        if stats[name]:
            parts.append(text)
    lines = [", ".join(parts)]
    if stats["cache_experts"]:
        shares = cache_figures(stats)
        rates = ("hit_rate", "ahead_accuracy", "repeat_accuracy")
        hit_rate, ahead, repeat = (100 * (shares[name] or 0) for name in rates)
        lines += [
            f"cache: {stats['cache_experts']} experts, {stats['cache_pinned']} pinned; {stats['cache_hits']} hits, "
            f"{stats['cache_misses']} misses, hit rate {hit_rate:.1f} %; {stats['cache_hits_ahead']} hits ahead",
            f"look-ahead: {ahead:.1f} % of {stats['ahead_predicted']} expected experts were chosen; the same as for "
            f"the last token: {repeat:.1f} %",
            f"read: {_bytes(stats['read_bytes'])}, of it {_bytes(stats['read_bytes_ahead'])} ahead; threads waited "
            f"{stats['read_wait_ns'] / 1e6:.3f} ms",
        ]
    if stats["capacity_moved"] or stats["capacity_dropped"]:
        moved, dropped = stats["capacity_moved"], stats["capacity_dropped"]
        lines.append(f"capacity: {moved} token-expert pairs moved, {dropped} dropped")
    return lines


def _report_experts(session: Any) -> None:
    """Where the weights are; then a line for each layer and expert."""
    stats = session.stats()
    lines = _residency_lines(stats)
    lines.append(
        f"{'layer':>5} {'expert':>6} {'tokens':>9} {'hits':>8} {'misses':>8} {'MB read':>9} {'load ms':>10} "
        f"{'compute ms':>11} {'merge ms':>10}  place" + (":node" if stats["numa_nodes"] else "")
    )
    for layer, expert in zip(*(stats["expert_place"] >= 0).nonzero(), strict=True):  # not those of dense layers
        row = {name: stats[f"expert_{name}"][layer, expert] for name in _COLUMNS}
        lines.append(
            f"{layer:5d} {expert:6d} {row['tokens']:9d} {row['hits']:8d} {row['misses']:8d} "
            f"{row['bytes_read'] / 1e6:9.3f} {row['load_ns'] / 1e6:10.3f} {row['compute_ns'] / 1e6:11.3f} "
            f"{row['merge_ns'] / 1e6:10.3f}  "
            f"{colibri.PLACES[int(row['place'])]}" + (f":{row['node']}" if row["node"] >= 0 else "")
        )
    click.echo("\n".join(lines), err=True)


def _bytes(size: float) -> str:
    """A size for people."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


# ---- Commands ------------------------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(colibri.__version__, prog_name="colibri")
def cli() -> None:
    """Mixture-of-Experts language models on CPUs."""


@contextlib.contextmanager
def _progress_bar(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr if that is a terminal; called with bytes done and in all."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with contextlib.ExitStack() as stack:
        bars: list[Any] = []

        def show(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(click.progressbar(length=total, label="converting", file=sys.stderr)))
            bars[0].update(done - bars[0].pos)

        yield show


@cli.command()
@click.argument("src")
@click.argument("dst")
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    default="q8",
    show_default=True,
    help="Of the weights; source: as the checkpoint has them.",
)
@click.option(
    "--other-dtype",
    type=click.Choice(_DTYPES),
    help="Of all weights but the routed experts'; default: that of --dtype.",
)
@click.option(
    "--scale-rule",
    type=click.Choice(["least_squares", "percentile", "max"]),
    default="least_squares",
    show_default=True,
    help="How the row scales of q8 and q4 are chosen.",
)
@click.option("--threads", type=click.IntRange(1, 256), metavar="T", help="Default: the processors there are.")
@click.option("--quiet", is_flag=True, help="No progress bar and no summary.")
def convert(
    src: str, dst: str, dtype: str, other_dtype: str | None, scale_rule: str, threads: int | None, quiet: bool
) -> None:
    """Convert a Hugging Face checkpoint (folder SRC, or a Hub name) into the .colibri file DST."""
    from .convert import ConversionWarning, format_summary

    with _progress_bar(quiet) as progress, warnings.catch_warnings():
        if not quiet:
            warnings.simplefilter("ignore", ConversionWarning)  # the summary lists them
        summary = colibri.convert(
            src, dst, dtype, other_dtype=other_dtype, scale_rule=scale_rule, num_threads=threads, progress=progress
        )
    if not quiet:
        _write(format_summary(summary) + "\n")


@cli.command()
@click.argument("prompt", default=_PROMPT)
@_model_option
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, metavar="N")
@_sampling_options
@_session_options
@click.option("--save-profile", metavar="FILE", help="At the end, write how often experts were used.")
@click.option("--metrics", metavar="FILE", help="At the end, write the figures as Prometheus text.")
@click.option("--verbose", is_flag=True, help="Say what the model is, and the figures of each layer and expert.")
def run(
    prompt: str,
    model_path: str | None,
    max_tokens: int,
    settings: dict[str, Any],
    save_profile: str | None,
    metrics: str | None,
    verbose: bool,
    **sampling: Any,
) -> None:
    """Continue PROMPT ("-" reads it from stdin; default: "Once upon a time"). On a terminal PROMPT is shown first."""
    if metrics == "-":
        raise click.UsageError("--metrics takes a file: the text goes to stdout")
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", "replace")
    with _open(model_path) as model:
        ids = model.tokenize(prompt)
        room = len(ids) + max_tokens - 1  # the last new token need not enter the cache
        with _session(model, settings, verbose, max_seq_len=max(room, 1)) as session:
            if verbose:
                _report_setting(session)
            if sys.stdout.isatty():  # a reader sees the whole text; a pipe gets the new text alone
                click.secho(prompt, bold=True, nl=False)
            for piece in session.generate(ids, max_new_tokens=max_tokens, stream=True, **sampling):
                _write(piece)
            _write("\n")
            _report_speed(session)
            if verbose:
                _report_experts(session)
            try:
                if metrics is not None:
                    write_whole(metrics, session.metrics().encode())
            finally:  # one that fails does not take the other with it
                if save_profile is not None:
                    session.save_profile(save_profile)


def _lines(interactive: bool) -> Iterator[str]:
    """What the user says, line by line, until the end of input or "/exit"."""
    while True:
        if interactive:
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.rstrip("\r\n")


@cli.command()
@_model_option
@click.option("--system", metavar="TEXT", help="A system message.")
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Of one answer; default: 128, or what fits.")
@_sampling_options
@_session_options
def chat(
    model_path: str | None,
    system: str | None,
    max_tokens: int | None,
    settings: dict[str, Any],
    **sampling: Any,
) -> None:
    """Talk to a model that has a chat template. One line is one message; "/exit" or the end of input ends."""
    from .chat import ChatTemplate

    with _open(model_path) as model:
        template = ChatTemplate(model)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        with _session(model, settings) as session:
            for line in _lines(sys.stdin.isatty()):
                messages.append({"role": "user", "content": line})
                answer = ""
                for piece in session.generate(
                    template.tokens(messages), max_new_tokens=max_tokens, stream=True, keep="prefix", **sampling
                ):
                    _write(piece)
                    answer += piece
                _write("\n")
                messages.append({"role": "assistant", "content": answer})


@cli.command()
@click.argument("text")
@_model_option
@click.option("--decode", is_flag=True, help='TEXT is token ids ("1 450 4996"); print their text.')
@click.option("--no-special", is_flag=True, help="Add no special tokens and read those in TEXT as plain text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def tokenize(text: str, model_path: str | None, decode: bool, no_special: bool, as_json: bool) -> None:
    """Print the token ids of TEXT ("-": of stdin) and their pieces, one a line."""
    if text == "-":
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    with _open(model_path) as model:
        if decode:
            result = model.detokenize(_parse_ids(text), special=not no_special)
            _write((json.dumps(result, ensure_ascii=False) if as_json else result) + "\n")
            return
        ids = model.tokenize(text, special=not no_special)
        pieces = [model.detokenize([token], special=True) for token in ids]
    if as_json:
        _write(json.dumps({"ids": ids, "pieces": pieces}, ensure_ascii=False) + "\n")
    else:
        _write("".join(f"{i}\t{json.dumps(piece, ensure_ascii=False)}\n" for i, piece in zip(ids, pieces, strict=True)))


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError:
        raise click.UsageError(f"--decode takes token ids, and {_first_bad(words)!r} is none") from None


def _first_bad(words: list[str]) -> str:
    """The first word that int() refuses."""
    for word in words:
        try:
            int(word)
        except ValueError:
            return word
    return ""


@cli.command()
@click.argument("model_path", metavar="[MODEL]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--no-tensors", is_flag=True, help="Leave out the table of tensors.")
def inspect(model_path: str | None, as_json: bool, no_tensors: bool) -> None:
    """Say what is in a .colibri file; default: the shipped demo model."""
    with _open(model_path) as model:
        path, config, tensors, metadata = model.path, model.config, list(model.tensors()), model.metadata
    by_dtype: dict[str, int] = {}
    for tensor in tensors:
        if tensor["dtype"] != "bytes":
            by_dtype[tensor["dtype"]] = by_dtype.get(tensor["dtype"], 0) + tensor["size"]
    weights = sum(by_dtype.values())
    bits = 8 * weights / config["num_parameters"] if config["num_parameters"] else 0.0
    summary = {
        **config, "weight_bytes": weights, "weight_bytes_by_dtype": by_dtype, "bits_per_weight": round(bits, 3)
    }  # fmt: skip
    if as_json:
        value = {"path": path, **summary, "metadata": metadata}
        _write(json.dumps(value if no_tensors else {**value, "tensors": tensors}, ensure_ascii=False) + "\n")
        return
    lines = [f"{'path':<26}{path}"]
    for name, value in summary.items():
        note = f"  ({_bytes(value)})" if name in ("file_size", "active_bytes", "weight_bytes") else ""
        if isinstance(value, dict):
            value = [f"{key} {_bytes(size)}" for key, size in value.items()]
        lines.append(f"{name:<26}{', '.join(map(str, value)) if isinstance(value, list) else value}{note}")
    lines += [f"{'metadata.' + str(name):<26}{value}" for name, value in metadata.items()]
    if not no_tensors:
        lines += [
            "",
            f"{'layer':>5}  {'role':<16}{'dtype':<7}{'count':>6}{'rows':>9}{'k':>9}{'bytes':>14}{'offset':>15}",
        ]
        for t in tensors:
            layer = "-" if t["layer"] is None else str(t["layer"])
            lines.append(
                f"{layer:>5}  {t['role']:<16}{t['dtype']:<7}{t['count']:>6}{t['rows']:>9}{t['k']:>9}"
                f"{t['size']:>14}{t['offset']:>15}"
            )
    _write("\n".join(lines) + "\n")


@cli.command()
@click.argument("model_path", metavar="[MODEL]", required=False)
def verify(model_path: str | None) -> None:
    """Read a whole .colibri file (default: the shipped demo model) and compare all its checksums."""
    with _open(model_path) as model:
        model.verify()
        count = sum(1 for _ in model.tensors())
        _write(f"{model.path}: {count} payloads, {_bytes(model.config['file_size'])}, every checksum is right\n")


@cli.command()
@_model_option
@click.option("--prompt-tokens", type=click.IntRange(1), default=512, show_default=True, metavar="N")
@click.option("--gen-tokens", type=click.IntRange(1), default=64, show_default=True, metavar="N")
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, metavar="R", help="The best counts.")
@_session_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    model_path: str | None,
    prompt_tokens: int,
    gen_tokens: int,
    repeat: int,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Measure prefill and decode speed."""
    with (
        _open(model_path) as model,
        _session(model, settings, max_seq_len=prompt_tokens + gen_tokens) as session,
    ):
        result = {"model": model.path, **measure(session, prompt_tokens, gen_tokens, repeat)}
        stats = session.stats()
    if as_json:
        _write(json.dumps(result) + "\n")
        return
    residency = "\n".join(_residency_lines(stats))
    ms = result["decode_ms"]
    _write(
        f"{result['model']}: {result['num_threads']} threads, {result['isa']}\n"
        f"prefill  {prompt_tokens} tokens: {result['prefill_tokens_per_s']:.1f} tokens/s\n"
        f"decode   {gen_tokens} tokens: {result['decode_tokens_per_s']:.1f} tokens/s; ms per token: "
        f"p50 {ms['p50']:.3f}, p90 {ms['p90']:.3f}, p99 {ms['p99']:.3f}, max {ms['max']:.3f}\n"
        f"weights  {_bytes(result['weight_bytes_per_token'])} per decoded token, {result['weight_gb_per_s']:.2f} GB/s\n"
        f"{residency}\n"
    )


@cli.command()
@click.argument("model_path", metavar="[MODEL]", required=False)
@click.option("--prompt", metavar="TEXT", help="The text to run.")
@click.option("--prompt-file", metavar="FILE", help='Read it from a file instead; "-" is stdin.')
@click.option(
    "--max-tokens",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Also continue it by up to N tokens.  [default: 0]",
)
@click.option("-o", "--output", required=True, metavar="PICTURE", help="What to write: a .png, .svg or .pdf file.")
@_session_options
def heatmap(
    model_path: str | None,
    prompt: str | None,
    prompt_file: str | None,
    max_tokens: int,
    output: str,
    settings: dict[str, Any],
) -> None:
    """Run a text and draw, layer by layer, how much each expert was used and what time one token took it: hot, slow and
    dead experts. MODEL is a .colibri file; default: the shipped demo model. A text longer than the model was made for
    is run in pieces.
    """
    from .heatmap import draw, picture_format, require_matplotlib

    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("give either --prompt or --prompt-file")
    picture = picture_format(output)
    require_matplotlib()
    text = prompt if prompt_file is None else _read_text(prompt_file)
    with _open(model_path) as model:
        ids = model.tokenize(text)
        span = max(1, min(len(ids), model.config["max_position"] or _SPAN, _SPAN))
        with _session(model, settings, max_seq_len=span + max(max_tokens, 1) - 1) as session:
            last = max(0, len(ids) - 1) // span * span
            for first in range(0, last, span):  # a long text: piece after piece, each as a text of its own
                session.generate(ids[first : first + span], max_new_tokens=0)
            session.generate(ids[last:], max_new_tokens=max_tokens)
            stats = session.stats()
        name = os.path.basename(model.path)
    write_whole(output, draw(stats, name, picture))


@cli.command()
@_model_option
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True, help="0: any that is free.")
def web(model_path: str | None, port: int) -> None:
    """Serve a page in which the browser runs the model, to this machine alone, until interrupted. It writes a story,
    and shows its speed and which experts are at work.
    """
    from .webserver import Server

    with _open(model_path) as model:
        path = model.path
        if not model.config["has_tokenizer"]:
            raise colibri.NoTokenizerError(f"{path} holds no tokenizer; the page needs text")
    with Server(path, port) as server:
        _write(f"{server.address} (Ctrl-C ends it)\n")
        server.serve_forever()


def _read_text(path: str) -> str:
    if path == "-":
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    with open(path, "rb") as file:
        return file.read().decode("utf-8", "replace")


# ---- Entry point ---------------------------------------------------------------------------------------------------


def _fail(message: str, status: int) -> NoReturn:
    """One line on stderr, and the exit status."""
    line = " ".join(str(message).split())
    try:
        sys.stderr.write(f"colibri: error: {line}\n")
        sys.stderr.flush()
    except OSError:
        pass
    raise SystemExit(status)


def _quiet_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush into a closed pipe or full disk says nothing."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_streams() -> None:
    """Characters that a stream cannot take become "?". Streams that were closed before we began are None: without stdin
    there is nothing to read, without stderr nobody to tell, without stdout nothing to do.
    """
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BytesIO())
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8")
    if sys.stdout is None:
        _fail("standard output is closed", 1)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _usage(error: click.UsageError) -> NoReturn:
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # its message is the whole help
        click.echo(error.format_message(), err=True)
        raise SystemExit(2)
    command = error.ctx.command_path if error.ctx is not None else "colibri"
    _fail(f"{error.format_message().rstrip('.')} (see '{command} --help')", 2)


def _terminated(number: int, _frame: object) -> NoReturn:
    """Leave by an exception, so that half-written files are removed on the way."""
    _quiet_stdout()
    raise SystemExit(128 + number)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line; `arguments` default to the process's. Ends by SystemExit, never with a traceback."""
    _prepare_streams()
    with contextlib.suppress(ValueError):  # not the main thread of a host: signals are its own
        signal.signal(signal.SIGTERM, _terminated)
    try:
        status = cli.main(args=arguments, prog_name="colibri", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as exc:
        _usage(exc)
    except click.ClickException as exc:
        _fail(exc.format_message(), 1)
    except (click.Abort, KeyboardInterrupt):
        _quiet_stdout()
        raise SystemExit(130) from None
    except BrokenPipeError:
        _quiet_stdout()
        raise SystemExit(1) from None
    except colibri.ColibriError as exc:
        _fail(str(exc), 1)
    except OSError as exc:
        _quiet_stdout()
        _fail(f"{exc.filename}: {exc.strerror}" if exc.filename else (exc.strerror or str(exc)), 1)
    except Exception as exc:
        _fail(f"{type(exc).__name__}: {exc}", 1)
    raise SystemExit(status if isinstance(status, int) else 0)
