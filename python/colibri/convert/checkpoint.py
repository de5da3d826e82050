"""A Hugging Face folder: config.json and the tensors that its index (or its one file) names.

The index decides which files are read. Every tensor must be taken exactly by the plan; what is left over is an error.
"""

from __future__ import annotations

import difflib
import os
import warnings
from pathlib import Path

from .config import Config
from .errors import ConversionError, ConversionWarning
from .json_file import read_json
from .layout import BF16, F16, F32
from .safetensors_file import SafetensorsFile, TensorInfo
from .sources import TensorRows

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": F32, "F16": F16, "BF16": BF16}
# Buffers that older libraries saved; they are computed from config.json.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
# Names in an error's sentence, and missing tensors after which the search ends: config.json may claim billions.
SHOWN, MAX_MISSING = 4, 100_000


class Checkpoint:
    """An open folder. `tensors` maps names to TensorInfo. Use as a context manager: leaving it closes the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warnings: list[str] = []
        self.config = Config(read_json(folder / "config.json"), str(folder / "config.json"))
        self.files: list[SafetensorsFile] = []
        self._taken: set[str] = set()
        self._missing: list[str] = []
        try:
            self.tensors = self._open_tensors()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def warn(self, message: str) -> None:
        """Note something that was ignored."""
        self.warnings.append(message)
        warnings.warn(message, ConversionWarning, stacklevel=2)

    # ---- Opening

    def _open_tensors(self) -> dict[str, TensorInfo]:
        if (self.folder / INDEX).is_file():
            return self._open_index()
        if (self.folder / SINGLE).is_file():
            self._warn_strays({SINGLE})
            return dict(self._open(SINGLE).tensors)
        if any(self.folder.glob("pytorch_model*.bin")):
            raise ConversionError(
                f"{self.folder}: the weights are pytorch_model.bin files; save the model as safetensors first"
            )
        raise ConversionError(f"{self.folder}: neither {SINGLE} nor {INDEX} is there")

    def _open_index(self) -> dict[str, TensorInfo]:
        where = str(self.folder / INDEX)
        weight_map = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConversionError(f"{where}: weight_map must be an object of file names")
        files = {}
        for name in sorted(set(weight_map.values())):
            if Path(name).name != name or "\\" in name or name in ("", ".", "..") or not name.isprintable():
                raise ConversionError(f"{where}: {name!r} is no plain file name")
            if not os.path.isfile(self.folder / name):
                raise ConversionError(f"{where}: the shard {name} is missing from {self.folder}")
            files[name] = self._open(name)
        self._warn_strays(set(files))
        tensors = {}
        for name, file in weight_map.items():
            if name not in files[file].tensors:
                raise ConversionError(f'{where}: tensor "{name}" is not in {file}')
            tensors[name] = files[file].tensors[name]
        for file_name, file in files.items():
            for name in file.tensors.keys() - tensors.keys():
                tensors[name] = file.tensors[
                    name
                ]  # not in the index: taken by nothing else, so it must be accounted for
            for name in file.tensors:
                if tensors[name].file is not file:
                    self.warn(f'tensor "{name}" in {file_name} was ignored: the index takes it from {weight_map[name]}')
        return tensors

    def _open(self, name: str) -> SafetensorsFile:
        self.files.append(SafetensorsFile(self.folder / name))
        return self.files[-1]

    def _warn_strays(self, used: set[str]) -> None:
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name not in used:
                self.warn(f"{path.name} was ignored: {SINGLE if used == {SINGLE} else INDEX} does not name it")

    # ---- Taking tensors

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor."""
        return name in self.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> TensorRows | None:
        """A tensor of a known shape, to be converted; None (and an error from finish) if it is missing."""
        info = self.tensors.get(name)
        if info is None:
            self._missing.append(name)
            if len(self._missing) == MAX_MISSING:
                raise ConversionError(f"{self.folder}: {_listed(self._missing)} are missing, at least")
            return None
        if info.shape != shape:
            raise ConversionError(
                f'tensor "{name}" in {info.file.path} has shape {list(info.shape)}, config.json says {list(shape)}'
            )
        if info.dtype not in DTYPES:
            raise ConversionError(
                f'tensor "{name}" in {info.file.path} is {info.dtype}; F32, F16 and BF16 can be converted'
            )
        self._taken.add(name)
        return TensorRows(info, DTYPES[info.dtype])

    def finish(self) -> None:
        """Raise if a tensor was missing or is left over."""
        left = [n for n in self.tensors if n not in self._taken and not n.endswith(IGNORED_SUFFIXES)]
        if not self._missing and not left:
            return
        parts = []
        if self._missing:
            parts.append(f"{_listed(self._missing)} {'is' if len(self._missing) == 1 else 'are'} missing")
        if left:
            near = [m for name in self._missing[:SHOWN] for m in difflib.get_close_matches(name, left, n=1, cutoff=0.9)]
            shown = list(dict.fromkeys(near + left))
            parts.append(f"{_listed(shown)} of the checkpoint would not be used")
        raise ConversionError(f"{self.folder}: {' and '.join(parts)}")

    def parts(self) -> list[Path]:
        """The files of the folder that are read, or may be."""
        small = ("config.json", INDEX, "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        texts = ("special_tokens_map.json", "chat_template.jinja")
        return [*(file.path for file in self.files), *(self.folder / n for n in (*small, *texts))]

    @property
    def taken(self) -> list[TensorInfo]:
        """The tensors that were taken."""
        return [self.tensors[name] for name in self._taken]


def _listed(names: list[str]) -> str:
    shown, more = ", ".join(f'"{name}"' for name in names[:SHOWN]), len(names) - SHOWN
    return f"tensor{'s' if len(names) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")
