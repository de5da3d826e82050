#!/usr/bin/env python3
"""Train the small Mixtral model that the demo and the tests use, on a CPU, in a fixed time.

    python tools/train_demo.py --text TEXT --out OUT --minutes 100 [--resume]

TEXT holds the training text: every ``*.txt`` with stories separated by ``<|endoftext|>``, and books in Markdown, either
as ``*.md`` or inside ``*.tar.gz``. Stories are the target; books, the simplest chapters first, keep a small collection
of stories from being learnt by heart. One story in twenty, chosen by a hash of its text, is held out for perplexity.

OUT receives ``ckpt/`` (a complete Hugging Face folder with the moving average of the weights), ``state.pt`` (all that
``--resume`` needs), ``heldout.txt``, ``train.log`` and at the end ``report.txt``. The learning rate follows the clock,
so the run ends when ``--minutes`` are over, however fast the machine is; text, first weights and
dropout depend on the seed only. A quiet machine with two cores sees some 20 M tokens in 100 minutes; where it sees far
fewer, ``--story-share 0.85 0.95 --dropout 0.05`` uses them better.

Needs: torch, tokenizers, safetensors; transformers too for ``--verify``, which compares ``ckpt/`` with
MixtralForCausalLM.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

END = "<|endoftext|>"
PROMPT = "Once upon a time"
SAMPLE_PROMPTS = (
    PROMPT,
    "One day, a little girl named Lily",
    "The dog saw a big box. He",
    "Tom and his mom went to the",
)
QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u00a0": " "})


@dataclass(frozen=True)
class Config:
    """The architecture, in the words of Mixtral's config.json."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def to_json(self) -> dict[str, Any]:
        """config.json, as transformers reads it."""
        shape = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return shape | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_dropout": 0.0,
            "sliding_window": None,
            "router_aux_loss_coef": 0.02,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": True,
            "torch_dtype": "float32",
        }


# ---------------------------------------------------------------------------------------------------------------- text


def strip_markdown(text: str) -> str:
    """One paragraph a line, without emphasis, rules, images, links' targets and front matter."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[*_`]+|<[^>\n]*>", "", text)
    text = re.sub(r"^\s*(?:-{3,}|#.*|>.*)$", "", text, flags=re.MULTILINE)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n".join(part for part in paragraphs if part)


def book_chapters(markdown: str) -> Iterator[str]:
    """The chapters (or tales) of one book: what lies between two headings, if it is long enough to tell anything."""
    for part in re.split(r"^#+ .*$", markdown.replace("\r", ""), flags=re.MULTILINE):
        chapter = strip_markdown(part.translate(QUOTES))
        if len(chapter) > 300:
            yield chapter


def read_books(folder: Path) -> list[str]:
    """The Markdown books of a folder, from files and from archives, in the order of their names."""
    books = {path.name: path.read_text("utf-8") for path in folder.glob("*.md")}
    for archive in sorted(folder.glob("*.tar.gz")):
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                data = tar.extractfile(member) if member.name.endswith(".md") else None
                if data is not None:
                    books[Path(member.name).name] = data.read().decode("utf-8")
    return [chapter for name in sorted(books) for chapter in book_chapters(books[name])]


def read_stories(folder: Path) -> list[str]:
    """The stories of a folder's text files, each once; a last story without a separator is cut short and left out."""
    stories: list[str] = []
    for path in sorted(folder.glob("*.txt")):
        parts = path.read_text("utf-8").translate(QUOTES).split(END)[:-1]
        stories += ["\n".join(line.strip() for line in part.splitlines() if line.strip()) for part in parts]
    return list(dict.fromkeys(story for story in stories if len(story) > 50))


def is_held_out(story: str) -> bool:
    return hashlib.sha256(story.encode()).digest()[0] % 20 == 0


def simplest(chapters: list[str], stories: list[str], size: int) -> list[str]:
    """The chapters with the fewest words that the stories lack, up to `size` characters, in their own order."""
    counts = Counter(word for story in stories for word in re.findall(r"[a-z]+", story.lower()))
    known = {word for word, count in counts.items() if count >= 2}

    def strangeness(chapter: str) -> float:
        words = re.findall(r"[a-z]+", chapter.lower())
        return sum(word not in known for word in words) / max(1, len(words))

    chosen, total = set(), 0
    for chapter in sorted(chapters, key=strangeness):
        total += len(chapter)
        if total > size:
            break
        chosen.add(chapter)
    return [chapter for chapter in chapters if chapter in chosen]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with GPT-2's splitting; END has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Stream:
    """Documents in a row, END before each; windows start anywhere or, as often, where a document starts."""

    def __init__(self, tokenizer: Tokenizer, documents: list[str]) -> None:
        ids: list[int] = []
        starts: list[int] = []
        for encoding in tokenizer.encode_batch(documents):
            starts.append(len(ids))
            ids += [0, *encoding.ids]
        self.ids = torch.tensor([*ids, 0], dtype=torch.int64)
        self.starts = torch.tensor(starts, dtype=torch.int64)

    def windows(self, rows: int, length: int, rng: torch.Generator) -> Tensor:
        last = len(self.ids) - length
        anywhere = torch.randint(last, (rows,), generator=rng)
        documents = self.starts[torch.randint(len(self.starts), (rows,), generator=rng)].clamp(max=last)
        at_start = torch.rand(rows, generator=rng) < 0.5
        first = torch.where(at_start, documents, anywhere)
        return self.ids[first[:, None] + torch.arange(length)]


@dataclass
class Corpus:
    tokenizer: Tokenizer
    stories: Stream
    books: Stream
    held_out: list[list[int]] = field(default_factory=list)

    def batch(self, tokens: int, length: int, story_share: float, rng: torch.Generator) -> Tensor:
        rows = tokens // length
        stories = int((torch.rand(rows, generator=rng) < story_share).sum())
        parts = [self.stories.windows(stories, length + 1, rng), self.books.windows(rows - stories, length + 1, rng)]
        return torch.cat(parts)[torch.randperm(rows, generator=rng)]


def load_corpus(text: Path, out: Path, vocab_size: int, book_size: int) -> Corpus:
    """Read, split and encode the text; the tokenizer is trained once and kept in `out` for later resumes."""
    everything = read_stories(text)
    stories = [story for story in everything if not is_held_out(story)]
    held_out = [story for story in everything if is_held_out(story)]
    books = simplest(read_books(text), stories, book_size)
    (out / "heldout.txt").write_text("".join(f"{story}\n{END}\n" for story in held_out), "utf-8")
    saved = out / "tokenizer.json"
    if not saved.exists():
        sample = "".join(books)[: sum(map(len, stories)) // 2]
        train_tokenizer([*stories, *sample.splitlines()], vocab_size).save(str(saved))
    tokenizer = Tokenizer.from_file(str(saved))
    tested = [[0, *encoding.ids, 0] for encoding in tokenizer.encode_batch(held_out)]
    return Corpus(tokenizer, Stream(tokenizer, stories), Stream(tokenizer, books), tested)


# --------------------------------------------------------------------------------------------------------------- model


class Permute(torch.autograd.Function):
    """x[order], where `order` is a permutation: its gradient is a gather too, faster than the general scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


def drop(x: Tensor, rate: float, rng: torch.Generator | None) -> Tensor:
    """Dropout with one random byte a value, faster on a CPU than torch's own; none without a generator."""
    if rng is None or rate == 0:
        return x
    words = torch.empty(-(-x.numel() // 7), dtype=torch.int64).random_(generator=rng)
    keep = round(256 * (1 - rate))
    mask = words.view(torch.uint8).view(-1, 8)[:, :7].reshape(-1)[: x.numel()] < keep  # the top byte lacks a bit
    return x * (mask.view_as(x) * (256 / keep))


def normal(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


class Layer(nn.Module):
    """Attention with grouped keys, then the experts; weights lie as transformers' [out][in]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        out_std = 0.02 / math.sqrt(2 * c.num_hidden_layers)
        heads, groups = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.norm1 = nn.Parameter(torch.ones(c.hidden_size))
        self.norm2 = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = normal(heads + 2 * groups, c.hidden_size, std=0.04)
        self.o = normal(c.hidden_size, heads, std=out_std)
        self.gate = normal(c.num_local_experts, c.hidden_size, std=0.02)
        self.w13 = normal(c.num_local_experts, 2 * c.intermediate_size, c.hidden_size, std=0.04)
        self.w2 = normal(c.num_local_experts, c.hidden_size, c.intermediate_size, std=2 * out_std)

    def matrices(self) -> list[tuple[nn.Parameter, bool]]:
        """The matrices, and of each whether it writes to the residual stream."""
        return [(self.qkv, False), (self.o, True), (self.w13, False), (self.w2, True)]

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        c, (rows, length, _) = self.c, x.shape
        heads, groups = c.num_attention_heads, c.num_key_value_heads
        qkv = functional.linear(x, self.qkv).view(rows, length, heads + 2 * groups, c.head_dim).transpose(1, 2)
        qk, v = qkv[:, : heads + groups], qkv[:, heads + groups :]
        left, right = qk.chunk(2, dim=-1)
        qk = qk * rope[0][:length] + torch.cat((-right, left), dim=-1) * rope[1][:length]
        q, k = qk[:, :heads], qk[:, heads:]
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.linear(y.transpose(1, 2).reshape(rows, length, -1), self.o)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and numbers of the chosen experts, and the balancing loss (1 when all are used alike)."""
        c = self.c
        probabilities = functional.linear(x, self.gate).softmax(dim=-1)
        weights, experts = probabilities.topk(c.num_experts_per_tok, dim=-1)
        counts = torch.bincount(experts.flatten(), minlength=c.num_local_experts)
        balance = (counts / experts.numel() * probabilities.mean(0)).sum() * c.num_local_experts
        return weights / weights.sum(-1, keepdim=True), experts, balance

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sort the tokens by expert, run each expert on its own, put the results back and add them up."""
        top = self.c.num_experts_per_tok
        weights, experts, balance = self.route(x)
        order = experts.flatten().argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = torch.bincount(experts.flatten(), minlength=self.c.num_local_experts).tolist()
        parts = Permute.apply(x.repeat_interleave(top, dim=0), order, inverse).split(counts)
        results = []
        for part, w13, w2 in zip(parts, self.w13.unbind(), self.w2.unbind(), strict=True):
            gate, up = functional.linear(part, w13).chunk(2, dim=-1)
            results.append(functional.linear(functional.silu(gate) * up, w2))
        y = Permute.apply(torch.cat(results), inverse, order).view(len(x), top, -1)
        return (y * weights[..., None]).sum(1), balance

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], dropout: float, rng: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        c = self.c
        y = self.attend(functional.rms_norm(x, (c.hidden_size,), self.norm1, c.rms_norm_eps), rope)
        x = x + drop(y, dropout, rng)
        y, balance = self.mix(functional.rms_norm(x, (c.hidden_size,), self.norm2, c.rms_norm_eps).flatten(0, 1))
        return x + drop(y.view_as(x), dropout, rng), balance


class Model(nn.Module):
    """Mixtral with tied embeddings."""

    def __init__(self, c: Config, dropout: float = 0.0) -> None:
        super().__init__()
        self.c, self.dropout = c, dropout
        self.embed = normal(c.vocab_size, c.hidden_size, std=0.02)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        speeds = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.outer(torch.arange(c.max_position_embeddings), speeds).repeat(1, 2)
        self.rope = (angles.cos(), angles.sin())

    def forward(self, ids: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Logits and the mean balancing loss of the layers; a generator turns dropout on."""
        x = drop(functional.embedding(ids, self.embed), self.dropout, rng)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, self.rope, self.dropout, rng)
            balances.append(balance)
        x = functional.rms_norm(x, (self.c.hidden_size,), self.norm, self.c.rms_norm_eps)
        return functional.linear(x, self.embed), torch.stack(balances).mean()


def hugging_face_names(model: Model) -> dict[str, Tensor]:
    """The weights under the names of Mixtral's files; views where possible."""
    c, tensors = model.c, {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    sizes = [c.num_attention_heads * c.head_dim] + 2 * [c.num_key_value_heads * c.head_dim]
    for number, layer in enumerate(model.layers):
        name = f"model.layers.{number}"
        tensors[f"{name}.input_layernorm.weight"] = layer.norm1
        tensors[f"{name}.post_attention_layernorm.weight"] = layer.norm2
        for letter, part in zip("qkv", layer.qkv.split(sizes), strict=True):
            tensors[f"{name}.self_attn.{letter}_proj.weight"] = part
        tensors[f"{name}.self_attn.o_proj.weight"] = layer.o
        tensors[f"{name}.block_sparse_moe.gate.weight"] = layer.gate
        for expert in range(c.num_local_experts):
            w1, w3 = layer.w13[expert].chunk(2)
            for letter, part in zip("123", (w1, layer.w2[expert], w3), strict=True):
                tensors[f"{name}.block_sparse_moe.experts.{expert}.w{letter}.weight"] = part
    return tensors


# ------------------------------------------------------------------------------------------------- judging and sampling


@torch.no_grad()
def perplexity(model: Model, documents: list[list[int]]) -> float:
    """Over all tokens of the documents, END included, each document on its own and cut at the longest context."""
    loss, count = 0.0, 0
    documents = sorted((ids[: model.c.max_position_embeddings + 1] for ids in documents), key=len)
    for first in range(0, len(documents), 16):
        group = documents[first : first + 16]
        width = max(map(len, group))
        rows = torch.tensor([ids + [-100] * (width - len(ids)) for ids in group])
        logits, _ = model(rows[:, :-1].clamp(min=0))
        loss += functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        ).item()
        count += sum(len(ids) - 1 for ids in group)
    return math.exp(loss / count)


@torch.no_grad()
def sample(model: Model, tokenizer: Tokenizer, prompt: str, temperature: float, seed: int, tokens: int = 200) -> str:
    """Continue `prompt`; temperature 0 takes the likeliest token."""
    rng = torch.Generator().manual_seed(seed)
    ids = [0, *tokenizer.encode(prompt).ids]
    for _ in range(tokens):
        logits = model(torch.tensor([ids]))[0][0, -1]
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            chosen = int((logits / temperature).softmax(0).multinomial(1, generator=rng))
        if chosen == 0:
            break
        ids.append(chosen)
    return tokenizer.decode(ids[1:])


# ------------------------------------------------------------------------------------------------------------ training


def orthogonalise(x: Tensor) -> Tensor:
    """The nearest matrices with equal singular values, roughly: five steps of Muon's Newton-Schulz iteration."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


class Muon:
    """Momentum whose updates are made orthogonal, for the layers' matrices: learns more from each token than AdamW.

    All matrices are cut into blocks of one shape [intermediate][hidden] (those that write to the residual stream after
    transposition), so that one batch of products serves them all. Updates have the size that AdamW's usually have.
    """

    def __init__(self, model: Model, decay: float) -> None:
        self.shape = (-1, model.c.intermediate_size, model.c.hidden_size)
        self.parameters = [(p, turned) for layer in model.layers for p, turned in layer.matrices()]
        self.momentum = torch.zeros_like(torch.cat([self.blocks(p, turned) for p, turned in self.parameters]))
        self.decay = decay

    def blocks(self, matrix: Tensor, turned: bool) -> Tensor:
        return (matrix.mT if turned else matrix).detach().reshape(self.shape)

    @torch.no_grad()
    def step(self, lr: float, workers: ThreadPoolExecutor) -> None:
        grads = torch.cat([self.blocks(p.grad, turned) for p, turned in self.parameters if p.grad is not None])
        self.momentum.lerp_(grads, 0.05)
        updates = torch.cat(list(workers.map(orthogonalise, grads.lerp_(self.momentum, 0.95).chunk(8))))
        sizes = [p.numel() // (self.shape[1] * self.shape[2]) for p, _ in self.parameters]
        for (p, turned), update in zip(self.parameters, updates.split(sizes), strict=True):
            view = p.mT if turned else p
            view.mul_(1 - lr * self.decay).sub_(update.reshape(view.shape), alpha=0.2 * math.sqrt(self.shape[2]) * lr)


class Trainer:
    """One run: its models, its optimiser, its clock and its files."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        self.workers = ThreadPoolExecutor(args.threads, initializer=torch.set_num_threads, initargs=(1,))
        torch.manual_seed(args.seed)
        self.rng = torch.Generator().manual_seed(args.seed)
        self.corpus = load_corpus(args.text, self.out, Config.vocab_size, args.book_bytes)
        self.config = Config()
        self.model = Model(self.config, args.dropout)
        self.average = Model(self.config)
        self.average.load_state_dict(self.model.state_dict())
        self.muon = Muon(self.model, args.weight_decay)
        self.optimizer = self.make_optimizer()
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        if args.resume and (self.out / "state.pt").exists():
            self.load_state()

    def make_optimizer(self) -> torch.optim.AdamW:
        """For what Muon leaves: embeddings, routers and norms."""
        taken = {id(p) for p, _ in self.muon.parameters}
        rest = [p for p in self.model.parameters() if id(p) not in taken]
        return torch.optim.AdamW(rest, lr=self.args.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def log(self, message: str) -> None:
        line = f"[{self.elapsed / 60:6.1f} min] {message}"
        print(line, flush=True)
        with (self.out / "train.log").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def save_state(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "momentum": self.muon.momentum,
            "rng": self.rng.get_state(),
            "counters": [self.step, self.tokens, self.elapsed],
        }
        torch.save(state, self.out / "state.tmp")
        (self.out / "state.tmp").replace(self.out / "state.pt")

    def load_state(self) -> None:
        state = torch.load(self.out / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.muon.momentum.copy_(state["momentum"])
        self.rng.set_state(state["rng"])
        self.step, self.tokens, self.elapsed = state["counters"]

    def save_checkpoint(self) -> None:
        """The averaged weights as a complete folder, written aside and put in place at once."""
        folder, fresh, old = (self.out / name for name in ("ckpt", "ckpt.new", "ckpt.old"))
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        tensors = {name: t.detach().clone().contiguous() for name, t in hugging_face_names(self.average).items()}
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        self.corpus.tokenizer.save(str(fresh / "tokenizer.json"))
        special = {"bos_token": END, "eos_token": END, "unk_token": END}
        describe = {
            "config.json": self.config.to_json(),
            "generation_config.json": {"bos_token_id": 0, "eos_token_id": 0, "do_sample": True, "temperature": 0.7},
            "tokenizer_config.json": special
            | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": self.config.max_position_embeddings}
            | {"clean_up_tokenization_spaces": False, "add_bos_token": False},
        }
        for name, content in describe.items():
            (fresh / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def progress(self) -> float:
        return min(1.0, self.elapsed / (60 * self.args.minutes))

    def schedule(self) -> float:
        """Warm-up by steps, then a cosine by the clock; a part of the highest learning rate."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress()))
        return min(1.0, (self.step + 1) / self.args.warmup) * (0.02 + 0.98 * cosine)

    def train_step(self) -> list[float]:
        first, last = self.args.story_share
        length = self.config.max_position_embeddings if self.step % 4 == 3 else self.args.length
        share = first + (last - first) * self.progress()
        batch = self.corpus.batch(self.args.batch_tokens, length, share, self.rng)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * self.schedule()
        parts = batch.chunk(self.args.parts)
        seeds = torch.randint(2**62, (len(parts),), generator=self.rng).tolist()
        results = list(self.workers.map(self.gradients, parts, seeds))
        for parameter, *grads in zip(self.model.parameters(), *(grads for _, grads in results), strict=True):
            parameter.grad = torch.stack(grads).mean(0)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.muon.step(self.args.muon_lr * self.schedule(), self.workers)
        self.update_average()
        self.step += 1
        self.tokens += batch[:, 1:].numel()
        return torch.tensor([losses for losses, _ in results]).mean(0).tolist()

    def gradients(self, rows: Tensor, seed: int) -> tuple[list[float], tuple[Tensor, ...]]:
        """Losses and gradients of a part of a batch, on one thread.

        Threads that meet once a step, not in every operation, lose little when the machine has other work.
        """
        logits, balance = self.model(rows[:, :-1], torch.Generator().manual_seed(seed))
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        total = loss + self.args.balance * balance
        return [loss.item(), balance.item()], torch.autograd.grad(total, tuple(self.model.parameters()))

    @torch.no_grad()
    def update_average(self) -> None:
        decay = min(self.args.ema, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)

    def checkpoint(self) -> None:
        self.save_state()
        self.save_checkpoint()
        score = perplexity(self.average, self.corpus.held_out)
        self.log(f"checkpoint: step {self.step}, {self.tokens / 1e6:.2f} M tokens, held-out perplexity {score:.3f}")
        self.log("greedy:  " + repr(sample(self.average, self.corpus.tokenizer, PROMPT, 0.0, 0, 60)))
        self.log("T = 0.7: " + repr(sample(self.average, self.corpus.tokenizer, PROMPT, 0.7, self.step, 60)))

    def run(self) -> None:
        parameters = sum(p.numel() for p in self.model.parameters())
        self.log(
            f"{parameters} parameters, {len(self.corpus.stories.ids)} story tokens, {len(self.corpus.books.ids)} book "
            f"tokens, {sum(map(len, self.corpus.held_out))} held-out tokens"
        )
        begun, due = self.elapsed, self.elapsed + 60 * min(2.0, self.args.checkpoint_minutes)
        started, recent = self.elapsed, []
        while self.progress() < 1:
            before = time.monotonic()
            recent.append(self.train_step())
            if self.elapsed >= due:
                self.checkpoint()
                due = self.elapsed + 60 * self.args.checkpoint_minutes
            self.elapsed += time.monotonic() - before
            if self.step % 25 == 0:
                self.log_steps(recent, self.elapsed - started)
                started, recent = self.elapsed, []
        self.checkpoint()
        self.log(f"done after {(self.elapsed - begun) / 60:.1f} min")
        self.report()

    def log_steps(self, recent: list[list[float]], seconds: float) -> None:
        loss, balance = torch.tensor(recent).mean(0).tolist()
        speed = len(recent) * self.args.batch_tokens / seconds
        rate = self.args.lr * self.schedule()
        self.log(f"step {self.step}: loss {loss:.4f}, balance {balance:.3f}, lr {rate:.2e}, {speed:.0f} tokens/s")

    def report(self) -> None:
        """Samples and figures for a reader to judge the model by."""
        lines = [
            f"parameters {sum(p.numel() for p in self.average.parameters())}",
            f"steps {self.step}, tokens {self.tokens}, minutes {self.elapsed / 60:.1f}",
            f"held-out perplexity (f32) {perplexity(self.average, self.corpus.held_out):.4f}",
        ]
        for prompt in SAMPLE_PROMPTS:
            for temperature, seed in ((0.0, 0), (0.7, 1), (0.7, 2)):
                story = sample(self.average, self.corpus.tokenizer, prompt, temperature, seed, 220)
                lines.append(f"\n--- temperature {temperature}, seed {seed}\n{story}")
        (self.out / "report.txt").write_text("\n".join(lines) + "\n", "utf-8")


def verify(folder: Path) -> None:
    """Check that transformers, reading the saved folder, computes what this program computes from the same file."""
    from transformers import AutoTokenizer, MixtralForCausalLM

    reference = MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = Model(Config())
    saved = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in hugging_face_names(ours).items():
            tensor.copy_(saved[name])
        ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(PROMPT + ", there was a little dog.")["input_ids"]])
        difference = (reference(ids).logits - ours(ids)[0]).abs().max().item()
    print(f"{ids.numel()} tokens, largest difference of logits {difference:.2e}")
    if difference > 1e-3:
        raise SystemExit("the model differs from MixtralForCausalLM")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="folder with the training text")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints, log and report")
    parser.add_argument("--minutes", type=float, default=100, help="length of the whole run, resumes included")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt if there is one")
    parser.add_argument("--verify", action="store_true", help="compare OUT/ckpt with transformers, do not train")
    parser.add_argument("--checkpoint-minutes", type=float, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3, help="of embeddings, routers and norms")
    parser.add_argument("--muon-lr", type=float, default=4e-3, help="of the layers' matrices")
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--parts", type=int, default=4, help="of a batch, shared out between the threads")
    parser.add_argument("--length", type=int, default=256, help="of three batches in four; the fourth has the full 512")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--ema", type=float, default=0.998, help="decay of the moving average, a step")
    parser.add_argument("--balance", type=float, default=0.02, help="weight of the loss that keeps all experts in use")
    parser.add_argument("--book-bytes", type=int, default=10_000_000, help="how much of the books to use")
    share = {"metavar": ("FIRST", "LAST"), "help": "part of the batches that are stories, at the start and at the end"}
    parser.add_argument("--story-share", type=float, nargs=2, default=(0.3, 0.8), **share)
    args = parser.parse_args()
    if args.text is None and not args.verify:
        parser.error("--text is needed to train")
    return args


def main() -> None:
    args = parse_arguments()
    if args.verify:
        verify(args.out / "ckpt")
    else:
        Trainer(args).run()


if __name__ == "__main__":
    main()
