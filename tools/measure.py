"""Measure what the README states about memory and opening: run it on your own machine and files.

    python tools/measure.py convert HF_FOLDER OUT.colibri [--dtype q8]   time and peak memory of a conversion
    python tools/measure.py open MODEL.colibri                          time to open and start a session, their memory

Linux only (reads /proc). Each measurement runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import click

MB = 1e6


def resident_bytes() -> int:
    """Resident memory of this process: anonymous and file pages."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise click.ClickException("/proc/self/status has no VmRSS: this tool needs Linux")


def in_child(*arguments: str) -> dict[str, float]:
    """Run one of the hidden commands below in a fresh interpreter and return the JSON it prints."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise click.ClickException(f"the measurement ended with status {done.returncode}")
    return json.loads(done.stdout)


@click.group()
def main() -> None:
    """Memory and start-up time of libcolibri."""


@main.command()
@click.argument("source", type=click.Path(exists=True))
@click.argument("target", type=click.Path())
@click.option("--dtype", default="q8", show_default=True)
def convert(source: str, target: str, dtype: str) -> None:
    """Convert a checkpoint; print seconds and the peak of resident memory."""
    result = in_child("convert-child", source, target, dtype)
    click.echo(
        f"{result['source_bytes'] / MB:.0f} MB -> {result['file_bytes'] / MB:.0f} MB in {result['seconds']:.1f} s"
    )
    click.echo(f"peak resident memory {result['peak_bytes'] / MB:.0f} MB")


@main.command(hidden=True)
@click.argument("source")
@click.argument("target")
@click.argument("dtype")
def convert_child(source: str, target: str, dtype: str) -> None:
    import resource

    import colibri

    start = time.perf_counter()
    colibri.convert(source, target, dtype=dtype)
    seconds = time.perf_counter() - start
    size = sum(f.stat().st_size for f in Path(source).glob("*.safetensors"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "seconds": seconds,
                "peak_bytes": peak,
                "source_bytes": size,
                "file_bytes": Path(target).stat().st_size,
            }
        )
    )


@main.command("open")
@click.argument("model", type=click.Path(exists=True))
@click.option("--runs", default=5, show_default=True)
def open_(model: str, runs: int) -> None:
    """Read the file once (page cache), then open it in fresh processes; print the median."""
    with open(model, "rb") as file:
        while file.read(1 << 24):
            pass
    results = sorted((in_child("open-child", model) for _ in range(runs)), key=lambda r: r["open_ms"])
    r = results[len(results) // 2]
    click.echo(f"opened {r['file_bytes'] / MB:.0f} MB in {r['open_ms']:.2f} ms, session in {r['session_ms']:.2f} ms")
    click.echo(
        f"resident memory grew by {r['grown_bytes'] / MB:.1f} MB; "
        f"workspace {r['workspace_bytes'] / MB:.1f} MB, of it KV cache {r['kv_bytes'] / MB:.1f} MB"
    )


@main.command(hidden=True)
@click.argument("model")
def open_child(model: str) -> None:
    import colibri
    import numpy as np

    np.zeros(1)
    colibri.version()
    before, start = resident_bytes(), time.perf_counter()
    opened = colibri.Model(model)
    middle = time.perf_counter()
    session = colibri.Session(opened, max_seq_len=512)
    end = time.perf_counter()
    stats = session.stats()
    print(
        json.dumps(
            {
                "open_ms": (middle - start) * 1e3,
                "session_ms": (end - middle) * 1e3,
                "grown_bytes": resident_bytes() - before,
                "file_bytes": Path(model).stat().st_size,
                "workspace_bytes": int(stats["workspace_bytes"]),
                "kv_bytes": int(stats["kv_bytes"]),
            }
        )
    )


if __name__ == "__main__":
    main()
