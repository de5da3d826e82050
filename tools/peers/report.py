"""Tables (plain text that is Markdown too) and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Rows = list[list[str]]


def table(head: list[str], rows: Rows) -> str:
    """Columns under their heads; the first one to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        aligned = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(aligned) + " |"

    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(head), "| " + " | ".join(rule) + " |", *map(line, rows)])


def number(value: float) -> str:
    """Three digits or more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def with_range(figures: dict[str, Any]) -> str:
    """A median with its least and greatest."""
    return f"{number(figures['median'])} ({number(figures['min'])}–{number(figures['max'])})"


def _times(results: list[dict[str, Any]], result: dict[str, Any], *path: str) -> str:
    """How many times as fast as `result` the first libcolibri is."""
    ours = next(r for r in results if r["threads"] == result["threads"] and r["engine"].startswith("libcolibri"))
    if result["engine"].startswith("libcolibri"):
        return ""
    for key in path:
        ours, result = ours[key], result[key]
    return number(ours["median"] / result["median"])


def speed_table(group: dict[str, Any]) -> str:
    """Of one shape and type."""
    results = group["results"]
    prompts = list(results[0]["prefill"])
    head = ["engine", "threads"]
    for n in prompts:
        head += [f"prefill {n}, tokens/s", "ours ÷ it", "of int8 peak"]
    head += ["decode, tokens/s", "ours ÷ it", "MB/token", "GB/s", "of read"]
    rows = []
    for result in results:
        row = [result["engine"], str(result["threads"])]
        for n in prompts:
            figures = result["prefill"][n]
            row += [with_range(figures), _times(results, result, "prefill", n), f"{figures['int8_fraction']:.1%}"]
        decode = result["decode"]
        row += [with_range(decode), _times(results, result, "decode"), f"{decode['weight_bytes_per_token'] / 1e6:.1f}"]
        row += [number(decode["gb_per_s"]), f"{decode['read_fraction']:.1%}"]
        rows.append(row)
    return table(head, rows)


def _limit_lines(group: dict[str, Any]) -> list[str]:
    lines = []
    for threads in dict.fromkeys(result["threads"] for result in group["results"]):
        own = [result for result in group["results"] if result["threads"] == threads]
        peaks = {r["int8_peak"]["isa"]: r["int8_peak"]["t_op_per_s"] for r in own}
        text = ", ".join(f"{number(peak)} T op/s {isa}" for isa, peak in peaks.items())
        lines.append(f"machine, threads: {threads}: {own[0]['read_gb_per_s']:.1f} GB/s read; int8 {text}")
    return lines


def _ratio_lines(group: dict[str, Any]) -> list[str]:
    first = group["results"][0]["engine"]
    return [
        f"{r['ours']} ÷ {r['peer']}, threads: {r['threads']}: "
        + ", ".join(f"prefill {n}: {number(x)}" for n, x in r["prefill"].items())
        + f", decode: {number(r['decode'])}"
        for r in group["ratios"]
        if r["ours"] != first
    ]


def speed_text(group: dict[str, Any]) -> str:
    """A heading, the machine's limits, the table, and what is beside it."""
    lines = [f"## {group['shape']}, {group['type']} (GGUF: {group['gguf_type']})", ""]
    lines += [f"- {line}" for line in _limit_lines(group)]
    lines += [f"- {label}: {about}" for label, about in group["engines"].items()]
    for label, value in group["agreement"].items():
        same = "same" if value["same_top_token"] else "another"
        difference = f"{value['relative_difference']:.2g}"
        lines.append(f"- logits of {label} beside libcolibri's: relative difference {difference}, {same} top token")
    lines += [f"- {line}" for line in _ratio_lines(group)]
    return "\n".join([*lines, "", speed_table(group), ""])


def busy_text(section: dict[str, Any]) -> str:
    """Decoding beside busy processes."""
    rows = [
        [r["engine"], str(r["threads"]), with_range(r["quiet"]), with_range(r["busy"]), f"{r['kept']:.0%}"]
        for r in section["results"]
    ]
    title = f"## {section['shape']}, {section['type']}: decoding beside one busy process per core"
    return "\n".join([title, "", table(["engine", "threads", "alone, tokens/s", "busy, tokens/s", "kept"], rows), ""])


def tail_text(section: dict[str, Any]) -> str:
    """Times of single tokens."""
    keys = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    rows = [
        [r["engine"], str(r["threads"]), *(f"{r[key]:.2f}" for key in keys), f"{r['p99_over_p50']:.3f}"]
        for r in section["results"]
    ]
    tokens = section["results"][0]["tokens"]
    title = f"## {section['shape']}, {section['type']}: ms of a decoded token, {tokens} tokens"
    return "\n".join([title, "", table(["engine", "threads", "p50", "p90", "p99", "max", "p99 ÷ p50"], rows), ""])


def calls_text(title: str, results: list[dict[str, Any]]) -> str:
    """Times of a router or a layer."""
    sizes = list(dict.fromkeys(r["tokens"] for r in results))
    rows: dict[tuple[str, int], list[str]] = {}
    for r in results:
        rows.setdefault((r["engine"], r["threads"]), []).append(with_range(r["ms"]))
    head = ["engine", "threads", *(f"tokens: {n}, ms" for n in sizes)]
    body = [[engine, str(threads), *cells] for (engine, threads), cells in rows.items()]
    return "\n".join([f"## {title}", "", table(head, body), ""])


def plot(path: Path, groups: list[dict[str, Any]]) -> None:
    """Bars of prefill and decode, least to greatest as lines, with the most threads. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(4 + 2.4 * len(groups), 4.5), layout="constrained")
    engines = list(dict.fromkeys(r["engine"] for group in groups for r in group["results"]))
    threads = max(r["threads"] for group in groups for r in group["results"])
    width = 0.8 / len(engines)
    for axis, kind in zip(axes, ("prefill", "decode"), strict=True):
        for position, engine in enumerate(engines):
            _bars(axis, groups, engine, kind, threads, position * width - 0.4 + width / 2, width)
        axis.set_xticks(range(len(groups)), [f"{group['shape']} {group['type']}" for group in groups])
        prompt = next(iter(groups[0]["results"][0]["prefill"]))
        title = f"prefill of {prompt} tokens" if kind == "prefill" else "decode (black: what read bandwidth allows)"
        axis.set_title(f"{title}, {threads} threads")
        axis.set_ylabel("tokens/s")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(axis: Any, groups: Any, engine: str, kind: str, threads: int, shift: float, width: float) -> None:
    """One engine's bars, and for decoding the ceiling that read bandwidth sets it."""
    found = [
        (i, r)
        for i, group in enumerate(groups)
        for r in group["results"]
        if r["engine"] == engine and r["threads"] == threads
    ]
    figures = [next(iter(r["prefill"].values())) if kind == "prefill" else r["decode"] for _, r in found]
    at = [i + shift for i, _ in found]
    middle = [f["median"] for f in figures]
    error = [[f["median"] - f["min"] for f in figures], [f["max"] - f["median"] for f in figures]]
    axis.bar(at, middle, width, label=engine, yerr=error, capsize=2)
    if kind == "decode":
        ceilings = [1e9 * r["read_gb_per_s"] / r["decode"]["weight_bytes_per_token"] for _, r in found]
        axis.hlines(ceilings, [x - width / 2 for x in at], [x + width / 2 for x in at], colors="black", lw=1)
