"""colibri._ffi against include/colibri.h: sizes, offsets and constants as the C compiler says; every prototype."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from colibri import _ffi

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "include" / "colibri.h"
STRUCTS = {
    name: value
    for name, value in vars(_ffi).items()
    if isinstance(value, type) and issubclass(value, ctypes.Structure) and name.startswith("colibri_")
}
NOT_NUMBERS = {"COLIBRI_VERSION_STRING", "COLIBRI_API"}

pytestmark = pytest.mark.skipif(not HEADER.is_file(), reason="needs the source tree's include/colibri.h")


def header_text() -> str:
    """The header without comments."""
    text = HEADER.read_text(encoding="utf-8")
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def header_constants() -> set[str]:
    """Enumerators, and macros that stand for a number or string."""
    text = header_text()
    names = set(re.findall(r"^#define (COLIBRI_\w+)[ \t]+[^\s{(]", text, flags=re.MULTILINE))
    for body in re.findall(r"enum \w* ?\{(.*?)\}", text, flags=re.DOTALL):
        names.update(re.findall(r"\b(COLIBRI_\w+)\b", body))
    return {n for n in names if n not in NOT_NUMBERS and not n.endswith("_INIT")}


def header_functions() -> dict[str, tuple[str, list[str]]]:
    """Every exported function: return type and parameter types (with names)."""
    pattern = r"^COLIBRI_API\s+([\w\s]+?[\s*]+)(colibri_\w+)\s*\((.*?)\)\s*;"
    found = {}
    for result, name, parameters in re.findall(pattern, header_text(), flags=re.DOTALL | re.MULTILINE):
        listed = [" ".join(p.split()) for p in parameters.split(",")]
        found[name] = (" ".join(result.split()), [] if listed == ["void"] else listed)
    return found


def compile_command() -> list[str] | None:
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What the C compiler says: "sizeof S", "offsetof S.f", "sizeof S.f", "constant N"."""
    command = compile_command()
    if command is None:
        pytest.skip("needs a C compiler (cc, or ziglang from PyPI)")
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'P("sizeof {name}", sizeof({name}));')
        for field, *_ in struct._fields_:
            lines.append(f'P("offsetof {name}.{field}", offsetof({name}, {field}));')
            lines.append(f'P("sizeof {name}.{field}", sizeof((({name} *)0)->{field}));')
    lines += [f'P("constant {name}", {name});' for name in sorted(header_constants())]
    body = "\n    ".join(lines)
    folder = tmp_path_factory.mktemp("ffi")
    (folder / "probe.c").write_text(
        '#include "colibri.h"\n#include <stdio.h>\n'
        '#define P(what, value) printf("%s=%lld\\n", what, (long long)(value))\n'
        f"int main(void) {{\n    {body}\n    return 0;\n}}\n"
    )
    exe = folder / "probe.exe"
    subprocess.run([*command, "-I", str(HEADER.parent), str(folder / "probe.c"), "-o", str(exe)], check=True)
    output = subprocess.run([str(exe)], check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, _, value in (line.partition("=") for line in output.splitlines())}


def test_structs(measured: dict[str, int]) -> None:
    for name, struct in STRUCTS.items():
        assert ctypes.sizeof(struct) == measured[f"sizeof {name}"], name
        for field, *_ in struct._fields_:
            descriptor = getattr(struct, field)
            assert descriptor.offset == measured[f"offsetof {name}.{field}"], f"{name}.{field}"
            assert descriptor.size == measured[f"sizeof {name}.{field}"], f"{name}.{field}"


def test_struct_fields_are_all_there() -> None:
    """Names and order as in the header, so that no field hides in another's padding."""
    text = header_text()
    declared = dict(re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, flags=re.DOTALL))
    assert declared.keys() == STRUCTS.keys()
    for name, body in declared.items():
        fields = []
        for declaration in body.split(";"):
            for part in declaration.split(","):
                if match := re.search(r"(\w+)\s*(\[\w+\])?\s*$", part):
                    fields.append(match[1])
        assert [field for field, *_ in STRUCTS[name]._fields_] == fields, name


def test_constants(measured: dict[str, int]) -> None:
    for name in header_constants():
        assert getattr(_ffi, name, None) == measured[f"constant {name}"], name
    mirrored = {n for n in vars(_ffi) if n.startswith("COLIBRI_")} - NOT_NUMBERS
    assert mirrored == header_constants()
    version = re.search(r'#define COLIBRI_VERSION_STRING "([^"]+)"', header_text())
    assert version is not None and version[1] == _ffi.COLIBRI_VERSION_STRING


def test_every_function_has_its_prototype() -> None:
    assert header_functions().keys() == _ffi.PROTOTYPES.keys()


SCALARS = {
    "int": ctypes.c_int, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t, "colibri_status_t": ctypes.c_int, "colibri_isa_t": ctypes.c_int, "float": ctypes.c_float,
}  # fmt: skip


def fits(declared: str, mirrored: Any, result: bool) -> bool:
    """Whether a ctypes type can stand for a C declaration ("const char *path"; results have no name)."""
    if declared == "void":
        return mirrored is None
    if "*" not in declared:
        words = declared.replace("const ", "").split()
        return SCALARS[words[0]] is mirrored
    base = declared.replace("const ", "").split("*")[0].strip()
    depth = declared.count("*")
    if depth == 2:
        return mirrored in (ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char_p))
    if base in STRUCTS:
        return mirrored is ctypes.POINTER(STRUCTS[base])
    if base == "char":
        return mirrored is ctypes.c_char_p if "const" in declared else mirrored is ctypes.c_void_p
    if base in SCALARS and not result:
        return mirrored in (ctypes.c_void_p, ctypes.POINTER(SCALARS[base]))
    return mirrored is ctypes.c_void_p


@pytest.mark.parametrize("name", sorted(_ffi.PROTOTYPES))
def test_prototype(name: str) -> None:
    result, parameters = header_functions()[name]
    restype, argtypes = _ffi.PROTOTYPES[name]
    assert fits(result, restype, True), f"{name} returns {result}"
    assert len(parameters) == len(argtypes)
    for declared, mirrored in zip(parameters, argtypes, strict=True):
        assert fits(declared, mirrored, False), f"{name}: {declared} as {mirrored}"


def test_one_exception_for_every_status() -> None:
    from colibri import errors

    statuses = {getattr(_ffi, n) for n in vars(_ffi) if n.startswith("COLIBRI_ERR_")}
    assert errors.ERROR_CLASSES.keys() == statuses
    assert all(cls.status == status for status, cls in errors.ERROR_CLASSES.items())
    assert max(statuses) + 1 == _ffi.COLIBRI_STATUS_COUNT_


def test_library_exports_every_function() -> None:
    library = _ffi.lib()
    assert all(hasattr(library, name) for name in _ffi.PROTOTYPES)
    for status in range(_ffi.COLIBRI_STATUS_COUNT_):
        assert library.colibri_status_name(status).startswith(b"COLIBRI_")
