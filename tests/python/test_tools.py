"""colibri-infer and colibri-bench, compiled here and linked with the package's shared library."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import colibri
import pytest
from colibri import _lib

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="links as on Linux"),
    pytest.mark.skipif(not (ROOT / "tools" / "colibri-infer.c").is_file(), reason="needs the source tree"),
]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both programs."""
    command = next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if command is None and importlib.util.find_spec("ziglang"):
        command = [sys.executable, "-m", "ziglang", "cc"]
    if command is None:
        pytest.skip("needs a C compiler (cc, or ziglang from PyPI)")
    folder = tmp_path_factory.mktemp("tools")
    library = folder / "libcolibri.so.0"
    shutil.copy(_lib.library_path(), library)
    parts = {"colibri-infer": [], "colibri-bench": ["limits", "limits_units"]}
    for name, more in parts.items():
        sources = [str(ROOT / "tools" / f"{part}.c") for part in (name, "cli_common", *more)]
        flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
        flags += ["-I", str(ROOT / "include"), f"-Wl,-rpath,{folder}"]
        subprocess.run([*command, *flags, *sources, str(library), "-lm", "-o", str(folder / name)], check=True)
    return folder


class Tool:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, *arguments: object, status: int = 0, **options: object) -> tuple[str, str]:
        command = [str(self.path), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False, **options)
        err = done.stderr.decode()
        assert done.returncode == status, err
        return done.stdout.decode(), err

    def fails(self, *arguments: object, status: int) -> str:
        out, err = self(*arguments, status=status)
        assert out == "" and err.startswith(f"{self.path.name}: error: ") and err.count("\n") == 1
        return err


@pytest.fixture
def infer(tools: Path) -> Tool:
    return Tool(tools / "colibri-infer")


@pytest.fixture
def bench(tools: Path) -> Tool:
    return Tool(tools / "colibri-bench")


def python_text(path: Path, prompt: str, count: int, **settings: float) -> str:
    with colibri.Session(path, max_seq_len=128) as session:
        return session.generate(prompt, max_new_tokens=count, **settings)


def test_help_and_version(infer: Tool, bench: Tool) -> None:
    assert "experts per token (not of sampling)" in infer("--help")[0] and "--json" in bench("--help")[0]
    assert infer("--version")[0].startswith(f"colibri-infer {colibri.version()}\n")


def test_text_equals_python(infer: Tool, tiny_models: dict[str, Path]) -> None:
    for path in tiny_models.values():
        settings = {"temperature": 0.9, "seed": 5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
        expected = python_text(path, "the inn é", 30, **settings)
        options = ["--temperature", 0.9, "--seed", 5, "--sample-top-k", 50, "--top-p", 0.9, "--min-p", 0.01]
        options += ["--repetition-penalty", 1.2, "--max-tokens", 30]
        out, err = infer("--model", path, "--prompt", "the inn é", *options)
        assert out == expected + "\n"
        assert err.count("\n") == 1 and err.startswith("prompt: ") and "generation: " in err
        assert infer(f"--model={path}", "--prompt=the inn é", *options, "--threads", 1, "--isa", "ref")[0] == out
        assert infer(f"--model={path}", "--prompt=the inn é", *options, "--max-chunk-tokens", 3)[0] == out


def test_batch(infer: Tool, tiny_model: Path) -> None:
    """Slot i continues the prompt with seed + i, whatever the others do."""
    options = ["--max-tokens", 20, "--temperature", 1.3, "--seed", 7, "--max-batch-size", 3]
    out, _ = infer("--model", tiny_model, "--prompt", "the inn", *options)
    texts = [python_text(tiny_model, "the inn", 20, temperature=1.3, seed=7 + i) for i in range(3)]
    assert out == "\n".join(f"--- slot {i}, seed {7 + i} ---\n{text}\n" for i, text in enumerate(texts))


def test_prompt_from_file(infer: Tool, tiny_model: Path, tmp_path: Path) -> None:
    text = "the inn \u20ac\0 <s> " * 300
    (tmp_path / "prompt").write_bytes(text.encode())
    with colibri.Session(tiny_model, max_seq_len=9000) as session:
        expected = session.generate(text, max_new_tokens=5) + "\n"
    options = ["--model", tiny_model, "--max-tokens", 5, "--prompt-file"]
    assert infer(*options, tmp_path / "prompt")[0] == expected
    assert infer(*options, "-", input=text.encode())[0] == expected


def test_verbose(infer: Tool, tiny_model: Path) -> None:
    _, err = infer("--model", tiny_model, "--prompt", "the inn", "--max-tokens", 3, "--top-k", 8, "--verbose")
    lines = err[err.index("layer expert") :].splitlines()
    assert len(lines) == 1 + 2 * 8 and all(len(line.split()) == 10 for line in lines[1:])
    assert all(line.endswith("  mapped") for line in lines[1:]) and "residency: map, ordinary pages\n" in err
    tokens = [int(line.split()[2]) for line in lines[1:]]
    assert len(set(tokens)) == 1 and tokens[0] >= 5  # every expert saw every token


def test_room(infer: Tool, tiny_model: Path) -> None:
    options = ["--model", tiny_model, "--prompt", "the inn"]
    infer(*options, "--max-seq-len", 12)
    assert "--max-seq-len 105" in infer.fails(*options, "--max-seq-len", 12, "--max-tokens", 101, status=1)
    infer.fails(*options, "--max-seq-len", 3, status=1)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--model", "m"], ["x"], ["-m", "m"], ["--no-such"], ["--model"], ["--verbose=1"], ["--json"],
     ["--max-tokens", "1x"], ["--max-tokens", ""], ["--max-tokens", " 1"], ["--max-tokens", "0x10"],
     ["--max-tokens", "0"], ["--max-tokens", "99999999999999999999"], ["--threads", "257"], ["--threads=-1"],
     ["--seed", "-1"], ["--seed", "18446744073709551616"], ["--temperature", "nan"], ["--temperature", "-0.5"],
     ["--temperature", "1e999"], ["--temperature", "1,5"], ["--top-p", "1.1"], ["--max-batch-size", "0"],
     ["--model", "m", "--prompt", "a", "--prompt-file", "b"]],
)  # fmt: skip
def test_usage(infer: Tool, arguments: list[str]) -> None:
    infer.fails(*arguments, status=2)


def test_failures(infer: Tool, bench: Tool, tiny_model: Path, textless_model: Path, tmp_path: Path) -> None:
    prompt = ["--prompt", "x"]
    assert "none.colibri" in infer.fails("--model", tmp_path / "none.colibri", *prompt, status=1)
    (tmp_path / "short.colibri").write_bytes(tiny_model.read_bytes()[:1000])
    assert "short.colibri" in infer.fails("--model", tmp_path / "short.colibri", *prompt, status=1)
    assert "short.colibri" in bench.fails("--model", tmp_path / "short.colibri", status=1)
    assert "tokenizer" in infer.fails("--model", textless_model, *prompt, status=1)
    assert "8 experts" in infer.fails("--model", tiny_model, *prompt, "--top-k", 9, status=1)
    assert "'sse'" in infer.fails("--model", tiny_model, *prompt, "--isa", "sse", status=2)
    assert "'q4'" in infer.fails("--model", tiny_model, *prompt, "--kv-dtype", "q4", status=2)
    assert "cpu_affinity" in infer.fails("--model", tiny_model, *prompt, "--affinity", "first", status=1)
    assert "activation_bits" in infer.fails("--model", tiny_model, *prompt, "--activation-bits", 9, status=1)
    assert "none" in infer.fails("--model", tiny_model, "--prompt-file", tmp_path / "none", status=1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--prompt", "the inn"]])
def test_full_disk(infer: Tool, tiny_model: Path, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [str(infer.path), "--model", str(tiny_model), *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1 and "cannot write the output" in done.stderr and done.stderr.count("\n") == 1


def test_bench(bench: Tool, tiny_model: Path, textless_model: Path) -> None:
    options = ["--prompt-tokens", 20, "--gen-tokens", 5, "--repeat", 2, "--threads", 1]
    for path in (tiny_model, textless_model):
        out, err = bench("--model", path, *options, "--json")
        value = json.loads(out)
        assert err == "" and value["model"] == str(path) and value["num_threads"] == 1
        assert value["prefill_tokens_per_s"] > 0 and value["decode_tokens_per_s"] > 0
        assert 0 < value["decode_ms"]["p50"] <= value["decode_ms"]["p90"] <= value["decode_ms"]["max"]
        assert value["weight_bytes_per_token"] > 10000 and value["weight_gb_per_s"] > 0
    assert "p99" in bench("--model", tiny_model, *options)[0]
    assert bench.fails("--model", tiny_model, "--gen-tokens", "0", status=2)


def test_bench_reads_the_same_weights_as_python(bench: Tool, tiny_model: Path) -> None:
    """Same pseudo-random tokens, same experts: the same bytes."""
    from colibri.bench import measure

    with colibri.Session(tiny_model, max_seq_len=25, num_threads=1, outputs="last") as session:
        expected = measure(session, 20, 5, 1)
    value = json.loads(bench("--model", tiny_model, "--prompt-tokens", 20, "--gen-tokens", 5, "--json")[0])
    assert value.keys() == {"model", *expected}
    assert value["weight_bytes_per_token"] == expected["weight_bytes_per_token"]


def test_limits(bench: Tool) -> None:
    options = ["--limits", "--buffer-mb", 16, "--repeat", 1, "--threads", 3]
    out, err = bench(*options, "--json")
    value = json.loads(out)
    assert err == "" and value.keys() == {
        "cpu", "num_threads", "rounds", "buffer_bytes", "read", "int8_tops", "f32_tflops"
    }  # fmt: skip
    assert value["num_threads"] == 3 and value["rounds"] == 1 and value["buffer_bytes"] == 16 << 20
    assert [read["pages"] for read in value["read"]] == ["huge", "4k"]
    for read in value["read"]:
        assert read["gb_per_s"].keys() == {"1", "2", "3"} and min(read["gb_per_s"].values()) > 0
    assert value["read"][1]["huge_bytes"] == 0
    for rates in (value["int8_tops"], value["f32_tflops"]):
        assert rates[-1]["isa"] == "portable" and len({rate["isa"] for rate in rates}) == len(rates)
        assert min(rate[key] for rate in rates for key in ("one_thread", "all_threads")) > 0
    words = set(value["cpu"].split())
    for word in ("amx_int8", "avx512_vnni", "avx2"):  # what the library found is measured, all but AMX always
        measured = word in {rate["isa"] for rate in value["int8_tops"]}
        assert measured == (word in words) or word == "amx_int8"
    text = bench(*options)[0]
    assert "4k" in text and "portable" in text and text.count("\n") > 6


def test_limits_usage(bench: Tool, infer: Tool, tiny_model: Path) -> None:
    assert "--limits" in bench.fails("--limits", "--model", tiny_model, status=2)
    assert "--no-such" in bench.fails("--limits", "--no-such", status=2)
    for option in (["--isa", "ref"], ["--affinity", "x"], ["--kv-dtype", "q8"], ["--prompt-tokens", 3]):
        assert option[0] in bench.fails("--limits", *option, status=2)
    assert "--limits" in bench.fails("--model", tiny_model, "--buffer-mb", 8, status=2)
    assert "--buffer-mb" in bench.fails("--limits", "--buffer-mb", 0, status=2)
    assert "--limits" in infer.fails("--limits", status=2)
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 1 << 40:
        assert "memory" in bench.fails("--limits", "--buffer-mb", 1 << 20, status=1)
