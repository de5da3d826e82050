"""Wheels for every platform from one machine: zig cross-compiles the library, hatchling packs the package around it.

    python tools/build_wheels.py OUTDIR [--targets NAME ...]

Needs hatchling and ziglang in this Python (pip install hatchling ziglang==0.16.0). Two builds give the same bytes.
tools/hatch_build.py holds the targets and their tags.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EPOCH = "1580601600"  # hatchling's own choice, whatever the environment says


def targets() -> dict[str, str]:
    """Zig's names and the tags of their wheels."""
    sys.path.insert(0, str(ROOT / "tools"))
    import hatch_build

    return {name: f"py3-none-{target.platform_tag}" for name, target in hatch_build.TARGETS.items()}


def build_wheel(target: str, tag: str, output: Path) -> Path:
    """Build in a process of its own, as pip would; the baseline processor, whatever the environment says."""
    environment = {**os.environ, "COLIBRI_TARGET": target, "COLIBRI_CPU": "baseline", "SOURCE_DATE_EPOCH": EPOCH}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(output)]
    made = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, **made)
    wheels = sorted(output.glob(f"*-{tag}.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        sys.exit(f"building the wheel for {target} failed (exit status {done.returncode})\n{done.stdout}")
    return wheels[0]


def main() -> None:
    missing = [name for name in ("hatchling", "ziglang") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)} not installed: pip install hatchling ziglang==0.16.0")
    known = targets()
    parser = argparse.ArgumentParser(description="Cross-build Python wheels with zig.")
    parser.add_argument("output", type=Path, help="a folder for the wheels")
    parser.add_argument("--targets", nargs="+", choices=known, default=list(known), metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for target in arguments.targets:
        for old in output.glob(f"libcolibri-*-{known[target]}.whl"):
            old.unlink()
        wheel = build_wheel(target, known[target], output)
        print(f"{wheel} ({wheel.stat().st_size} bytes)", flush=True)


if __name__ == "__main__":
    main()
