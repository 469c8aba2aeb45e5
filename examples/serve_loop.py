"""Serves random requests over one pool of KDA states, as an inference engine does, and compares every state with an exact one.

    python examples/serve_loop.py                                  # the best backend of this machine
    python examples/serve_loop.py --requests 200 --slots 64 --out runs/more

Each step of the engine admits requests, prefills pieces of their prompts under a budget of tokens, and continues all running requests:
some by one token, some by drafts, of which it keeps the right ones. Prefixes of prompts are cached in slots of the same pool. The least
recently used ones are evicted when slots are needed. On a GPU the calls of `fused_recurrent_kda` are captured in two CUDA graphs, which
are replayed with other slots.

The model is one layer of random projections of random embeddings, and all tokens are random: only states and slots matter here. After
every call an oracle computes from the tokens alone which state each slot must hold, token by token, in fp64, on the CPU. The exit status
is 1 if the error of a state exceeds the limit of the contract (docs/contract.md, "Accuracy").

The folder `--out` gets run.json (options, counts, latencies) and latency.png. The picture needs matplotlib; `--no-picture` leaves it out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core import chunk_kda, explain, fused_recurrent_kda
from kda_core.contract import CHECKPOINT_SPACING
from kda_core.errors import KdaError
from kda_core.registry import Call, record_calls
from kda_core.testing import error, token_oracle, tolerance

Tokens = tuple[int, ...]
VOCABULARY, WIDTH = 256, 64  # tokens; elements of an embedding
PREFIXES, SHARED = 4, 0.75  # prefixes that prompts share; share of the prompts that start with one
DRAFTED, CORRECT = 0.6, 0.7  # share of the steps with drafts for a request; share of the right drafts
NO_SLOT, FIRST_SLOT = 0, 1  # padded rows name slot 0, as in vLLM
KINDS = {"prefill": "#0072b2", "decode": "#009e73", "verify": "#d55e00"}  # of calls, and their colours


class Options(NamedTuple):
    """What determines a run, apart from the device and the backend."""

    requests: int = 48
    batch: int = 6
    slots: int = 32
    budget: int = 256
    drafts: int = 2
    heads: int = 2
    head_dim: int = 128
    seed: int = 0


HELP = {
    "requests": "requests to serve",
    "batch": "running requests at most",
    "slots": "slots of the pool, with the one that padding names",
    "budget": "tokens that a step prefills at most",
    "drafts": "drafts of a request in a verify step",
    "heads": "heads of the layer",
    "head_dim": "K = V of a head; the GPU backends serve 128",
    "seed": "of the model and the requests",
}


class WrongStateError(Exception):
    """A slot does not hold the state that it must hold."""


# ---- the model and its requests


class Model:
    """The inputs of a KDA layer. All tokens are projected once, on the CPU, so that a token has the same bits in every call."""

    def __init__(self, options: Options, device: torch.device | str) -> None:
        rng = torch.Generator().manual_seed(options.seed)
        embedding, head = torch.randn(VOCABULARY, WIDTH, generator=rng), (options.heads, options.head_dim)

        def projected(*size: int) -> Tensor:
            weight = torch.randn(WIDTH, math.prod(size), generator=rng) / WIDTH**0.5
            return (embedding @ weight).view(VOCABULARY, *size).bfloat16().to(device)

        self.tables = {name: projected(*head) for name in ("q", "k", "v", "g")}
        self.tables["beta"] = projected(options.heads)
        dt_bias = torch.rand(head, generator=rng) * 4 - 8  # states last for 10 to 600 tokens
        self.options: dict[str, Any] = {
            "dt_bias": dt_bias.to(device),
            "lower_bound": -5.0,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
            "state_v_first": True,
        }

    def arguments(self, ids: Tensor) -> dict[str, Any]:
        """Returns the arguments of a call for tokens `ids` [B, T]."""
        return {name: table[ids] for name, table in self.tables.items()} | self.options

    def packed(self, sequences: Sequence[Tokens]) -> dict[str, Any]:
        """Returns the arguments of a call for sequences that are packed along T."""
        device = self.tables["q"].device
        ids = torch.tensor([[token for tokens in sequences for token in tokens]], device=device)
        ends = torch.tensor([0, *map(len, sequences)]).cumsum(0)
        return self.arguments(ids) | {"cu_seqlens": ends.to(device), "cu_seqlens_cpu": ends}


@dataclass(eq=False)
class Request:
    """A prompt and its answer. The answer is drawn beforehand; a real engine samples it from o.

    Attributes:
        tokens: of the prompt and the answer. prompt: how many of them are the prompt. arrival: the step in which it comes.
        done: how many tokens have been processed, in so many `pieces` of the prompt.
        row: its slots. column: the place of its current state in `row`.
        held: the tokens that led to the state in each slot of `row` that was written.
        entry: the cached prefix from which the next piece of the prompt starts, or None.
    """

    tokens: Tokens
    prompt: int
    arrival: int
    done: int = 0
    pieces: int = 0
    row: list[int] = field(default_factory=list)
    column: int = 0
    held: dict[int, Tokens] = field(default_factory=dict)
    entry: Entry | None = None


def draw_requests(options: Options) -> list[Request]:
    """Returns random requests in the order of their arrival."""
    rng = random.Random(options.seed)
    draw = lambda least, most: tuple(rng.choices(range(VOCABULARY), k=rng.randint(least, most)))
    prefixes, arrival, found = [draw(64, 320) for _ in range(PREFIXES)], 0, []
    for _ in range(options.requests):
        prompt = (rng.choice(prefixes) if rng.random() < SHARED else ()) + draw(20, 150)
        found.append(Request(prompt + draw(4, 40), len(prompt), arrival))
        arrival += rng.randint(0, 4)
    return found


# ---- the slots


class Pool:
    """The states, and which slots are free. A free slot holds NaNs, so that the check notices a call that reads it."""

    def __init__(self, options: Options, device: torch.device) -> None:
        D = options.head_dim
        self.states = torch.full((options.slots, options.heads, D, D), torch.nan, device=device)
        self.free = list(range(FIRST_SLOT, options.slots))

    def give(self, slot: int) -> None:
        """Takes a slot back."""
        self.states[slot] = torch.nan
        self.free.append(slot)


@dataclass(eq=False)
class Entry:
    """A cached prefix: its tokens, the slot of their state, and how many running requests are going to read it."""

    tokens: Tokens
    slot: int
    references: int = 0


class PrefixCache:
    """Cached prefixes, whose lengths are multiples of `CHECKPOINT_SPACING`, the least recently used one first."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.evictions = pool, 0
        self.entries: OrderedDict[Tokens, Entry] = OrderedDict()

    def find(self, tokens: Tokens) -> Entry | None:
        """Returns the longest cached prefix of these tokens."""
        for length in range(len(tokens) // CHECKPOINT_SPACING * CHECKPOINT_SPACING, 0, -CHECKPOINT_SPACING):
            if (entry := self.entries.get(tokens[:length])) is not None:
                self.entries.move_to_end(entry.tokens)
                return entry
        return None

    def insert(self, tokens: Tokens, slot: int) -> Entry:
        """Returns the entry of a prefix whose state was written to `slot`. If there is one already, the slot is given back."""
        if tokens in self.entries:
            self.pool.give(slot)
        return self.entries.setdefault(tokens, Entry(tokens, slot))

    def take(self, count: int) -> list[int] | None:
        """Returns slots of the pool, and evicts prefixes without references if too few are free. None if too few are left."""
        evictable = [entry for entry in self.entries.values() if not entry.references]
        missing = max(0, count - len(self.pool.free))
        if missing > len(evictable):
            return None
        for entry in evictable[:missing]:
            self.pool.give(self.entries.pop(entry.tokens).slot)
            self.evictions += 1
        return [self.pool.free.pop() for _ in range(count)]


# ---- the exact states


class Oracle:
    """Computes states from tokens alone. It knows nothing of slots, pieces, prefixes and drafts.

    Attributes:
        exact: the fp64 state [H, V, K] after these tokens.
        limit: of the error of a state. The contract grants it to a backend for one call with all requests.
        worst: the largest error. compared: the number of compared states.
    """

    def __init__(self, options: Options, requests: Sequence[Request]) -> None:
        self.model = Model(options, "cpu")
        D = options.head_dim
        self.exact: dict[Tokens, Tensor] = {(): torch.zeros(options.heads, D, D, dtype=torch.float64)}
        self.limit = tolerance(self.model.packed([request.tokens for request in requests]))[1]
        self.worst, self.compared = 0.0, 0

    def check(self, pool: Pool, contents: dict[int, Tokens]) -> None:
        """Compares the state in each slot of `contents` with the exact one after these tokens.

        Raises:
            WrongStateError: an error exceeds the limit, or a free slot was written.
        """
        self.extend(list(dict.fromkeys(contents.values())))
        states = pool.states.cpu()
        for slot, tokens in contents.items():
            off = error(states[slot].unsqueeze(0), self.exact[tokens].unsqueeze(0), state=True)
            if off > self.limit:
                what = f"slot {slot}: the state after {len(tokens)} tokens"
                raise WrongStateError(f"{what} has the error {off:.2e}, the limit is {self.limit:.2e}")
            self.worst, self.compared = max(self.worst, off), self.compared + 1
        if written := [slot for slot in pool.free if not states[slot].isnan().all()]:
            raise WrongStateError(f"slot {written[0]} is free, but a call wrote to it")

    def extend(self, wanted: list[Tokens]) -> None:
        """Computes unknown states from known ones after fewer tokens, and forgets those that are no longer wanted."""
        if new := [tokens for tokens in wanted if tokens not in self.exact]:
            known = [max((t for t in self.exact if tokens[: len(t)] == t), key=len) for tokens in new]
            x = self.model.packed([tokens[len(start) :] for tokens, start in zip(new, known)])
            initial = torch.stack([self.exact[start] for start in known])
            self.exact |= dict(zip(new, token_oracle(**x, initial_state=initial)[1]))
        self.exact = {tokens: self.exact[tokens] for tokens in [(), *wanted]}


# ---- the engine


def captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Returns what repeats a call with the same tensors: on a GPU the replay of a CUDA graph, elsewhere the call."""
    if device.type != "cuda":
        return call
    call()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class TokenStep:
    """A call of `fused_recurrent_kda` for a padded batch, always with the same tensors, as a CUDA graph needs it."""

    def __init__(self, model: Model, pool: Pool, batch: int, width: int, backend: str | None) -> None:
        """`width` is the number of tokens of each sequence. With more than one, each has a slot for the state after it."""
        self.model, self.pool, self.backend = model, pool, backend
        device = pool.states.device
        self.ids = torch.zeros(batch, width, dtype=torch.int64, device=device)
        self.slots = torch.full((batch, width), NO_SLOT, dtype=torch.int32, device=device)
        self.accepted = torch.ones(batch, dtype=torch.int32, device=device)
        self.run = captured(self.call, device)  # all rows are padding

    def call(self) -> None:
        several = self.ids.shape[1] > 1
        fused_recurrent_kda(
            **self.model.arguments(self.ids),
            initial_state=self.pool.states,
            ssm_state_indices=self.slots if several else self.slots[:, 0],
            num_accepted_tokens=self.accepted if several else None,
            inplace_final_state=True,
            first_slot=FIRST_SLOT,
            backend=self.backend,
        )

    def __call__(self, rows: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> None:
        """Runs it for rows (tokens, slots, number of accepted tokens)."""
        batch, width = self.ids.shape
        padding = [([0] * width, [NO_SLOT] * width, 1)] * (batch - len(rows))
        for target, values in zip((self.ids, self.slots, self.accepted), zip(*rows, *padding)):
            target.copy_(torch.tensor(values))
        self.run()


@dataclass(eq=False)
class Piece:
    """A piece of a prompt: its tokens up to `end`, the slot of the state there, and (position, slot) of checkpoints before."""

    request: Request
    end: int
    write: int
    checkpoints: list[tuple[int, int]] = field(default_factory=list)


class Engine:
    """Continuous batching over one pool.

    Attributes:
        counts: of what happened. latencies: (kind of call, time of its end, duration), in seconds without the checks.
        in_call: whether the backend stores checkpoints inside of a call. If not, a piece ends at every checkpoint.
    """

    def __init__(self, options: Options, device: torch.device, backend: str | None) -> None:
        self.options, self.device, self.backend = options, device, backend
        self.rng, self.now, self.busy = random.Random(options.seed), 0, 0.0
        self.waiting, self.running = draw_requests(options), list[Request]()
        self.model, self.pool = Model(options, device), Pool(options, device)
        self.cache, self.oracle = PrefixCache(self.pool), Oracle(options, self.waiting)
        self.counts: Counter[str] = Counter(prompt_tokens=sum(r.prompt for r in self.waiting))
        self.latencies: list[tuple[str, float, float]] = []
        self.width = options.drafts + 1
        self.decode = TokenStep(self.model, self.pool, options.batch, 1, backend)
        self.verify = TokenStep(self.model, self.pool, options.batch, self.width, backend)
        size, self.in_call = CHECKPOINT_SPACING, True
        probe = Piece(Request((0,) * size, size, 0, row=[NO_SLOT]), size, NO_SLOT, [(size, NO_SLOT)])
        self.in_call = explain(**self.prefill_arguments([probe])).error is None

    def step(self) -> None:
        """Makes up to three calls, and checks all states after each.

        Raises:
            WrongStateError: see `Oracle.check`.
        """
        self.admit()
        if pieces := self.plan_pieces():
            self.prefill(pieces)
        ready = [r for r in self.running if r.done >= r.prompt]
        enough = [r for r in ready if len(r.tokens) - r.done >= self.width]
        drafted = [r for r in enough if self.rng.random() < DRAFTED]
        if plain := [r for r in ready if r not in drafted]:
            self.decode_tokens(plain)
        if drafted:
            self.verify_drafts(drafted)
        for request in [r for r in self.running if r.done == len(r.tokens)]:
            self.running.remove(request)
            for slot in request.row:
                self.pool.give(slot)
            self.counts["finished"] += 1
        self.now += 1

    def timed(self, kind: str, call: Callable[[], Any]) -> None:
        """Makes a call, and records its duration until the device is done."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds = time.perf_counter() - start
        self.busy += seconds
        self.latencies.append((kind, self.busy, seconds))

    def check(self) -> None:
        """Compares all states of the pool with the exact ones."""
        cached = {entry.slot: entry.tokens for entry in self.cache.entries.values()}
        held = {slot: tokens for request in self.running for slot, tokens in request.held.items()}
        self.oracle.check(self.pool, cached | held)

    # ---- prompts

    def admit(self) -> None:
        """Starts requests that have come, from the longest cached prefix, as long as there are slots."""
        while self.waiting and self.waiting[0].arrival <= self.now and len(self.running) < self.options.batch:
            request = self.waiting[0]
            entry = self.cache.find(request.tokens[: request.prompt - 1])
            if entry is not None:
                entry.references += 1  # before `take`, which must not evict it
            row = self.cache.take(self.width)
            if row is None:
                if entry is not None:
                    entry.references -= 1
                return
            request.row, request.entry = row, entry
            if entry is not None:
                request.done = len(entry.tokens)
                self.counts["prefix_hits"] += 1
                self.counts["prefix_tokens"] += request.done
            self.running.append(self.waiting.pop(0))

    def plan_pieces(self) -> list[Piece]:
        """Returns pieces within the budget. All but the last of a prompt end at a multiple of `CHECKPOINT_SPACING`."""
        pieces, budget, size = [], self.options.budget, CHECKPOINT_SPACING
        for request in self.running:
            left = request.prompt - request.done
            end = request.done + (left if left <= budget else budget // size * size)
            if end <= request.done:
                continue
            piece = Piece(request, end, request.row[0])
            for position in range(request.done + size, min(end, request.prompt - 1) + 1, size):
                if request.tokens[:position] in self.cache.entries:
                    continue
                if (taken := self.cache.take(1)) is None:
                    break
                piece.checkpoints.append((position, taken[0]))
                if not self.in_call:  # the cache alone gets the state, and the next piece starts from there
                    piece.end, piece.write = position, taken[0]
                    break
            pieces.append(piece)
            budget -= piece.end - request.done
        return pieces

    def prefill_arguments(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Returns the arguments of the call for these pieces."""
        requests = [piece.request for piece in pieces]
        index = lambda values: torch.tensor(values, dtype=torch.int32, device=self.device)
        arguments = self.model.packed([p.request.tokens[p.request.done : p.end] for p in pieces]) | {
            "initial_state": self.pool.states,
            "ssm_state_indices": index([r.row[0] if r.entry is None else r.entry.slot for r in requests]),
            "has_initial_state": index([r.done for r in requests]) > 0,
            "final_state_indices": index([piece.write for piece in pieces]),
            "first_slot": FIRST_SLOT,
            "output_final_state": True,
            "backend": self.backend,
        }
        if self.in_call:
            points = [(at - p.request.done, slot) for p in pieces for at, slot in p.checkpoints]
            arguments["checkpoint_cu"] = index([0, *accumulate(len(p.checkpoints) for p in pieces)])
            arguments["checkpoint_positions"] = index([at for at, _ in points])
            arguments["checkpoint_indices"] = index([slot for _, slot in points])
        return arguments

    def prefill(self, pieces: Sequence[Piece]) -> None:
        """Processes the pieces in one call, and puts their checkpoints into the cache."""
        arguments = self.prefill_arguments(pieces)
        self.timed("prefill", lambda: chunk_kda(**arguments))
        for piece in pieces:
            request = piece.request
            if request.entry is not None:
                request.entry.references -= 1
                request.entry = None
            request.done, request.pieces = piece.end, request.pieces + 1
            self.counts["chunked_prompts"] += request.pieces == 2
            for position, slot in piece.checkpoints:
                entry = self.cache.insert(request.tokens[:position], slot)
                if slot == piece.write:
                    entry.references, request.entry = entry.references + 1, entry
            if request.entry is None:
                request.held[piece.write] = request.tokens[: piece.end]
        self.check()

    # ---- answers

    def decode_tokens(self, requests: Sequence[Request]) -> None:
        """Continues requests by one token, in place."""
        rows = [([r.tokens[r.done]], [r.row[r.column]], 1) for r in requests]
        self.timed("decode", lambda: self.decode(rows))
        for request in requests:
            request.done += 1
            request.held[request.row[request.column]] = request.tokens[: request.done]
        self.counts["answer_tokens"] += len(requests)
        self.check()

    def verify_drafts(self, requests: Sequence[Request]) -> None:
        """Continues requests by the next token and drafts. The next call starts from the slot of the last right one, which rolls the
        others back: their states stay in their slots until they are overwritten."""
        drafts = [self.draft(request) for request in requests]
        rows = [(ids, r.row, r.column + 1) for r, ids in zip(requests, drafts)]
        self.timed("verify", lambda: self.verify(rows))
        for request, ids in zip(requests, drafts):
            before, right = request.tokens[: request.done], request.tokens[request.done :]
            request.held |= {slot: before + ids[: t + 1] for t, slot in enumerate(request.row)}
            accepted = next((t for t in range(self.width) if ids[t] != right[t]), self.width)
            request.done, request.column = request.done + accepted, accepted - 1
            self.counts["answer_tokens"] += accepted
            self.counts["accepted_drafts"] += accepted - 1
            self.counts["rejected_drafts"] += self.width - accepted
        self.check()

    def draft(self, request: Request) -> Tokens:
        """Returns the next token and drafts of those after it, of which some are wrong."""
        first, *right = request.tokens[request.done : request.done + self.width]
        shifts = [0 if self.rng.random() < CORRECT else self.rng.randrange(1, VOCABULARY) for _ in right]
        return (first, *((token + shift) % VOCABULARY for token, shift in zip(right, shifts)))


# ---- reports


def progress(engine: Engine, before: int) -> None:
    """Shows the state of a run: one line that changes in a terminal, otherwise a line for each tenth of the requests. `before` is the
    number of requests that had finished before the step."""
    done, total, width = engine.counts["finished"], engine.options.requests, 20
    bar = ("#" * (width * done // total)).ljust(width, ".")
    line = f"step {engine.now:>4} [{bar}] {done:>{len(str(total))}}/{total} requests, {len(engine.running)} running"
    line += f"  cached {len(engine.cache.entries)}, hits {engine.counts['prefix_hits']}"
    line += f", evicted {engine.cache.evictions}  error {engine.oracle.worst:.1e}"
    if sys.stdout.isatty():
        print(f"\r{line.ljust(110)}", end="\n" if done == total else "", flush=True)
    elif done * 10 // total > before * 10 // total:
        print(line, flush=True)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Returns percentiles in ms. The first call may compile kernels and is left out."""
    later = sorted(seconds[1:])
    return {f"p{p}": 1e3 * later[len(later) * p // 100] for p in (50, 90, 99) if later}


def record(engine: Engine, calls: Sequence[Call]) -> dict[str, Any]:
    """Returns run.json."""
    latencies = {kind: [s for k, _, s in engine.latencies if k == kind] for kind in KINDS}
    return {
        "options": engine.options._asdict(),
        "device": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU",
        "prefill": sorted({call.backend for call in calls if call.entry == "chunk_fwd"}),
        "decoding": sorted({call.backend for call in calls if call.entry == "recurrent_fwd"}),
        "checkpoints": "in a call" if engine.in_call else "at ends of pieces",
        "counts": {**engine.counts, "evictions": engine.cache.evictions, "compared": engine.oracle.compared},
        "error": engine.oracle.worst,
        "limit": engine.oracle.limit,
        "milliseconds": {kind: percentiles(seconds) for kind, seconds in latencies.items()},
        "latencies": engine.latencies,
    }


def draw(run: dict[str, Any], path: Path) -> None:
    """Writes the latencies over time as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for kind, color in KINDS.items():
        if points := [(at, 1e3 * seconds) for k, at, seconds in run["latencies"] if k == kind]:
            axes.plot(*zip(*points), ".", color=color, markersize=4, label=f"{kind}: {len(points)} calls")
    title = f"{run['options']['requests']} requests, {run['options']['slots']} slots: "
    title += f"{'+'.join(sorted({*run['prefill'], *run['decoding']}))} on {run['device']}"
    axes.set(title=title, xlabel="time in calls (s)", ylabel="latency of a call (ms)", yscale="log")
    axes.yaxis.set_major_formatter(LogFormatter())  # 6 and 20, not powers of ten
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=96)


def finish(run: dict[str, Any], folder: Path, picture: bool) -> None:
    """Writes run.json and latency.png, and prints the results."""
    n: Counter[str] = Counter(run["counts"])
    for entry in ("prefill", "decoding"):
        print(f"{entry:<10}served by {', '.join(run[entry])}")
    print(f"requests  {n['finished']}, {n['chunked_prompts']} of their prompts in several pieces")
    print(f"tokens    {n['prompt_tokens']:,} of prompts, {n['answer_tokens']:,} of answers")
    print(f"prefixes  {n['prefix_hits']} hits of {n['prefix_tokens']:,} tokens, stored {run['checkpoints']}")
    print(f"evictions {n['evictions']}")
    print(f"drafts    {n['accepted_drafts']} accepted, {n['rejected_drafts']} rolled back")
    for kind, found in run["milliseconds"].items():
        print(f"{kind:<10}" + ", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()))
    print(f"states    {n['compared']:,} compared, largest error {run['error']:.1e}, limit {run['limit']:.1e}")
    (folder / "run.json").write_text(json.dumps(run) + "\n")
    print(f"record    {folder / 'run.json'}")
    if picture:
        draw(run, folder / "latency.png")
        print(f"picture   {folder / 'latency.png'}")


# ---- command line


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    out = Path("runs/serve-loop")
    made.add_argument("--out", type=Path, default=out, help="folder of the run (default: %(default)s)")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")
    made.add_argument("--backend", help="backend that must serve the calls (default: the best one)")
    made.add_argument("--no-picture", action="store_true", help="draw no latency.png")
    for name, default in Options()._asdict().items():
        flag = f"--{name.replace('_', '-')}"
        made.add_argument(flag, type=int, default=default, help=f"{HELP[name]} (default: %(default)s)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    command = parser()
    args = command.parse_args(arguments)
    options = Options(**{name: getattr(args, name) for name in Options._fields})
    least = dict.fromkeys(Options._fields, 1) | {"seed": 0, "budget": CHECKPOINT_SPACING}
    least["slots"] = FIRST_SLOT + options.batch * (options.drafts + 1)
    for name, value in options._asdict().items():
        if value < least[name]:
            command.error(f"--{name.replace('_', '-')}: expected at least {least[name]}, got {value}")
    if not args.no_picture and importlib.util.find_spec("matplotlib") is None:
        command.error("latency.png needs matplotlib: python -m pip install matplotlib, or pass --no-picture")
    if args.device == "cuda" and not torch.cuda.is_available():
        command.error("--device: expected cpu, because torch finds no GPU, got cuda")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with record_calls() as calls:
            engine = Engine(options, device, args.backend)
            while engine.waiting or engine.running:
                before = engine.counts["finished"]
                engine.step()
                progress(engine, before)
    except KeyboardInterrupt:
        print("\nstopped")
        return 130
    except (KdaError, WrongStateError) as problem:
        print(f"\n{problem}", file=sys.stderr)
        return 1
    finish(record(engine, calls), args.out, picture=not args.no_picture)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the calls of the oracle, and on a CPU all calls, are too small for more
    raise SystemExit(main())
