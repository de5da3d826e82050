"""The command line: results on stdout, one line for an error, exit status 0, 1, 2 or 130, never a traceback."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import colibri
import pytest
from colibri import cli
from conftest import write_checkpoint

COMMAND = [sys.executable, "-m", "colibri"]
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes and signals")


class Runner:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object, status: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        out, err = self.capsys.readouterr()
        assert caught.value.code == status, err
        assert "Traceback" not in err
        return out, err

    def fails(self, *arguments: object, status: int = 1) -> str:
        """The one error line."""
        out, err = self(*arguments, status=status)
        assert out == "" and err.startswith("colibri: error: ") and err.count("\n") == 1
        return err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def test_version_and_help(run: Runner) -> None:
    assert run("--version")[0] == f"colibri, version {colibri.__version__}\n"
    for command in ("convert", "run", "chat", "tokenize", "inspect", "verify", "bench"):
        assert command in run("--help")[0] and "Usage:" in run(command, "--help")[0]


def test_convert_inspect_verify(
    run: Runner, tiny_checkpoint: Path, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "new.colibri"
    out, err = run("convert", tiny_checkpoint, path)
    assert "mixtral, q8" in out and "65 tensors" in out and err == ""
    assert path.read_bytes() == tiny_models["q8"].read_bytes()
    assert run("convert", tiny_checkpoint, tmp_path / "f32.colibri", "--dtype", "f32", "--quiet") == ("", "")
    assert (tmp_path / "f32.colibri").read_bytes() == tiny_models["f32"].read_bytes()
    assert "every checksum is right" in run("verify", path)[0]
    text = run("inspect", path)[0]
    assert "mixtral" in text and "attn_qkv" in text and "bits_per_weight" in text
    value = json.loads(run("inspect", path, "--json")[0])
    assert value["num_experts"] == 8 and len(value["tensors"]) > 10 and value["metadata"]["dtype"] == "q8"
    assert sum(value["weight_bytes_by_dtype"].values()) == value["weight_bytes"] and "f16 " in text and "q8 " in text
    assert "tensors" not in json.loads(run("inspect", path, "--json", "--no-tensors")[0])


def test_convert_mixed(run: Runner, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The experts in q4, the rest in q8: it runs, and says so."""
    path = tmp_path / "mixed.colibri"
    out, _ = run("convert", tiny_checkpoint, path, "--dtype", "q4", "--other-dtype", "q8")
    assert "mixtral, q4 experts, else q8" in out
    value = json.loads(run("inspect", path, "--json")[0])
    assert value["dtype"] == "q4" and value["metadata"]["other_dtype"] == "q8"
    assert set(value["weight_bytes_by_dtype"]) == {"f16", "f32", "q8", "q4"}
    assert len(run("run", "ab", "--model", path, "--max-tokens", 3)[0]) > 0


def test_convert_fails_cleanly(run: Runner, tmp_path: Path, tiny_checkpoint: Path) -> None:
    assert "no such folder" in run.fails("convert", tmp_path / "none", tmp_path / "x.colibri")
    assert "no such folder" in run.fails("convert", tiny_checkpoint, tmp_path / "no" / "x.colibri")
    for option in ("--dtype", "--other-dtype"):
        run.fails("convert", tiny_checkpoint, tmp_path / "x.colibri", option, "q3", status=2)
    assert list(tmp_path.iterdir()) == []


def test_damaged_files(run: Runner, tiny_model: Path, tmp_path: Path) -> None:
    data = bytearray(tiny_model.read_bytes())
    data[next(t["offset"] for t in colibri.Model(tiny_model).tensors() if t["role"] == "head")] ^= 1
    damaged = tmp_path / "damaged.colibri"
    damaged.write_bytes(data)
    assert "checksum" in run.fails("verify", damaged)
    damaged.write_bytes(data[:100])
    for command in (
        ["verify", damaged],
        ["inspect", damaged],
        ["run", "-m", damaged],
        ["tokenize", "x", "-m", damaged],
    ):
        assert "damaged.colibri" in run.fails(*command)


def test_run(run: Runner, tiny_model: Path) -> None:
    with colibri.Session(tiny_model, max_seq_len=64) as session:
        expected = session.generate("the inn", max_new_tokens=9, temperature=0.8, seed=4, top_k=40)
    options = ["--max-tokens", 9, "--temperature", 0.8, "--seed", 4, "--top-k", 40, "--threads", 1, "--isa", "ref"]
    out, err = run("run", "the inn", "-m", tiny_model, *options)
    assert out == expected + "\n"
    assert err.count("\n") == 1 and err.startswith("prompt: 5 tokens, ") and "generation: " in err
    out, err = run("run", "the inn", "-m", tiny_model, *options, "--verbose", "--experts-per-token", 3)
    table = err[err.index("layer expert") :].splitlines()
    assert len(table) == 1 + 16 and all(line.endswith("  mapped") for line in table[1:])
    assert "residency: map, ordinary pages\n" in err and "info: " in err
    with colibri.Session(tiny_model, max_seq_len=64, kv_dtype="f32", activation_bits=16) as session:
        expected = session.generate("the inn", max_new_tokens=9, temperature=0.8, seed=4, top_k=40)
    more = ["--affinity", "none", "--kv-dtype", "f32", "--activation-bits", 16]
    assert run("run", "the inn", "-m", tiny_model, *options, *more)[0] == expected + "\n"
    assert "cpu_affinity" in run.fails("run", "the inn", "-m", tiny_model, "--affinity", "0,0")


def test_run_reads_stdin(run: Runner, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("run", "héllo\n", "-m", tiny_model, "--max-tokens", 4)[0]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("héllo\n".encode())))
    assert run("run", "-", "-m", tiny_model, "--max-tokens", 4)[0] == expected


def test_tokenize(run: Runner, tiny_model: Path) -> None:
    assert run("tokenize", "the é</s>", "-m", tiny_model)[0].splitlines()[:2] == ['0\t"<s>"', '259\t"the"']
    value = json.loads(run("tokenize", "the</s>", "-m", tiny_model, "--json")[0])
    assert value == {"ids": [0, 259, 1], "pieces": ["<s>", "the", "</s>"]}
    assert json.loads(run("tokenize", "</s>", "-m", tiny_model, "--json", "--no-special")[0])["ids"][0] > 1
    assert run("tokenize", "--decode", "[0, 259, 1]", "-m", tiny_model)[0] == "<s>the</s>\n"
    assert run("tokenize", "--decode", "0 259 1", "-m", tiny_model, "--no-special")[0] == "the\n"
    assert "'x'" in run.fails("tokenize", "--decode", "1 x", "-m", tiny_model, status=2)
    assert "999" in run.fails("tokenize", "--decode", "999", "-m", tiny_model)


def test_textless_model(run: Runner, textless_model: Path) -> None:
    for command in (["run", "x"], ["tokenize", "x"], ["chat"]):
        line = run.fails(*command, "-m", textless_model)
        assert "tokenizer" in line or "chat template" in line


def test_chat(run: Runner, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    asked: list[tuple[list[int], str]] = []
    generate = colibri.Session.generate

    def record(self: colibri.Session, prompt: list[int], *args: Any, **options: Any) -> Any:
        asked.append((prompt, options["keep"]))
        return generate(self, prompt, *args, **options)

    monkeypatch.setattr(colibri.Session, "generate", record)
    monkeypatch.setattr("sys.stdin", io.StringIO("the inn\n\nthe end\n/exit\nnot read\n"))
    out, _ = run("chat", "-m", tiny_model, "--max-tokens", 4, "--system", "a", "--threads", 1)
    assert out.count("\n") >= 2 and [keep for _, keep in asked] == ["prefix", "prefix"]
    model = colibri.Model(tiny_model)
    first = model.detokenize(asked[0][0], special=True)
    assert first == "<s>[system]a\n[user]the inn\n[assistant]" and asked[0][0].count(0) == 1
    second = model.detokenize(asked[1][0], special=True)
    assert second.startswith(first) and second.endswith("</s>\n[user]the end\n[assistant]")
    assert asked[1][0].count(0) == 1


def test_chat_without_jinja2(run: Runner, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install 'libcolibri[chat]'" in run.fails("chat", "-m", tiny_model)


def test_bench(run: Runner, tiny_model: Path) -> None:
    options = ["-m", tiny_model, "--prompt-tokens", 20, "--gen-tokens", 5, "--repeat", 2, "--threads", 1]
    out, _ = run("bench", *options)
    assert "prefill" in out and "p99" in out
    value = json.loads(run("bench", *options, "--json")[0])
    assert value["prefill_tokens_per_s"] > 0 and value["decode_tokens_per_s"] > 0 and value["num_threads"] == 1
    assert 0 < value["decode_ms"]["p50"] <= value["decode_ms"]["p99"] <= value["decode_ms"]["max"]
    assert 0 < value["weight_bytes_per_token"] <= 2 * colibri.Model(tiny_model).config["file_size"]


@pytest.mark.parametrize(
    "arguments",
    [["--no-such"], ["nonsense"], ["run", "--no-such"], ["run", "a", "b"], ["run", "--max-tokens"],
     ["run", "--max-tokens", "x"], ["run", "--max-tokens", "0"], ["run", "--temperature", "-1"],
     ["run", "--top-p", "2"], ["run", "--seed", "-1"], ["run", "--isa", "sse"], ["tokenize"], ["convert", "a"],
     ["bench", "--repeat", "0"]],
)  # fmt: skip
def test_usage(run: Runner, arguments: list[str]) -> None:
    assert "--help" in run.fails(*arguments, status=2)


def test_no_command(run: Runner) -> None:
    """The help, as it is elsewhere: readable, not squeezed into one line."""
    with pytest.raises(SystemExit):
        cli.main([])
    out, err = run.capsys.readouterr()
    assert "\nCommands:\n" in out + err and "error" not in out + err


def test_ids_that_are_none(run: Runner, tiny_model: Path) -> None:
    for word in ("x", "²", "1.5", "--"):
        assert repr(word) in run.fails("tokenize", "--decode", f"1 {word}", "-m", tiny_model, status=2)


def test_failures(run: Runner, tiny_model: Path, tmp_path: Path) -> None:
    assert "none.colibri" in run.fails("run", "x", "-m", tmp_path / "none.colibri")
    assert "9" in run.fails("run", "x", "-m", tiny_model, "--experts-per-token", 9)
    for isa in ("avx512", "amx", "neon"):
        if not colibri.isa_supported(isa):
            assert isa in run.fails("run", "x", "-m", tiny_model, "--isa", isa)


def test_a_fault_of_ours_is_one_line_too(run: Runner, monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    def fault(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(colibri.Model, "verify", fault)
    assert run.fails("verify", tiny_model) == "colibri: error: RuntimeError: two lines\n"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that writes for minutes, on a model without an end token."""
    folder = tmp_path_factory.mktemp("endless")
    path = folder / "endless.colibri"
    colibri.convert(write_checkpoint(folder / "checkpoint", eos=False, positions=1 << 20), path)
    assert colibri.Model(path).config["eos_tokens"] == []
    return [*COMMAND, "run", "the", "-m", str(path), "--max-tokens", "300000", "--threads", "1"]


@posix
def test_streams_and_closed_pipe(endless: list[str]) -> None:
    """The first characters arrive long before the last; a reader that goes away ends the program quietly."""
    with subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert len(os.read(process.stdout.fileno(), 1)) == 1
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@posix
def test_ctrl_c(endless: list[str], interruptible: None) -> None:
    with subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.strip() == b""


@posix
def test_terminated(endless: list[str]) -> None:
    with subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and err == b""


@posix
def test_terminated_conversion_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "import colibri.convert.writer as writer\n"
        "from colibri.cli import main\n"
        "sync = os.fsync\n"
        "writer.os.fsync = lambda file: (os.kill(os.getpid(), signal.SIGTERM), sync(file))\n"
        "main(['convert', sys.argv[1], sys.argv[2], '--quiet'])\n"
    )
    target = tmp_path / "out.colibri"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_checkpoint), str(target)], capture_output=True, check=False
    )
    assert done.returncode == 143 and done.stderr == b"" and list(tmp_path.iterdir()) == []


@posix
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(tiny_model: Path) -> None:
    for arguments in (["verify", str(tiny_model)], ["run", "x", "-m", str(tiny_model)], ["--help"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 1 and done.stderr == "colibri: error: No space left on device\n"


@posix
def test_closed_streams(tiny_model: Path) -> None:
    """Streams that are closed when the program begins."""

    def shell(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = shell(">&-", "verify", str(tiny_model))
    assert done.returncode == 1 and done.stderr == "colibri: error: standard output is closed\n"
    done = shell("2>&-", "run", "x", "-m", str(tiny_model), "--max-tokens", "1")
    assert done.returncode == 0 and done.stdout.endswith("\n")
    done = shell("<&-", "run", "-", "-m", str(tiny_model), "--max-tokens", "1")
    assert "AttributeError" not in done.stderr
    assert shell(">&- 2>&-", "verify", str(tiny_model)).returncode == 1


def test_any_locale(tiny_model: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [*COMMAND, "tokenize", "--decode", "197 171", "-m", str(tiny_model)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0 and done.stderr == b"" and done.stdout.endswith(b"?\n")
