"""One engine in a process of its own: reads one JSON object a line, answers with one line; ends with its input.

    python worker.py '{"engine": "llama.cpp", "model": "Q8_0.gguf", "threads": 2, "room": 600}'

It stands alone, so that any environment's Python that holds the engine can run it. The first line it writes says what
the engine is: {"about": "..."}. Commands:

    {"cmd": "threads", "n": 1}                          compute with so many threads from now on
    {"cmd": "prefill", "tokens": [...]}                 -> {"seconds": s}, from an empty cache
    {"cmd": "decode", "tokens": [...], "prompt": [...], "warmup": [...], "limit_s": 10}
                                                        -> {"times": [s, ...], "weight_bytes": b, ...}: tokens one by
                                                           one, for so many seconds at most, behind a prompt (one call)
                                                           and others one by one; page faults and disk reads of the
                                                           process meanwhile, and the engine's own figures
    {"cmd": "profile", "path": "..."}                   write libcolibri's profile of the experts' use so far
    {"cmd": "logits", "tokens": [...]}                  -> {"logits": [...]} after the last of them
    {"cmd": "layer", "n": 32, "repeat": 5}              -> {"times": [s, ...]}: n vectors through one layer's experts
    {"cmd": "route", "n": 1024, "repeat": 5}            -> {"times": [s, ...]}: n vectors through one router

With "cgroup" in its options the process enters that group (a path of cgroup.procs) before the engine starts. Any
failure is {"error": "a sentence"}. An idle worker waits in read() and uses no processor.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import warnings
from typing import Any

import numpy as np

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class Failure(Exception):
    """What the engine cannot do, in a sentence."""


class Engine:
    """What the commands call. `options` is the JSON object of the command line."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.about = options, ""

    def threads(self, n: int) -> None:
        """Compute with n threads."""
        raise NotImplementedError

    def empty(self) -> None:
        """Forget all tokens."""
        raise NotImplementedError

    def feed(self, tokens: list[int]) -> None:
        """Append tokens and compute the logits of the last one."""
        raise NotImplementedError

    def logits(self) -> list[float]:
        """Of the latest token."""
        raise NotImplementedError

    def mark(self) -> None:
        """Count weight bytes from here on, where the engine counts them."""

    def weight_bytes(self) -> int | None:
        """Read since mark()."""
        return None

    def figures(self) -> dict[str, Any]:
        """What the engine counted since mark(), and how it holds the model."""
        return {}

    def save_profile(self, path: str) -> None:
        """Write how often each expert was used."""
        raise NotImplementedError

    def layer(self, n: int) -> Any:
        """A function without arguments that runs n vectors through the experts."""
        raise NotImplementedError

    def route(self, n: int) -> Any:
        """The same for a router."""
        raise NotImplementedError


def vectors(n: int, width: int) -> np.ndarray:
    """Hidden states [n][width], 64-byte aligned."""
    raw = np.empty(n * width + 16, np.float32)
    skip = (-raw.ctypes.data % 64) // 4
    result = raw[skip : skip + n * width].reshape(n, width)
    result[:] = np.random.Generator(np.random.SFC64(n)).standard_normal((n, width), np.float32)
    return result


class Colibri(Engine):
    """libcolibri through its C functions."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        from colibri import _ffi

        self.ffi, self.lib, self.session = _ffi, _ffi.lib(), None
        self.model = ctypes.c_void_p()
        _ffi.check(self.lib.colibri_model_open(options["model"].encode(), ctypes.byref(self.model)))
        self.info = _ffi.colibri_model_info_t.init()
        _ffi.check(self.lib.colibri_model_info(self.model, ctypes.byref(self.info)))
        self.output = vectors(1, self.info.vocab_size)
        self.threads(options["threads"])

    def threads(self, n: int) -> None:
        if self.session:
            self.lib.colibri_free(self.session)
        isa = self.lib.colibri_isa_from_name(self.options.get("isa", "auto").encode())
        config = self.ffi.colibri_config_t.init(
            model=self.model, max_seq_len=self.options["room"], num_threads=n, isa=isa
        )
        if "residency" in self.options:
            config.residency = getattr(self.ffi, "COLIBRI_RESIDENCY_" + self.options["residency"].upper())
        for name in ("expert_cache_size", "hugepage_size"):
            setattr(config, name, self.options.get(name, 0))
        if "expert_profile" in self.options:
            config.expert_profile = self.options["expert_profile"].encode()
        self.session = self.lib.colibri_init(ctypes.byref(config))
        if not self.session:
            raise self.ffi.last_error()
        stats = self._stats()
        self.about = f"{self.lib.colibri_version().decode()}, {self.lib.colibri_isa_name(stats.isa).decode()}"

    def _stats(self) -> Any:
        stats = self.ffi.colibri_stats_t.init()
        self.ffi.check(self.lib.colibri_stats(self.session, ctypes.byref(stats)))
        return stats

    def empty(self) -> None:
        self.ffi.check(self.lib.colibri_reset(self.session))

    def mark(self) -> None:
        self.lib.colibri_stats_reset(self.session)

    def feed(self, tokens: list[int]) -> None:
        packed, length = (ctypes.c_int32 * len(tokens))(*tokens), ctypes.c_int32(len(tokens))
        self.ffi.check(self.lib.colibri_set_input(self.session, packed, ctypes.byref(length), 1))
        self.ffi.check(self.lib.colibri_infer(self.session))

    def logits(self) -> list[float]:
        self.ffi.check(self.lib.colibri_get_output(self.session, self.output.ctypes.data, self.output.nbytes))
        return self.output[0].tolist()

    def weight_bytes(self) -> int | None:
        return int(self._stats().weight_bytes)

    def figures(self) -> dict[str, Any]:
        stats = self._stats()
        values = {name: getattr(stats, name) for name, *_ in stats._fields_}
        return {name: value for name, value in values.items() if isinstance(value, int)}  # without histograms

    def save_profile(self, path: str) -> None:
        self.ffi.check(self.lib.colibri_save_profile(self.session, path.encode()))

    def layer(self, n: int) -> Any:
        hidden = vectors(n, self.info.hidden_size)
        output = vectors(n, self.info.hidden_size)
        call, address, result = self.lib.colibri_moe_forward, hidden.ctypes.data, output.ctypes.data
        return lambda keep=(hidden, output): self.ffi.check(call(self.session, 0, address, n, result))

    def route(self, n: int) -> Any:
        hidden, top_k = vectors(n, self.info.hidden_size), self.info.top_k
        ids, weights = np.empty((n, top_k), np.int32), np.empty((n, top_k), np.float32)
        call, into = self.lib.colibri_route_tokens, (ids.ctypes.data, weights.ctypes.data)
        address = hidden.ctypes.data
        return lambda keep=(hidden, ids, weights): self.ffi.check(call(self.session, 0, address, n, *into))


class Llama(Engine):
    """llama.cpp through the low-level functions of llama-cpp-python."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import llama_cpp

        self.llama, self.context = llama_cpp, None
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        if options.get("mmap"):
            pass  # its default
        elif "use_mmap" in dict(params._fields_):
            params.use_mmap = False
        else:
            params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        self.model = llama_cpp.llama_model_load_from_file(options["model"].encode(), params)
        if not self.model:
            raise Failure(f"llama.cpp cannot load {options['model']}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self._open(options["threads"])
        known = [word.strip() for word in llama_cpp.llama_print_system_info().decode().split("|")]
        names = [word.split(" = ")[0].split(": ")[-1] for word in known if word.endswith("= 1")]
        self.about = f"llama-cpp-python {llama_cpp.__version__}, {' '.join(names)}"

    def _open(self, n: int) -> None:
        params = self.llama.llama_context_default_params()
        self.piece = min(self.options["room"], 2048)
        params.n_ctx = -(-self.options["room"] // 256) * 256
        params.n_batch, params.n_ubatch = max(self.piece, 512), 512
        params.n_threads = params.n_threads_batch = n
        self.context = self.llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise Failure("llama.cpp cannot make a context")

    def threads(self, n: int) -> None:
        self.llama.llama_set_n_threads(self.context, n, n)

    def empty(self) -> None:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)

    def feed(self, tokens: list[int]) -> None:
        for first in range(0, len(tokens), self.piece):
            part = tokens[first : first + self.piece]
            array = (self.llama.llama_token * len(part))(*part)
            status = self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(array, len(part)))
            if status != 0:
                raise Failure(f"llama_decode ended with status {status}")
        self.llama.llama_synchronize(self.context)

    def logits(self) -> list[float]:
        return list(self.llama.llama_get_logits_ith(self.context, -1)[: self.vocab])


class Transformers(Engine):
    """Hugging Face transformers on PyTorch, bfloat16 or float32."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import torch
        import transformers

        self.torch, self.transformers = torch, transformers
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.threads(options["threads"])
        dtype = getattr(torch, options["dtype"])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
        self.about = f"{transformers.__version__}, torch {torch.__version__}, {options['dtype']}"
        self.empty()

    def threads(self, n: int) -> None:
        self.torch.set_num_threads(n)

    def empty(self) -> None:
        self.cache, self.last = self.transformers.DynamicCache(), None

    def feed(self, tokens: list[int]) -> None:
        with self.torch.inference_mode():
            ids = self.torch.tensor([tokens])
            self.last = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def logits(self) -> list[float]:
        return self.last[0, -1].float().tolist()


class Torch(Engine):
    """A router in PyTorch: product, softmax, top-k, and weights that sum to one."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import torch

        self.torch, self.about = torch, f"torch {torch.__version__}"
        self.threads(options["threads"])
        self.gate = torch.randn(options["experts"], options["hidden"])

    def threads(self, n: int) -> None:
        self.torch.set_num_threads(n)

    def route(self, n: int) -> Any:
        torch, hidden = self.torch, self.torch.from_numpy(vectors(n, self.options["hidden"]))

        def run() -> Any:
            with torch.inference_mode():
                shares = torch.softmax(torch.nn.functional.linear(hidden, self.gate), dim=-1)
                weights, ids = torch.topk(shares, self.options["top_k"], dim=-1)
                return ids, weights / weights.sum(dim=-1, keepdim=True)

        return run


class KtKernel(Engine):
    """One MoE layer of kt-kernel in int8, on random weights."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        import kt_kernel
        import torch

        self.torch, self.kt = torch, kt_kernel.kt_kernel_ext
        if not hasattr(self.kt.moe, "AMXInt8_MOE"):
            raise Failure("kt-kernel has no int8 experts for this processor")
        kernel = "amx" if kt_kernel.__cpu_variant__ == "amx" else kt_kernel.__int8_kernel__
        self.about = f"{kt_kernel.__version__}, {kernel}"
        experts, hidden, inter = options["experts"], options["hidden"], options["inter"]
        self.weights = [
            (torch.randn(experts, rows, k, dtype=torch.float32) / k**0.5).to(torch.bfloat16).contiguous()
            for rows, k in ((inter, hidden), (inter, hidden), (hidden, inter))
        ]
        pool = self.kt.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [options["threads"]]
        self.infer = self.kt.CPUInfer(pool)
        self.mask = torch.zeros(experts, dtype=torch.bool)
        config = self.kt.moe.MOEConfig(experts, options["top_k"], hidden, inter, self.mask.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, self.infer.backend_, options["room"]
        config.gate_proj, config.up_proj, config.down_proj = (matrix.data_ptr() for matrix in self.weights)
        self.moe, order = self.kt.moe.AMXInt8_MOE(config), torch.arange(experts)
        self.infer.submit(self.moe.load_weights_task(order.data_ptr()))
        self.infer.sync()
        del self.weights

    def threads(self, n: int) -> None:
        if n != self.options["threads"]:
            raise Failure("kt-kernel keeps the threads it was started with")

    def layer(self, n: int) -> Any:
        torch, experts, top_k = self.torch, self.options["experts"], self.options["top_k"]
        hidden = torch.from_numpy(vectors(n, self.options["hidden"])).to(torch.bfloat16)
        ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(n)]).to(torch.int64).contiguous()
        weights = torch.full((n, top_k), 1 / top_k)
        output, count = torch.empty_like(hidden), torch.tensor([n], dtype=torch.int32)
        addresses = [part.data_ptr() for part in (ids, weights, hidden, output)]

        def run(keep: Any = (ids, weights, hidden, output)) -> None:
            self.infer.submit(self.moe.forward_task(count.data_ptr(), top_k, *addresses, False))
            self.infer.sync()

        return run


ENGINES = {
    "libcolibri": Colibri,
    "llama.cpp": Llama,
    "transformers": Transformers,
    "torch": Torch,
    "kt-kernel": KtKernel,
}


def timed(call: Any, *arguments: Any) -> float:
    """Seconds of a call."""
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def used() -> dict[str, int]:
    """Page faults of this process and bytes that it had read from disks, so far, where the system counts them."""
    counts = {}
    if resource is not None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counts |= {"minor_faults": usage.ru_minflt, "major_faults": usage.ru_majflt}
    try:
        with open("/proc/self/io", "rb", buffering=0) as file:
            counts |= {"disk_bytes": int(file.read(4096).split(b"\nread_bytes: ", 1)[1].split(b"\n", 1)[0])}
    except (OSError, IndexError):
        pass
    return counts


def decode(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """Feed tokens one by one until they or the seconds are used up."""
    engine.empty()
    if command.get("prompt"):
        engine.feed(command["prompt"])
    for token in command.get("warmup", ()):
        engine.feed([token])
    engine.mark()
    times: list[float] = []
    before = used()
    end = time.perf_counter() + command.get("limit_s", 1e9)
    for token in command["tokens"]:
        times.append(timed(engine.feed, [token]))
        if time.perf_counter() > end:
            break
    after = used()
    counts = {name: after[name] - before[name] for name in after}
    return {"times": times, "weight_bytes": engine.weight_bytes(), **counts, "figures": engine.figures()}


def run(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """Do one command."""
    name = command["cmd"]
    if name == "threads":
        engine.threads(command["n"])
        return {"about": engine.about}
    if name == "prefill":
        engine.empty()
        return {"seconds": timed(engine.feed, command["tokens"])}
    if name == "decode":
        return decode(engine, command)
    if name == "profile":
        engine.save_profile(command["path"])
        return {}
    if name == "logits":
        engine.empty()
        engine.feed(command["tokens"])
        return {"logits": engine.logits()}
    if name in ("layer", "route"):
        call = getattr(engine, name)(command["n"])
        call()
        return {"times": [timed(call) for _ in range(command["repeat"])]}
    raise Failure(f"unknown command {name!r}")


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split()) or "failed"
    return text if isinstance(error, Failure) else f"{type(error).__name__}: {text}"


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what engines print must not stand among the answers

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    options = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    try:
        if "cgroup" in options:
            with open(options["cgroup"], "w") as file:
                file.write(str(os.getpid()))
        engine = ENGINES[options["engine"]](options)
    except Exception as error:
        answer({"error": sentence(error)})
        return
    answer({"about": engine.about})
    gc.disable()  # collections would stand in the times of single tokens
    for line in sys.stdin:
        try:
            answer(run(engine, json.loads(line)))
        except Exception as error:
            answer({"error": sentence(error)})
        gc.collect()
    answers.flush()
    os._exit(0)  # engines' own threads may never end


if __name__ == "__main__":
    main()
