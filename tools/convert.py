"""Converts a Hugging Face MoE checkpoint into a .colibri file, without installing the package's command line.

usage: convert.py --model SRC --output DST [--quantize int8|none] [--dtype f32|f16|bf16|q8|q4] [--other-dtype …]

--quantize int8 is --dtype q8; without either, the weights keep the checkpoint's type. The same as `colibri convert`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from pathlib import Path

if importlib.util.find_spec("colibri") is None:  # not installed: run from the source tree
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from colibri.convert import DTYPES, ConversionError, ConversionWarning, convert, format_summary


def main() -> int:
    """Parse, convert, print the summary; 1 and a sentence on failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder of the checkpoint, or a Hub name")
    parser.add_argument("--output", required=True, help="file to write")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--quantize", choices=("int8", "none"), default="none", help="int8: rotated 8-bit weights")
    kinds.add_argument("--dtype", choices=DTYPES, help="type of the stored weights")
    parser.add_argument(
        "--other-dtype", choices=DTYPES, help="of all weights but the routed experts'; default: the same"
    )
    parser.add_argument("--scale-rule", choices=("least_squares", "percentile", "max"), default="least_squares")
    parser.add_argument("--threads", type=int, help="default: all processors")
    options = parser.parse_args()
    dtype = options.dtype or ("q8" if options.quantize == "int8" else "source")
    warnings.simplefilter("ignore", ConversionWarning)  # they stand in the summary
    show = _Progress(sys.stderr.isatty())
    try:
        summary = convert(
            options.model,
            options.output,
            dtype,
            other_dtype=options.other_dtype,
            scale_rule=options.scale_rule,
            num_threads=options.threads,
            progress=show,
        )
    except ConversionError as error:
        show.end()
        print(f"convert.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        show.end()
        print("convert.py: interrupted, nothing was written", file=sys.stderr)
        return 130
    show.end()
    print(format_summary(summary))
    return 0


class _Progress:
    """A line with a percentage, on a terminal only."""

    def __init__(self, terminal: bool) -> None:
        self._terminal, self._shown = terminal, -1

    def __call__(self, done: int, total: int) -> None:
        percent = done * 100 // total
        if self._terminal and percent != self._shown:
            self._shown = percent
            print(f"\rconverting: {percent} %", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._shown >= 0:
            print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
