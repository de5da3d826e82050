"""Release archives: what tools/make_dist.py packs for other machines, read here whatever the target; and CMake's
find_package on one of them.

Two targets are built for this. COLIBRI_DIST names a folder that `zig build dist` has filled: then all are read."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from binaries import Binary, read_archive, read_binary

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import make_dist  # noqa: E402

BUILT_HERE = ("x86_64-linux-gnu.2.17", "x86_64-windows-gnu")
OTHER_KINDS = ("aarch64-macos", "wasm32-wasi")  # of files: Mach-O with a signature, WebAssembly
HOST = BUILT_HERE[0]
RUNS_HERE = sys.platform == "linux" and platform.machine() == "x86_64"
# libc and its own parts: musl is one library, and on Windows these come with every system since 2015
LIBRARIES = {
    "gnu": r"(libc|libm|libpthread|ld-linux[\w.-]*)\.so(\.\d+)?",
    "musl": r"libc\.so|libc\.musl-\w+\.so\.1",
    "macos": r"/usr/lib/libSystem\.B\.dylib",
    "windows": r"(kernel32|ntdll|ucrtbase|api-ms-win-[\w-]+)\.dll",
}
# zig's linker puts these, both the address of the library's first byte, into the export trie of each Mach-O library.
# It reads no list of exported symbols, takes no notice of hidden declarations of the two and refuses definitions.
LINKERS_OWN = {"_mh_dylib_header", "__dso_handle"}
NEWER_X86 = (  # than what every x86-64 has: SSE3 and SSSE3, SSE4, AVX and later, bits
    r"addsubp[sd]|hadd\w+|hsub\w+|lddqu|movddup|movs[hl]dup|fisttp\w*|mwait|monitor|cmpxchg16b|pabs[bwd]|palignr|phadd\w+|phsub\w+"
    r"|pmaddubsw|pmulhrsw|pshufb|psign[bwd]|p?blend\w+|dpp[sd]|extractps|insertps|movntdqa|mpsadbw|packusdw|pcmpeqq"
    r"|pcmpgtq|pextr[bdq]|pinsr[bdq]|phminposuw|p(max|min)(sb|sd|ud|uw)|pmov[sz]x\w+|pmuldq|pmulld|ptest|round[sp][sd]"
    r"|crc32\w?|pcmp[ei]str[im]|popcnt\w?|lzcnt\w?|movbe\w?|adcx\w?|adox\w?|rdrand\w?|rdseed\w?|v(?!er[rw])[a-z]\w+"
    r"|andn\w?|bextr\w?|bls\w+|bzhi\w?|mulx\w?|pdep\w?|pext\w?|rorx\w?|sarx\w?|shlx\w?|shrx\w?|gf2p8\w+|aes\w+|sha\d\w+|t(ile|dp)\w+"
)
NEWER = {  # by processor, as regular expressions of mnemonics
    "x86_64": NEWER_X86,
    # ARMv8.0, so Cortex-A53 and A72: no dot products, matrix products, bfloat16, halves, atomics of one instruction
    "aarch64": r"[su]dot|usdot|sudot|[su]mmla|usmmla|bf(dot|mmla|mlal[bt]|cvtn?2?)|fml[as]l2?|sqrdml[as]h"
    r"|casp?(a?l?)[bh]?|swp(a?l?)[bh]?|(ld|st)(add|clr|eor|set|[su]max|[su]min)(a?l?)[bh]?|ldapr\w*|ptrue|whilel\w+|cnt[bhwd]",
    # ARMv7-A with VFPv4 and NEON, which Cortex-A7 has: nothing of ARMv8
    "arm": r"vrint\w|v(max|min)nm|vsel\w+|vcvt[anpm]|crc32c?[bhw]|lda(ex)?[bhd]?|stl(ex)?[bhd]?|aes\w+|sha\d\w+"
    r"|v[su]dot|v\w*mmla|sevl|hlt",
    # RV64GC: no vectors, no bit manipulation, no conditional zero
    "riscv64": r"v[a-z]\w*\.[a-z.]+|vset\w+|sh[123]add(\.uw)?|andn|orn|xnor|c[lt]zw?|cpopw?|maxu?|minu?|sext\.[bh]"
    r"|zext\.h|ro[lr]i?w?|rev8|orc\.b|b(set|clr|inv|ext)i?|czero\.\w+|add\.uw|slli\.uw|pack\w*|prefetch\.\w",
}
SPECIAL = {  # objects that only a processor found to have the instructions gets to run
    "x86_64": {"avx2.o", "avx512.o", "amx.o"},
    "aarch64": {"neon_dotprod.o", "neon_i8mm.o"},
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of archives."""
    if "COLIBRI_DIST" in os.environ:
        return Path(os.environ["COLIBRI_DIST"])
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install ziglang==0.16.0")
    folder = tmp_path_factory.mktemp("dist")
    make(ROOT, folder, *BUILT_HERE)
    return folder


def make(sources: Path, folder: Path, *targets: str) -> None:
    command = [sys.executable, str(sources / "tools" / "make_dist.py"), str(folder), "--targets", *targets]
    subprocess.run(command, check=True)


def archive(dist: Path, target: str) -> Path:
    """The target's archive, which must be there if it was asked for."""
    name = f"colibri-{make_dist.version()}-{target}"
    path = dist / (name + (".zip" if "windows" in target else ".tar.gz"))
    if not path.exists() and target not in BUILT_HERE:
        pytest.skip(f"{path.name} is not in the folder: COLIBRI_DIST names one that `zig build dist` has filled")
    return path


@pytest.fixture(scope="module")
def unpack(dist: Path, tmp_path_factory: pytest.TempPathFactory):
    """A function from a target to the folder inside its archive, unpacked somewhere else than it was built."""
    done: dict[str, Path] = {}

    def unpacked(target: str) -> Path:
        path = archive(dist, target)
        if target not in done:
            folder = tmp_path_factory.mktemp("some other place")
            if path.suffix == ".zip":
                with zipfile.ZipFile(path) as packed:
                    packed.extractall(folder)
            else:
                with tarfile.open(path) as packed:
                    packed.extractall(folder)
            done[target] = folder / f"colibri-{make_dist.version()}-{target}"
        return done[target]

    return unpacked


def shared_library(folder: Path) -> Path:
    names = ("lib/libcolibri.so", "lib/libcolibri.dylib", "bin/colibri.dll")
    return next(folder / name for name in names if (folder / name).exists())


def static_library(folder: Path) -> Path:
    return next(folder / name for name in ("lib/libcolibri.a", "lib/colibri_static.lib") if (folder / name).exists())


def machine(target: str) -> str:
    return target.split("-")[0]


every_target = pytest.mark.parametrize("target", make_dist.TARGETS)
# WebAssembly has no shared libraries and one instruction set; its modules are not read here
native_target = pytest.mark.parametrize("target", [name for name in make_dist.TARGETS if "wasm32" not in name])


@every_target
def test_contents(unpack, target: str) -> None:
    folder = unpack(target)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    expected = {
        "LICENSE",
        "include/colibri.h",
        "include/colibri.hpp",
        "include/colibri_format.h",
        "lib/pkgconfig/colibri.pc",
    }
    expected |= {f"lib/cmake/Colibri/ColibriConfig{part}.cmake" for part in ("", "Version")}
    expected |= {static_library(folder).relative_to(folder).as_posix()}
    if "windows" in target:
        expected |= {"bin/colibri-infer.exe", "bin/colibri.dll", "lib/colibri.lib"}
    elif "wasm32" in target:
        expected |= {"bin/colibri-infer.wasm"}
    else:
        expected |= {"bin/colibri-infer", shared_library(folder).relative_to(folder).as_posix()}
    assert expected <= files
    assert not [name for name in files if name.endswith((".pdb", ".o", ".obj", ".part"))]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_sums(dist: Path) -> None:
    lines = (dist / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert set(sums) == {path.name for path in dist.glob("colibri-*")}
    for name, digest in sums.items():
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest


@every_target
def test_archives_say_nothing_of_their_maker(dist: Path, target: str) -> None:
    """No owner, no time; programs may be executed; nothing leads out of the folder."""
    path = archive(dist, target)
    top = f"colibri-{make_dist.version()}-{target}/"
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as packed:
            assert all(entry.date_time == (1980, 1, 1, 0, 0, 0) for entry in packed.infolist())
            names = packed.namelist()
    else:
        with tarfile.open(path) as packed:
            names, entries = packed.getnames(), packed.getmembers()
        assert {(e.uid, e.gid, e.uname, e.gname, e.mtime) for e in entries} == {(0, 0, "", "", make_dist.EPOCH)}
        assert all(e.mode & 0o111 for e in entries if e.name.startswith(top + "bin/"))
        assert all("/" not in e.linkname for e in entries)
    assert names == sorted(names) and all(name.startswith(top) for name in names)


@every_target
def test_no_paths_inside(unpack, target: str) -> None:
    """Nothing tells where it was built."""
    traces = [b"zig-cache", b".cache/zig", b"ziglang", b"/tmp/", b"colibri-dist-"]
    traces += [os.fsencode(path) for path in (ROOT, Path.home()) if len(path.parts) > 1]
    folder = unpack(target)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).parts[0] in ("lib", "bin"):
            data = path.read_bytes()
            assert [trace for trace in traces if trace in data] == [], path


@native_target
def test_shared_library(unpack, target: str) -> None:
    """Offers colibri_* and nothing else; needs the C library and nothing else, none newer than glibc 2.17."""
    path = shared_library(unpack(target))
    library = read_binary(path.read_bytes())
    header = (ROOT / "include/colibri.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"\b(colibri_\w+)\(", header.split("/* ---- Status")[1]))
    assert "colibri_init" in library.exported and len(library.exported) > 30
    exported = set(library.exported) - (LINKERS_OWN if "macos" in target else set())
    assert [name for name in exported if not name.startswith("colibri_")] == []
    assert exported <= declared
    kind = next(kind for kind in LIBRARIES if kind in target.replace("windows-gnu", "windows"))
    assert [name for name in library.needed if not re.fullmatch(LIBRARIES[kind], name, re.IGNORECASE)] == []
    assert library.needed
    glibc = [tuple(map(int, v[6:].split("."))) for v in library.versions if re.fullmatch(r"GLIBC_[\d.]+", v)]
    assert all(version <= (2, 17) for version in glibc) and (glibc or kind != "gnu"), library.versions
    if kind in ("gnu", "musl"):
        assert library.soname == "libcolibri.so.0" and ".symtab" not in library.sections
        assert path.with_name("libcolibri.so.0").resolve() == path.resolve() != path
    if kind == "macos":
        assert library.soname.startswith("@rpath/libcolibri.")
    if kind == "windows":
        implib = path.parents[1] / "lib" / "colibri.lib"
        assert all(name.encode() in implib.read_bytes() for name in exported)


@native_target
def test_tools_need_nothing(unpack, target: str) -> None:
    """On Linux they are static; elsewhere they need what every system has, not even our own library."""
    for path in (unpack(target) / "bin").glob("colibri-*"):
        tool = read_binary(path.read_bytes())
        if "linux" in target:
            assert not tool.interpreter and tool.needed == [], path
        else:
            kind = LIBRARIES["windows" if "windows" in target else "macos"]
            assert tool.needed and [n for n in tool.needed if not re.fullmatch(kind, n, re.IGNORECASE)] == [], path


def static_objects(folder: Path) -> dict[str, Binary]:
    return {name: read_binary(data) for name, data in read_archive(static_library(folder)).items()}


@native_target
def test_static_library(unpack, target: str) -> None:
    """Every global symbol has our prefix, so that it meets no other of its host's; what it needs, libc has."""
    objects = static_objects(unpack(target))
    offered = {name.removeprefix(".refptr.") for each in objects.values() for name in each.exported}  # COFF's pointers
    assert "colibri_init" in offered and any(name.startswith("coli_") for name in offered)
    assert [name for name in offered if not name.startswith(("coli_", "colibri_"))] == []
    needed = {name for each in objects.values() for name in each.undefined} - offered
    assert [name for name in needed if name.startswith(("coli_", "colibri_"))] == []
    assert needed.isdisjoint(
        {"printf", "puts", "fprintf", "abort", "exit", "_exit", "getenv", "__assert_fail", "perror"}
    )


def disassembly(path: Path, target: str) -> str:
    names = ["llvm-objdump", *(f"llvm-objdump-{v}" for v in range(30, 13, -1))]
    found = next((tool for tool in names if shutil.which(tool)), None)
    if found is None and target.startswith("x86_64-linux") and RUNS_HERE and shutil.which("objdump"):
        found = "objdump"
    if found is None:
        pytest.skip("no llvm-objdump is installed (Debian: llvm)")
    attributes = {  # what a baseline lacks must be shown too, not as <unknown>
        "aarch64": ["--mattr=+v8.6a,+dotprod,+i8mm,+bf16,+fullfp16,+fp16fml,+lse,+rdm,+sve,+crypto"],
        "arm": ["--mattr=+neon,+vfp4,+v8.2a,+fp-armv8,+crc,+crypto,+dotprod"],
        "riscv64": ["--mattr=+m,+a,+f,+d,+c"],
    }.get(machine(target), [])
    command = [found, "-d", "--no-show-raw-insn", *(attributes if found != "objdump" else []), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(listing: str) -> dict[str, set[str]]:
    """The mnemonics of every object in what objdump says of an archive."""
    member, found = "", {}
    prefixes = r"(?:(?:lock|rep\w*|data16|cs|ds|notrack)\s+)*"
    for line in listing.splitlines():
        if "file format" in line:
            member = re.split(r"[/:()]", line.split("file format")[0].strip().rstrip(":)"))[-1]
            found[member] = set()
        elif match := re.match(rf"\s*[0-9a-f]+:\s+{prefixes}([a-z][\w.]*|<unknown>)", line):
            found[member].add(match[1])
    return found


def mnemonic(word: str, target: str) -> str:
    """Without the types that 32-bit ARM appends."""
    return word.split(".")[0] if machine(target) == "arm" else word


@native_target
def test_instructions_of_the_baseline(unpack, target: str) -> None:
    """Nothing is newer than the target's oldest processor, but in objects that are chosen when the library runs."""
    found = instructions(disassembly(static_library(unpack(target)), target))
    found = {name.replace(".obj", ".o"): use for name, use in found.items()}
    assert len(found) > 15 and sum(len(use) > 20 for use in found.values()) > 15  # some are empty on some systems
    special = SPECIAL.get(machine(target), set())
    assert special <= set(found)
    if target == "aarch64-macos":
        return  # every Mac of this kind has dot products and atomics
    newer = re.compile(f"<unknown>|{NEWER[machine(target)]}")
    use = {name: [i for i in sorted(use) if newer.fullmatch(mnemonic(i, target))] for name, use in found.items()}
    if target == "x86_64-macos":  # every Mac of this kind has SSSE3
        old = re.compile(
            r"pshufb|palignr|pabs[bwd]|ph(add|sub)\w+|h(add|sub)\w+|movs[hl]dup|movddup|pmaddubsw|pmulhrsw|psign[bwd]"
        )
        old = re.compile(f"<unknown>|{old.pattern}")  # here tables of jumps lie among the code
        use = {name: [i for i in use if not old.fullmatch(i)] for name, use in use.items()}
    assert {name: use for name, use in use.items() if use and name not in special} == {}
    assert all(use[name] for name in special), "the newer objects do not use what they are for"


def test_newer_instructions_are_recognised() -> None:
    """The patterns know what they forbid and let pass what is old."""
    new = {
        "x86_64": "vaddps pmulld pshufb popcntq roundps shlxq tdpbssd crc32q haddps pminsd",
        "aarch64": "sdot smmla usdot bfdot casal ldaddal swpal fmlal bfmmla bfcvtn ldapr",
        "arm": "vrintn vmaxnm vcvta crc32w ldaex stl vsdot",
        "riscv64": "vadd.vv vsetvli vle32.v sh1add andn clz czero.eqz rev8 vfmacc.vf",
    }
    old = {
        "x86_64": "addps pmaddwd tzcntl verr cvtps2dq pminub pmaxsw psadbw shlq pextrw pinsrw fmul bsrl xgetbv",
        "aarch64": "fmla smull ldaxr stlxr bfi bfxil fmls cmeq ldar cnt ldset_of stadd_of bfm smlal",
        "arm": "vmla vfma ldrex vcvt vmov ldm stm vmax sdiv vcvtr dmb lda_of",
        "riscv64": "add fmadd.d c.add lr.w.aq amoadd.w.aqrl fcvt.s.w sext.w zext.b fence mv",
    }
    for name, pattern in NEWER.items():
        assert [word for word in new[name].split() if not re.fullmatch(pattern, word)] == []
        assert [word for word in old[name].split() if re.fullmatch(pattern, word)] == []


@pytest.mark.slow
def test_two_builds_are_equal(dist: Path, tmp_path: Path) -> None:
    """The same sources in another folder, with an empty cache, give the same bytes."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed: pip install ziglang==0.16.0")
    sources = tmp_path / "elsewhere"
    sources.mkdir()
    for name in ("build.zig", *make_dist.DOCUMENTS):
        shutil.copy(ROOT / name, sources / name)
    for name in ("include", "lib", "tools", "tests", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "python", "golden")
        shutil.copytree(ROOT / name, sources / name, ignore=ignored)
    for target in (*BUILT_HERE, *(OTHER_KINDS if "COLIBRI_DIST" in os.environ else ())):
        make(sources, tmp_path, target)
        assert archive(tmp_path, target).read_bytes() == archive(dist, target).read_bytes(), target


@pytest.mark.skipif(not RUNS_HERE, reason="runs an x86-64 Linux program")
def test_infer_runs(unpack) -> None:
    import colibri

    try:
        model = colibri.demo_path()
    except colibri.NotFoundError:
        pytest.skip("this checkout has no demo model")
    for target in (HOST, "x86_64-linux-musl"):
        if target == HOST or "COLIBRI_DIST" in os.environ:
            command = [str(unpack(target) / "bin/colibri-infer"), "--model", str(model), "--prompt", "Once upon a time"]
            done = subprocess.run([*command, "--max-tokens", "8"], env={}, capture_output=True, text=True, check=True)
            assert len(done.stdout.split()) > 4


PROJECT = """
cmake_minimum_required(VERSION 3.10)
project(host C)
find_package(Colibri {version} REQUIRED)
add_executable(shared host.c)
target_link_libraries(shared Colibri::colibri)
add_executable(static host.c)
target_link_libraries(static Colibri::colibri_static)
"""
HOST_C = """
#include <colibri.h>
#include <string.h>
int main(void) {
    colibri_config_t config = COLIBRI_CONFIG_INIT;
    config.model_path = "no such file";
    return strcmp(colibri_version(), COLIBRI_VERSION_STRING) || colibri_init(&config) || !colibri_last_error()[0];
}
"""


@pytest.mark.skipif(not RUNS_HERE, reason="builds and runs an x86-64 Linux program")
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed as cc")
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_cmake_find_package(unpack, tmp_path: Path) -> None:
    folder = unpack(HOST)

    def configure(version: str, build: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(version=version))
        (tmp_path / "host.c").write_text(HOST_C)
        command = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / build), f"-DCMAKE_PREFIX_PATH={folder}"]
        return subprocess.run([*command, "-GUnix Makefiles"], capture_output=True, text=True, check=False)

    major, minor, patch = map(int, make_dist.version().split("."))
    for wrong in (f"{major + 1}", f"{major}.{minor + 1}", f"{major}.{minor}.{patch + 1}"):
        done = configure(wrong, f"build-{wrong}")
        assert done.returncode != 0 and "ColibriConfig.cmake, version" in done.stderr, done.stderr
    for right in ("", f"{major}.{minor}", f"{make_dist.version()} EXACT"):
        done = configure(right, "build")
        assert done.returncode == 0, done.stderr
    subprocess.run(["cmake", "--build", str(tmp_path / "build")], capture_output=True, check=True)
    for program in ("shared", "static"):
        path = tmp_path / "build" / program
        subprocess.run([str(path)], check=True)
        assert any("libcolibri" in name for name in read_binary(path.read_bytes()).needed) == (program == "shared")
