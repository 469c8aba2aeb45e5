"""Prefill over a pool, alone and beside decoding: the calls of a step of a serving engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kda_core
from kda_core.bench.decode import TOKENS, D, Launch
from kda_core.registry import record_calls
from kda_core.testing import error, make_inputs, token_oracle


@dataclass(frozen=True)
class Load:
    """`prompts` packed sequences of `tokens` tokens, and `decodes` sequences of one, with `heads` heads; `launches` of each."""

    prompts: int
    tokens: int
    decodes: int
    heads: int
    launches: int


LOAD = Load(prompts=4, tokens=2048, decodes=60, heads=32, launches=4)
SMALL = Load(prompts=2, tokens=65, decodes=3, heads=2, launches=2)


def launches(impl: str, load: Load, device: torch.device) -> Iterator[tuple[dict[str, Any], Launch]]:
    """Yields the fields of a row that describe a call, and its launches."""
    prefill, decode = _Prefill(impl, load, device), _Decode(impl, load, device)
    pool = torch.randn(load.launches * (load.prompts + load.decodes), load.heads, D, D, device=device)
    order = torch.randperm(len(pool), device=device).to(torch.int32).view(load.launches, -1)
    prompts, singles = order[:, : load.prompts].contiguous(), order[:, load.prompts :].contiguous()
    prefills = [partial(prefill, pool, slots) for slots in prompts]
    decodes = [partial(decode, pool, slots) for slots in singles]
    check_prefill = lambda run: prefill.errors(pool, prompts[0], run)
    check_decode = lambda run: decode.errors(pool, singles[0], run)
    of_prefill = {"N": load.prompts, "HV": load.heads, "T": load.tokens}
    yield of_prefill | {"call": "prefill"}, Launch(prefills, lambda: check_prefill(prefills[0]))
    states = [torch.randn(load.prompts, load.heads, D, D, device=device) for _ in prompts]
    plain = [partial(prefill, s) for s in states]
    yield (
        of_prefill | {"call": "prefill without a pool"},
        Launch(plain, lambda: prefill.errors(states[0], None, plain[0])),
    )
    of_decode = {"N": load.decodes, "HV": load.heads, "T": 1}
    yield of_decode | {"call": "decode"}, Launch(decodes, lambda: check_decode(decodes[0]))
    both = {"N": load.prompts + load.decodes, "HV": load.heads, "T": load.tokens}
    fork = _fork(device)
    for name, pairs in (
        ("mixed, prefill first", zip(prefills, decodes, strict=True)),
        ("mixed, decode first", zip(decodes, prefills, strict=True)),
    ):
        calls = [partial(fork, first, second) for first, second in pairs]

        def check(run: Callable[[], Any] = calls[0]) -> dict[str, Any]:
            # either part is checked with the call of both
            found = [check_prefill(run), check_decode(run)]
            return {e: max(f[e] for f in found) for e in ("error_o", "error_state")}

        yield both | {"call": name}, Launch(calls, check)


def _fork(device: torch.device) -> Callable[..., Any]:
    """Returns a function that runs two functions at once on a GPU: the first on the current stream, the second on another one."""
    if device.type == "cpu":
        return lambda first, second: [call() for call in (first, second)]
    side = torch.cuda.Stream()

    def run(first: Callable[[], Any], second: Callable[[], Any]) -> None:
        stream = torch.cuda.current_stream()
        side.wait_stream(stream)
        first()
        with torch.cuda.stream(side):
            second()
        stream.wait_stream(side)

    return run


class _Calls:
    """Calls of one function on one backend, over slots of a pool or on states of their own."""

    function: Callable[..., Any]
    options: dict[str, Any]
    length: int
    final: Tensor  # of calls without slots

    def __init__(self, impl: str, tokens: dict[str, Any]):
        self.tokens, self.backend = tokens, impl.removeprefix("kda-")
        self.o = torch.empty_like(tokens["v"])

    def __call__(self, states: Tensor, slots: Tensor | None = None) -> Tensor:
        """Returns the final states: those of the pool if there are slots."""
        where: dict[str, Any]
        if slots is None:
            where = {"out": (self.o, self.final)}
        else:
            where = {"ssm_state_indices": slots, "out": self.o}
        with record_calls() as calls:
            o, after = self.function(
                **self.tokens, **self.options, **where, initial_state=states, output_final_state=True,
                backend=self.backend,
            )  # fmt: skip
        assert [c.backend for c in calls] == [self.backend], calls
        assert o is self.o
        return after

    def errors(self, states: Tensor, slots: Tensor | None, run: Callable[[], Any]) -> dict[str, Any]:
        """Returns the errors of the first sequence after `run`, which makes this call."""
        at = 0 if slots is None else int(slots[0])
        before = states[at : at + 1].clone()
        after = run() if slots is None else (run(), states)[1]
        own = {
            n: x[:1, : self.length] if n in TOKENS else x for n, x in self.tokens.items() if n != "cu_seqlens"
        }
        want_o, want_state = token_oracle(**own, initial_state=before)
        return {
            "error_o": error(self.o[:1, : self.length], want_o),
            "error_state": error(after[at : at + 1], want_state, state=True),
        }


class _Prefill(_Calls):
    """Calls with and without slots have the same o and the same workspace: the memory changes the time by up to 6%."""

    function = staticmethod(kda_core.chunk_kda)

    def __init__(self, impl: str, load: Load, device: torch.device):
        self.length, lengths = load.tokens, (load.tokens,) * load.prompts
        x = make_inputs(
            "slow", sum(lengths), H=load.heads, lengths=lengths, state_v_first=True, device=device
        )
        super().__init__(impl, x.arguments)
        self.final = torch.empty(load.prompts, load.heads, D, D, device=device)
        self.options = {"context_parallel": "off"}
        slots = torch.arange(load.prompts, dtype=torch.int32, device=device)
        needed = [
            kda_core.explain(
                **x.arguments, **self.options, **given, initial_state=self.final, output_final_state=True,
                backend=self.backend,
            ).workspace_bytes
            for given in ({}, {"ssm_state_indices": slots})
        ]  # fmt: skip
        self.options["workspace"] = torch.empty(max(needed), dtype=torch.uint8, device=device)


class _Decode(_Calls):
    function = staticmethod(kda_core.fused_recurrent_kda)
    options = {}  # noqa: RUF012

    def __init__(self, impl: str, load: Load, device: torch.device):
        self.length = 1
        x = make_inputs("slow", 1, B=load.decodes, H=load.heads, state_v_first=True, seed=1, device=device)
        super().__init__(impl, x.arguments)
