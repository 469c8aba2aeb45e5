"""The measured functions: backends of kda-core by name, and peers. All take the arguments of ``chunk_kda``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import kda_core
from kda_core.bench import peers
from kda_core.bench.cases import CP, Case
from kda_core.bench.peers import Outputs
from kda_core.registry import record_calls


def backend(name: str, context_parallel: Any = "off") -> Callable[..., Outputs]:
    """Returns ``chunk_kda`` on one backend. Every call asserts that this backend served it."""

    def call(**x: Any) -> Outputs:
        with record_calls() as calls:
            o, state = kda_core.chunk_kda(**x, backend=name, context_parallel=context_parallel)
        assert [c.backend for c in calls] == [name], calls
        return o, state

    return call


def backend_name(impl: str) -> str:
    """Returns the backend of an implementation, without its suffix."""
    return impl.partition("+")[0].removeprefix("kda-")


def named(name: str, training: bool = False) -> Callable[..., Outputs]:
    """Returns the function of an implementation.

    Names: "reference", "kda-<backend>", and the peers; a suffix "+cp" lets a planner decide whether to split.

    Args:
        training: whether it is called for training, where cuDNN's engine is the one with a backward.

    Raises:
        ValueError: the implementation is unknown or cannot run on this machine.
    """
    if name == "fla":
        return peers.fla()
    if (peer := name.removesuffix(peers.PREPARED)) in peers.ENGINES:
        return peers.cudnn(peers.BACKWARD_ENGINE if training else peers.ENGINES[peer])
    if (problem := unavailable(name)) is not None:
        raise ValueError(f"impl: {name!r} cannot run here: {problem}")
    return backend(backend_name(name), "auto" if name.endswith(CP) else "off")


def unavailable(impl: str) -> str | None:
    """Returns why a backend cannot run on this machine; None if it can."""
    known = {i.name: i for i in kda_core.backends()}
    name = backend_name(impl)
    if name not in known:
        return f"known backends are {', '.join(known)}"
    found = known[name]
    return None if found.status == "ok" else f"{found.status}: {found.reason}"


def serves(impl: str, call: str, case: Case) -> bool:
    """Returns whether an implementation has the arguments of a case. Backends are asked in the call."""
    return not peers.is_peer(impl) or peers.serves(impl, call, case.H != case.HV, case.use_graph)


def default(device: torch.device, call: str) -> list[str]:
    """Returns the implementations of a call that run on this machine, without suffixes of backends: the backends for its GPU, or the
    reference on a CPU, and the peers that are installed. On a CPU there is no peer."""
    if device.type == "cpu":
        return ["reference"]
    ok = [i.name for i in kda_core.backends() if i.status == "ok"]
    found: Iterable[str] = (f"kda-{n}" for n in ok if n not in ("reference", *peers.PEERS))
    installed = (n for n in peers.names(call) if peers.unavailable(n, call, device) is None)
    return [*(list(found) or ["reference"]), *installed]
