"""The variants that installed backends list for ahead-of-time compilation, in `BackendSpec.variants`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from kda_core.discovery import FAILURES
from kda_core.plugin_checks import show_error
from kda_core.registry import REGISTRY, arch_matches, show_archs
from kda_cute.jit.key import Variant, canonical
from kda_cute.jit.target import capability_of_arch


@dataclass(frozen=True)
class Offer:
    """What one backend lists for an architecture.

    Attributes:
        backend: its name.
        variants: the variants, each once.
        reason: why there are none; else empty.
        broken: whether the list could not be read, in contrast to an empty list.
    """

    backend: str
    variants: tuple[Variant, ...] = ()
    reason: str = ""
    broken: bool = False


def offers(arch: str, backend: str | None = None) -> list[Offer]:
    """Returns an offer for each installed backend, or for `backend` alone. Imports the modules of the kernels and the DSL. An
    exception of a backend becomes its `Offer.reason`.

    Raises:
        ArgumentError: `arch` is not the name of an architecture.
        BackendNotFoundError: `backend` is not installed.
    """
    capability = capability_of_arch(arch)
    candidates = REGISTRY.backends() if backend is None else [REGISTRY.find(backend)]
    return [_offer(candidate, arch, capability) for candidate in candidates]


def offering_backend(variant: Variant) -> str | None:
    """Returns the name of the installed backend that lists a variant; None if none does."""
    wanted = _identity(variant)
    for offer in offers(variant.arch):
        if any(_identity(offered) == wanted for offered in offer.variants):
            return offer.backend
    return None


def _offer(candidate: Any, arch: str, capability: tuple[int, int]) -> Offer:
    name, spec = candidate.name, candidate.spec
    if spec is not None and not arch_matches(spec, capability):
        return Offer(name, reason=f"runs on {show_archs(spec.archs)}")
    if candidate.status != "ok":
        return Offer(name, reason=f"{candidate.status}: {candidate.reason}", broken=True)
    if spec.variants is None:
        return Offer(name, reason=spec.unavailable or "nothing to compile")
    module, _, attribute = spec.variants.partition(":")
    try:
        pairs = getattr(importlib.import_module(module), attribute)(arch)
        variants = [Variant(kernel, config, arch) for kernel, config in pairs]
    except FAILURES as error:
        reason = f"broken: {spec.variants} failed: {show_error(error)}"
        return Offer(name, reason=reason, broken=True)
    unique = {_identity(variant): variant for variant in variants}
    return Offer(name, tuple(unique.values()), "" if unique else "nothing to compile")


def _identity(variant: Variant) -> tuple[type, str]:
    return variant.kernel, canonical(variant.config)
