"""Pictures of a session's experts, layer by layer: how many tokens each got, and what one of them cost.

Needs matplotlib (``pip install 'libcolibri[plot]'``).
"""

from __future__ import annotations

import io
import os
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import ColibriError, InvalidArgumentError

_Array = NDArray[Any]

_FORMATS = ("png", "svg", "pdf")
_DEAD = "black"  # of no colour map below
_CELL = (0.46, 0.26)  # inches, width and height, as long as the picture does not get too large
_LEAST, _MOST = (4.2, 1.0), (15.5, 11.0)  # inches of one panel
_LABELLED = (0.3, 0.16)  # cells of this size hold a number


def picture_format(path: str | os.PathLike[str]) -> str:
    """What a file's name asks for: png, svg or pdf. Raises InvalidArgumentError for other names."""
    ending = os.path.splitext(os.fspath(path))[1][1:].lower()
    if ending not in _FORMATS:
        raise InvalidArgumentError(f"{os.fspath(path)}: a picture's name ends in .{', .'.join(_FORMATS)}")
    return ending


def require_matplotlib() -> Any:
    """The module matplotlib, or ColibriError."""
    try:
        import matplotlib
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.patches
        import matplotlib.style
    except ImportError:
        raise ColibriError("heatmaps need matplotlib: pip install 'libcolibri[plot]'") from None
    return matplotlib


def draw(stats: dict[str, Any], name: str, picture: str = "png") -> bytes:
    """A picture of what :meth:`colibri.Session.stats` counted: use on one panel, time on the other.

    Args:
        stats: of a session that has run something.
        name: of the model, for the title.
        picture: "png", "svg" or "pdf".

    Returns:
        the bytes of the file.

    Raises:
        ColibriError: without matplotlib, experts, or tokens.
    """
    matplotlib = require_matplotlib()
    layers = np.flatnonzero((stats["expert_place"] >= 0).any(axis=1))  # the others are dense
    tokens = stats["expert_tokens"][layers].astype(np.float64)
    if tokens.size == 0:
        raise ColibriError(f"{name} has no experts: there is nothing to draw")
    if not tokens.any():
        raise ColibriError("no token was run: there is nothing to draw")
    nanoseconds = stats["expert_compute_ns"][layers].astype(np.float64)
    name = "".join(c if c.isprintable() else "?" for c in name).replace("$", r"\$")  # $ would begin a formula
    with matplotlib.style.context("default"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a character of the name that the font lacks
        run = stats["prompt_tokens"] + stats["decode_tokens"]
        figure = _figure(matplotlib, layers, tokens, nanoseconds, run, name)
        file = io.BytesIO()
        figure.savefig(file, format=picture, dpi=120)
    return file.getvalue()


def _figure(matplotlib: Any, layers: _Array, tokens: _Array, nanoseconds: _Array, run: int, name: str) -> Any:
    """`run` tokens went through these layers; tokens and nanoseconds are [layers, experts]."""
    used = tokens > 0
    share = np.where(used, 100 * tokens / max(run, 1), np.nan)
    cost = np.full_like(tokens, np.nan)
    np.divide(nanoseconds, tokens, out=cost, where=used)
    scale, unit = (1e6, "ms") if np.nanmedian(cost) >= 1e6 else (1e3, "µs")
    cost /= scale

    rows, columns = tokens.shape
    width, height = (float(np.clip(n * _CELL[i], _LEAST[i], _MOST[i])) for i, n in enumerate((columns, rows)))
    beside = width < 1.1 * height
    panels = (1, 2) if beside else (2, 1)
    size = (panels[1] * (width + 1.9) + 0.3, panels[0] * (height + 0.95) + 1.25)
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    left, right = figure.subplots(*panels)
    cell = (width / columns, height / rows)
    chosen, computing = "Use: tokens that chose the expert", f"Time: computing one token, {unit}"
    _panel(left, layers, share, cell, chosen, "%", _share_colours(matplotlib, share, tokens, run))
    _panel(right, layers, cost, cell, computing, unit, _cost_colours(matplotlib, cost))
    title = _title(name, layers, share, cost, unit, run)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", linespacing=1.4)
    dead = matplotlib.patches.Patch(facecolor=_DEAD, label="never used")
    figure.legend(handles=[dead], loc="outside lower right", fontsize=9, frameon=False)
    return figure


def _share_colours(matplotlib: Any, share: _Array, tokens: _Array, run: int) -> dict[str, Any]:
    """Blue below, red above what every expert would get if all were used alike; by factors."""
    even = 100 * tokens.sum() / max(run, 1) / tokens.size
    halvings = float(np.clip(-np.log2(np.nanmin(share) / even), 1, 4))
    doublings = float(np.clip(np.log2(np.nanmax(share) / even), 0.5, 5))
    steps = np.arange(-int(halvings), int(doublings) + 1)
    ticks = {even * 2.0**step: f"{_number(even * 2.0**step)}{' (even)' if step == 0 else ''}" for step in steps}
    below = round(256 * halvings / (halvings + doublings))
    # both ends have their full colour however far they go; no blue is so dark that it looks like the dead ones' black
    shades = np.concatenate([np.linspace(0.15, 0.5, below), np.linspace(0.5, 1.0, 256 - below)])
    colours = matplotlib.colors.ListedColormap(matplotlib.colormaps["RdBu_r"](shades))
    norm = matplotlib.colors.LogNorm(even * 2.0**-halvings, even * 2.0**doublings)
    return {"cmap": colours, "norm": norm, "ticks": ticks}


def _cost_colours(matplotlib: Any, cost: _Array) -> dict[str, Any]:
    """Pale to red, by factors; a few outliers do not pale the rest."""
    known = cost[np.isfinite(cost)]
    low, high = np.percentile(known, 2), np.percentile(known, 99.5)
    low, high = max(low, 1e-6), max(high, low * 1.5, 1e-6)
    ticks = {value: _number(value) for value in np.geomspace(low, high, 5)}
    colours = matplotlib.colormaps["YlOrRd"](np.linspace(0.0, 0.85, 256))
    return {
        "cmap": matplotlib.colors.ListedColormap(colours), "norm": matplotlib.colors.LogNorm(low, high), "ticks": ticks
    }  # fmt: skip


def _panel(
    axes: Any, layers: _Array, values: _Array, cell: tuple[float, float], title: str, unit: str, colours: dict[str, Any]
) -> None:
    """One picture: a cell of so many inches for each value, and its colour bar."""
    rows, columns = values.shape
    axes.set_facecolor(_DEAD)  # NaN is not drawn: the ground shows
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours["cmap"], norm=colours["norm"])
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("expert", fontsize=9)
    axes.set_ylabel("layer", fontsize=9)
    axes.tick_params(labelsize=8)
    for axis, labels, inches in ((axes.xaxis, np.arange(columns), cell[0]), (axes.yaxis, layers, cell[1])):
        step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128) if s * inches >= 0.24 or s == 128)
        axis.set_ticks(np.arange(0, len(labels), step), [str(label) for label in labels[::step]])
    if min(cell) >= 0.1:  # lines between cells
        axes.set_xticks(np.arange(columns - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(rows - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.6)
        axes.tick_params(which="minor", length=0)
    if cell[0] >= _LABELLED[0] and cell[1] >= _LABELLED[1]:
        for (row, column), value in np.ndenumerate(values):
            dark = not np.isfinite(value) or sum(image.cmap(image.norm(value))[:3]) < 1.5
            text = _number(value) if np.isfinite(value) else "×"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    outside = [np.nanmin(values) < image.norm.vmin * 0.999, np.nanmax(values) > image.norm.vmax * 1.001]
    extend = {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[tuple(map(int, outside))]  # type: ignore
    bar = axes.figure.colorbar(image, ax=axes, extend=extend, pad=0.015, aspect=30, fraction=0.05)
    bar.set_ticks(list(colours["ticks"]), labels=list(colours["ticks"].values()))
    bar.minorticks_off()
    bar.ax.set_title(unit, fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _number(value: float) -> str:
    """Three digits, no exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2g}"


def _title(
    name: str, layers: _Array, share: _Array, cost: _Array, unit: str, run: int
) -> str:  # fmt: skip
    """What the picture shows, in words: the experts that stand out."""

    def place(values: _Array) -> str:
        row, column = np.unravel_index(np.nanargmax(values), values.shape)
        return f"layer {layers[row]} expert {column}"

    dead = int(np.isnan(share).sum())
    return (
        f"{name}: {run} tokens, {share.shape[0]} layers with {share.shape[1]} experts\n"
        f"hottest: {place(share)}, {_number(np.nanmax(share))} % of tokens; never used: {dead} of {share.size}\n"
        f"slowest: {place(cost)}, {_number(np.nanmax(cost))} {unit} a token, "
        f"{np.nanmax(cost) / np.nanmedian(cost):.1f} x the median"
    )
