#!/usr/bin/env python3
"""How rotated integer activations stand outliers: the error of y = W x against float64, for made-up activations.

    python tools/robustness.py [--k 2048 4096 14336] [--tokens 32] [--rows 256] [--weights f32|q8] [--json]

Some tokens of real models hold "massive" activations: a few channels a thousand times as large as the rest. One scale
for a whole token then leaves few steps for the rest. Rotation (multiplying k by a blockwise Hadamard matrix, on both
sides of the product) spreads the outliers over a block. Activations here:

    plain            Gaussian
    heavy            Student's t with 3 degrees of freedom, times a lognormal (sigma 1) scale for each channel
    1, 16, 64 x1000  Gaussian, so many channels (the same in all tokens) times 1000

and ways of rounding them to 8 or 16 bits (-127 ... 127 or -16256 ... 16256, as libcolibri does):

    32               no rotation, a scale for each 32 values: the common scheme
    none             no rotation, a scale for each token
    128 ... 4096     rotation in blocks of so many, a scale for each token; libcolibri takes the largest power of two
                     that divides k, at most 4096

Two errors are printed, root mean square over tokens and rows. "Of y": relative to y. "Of the rest": relative to the
part of y that comes from the ordinary channels alone, which is far smaller: at 100 % nothing of them is left. W is
Gaussian; with --weights q8 it is rounded too, by rows of the rotated matrix as in a q8 file (for "32" in groups of 32),
which shows what the weights cost by themselves: 0.8 % of y, about as much as 8-bit activations.

Needs numpy.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
GROUP = 32
LIMITS = {8: 127, 16: 16256}
BLOCKS = (128, 256, 512, 1024, 2048, 4096)
OUTLIER = 1000.0
CASES = {"plain": 0, "heavy": 0, "1 x1000": 1, "16 x1000": 16, "64 x1000": 64}


@dataclass(frozen=True)
class Row:
    """The two errors of one case by one way, as fractions."""

    k: int
    case: str
    bits: int
    way: str
    of_y: float
    of_rest: float


def hadamard(x: Array, block: int) -> Array:
    """x [...][k], every `block` values times the Hadamard matrix / sqrt(block): lengths are kept."""
    parts = x.reshape(-1, block)
    step = 1
    while step < block:
        pairs = parts.reshape(len(parts), -1, 2, step)
        parts = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        parts, step = parts.reshape(len(parts), block), 2 * step
    return (parts / np.sqrt(block)).reshape(x.shape)


def rounded(x: Array, limit: int, group: int | None = None) -> Array:
    """x [n][k] as integers up to `limit` times one scale for each row, or for each `group` values of a row."""
    values = x.reshape(len(x), -1, group or x.shape[1])
    scale = np.abs(values).max(axis=2, keepdims=True) / limit
    return (np.rint(values / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)


def activations(case: str, tokens: int, k: int, random: np.random.Generator) -> tuple[Array, NDArray[np.bool_]]:
    """x [tokens][k], and which channels are ordinary."""
    ordinary = np.ones(k, bool)
    ordinary[random.permutation(k)[: CASES[case]]] = False
    if case == "heavy":
        return random.standard_t(3, (tokens, k)) * np.exp(random.standard_normal(k)), ordinary
    return random.standard_normal((tokens, k)) * np.where(ordinary, 1, OUTLIER), ordinary


def ways_for(k: int) -> dict[str, int]:
    """Names of the ways that k allows: block of the rotation, 0 for none."""
    largest = k & -k
    return {"32": 0, "none": 0} | {str(block): block for block in BLOCKS if block <= largest}


def product(x: Array, w: Array, bits: int, way: str, block: int, weights: str) -> Array:
    """y [tokens][rows] as the way has it."""
    if block:
        x, w = hadamard(x, block), hadamard(w, block)
    group = GROUP if way == "32" else None
    if weights == "q8":
        w = rounded(w, LIMITS[8], group)
    return rounded(x, LIMITS[bits], group) @ w.T


def measure(k: int, tokens: int, rows: int, weights: str, seed: int = 0) -> list[Row]:
    """Every case, number of bits and way at one k, a multiple of 128."""
    found = []
    for case in CASES:
        random = np.random.default_rng([seed, k, *case.encode()])
        x, ordinary = activations(case, tokens, k, random)
        w = random.standard_normal((rows, k))
        y, rest = x @ w.T, (x * ordinary) @ w.T
        for bits in LIMITS:
            for way, block in ways_for(k).items():
                error = np.linalg.norm(product(x, w, bits, way, block, weights) - y)
                of_y, of_rest = error / np.linalg.norm(y), error / np.linalg.norm(rest)
                found.append(Row(k, case, bits, way, float(of_y), float(of_rest)))
    return found


def table(rows: list[Row]) -> str:
    """For people: a line for each case and number of bits, a column for each way, in per cent."""
    lines = []
    for k in dict.fromkeys(row.k for row in rows):
        ways = list(dict.fromkeys(row.way for row in rows if row.k == k))
        for title, name in (("of y", "of_y"), ("of the rest", "of_rest")):
            lines += ["", f"k = {k}, error {title}, %", f"{'':18}" + "".join(f"{way:>9}" for way in ways)]
            for case in CASES:
                for bits in LIMITS:
                    found = [row for row in rows if (row.k, row.case, row.bits) == (k, case, bits)]
                    numbers = "".join(f"{100 * getattr(row, name):9.3f}" for row in found)
                    lines.append(f"{case:11}{bits:2} bits{numbers}")
    return "\n".join(lines[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description="How rotated integer activations stand outliers.")
    parser.add_argument("--k", type=int, nargs="+", default=[2048, 4096, 14336], help="row lengths, multiples of 128")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rows", type=int, default=256, help="of W")
    parser.add_argument("--weights", choices=("f32", "q8"), default="f32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    if any(k < 128 or k % 128 for k in arguments.k) or arguments.tokens < 1 or arguments.rows < 1 or arguments.seed < 0:
        parser.error("--k takes multiples of 128, --tokens and --rows at least 1, --seed at least 0")
    rows = [
        row
        for k in arguments.k
        for row in measure(k, arguments.tokens, arguments.rows, arguments.weights, arguments.seed)
    ]
    print(json.dumps([vars(row) for row in rows], indent=1) if arguments.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
