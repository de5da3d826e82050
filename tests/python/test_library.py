"""The shared library as a plug-in host sees it: loaded and unloaded again and again, and files beyond 2 GiB."""

from __future__ import annotations

import _ctypes
import ctypes
import shutil
import struct
import sys
import threading
import time
import zlib
from pathlib import Path

import colibri
import numpy as np
import pytest
from colibri import _ffi, _lib

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and uses dlclose")


def is_mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text(encoding="utf-8")


def num_tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def infer_once(library: ctypes.CDLL, model: bytes) -> None:
    library.colibri_init.restype = ctypes.c_void_p
    config = _ffi.colibri_config_t.init(model_path=model, max_seq_len=32, num_threads=3)
    context = ctypes.c_void_p(library.colibri_init(ctypes.byref(config)))
    assert context.value
    tokens, lengths = (ctypes.c_int32 * 4)(1, 2, 3, 4), (ctypes.c_int32 * 1)(4)
    assert library.colibri_set_input(context, tokens, lengths, 1) == 0
    assert library.colibri_infer(context) == 0
    library.colibri_free(context)


def test_load_use_unload_on_a_thread(tiny_model: Path, tmp_path: Path) -> None:
    """dlopen, infer, free, dlclose on a helper thread, 50 times: leaves no mapping or thread behind."""
    path = tmp_path / "libplugin-colibri.so"
    shutil.copy(_lib.library_path(), path)
    problems: list[BaseException] = []

    def use() -> None:
        try:
            library = ctypes.CDLL(str(path))
            infer_once(library, str(tiny_model).encode())
            _ctypes.dlclose(library._handle)
        except BaseException as exc:
            problems.append(exc)

    threads = num_tasks()
    for _ in range(50):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert not problems, problems
        assert not is_mapped(path.name)
    deadline = time.monotonic() + 30
    while num_tasks() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # a joined thread may still be on its way out of the kernel
    assert num_tasks() <= threads


def test_tensors_beyond_2_gib(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """The last payload moved beyond 4 GiB in a sparse file: the same logits."""
    data = tiny_models["f32"].read_bytes()
    size, directory, length = struct.unpack_from("<QQQ", data, 24)
    (entries,) = struct.unpack_from("<I", data, 52)
    first = directory + length - 64 * entries
    places = sorted((struct.unpack_from("<QQ", data, first + 64 * i + 24), first + 64 * i) for i in range(entries))
    experts = [(o, n, at) for (o, n), at in places if struct.unpack_from("<H", data, at)[0] == 34]
    start = experts[-1][0]  # the last layer's experts and all behind them move
    shift = (5 << 30) + 4096 - 4096 % 64
    head = bytearray(data[: directory + length])
    for (offset, _), at in places:
        if offset >= start:
            struct.pack_into("<Q", head, at + 24, offset + shift)
    struct.pack_into("<Q", head, 24, size + shift)
    struct.pack_into("<I", head, 48, 0)
    struct.pack_into("<I", head, 48, zlib.crc32(head[directory:], zlib.crc32(head[:64])))
    path = tmp_path / "sparse.colibri"
    try:
        with open(path, "wb") as file:
            file.write(head)
            file.write(data[directory + length : start])
            file.seek(start + shift)
            file.write(data[start:])
        assert path.stat().st_size > 1 << 32
    except OSError as exc:
        pytest.skip(f"no sparse file of 5 GiB here: {exc}")
    expected, moved = (
        colibri.Session(p, max_seq_len=16, num_threads=1).forward([1, 2, 3]) for p in (tiny_models["f32"], path)
    )
    assert np.array_equal(expected, moved)
