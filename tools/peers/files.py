"""Files of the shapes, written when they are first needed and kept: checkpoint, .colibri, GGUF."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click
import colibri

from .gguf_file import TYPES, write_gguf
from .shapes import Shape, write_checkpoint


def checkpoint(folder: Path, shape: Shape) -> Path:
    """The shape's checkpoint, written if it is not there."""
    path = folder / shape.name / "checkpoint"
    if not path.is_dir():
        click.echo(f"writing {path} ({2 * shape.parameters / 1e9:.1f} GB)", err=True)
        write_checkpoint(path, shape)
    return path


def colibri_file(folder: Path, shape: Shape, dtype: str) -> Path:
    """The shape's .colibri file."""
    path = folder / shape.name / f"{dtype}.colibri"
    if not path.is_file():
        source = checkpoint(folder, shape)
        click.echo(f"writing {path}", err=True)
        colibri.convert(source, path, dtype=dtype)
    return path


def gguf_path(folder: Path, shape: Shape, dtype: str) -> Path:
    """Where the shape's GGUF file is or will be."""
    return folder / shape.name / f"{TYPES[dtype]}.gguf"


def gguf_file(folder: Path, shape: Shape, dtype: str) -> Path:
    """The shape's GGUF file."""
    path = gguf_path(folder, shape, dtype)
    if not path.is_file():
        if importlib.util.find_spec("gguf") is None:
            raise click.ClickException(f"to write {path}, install the package gguf")
        source = checkpoint(folder, shape)
        click.echo(f"writing {path}", err=True)
        write_gguf(path, source, shape, dtype)
    return path
