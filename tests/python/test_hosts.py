"""Hosts in other languages, built as their users would build them, against what `zig build --prefix` installs; and
hosts that load and unload the library, use several models at once, or fork.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import colibri
import pytest
from colibri import _ffi, _lib

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROMPT = "Once upon a time"
TOKENS = 24
LINUX = sys.platform == "linux"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="needs the source tree")


# ---- What is built and what it must print ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `zig build` installs; COLIBRI_PREFIX names one that is there already."""
    if "COLIBRI_PREFIX" in os.environ:
        return Path(os.environ["COLIBRI_PREFIX"])
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang from PyPI")
    folder = tmp_path_factory.mktemp("prefix")
    cache = tmp_path_factory.mktemp("cache")
    command = [sys.executable, "-m", "ziglang", "build", "--prefix", str(folder), "--cache-dir", str(cache)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="session")
def story() -> str:
    """The demo model's greedy continuation, by the Python package."""
    if not Path(colibri.demo_path()).is_file():
        pytest.skip("the demo model is not in the package")
    text = colibri.Session(colibri.demo_path()).generate(PROMPT, max_new_tokens=TOKENS)
    assert len(text) > TOKENS
    return PROMPT + text + "\n"


def needs(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    arguments = [str(c) for c in command]
    variables = {**os.environ, **environment}
    return subprocess.run(arguments, cwd=cwd, env=variables, capture_output=True, text=True, timeout=600)


def build(*command: str | Path, cwd: Path | None = None, **environment: str) -> None:
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def check_program(program: Path | list[str | Path], prefix: Path, story: str) -> None:
    """It tells the story, and says what is wrong with a missing file and a wrong command line."""
    command = program if isinstance(program, list) else [program]
    libraries = {"LD_LIBRARY_PATH": str(prefix / "lib"), "DYLD_LIBRARY_PATH": str(prefix / "lib")}
    done = run(*command, colibri.demo_path(), PROMPT, str(TOKENS), **libraries)
    assert (done.returncode, done.stdout) == (0, story), done.stderr
    done = run(*command, "/no/such/file.colibri", PROMPT, **libraries)
    assert done.returncode == 1 and done.stdout == ""
    assert "there is no file '/no/such/file.colibri'" in done.stderr and "(COLIBRI_ERR_NOT_FOUND)" in done.stderr
    assert run(*command, **libraries).returncode == 2


def pkg_config(prefix: Path) -> list[str]:
    needs("pkg-config")
    pkg = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    done = run("pkg-config", "--cflags", "--libs", "colibri", **pkg)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


# ---- C and C++ -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["five_functions", "own_memory"])
def test_c_by_pkg_config(name: str, prefix: Path, story: str, tmp_path: Path) -> None:
    needs("cc")
    program = tmp_path / name
    build("cc", "-std=c11", *WARNINGS, EXAMPLES / "c" / f"{name}.c", *pkg_config(prefix), "-o", program)
    check_program(program, prefix, story)


@pytest.mark.parametrize("name", ["five_functions", "own_memory"])
def test_c_with_the_static_library(name: str, prefix: Path, story: str, tmp_path: Path) -> None:
    needs("cc")
    program, include, library = tmp_path / name, prefix / "include", prefix / "lib" / "libcolibri.a"
    build("cc", "-std=c11", EXAMPLES / "c" / f"{name}.c", f"-I{include}", library, "-lm", "-lpthread", "-o", program)
    check_program(program, tmp_path, story)


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_cmake(language: str, prefix: Path, story: str, tmp_path: Path) -> None:
    needs("cmake", "make" if not shutil.which("ninja") else "ninja")
    if not list(prefix.rglob("*olibri*onfig.cmake")):
        pytest.skip("this build installs no CMake package files")
    needs("cc" if language == "c" else "c++")
    build("cmake", "-S", EXAMPLES / language, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    build("cmake", "--build", tmp_path)
    for name in ["five_functions", "own_memory"] if language == "c" else ["story", "own_threads"]:
        check_program(tmp_path / name, prefix, story)


@pytest.mark.parametrize("name", ["story", "own_threads"])
@pytest.mark.parametrize("compiler", ["c++", "clang++", "zig"])
def test_cpp(compiler: str, name: str, prefix: Path, story: str, tmp_path: Path) -> None:
    command = [compiler]
    if compiler == "zig":
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("needs ziglang from PyPI")
        command = [sys.executable, "-m", "ziglang", "c++"]
    else:
        needs(compiler)
    program = tmp_path / name
    source = EXAMPLES / "cpp" / f"{name}.cpp"
    build(*command, "-std=c++17", *WARNINGS, source, *pkg_config(prefix), "-lpthread", "-o", program)
    check_program(program, prefix, story)


def test_cpp_header(prefix: Path, story: str, tmp_path: Path) -> None:
    """Everything else that colibri.hpp offers, in one program: tests/c/hosts.cpp."""
    needs("c++")
    program = tmp_path / "hosts"
    source = ROOT / "tests" / "c" / "hosts.cpp"
    library = prefix / "lib" / "libcolibri.a"
    flags = ["-std=c++17", *WARNINGS, f"-I{prefix / 'include'}"]
    build("c++", *flags, source, library, "-lm", "-lpthread", "-o", program)
    done = run(program, colibri.demo_path(), PROMPT, story[len(PROMPT) : -1], str(TOKENS), tmp_path / "profile")
    assert done.returncode == 0 and done.stderr.endswith(", 0 failed\n"), done.stderr


# ---- Rust and Go -----------------------------------------------------------------------------------------------------


def test_rust(prefix: Path, story: str, tmp_path: Path) -> None:
    needs("cargo")
    target = tmp_path / "target"
    source = tmp_path / "rust"  # a copy: cargo writes Cargo.lock beside Cargo.toml
    shutil.copytree(EXAMPLES / "rust", source, ignore=shutil.ignore_patterns("target", "Cargo.lock"))
    variables = {"COLIBRI_PREFIX": str(prefix), "CARGO_TARGET_DIR": str(target), "RUSTFLAGS": "-D warnings"}
    build("cargo", "build", "--offline", cwd=source, **variables)
    check_program(target / "debug" / "story", tmp_path, story)


def test_rust_declarations(prefix: Path, tmp_path: Path) -> None:
    """Sizes and offsets of the structs in ffi.rs are those that Python's mirror has, which test_ffi compares with C."""
    needs("rustc")
    names = ["colibri_config_t", "colibri_model_info_t", "colibri_stream_t"]
    lines, expected = [], []
    for name in names:
        struct = getattr(_ffi, name)
        lines.append(f"let v = ffi::{name}::default(); let at = std::ptr::addr_of!(v) as usize;")
        lines.append(f'println!("{name} {{}} {{}}", std::mem::size_of_val(&v), v.struct_size);')
        expected.append(f"{name} {ctypes.sizeof(struct)} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            lines.append(f'println!("{name}.{field} {{}}", std::ptr::addr_of!(v.{field}) as usize - at);')
            expected.append(f"{name}.{field} {getattr(struct, field).offset}")
    shutil.copy(EXAMPLES / "rust" / "src" / "ffi.rs", tmp_path)
    (tmp_path / "probe.rs").write_text(
        "#![allow(dead_code)]\nmod ffi;\nfn main() {\n" + "\n".join(lines) + "\n}\n", encoding="utf-8"
    )
    build("rustc", "--edition", "2021", "probe.rs", cwd=tmp_path)
    assert run(tmp_path / "probe").stdout.splitlines() == expected


def test_go(prefix: Path, story: str, tmp_path: Path) -> None:
    needs("go", "cc", "pkg-config")
    variables = {
        "PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig"),
        "GOCACHE": str(tmp_path / "cache"),
        "GOFLAGS": "-mod=mod -buildvcs=false",
        "GOPROXY": "off",
        "CGO_ENABLED": "1",
    }
    program = tmp_path / "story"
    build("go", "vet", ".", cwd=EXAMPLES / "go", **variables)
    build("go", "build", "-o", program, ".", cwd=EXAMPLES / "go", **variables)
    check_program(program, prefix, story)


# ---- Node.js, with the library as WebAssembly ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wasm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `zig build web` installs; a prefix that is there already may have it."""
    made = Path(os.environ.get("COLIBRI_PREFIX", ""), "web", "colibri.wasm")
    if made.is_absolute() and made.is_file():
        return made
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang from PyPI")
    folder, cache = tmp_path_factory.mktemp("web"), tmp_path_factory.mktemp("cache")
    build(sys.executable, "-m", "ziglang", "build", "web", "--prefix", folder, "--cache-dir", cache, cwd=ROOT)
    return folder / "web" / "colibri.wasm"


@pytest.fixture
def node(wasm: Path, tmp_path: Path) -> list[str | Path]:
    """The command: a copy of the example, with the library beside it."""
    needs("node")
    shutil.copytree(EXAMPLES / "node", tmp_path / "node")
    shutil.copy(wasm, tmp_path / "node" / "colibri.wasm")
    return ["node", tmp_path / "node" / "story.mjs"]


def test_node(
    node: list[str | Path], wasm: Path, prefix: Path, story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLIBRI_WASM", raising=False)
    check_program(node, prefix, story)
    (tmp_path / "node" / "colibri.wasm").unlink()
    done = run(*node, colibri.demo_path(), PROMPT)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert str(tmp_path / "node" / "colibri.wasm") in done.stderr and "COLIBRI_WASM" in done.stderr
    monkeypatch.setenv("COLIBRI_WASM", str(wasm))
    check_program(node, prefix, story)


def test_node_characters_across_tokens(node: list[str | Path], tiny_model: Path) -> None:
    """A random model's bytes, which seldom make whole characters, are those of the Python package."""
    prompt = "Où est 🐦?"
    expected = colibri.Session(tiny_model).generate(prompt, max_new_tokens=60)
    assert not expected.isascii()
    done = subprocess.run([*map(str, node), str(tiny_model), prompt, "60"], capture_output=True, timeout=600)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, prompt + expected + "\n", b"")


def test_node_text_as_it_is_made(node: list[str | Path]) -> None:
    """The first words are there when most of them are not yet made; a reader that goes then ends the program."""
    expected = colibri.Session(colibri.demo_path()).generate(PROMPT, max_new_tokens=400)
    arguments = [*map(str, node), colibri.demo_path(), PROMPT, "400"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None and process.stderr is not None
        text = ""
        while len(text) <= len(PROMPT):
            text += process.stdout.read(4096).decode()
        assert (PROMPT + expected).startswith(text) and len(text) < len(expected) / 2
        process.stdout.close()
        message = process.stderr.read().decode()
        assert process.wait(60) == 1 and message.startswith("story.mjs: ") and message.count("\n") == 1, message


def test_node_errors_are_one_line(node: list[str | Path], tiny_model: Path, tmp_path: Path) -> None:
    """A directory, a file that is none, one cut short, and a text that grows over the model's room."""
    (tmp_path / "none").write_text("a text", encoding="utf-8")
    (tmp_path / "cut").write_bytes(tiny_model.read_bytes()[:-4096])
    for name in ["node", "none", "cut"]:
        done = run(*node, tmp_path / name, PROMPT)
        assert (done.returncode, done.stdout) == (1, ""), name
        assert done.stderr.endswith("(COLIBRI_ERR_FORMAT)\n") and done.stderr.count("\n") == 1, done.stderr
    done = run(*node, tiny_model, "dog " * 600)
    assert done.returncode == 1 and done.stderr.endswith("max_seq_len is 512 (COLIBRI_ERR_SLOT_FULL)\n"), done.stderr


# ---- Plug-in hosts, several models, forks ----------------------------------------------------------------------------


def use(library: ctypes.CDLL, model: Path, threads: int = 3, **options: int) -> bytes:
    """init, set_input, infer, get_output, free: the logits."""
    library.colibri_init.restype = ctypes.c_void_p
    config = _ffi.colibri_config_t.init(model_path=str(model).encode(), max_seq_len=32, num_threads=threads, **options)
    context = ctypes.c_void_p(library.colibri_init(ctypes.byref(config)))
    assert context.value
    try:
        tokens, lengths = (ctypes.c_int32 * 4)(1, 2, 3, 4), (ctypes.c_int32 * 1)(4)
        assert library.colibri_set_input(context, tokens, lengths, 1) == 0
        assert library.colibri_infer(context) == 0
        size = ctypes.c_size_t()
        assert library.colibri_output_size(context, ctypes.byref(size)) == 0
        memory = ctypes.create_string_buffer(size.value + 64)
        aligned = (ctypes.addressof(memory) + 63) // 64 * 64
        assert library.colibri_get_output(context, ctypes.c_void_p(aligned), size) == 0
        return ctypes.string_at(aligned, size.value)
    finally:
        library.colibri_free(context)


def belongings() -> tuple[int, int, int]:
    """Threads, descriptors and mappings of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    tasks, handles = Path("/proc/self/task"), Path("/proc/self/fd")
    return len(list(tasks.iterdir())), len(list(handles.iterdir())), len(maps)


PLUGIN_HOST = """
import ctypes, sys, _ctypes
from pathlib import Path
from test_hosts import belongings, use

path, model, stream = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
options = {"expert_cache_size": stream, "guard_mapping": int(not stream)}
expected = use(ctypes.CDLL(str(path) + ".other"), model)
seen = []
for _ in range(50):
    library = ctypes.CDLL(path)
    assert use(library, model, **options) == expected
    _ctypes.dlclose(library._handle)
    assert Path(path).name + "\\n" not in Path("/proc/self/maps").read_text()
    seen.append(belongings())
print(*seen, sep="\\n")
"""


@pytest.mark.skipif(not LINUX, reason="reads /proc and uses dlclose")
@pytest.mark.parametrize("stream", [0, 4], ids=["map", "stream"])
def test_plugin_host_leaks_nothing(stream: int, tiny_model: Path, tmp_path: Path) -> None:
    """dlopen, init, infer, free, dlclose, 50 times, in a process of its own: threads, descriptors and mappings stay."""
    path = tmp_path / "libplugin.so"
    shutil.copy(_lib.library_path(), path)
    shutil.copy(_lib.library_path(), f"{path}.other")
    folders = os.pathsep.join([str(ROOT / "tests" / "python"), *sys.path])
    done = run(sys.executable, "-c", PLUGIN_HOST, path, tiny_model, str(stream), PYTHONPATH=folders)
    assert done.returncode == 0, done.stderr
    seen = [tuple(map(int, line.strip("()").split(","))) for line in done.stdout.splitlines()]
    assert len(seen) == 50
    threads, handles, mappings = zip(*seen, strict=True)
    assert len(set(threads[-10:])) == 1 and threads[-1] == 1
    assert len(set(handles)) == 1
    # the C library and Python keep memory of their own: its mappings settle, a leak would add one in each round
    assert max(mappings) - min(mappings[:10]) < 10, mappings
    assert max(mappings[25:]) - min(mappings[25:]) <= 2, mappings


def test_two_models_at_once(tiny_models: dict[str, Path]) -> None:
    """Two models in one process, from two threads: each gives what it gives alone."""
    library = _ffi.lib()
    expected = {dtype: use(library, path) for dtype, path in tiny_models.items()}
    assert len(set(expected.values())) == 2
    problems: list[str] = []

    def work(dtype: str) -> None:
        try:
            for _ in range(20):
                if use(library, tiny_models[dtype], threads=2) != expected[dtype]:
                    problems.append(f"{dtype} differs")
        except BaseException as exc:
            problems.append(f"{dtype}: {exc!r}")

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def in_child(work: Callable[[], bool]) -> bool:
    """fork, do it, and say whether it was true; a child that hangs is ended by an alarm."""
    import signal

    child = os.fork()
    if child == 0:
        result = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            result = 0 if work() else 2
        finally:
            os._exit(result)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("stream", [0, 4], ids=["map", "stream"])
def test_fork_before_and_after_use(stream: int, tiny_model: Path) -> None:
    """Before: the child makes sessions like anybody. After: the parent's session is COLIBRI_ERR_THREAD there, may be
    freed, and one of the child's own works; the parent's goes on.
    """
    library = _ffi.lib()
    expected = use(library, tiny_model)
    assert in_child(lambda: use(library, tiny_model, expert_cache_size=stream) == expected)

    config = _ffi.colibri_config_t.init(
        model_path=str(tiny_model).encode(), max_seq_len=32, num_threads=3, expert_cache_size=stream
    )
    context = ctypes.c_void_p(library.colibri_init(ctypes.byref(config)))
    assert context.value
    tokens, lengths = (ctypes.c_int32 * 4)(1, 2, 3, 4), (ctypes.c_int32 * 1)(4)
    assert library.colibri_set_input(context, tokens, lengths, 1) == 0
    assert library.colibri_infer(context) == 0

    def child() -> bool:
        refused = library.colibri_set_input(context, tokens, lengths, 1) == 0
        refused = refused and library.colibri_infer(context) == _ffi.COLIBRI_ERR_THREAD
        refused = refused and b"colibri_init in the child" in library.colibri_last_error()
        library.colibri_free(context)
        return refused and use(library, tiny_model, expert_cache_size=stream) == expected

    assert in_child(child)
    assert library.colibri_set_input(context, tokens, lengths, 1) == 0
    assert library.colibri_infer(context) == 0
    library.colibri_free(context)
