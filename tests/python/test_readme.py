"""The README's commands and programs, run word by word: blocks marked <!-- run --> and <!-- file: NAME -->."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import colibri
import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- (run|file: (?P<name>\S+)) -->\n```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)


def blocks() -> list[re.Match[str]]:
    return list(BLOCK.finditer((ROOT / "README.md").read_text(encoding="utf-8")))


def test_readme_has_what_it_promises() -> None:
    languages = [b["language"] for b in blocks()]
    assert languages.count("sh") >= 4 and "python" in languages and "c" in languages
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 'pip install . && colibri run "Once upon a time"' in text
    assert "pip install '.[test]' && pytest" in text


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_readme_runs(tmp_path: Path) -> None:
    """All marked blocks in order, in a copy of the sources (the build leaves files behind)."""
    if not Path(colibri.demo_path()).exists():
        pytest.fail("the demo model is not in the package")
    if shutil.which("cc") is None or shutil.which("pkg-config") is None:
        pytest.skip("needs a C compiler and pkg-config")
    folder = tmp_path / "clone"
    ignore = shutil.ignore_patterns(".git", ".zig-cache", "zig-out", "build", "out", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=ignore)
    environment = dict(
        os.environ,
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )
    for block in blocks():
        text = block["text"]
        if block["name"]:
            (folder / block["name"]).write_text(text, encoding="utf-8")
        elif block["language"] == "python":
            (folder / "quickstart.py").write_text(text, encoding="utf-8")
            assert (
                len(
                    run(
                        [sys.executable, str(folder / "quickstart.py")],
                        tmp_path,
                        environment,
                    )
                )
                > 40
            )
        else:
            run(["bash", "-euo", "pipefail", "-c", text], folder, environment)
