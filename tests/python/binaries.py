"""Reads what libraries offer and need, for any target on any machine: ELF, PE/COFF and Mach-O files, static archives of
their objects. Only what the tests ask; a file of another shape fails an assertion."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Binary:
    """The parts of a library, a program or an object that say what it offers and what it needs."""

    interpreter: bool = False  # ELF: a dynamic executable
    soname: str = ""  # ELF, Mach-O: the name that others load it by
    needed: list[str] = field(default_factory=list)  # names of libraries
    exported: list[str] = field(default_factory=list)  # dynamic symbols; in an object, its global ones
    undefined: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # ELF: of needed symbols
    sections: list[str] = field(default_factory=list)


def text_at(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def read_binary(data: bytes) -> Binary:
    if data[:4] == b"\x7fELF":
        return read_elf(data)
    if data[:4] == b"\xcf\xfa\xed\xfe":
        return read_macho(data)
    if data[:2] == b"MZ":
        return read_pe(data)
    assert data[:2] in (b"\x64\x86", b"\x64\xaa"), f"an unknown kind of file: it begins with {data[:4].hex()}"
    return read_coff(data)


# ---- ELF, of 32 and 64 bits, little-endian


def read_elf(data: bytes) -> Binary:
    assert data[:4] == b"\x7fELF" and data[4] in (1, 2) and data[5] == 1, "not a little-endian ELF file"
    wide = data[4] == 2
    program_at, section_at = struct.unpack_from("<QQ" if wide else "<II", data, 32 if wide else 28)
    counts = struct.unpack_from("<HHHHH", data, 54 if wide else 42)
    program_size, programs, section_size, sections, names_index = counts
    elf = Binary()
    kinds = [struct.unpack_from("<I", data, program_at + i * program_size)[0] for i in range(programs)]
    elf.interpreter = 3 in kinds  # PT_INTERP
    layout = "<IIQQQQIIQQ" if wide else "<IIIIIIIIII"
    headers = [struct.unpack_from(layout, data, section_at + i * section_size) for i in range(sections)]
    names = data[headers[names_index][4] :]
    table = {text_at(names, header[0]): data[header[4] : header[4] + header[5]] for header in headers}
    elf.sections = list(table)
    strings = table.get(".dynstr", b"\0")
    for tag, value in struct.iter_unpack("<qQ" if wide else "<iI", table.get(".dynamic", b"")):
        if tag == 1:
            elf.needed.append(text_at(strings, value))
        elif tag == 14:
            elf.soname = text_at(strings, value)
    kind = struct.unpack_from("<H", data, 16)[0]
    which = (".symtab", ".strtab") if kind == 1 else (".dynsym", ".dynstr")  # 1: an object
    read_elf_symbols(elf, table.get(which[0], b""), table.get(which[1], b""), wide)
    read_elf_versions(elf, table.get(".gnu.version_r", b""), strings)
    return elf


def read_elf_symbols(elf: Binary, symbols: bytes, strings: bytes, wide: bool) -> None:
    for entry in struct.iter_unpack("<IBBHQQ" if wide else "<IIIBBH", symbols):
        name, info, section = (entry[0], entry[1], entry[3]) if wide else (entry[0], entry[3], entry[5])
        if name and info >> 4 in (1, 2):  # global or weak
            (elf.exported if section else elf.undefined).append(text_at(strings, name))


def read_elf_versions(elf: Binary, needs: bytes, strings: bytes) -> None:
    position = 0
    while needs:
        _, count, _, auxiliary, following = struct.unpack_from("<HHIII", needs, position)
        where = position + auxiliary
        for _ in range(count):
            _, _, _, name, next_auxiliary = struct.unpack_from("<IHHII", needs, where)
            elf.versions.append(text_at(strings, name))
            where += next_auxiliary
        if not following:
            break
        position += following


# ---- Mach-O, of 64 bits. Names lose the underscore that C gets there.


def read_macho(data: bytes) -> Binary:
    commands = struct.unpack_from("<I", data, 16)[0]
    macho, position, trie = Binary(), 32, (0, 0)
    is_object = struct.unpack_from("<I", data, 12)[0] == 1
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, position)
        if command in (0xC, 0x80000018, 0x8000001F):  # LC_LOAD_DYLIB, weak, re-exported
            macho.needed.append(text_at(data, position + struct.unpack_from("<I", data, position + 8)[0]))
        elif command == 0xD:  # LC_ID_DYLIB
            macho.soname = text_at(data, position + struct.unpack_from("<I", data, position + 8)[0])
        elif command == 0x2:  # LC_SYMTAB
            symbols, count, strings, _ = struct.unpack_from("<IIII", data, position + 8)
            read_macho_symbols(macho, data[symbols : symbols + 16 * count], data[strings:])
        elif command in (0x22, 0x80000022):  # LC_DYLD_INFO
            trie = struct.unpack_from("<II", data, position + 40)
        elif command == 0x80000033:  # LC_DYLD_EXPORTS_TRIE
            trie = struct.unpack_from("<II", data, position + 8)
        position += size
    if not is_object:
        exports = data[trie[0] : trie[0] + trie[1]]
        macho.exported = [name.removeprefix("_") for name in walk_trie(exports, 0, b"")] if exports else []
    return macho


def read_macho_symbols(macho: Binary, symbols: bytes, strings: bytes) -> None:
    for name, kind, _, _, _ in struct.iter_unpack("<IBBHQ", symbols):
        if kind & 0xE0 == 0 and kind & 1:  # no debugging entry, external (hidden ones too: other objects see them)
            defined = kind & 0xE != 0
            (macho.exported if defined else macho.undefined).append(text_at(strings, name).removeprefix("_"))


def walk_trie(data: bytes, node: int, prefix: bytes) -> list[str]:
    """All names of an export trie below a node."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = data[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value, at

    size, position = number(node)
    names = [prefix.decode()] if size else []
    position += size
    children, position = data[position], position + 1
    for _ in range(children):
        end = data.index(b"\0", position)
        label = data[position:end]
        child, position = number(end + 1)
        names += walk_trie(data, child, prefix + label)
    return names


# ---- PE, of 64 bits, and COFF objects


def read_pe(data: bytes) -> Binary:
    header = struct.unpack_from("<I", data, 0x3C)[0]
    assert data[header : header + 4] == b"PE\0\0"
    sections, optional = struct.unpack_from("<H", data, header + 6)[0], struct.unpack_from("<H", data, header + 20)[0]
    assert struct.unpack_from("<H", data, header + 24)[0] == 0x20B, "not a 64-bit PE file"
    exports, imports = (struct.unpack_from("<I", data, header + 24 + 112 + 8 * i)[0] for i in (0, 1))
    table = [struct.unpack_from("<8sIIII", data, header + 24 + optional + 40 * i) for i in range(sections)]
    pe = Binary(sections=[name.rstrip(b"\0").decode() for name, *_ in table])

    def at(address: int) -> int:
        start, raw = next((v, r) for _, size, v, raw_size, r in table if v <= address < v + max(size, raw_size))
        return address - start + raw

    if exports:
        count, _, names = struct.unpack_from("<III", data, at(exports) + 24)
        addresses = struct.unpack_from(f"<{count}I", data, at(names))
        pe.exported = [text_at(data, at(address)) for address in addresses]
        pe.soname = text_at(data, at(struct.unpack_from("<I", data, at(exports) + 12)[0]))
    position = at(imports) if imports else 0
    while imports and any(entry := struct.unpack_from("<IIIII", data, position)):
        pe.needed.append(text_at(data, at(entry[3])))
        position += 20
    return pe


def read_coff(data: bytes) -> Binary:
    symbols_at, count = struct.unpack_from("<II", data, 8)
    strings = data[symbols_at + 18 * count :]
    coff, index = Binary(), 0
    while index < count:
        raw, _, section, _, storage, auxiliary = struct.unpack_from("<8sIhHBB", data, symbols_at + 18 * index)
        short = raw.rstrip(b"\0").decode(errors="replace")
        name = text_at(strings, struct.unpack_from("<4xI", raw)[0]) if raw[:4] == b"\0\0\0\0" else short
        if storage in (2, 105):  # external, weak
            (coff.undefined if section == 0 else coff.exported).append(name)
        index += 1 + auxiliary
    return coff


# ---- Archives


def read_archive(path: Path) -> dict[str, bytes]:
    """The objects of a static library, GNU or BSD, by name."""
    data = path.read_bytes()
    assert data[:8] == b"!<arch>\n", f"{path} is not an archive"
    position, long_names, found = 8, b"", {}
    while position < len(data):
        name, size = data[position : position + 16].rstrip(), int(data[position + 48 : position + 58])
        body = data[position + 60 : position + 60 + size]
        position += 60 + size + size % 2
        if name == b"//":
            long_names = body
            continue
        if name.startswith(b"#1/"):
            length = int(name[3:])
            name, body = body[:length].rstrip(b"\0"), body[length:]
        elif name.startswith(b"/") and name[1:].isdigit():
            name = long_names[int(name[1:]) :].split(b"\n")[0].split(b"\0")[0]
        name = name.rstrip(b"/")
        if name and not name.startswith(b"__.SYMDEF"):
            found[name.decode()] = body
    return found
