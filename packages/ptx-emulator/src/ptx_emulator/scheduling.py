"""Cluster launch control: a CTA cancels a cluster that has not started, and does its work.

The 16 bytes of a response are opaque. Here they hold 1 if a cluster was cancelled, and the index of its first CTA.

Source: PTX ISA, "clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel".
"""

from __future__ import annotations

import numpy as np

from ptx_emulator.access import addresses, cta_at, mbarrier_at
from ptx_emulator.decode import Decoder, Execute, handler
from ptx_emulator.lanes import INDICES, to_bits
from ptx_emulator.machine import Warp
from ptx_emulator.memory import CTA_BITS
from ptx_emulator.parser import Instruction, Sink, Vector
from ptx_emulator.races import issue_snapshot

BYTES = 16  # of a response


@handler("clusterlaunchcontrol")
def _control(d: Decoder, i: Instruction) -> Execute:
    if i.modifiers[0] == "try_cancel":
        return _try_cancel(d, i)
    if i.modifiers[:2] == ("query_cancel", "is_canceled"):
        d.only(i.modifiers[2:], "pred", "b128")
        return _is_cancelled(d, i)
    if i.modifiers[0] == "query_cancel" and i.modifiers[1].startswith("get_first_ctaid"):
        d.only(i.modifiers[2:], "v4", "b32", "b128", "x", "y", "z")
        return _first_cta(d, i)
    d.refuse(f"clusterlaunchcontrol.{'.'.join(i.modifiers)} is not modelled")


def _try_cancel(d: Decoder, i: Instruction) -> Execute:
    """`try_cancel`: the response arrives at some later time, and an mbarrier counts its bytes."""
    multicast = "multicast::cluster::all" in i.modifiers
    d.only(
        i.modifiers[1:], "async", "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster::all", "b128"
    )  # fmt: skip
    base, offset = d.address(i.operands[0], "b32")
    barrier_base, barrier_offset = d.address(i.operands[1], "b32")

    def start(w: Warp, lanes: int) -> None:
        places = addresses(w, base, offset, lanes).tolist()
        barriers = addresses(w, barrier_base, barrier_offset, lanes).tolist()
        for place, barrier, lane in zip(places, barriers, INDICES[lanes].tolist()):
            _request(w, place, barrier, lane, multicast)

    return start


def _request(w: Warp, place: int, barrier: int, lane: int, multicast: bool) -> None:
    """Start one `try_cancel`."""
    if place % BYTES:
        w.fail(f"try_cancel: address {place:#x} is not aligned to {BYTES} bytes")
    if w.cta.cluster.declined:
        w.fail("try_cancel after an earlier one of this cluster has failed: no cluster is left")
    ranks = range(len(w.cta.cluster.ctas)) if multicast else [w.cta.rank]
    local = (1 << CTA_BITS) - 1
    found = []
    for rank in ranks:
        cta, here = cta_at(w, place & local | rank << CTA_BITS)
        shared = cta.shared
        if here < shared.low or here + BYTES > shared.high:
            w.fail(f"try_cancel: shared memory out of bounds: {BYTES} bytes at {here:#x}")
        shared.track()[here - shared.base : here - shared.base + BYTES] = 0
        if shared.shadow is not None:
            shared.shadow.store(w, np.arange(4) + ((here - shared.base) >> 2), lane)
        found.append((cta, here, mbarrier_at(w, barrier & local | rank << CTA_BITS, proxy=True)))
        cta.incoming += 1
    pc, clock = w.pc, w.clock.now

    def complete() -> None:
        w.pc = pc
        first = w.machine.cancel()
        w.cta.cluster.declined = first is None
        response = np.array([[0, 0, 0, 0] if first is None else [1, *first]], np.uint32)
        for cta, here, mbarrier in found:
            cta.shared.store(np.array([here]), 4, 4, response, None)
            cta.incoming -= 1
            mbarrier.release(issue_snapshot(w, clock))
            mbarrier.count_bytes(BYTES, w.fail)

    w.machine.pending.append(complete)


def _is_cancelled(d: Decoder, i: Instruction) -> Execute:
    to, source = d.destination(i.operands[0], "pred"), d.source(i.operands[1], "b128")

    def query(w: Warp, lanes: int) -> None:
        words = np.ascontiguousarray(w.regs[source]).view(np.uint32).reshape(32, 4)
        w.put_predicate(to, to_bits(words[:, 0] != 0), w.unknown[source], lanes)

    return query


def _first_cta(d: Decoder, i: Instruction) -> Execute:
    """`get_first_ctaid`: all three parts as a vector, or one of them (`::x`)."""
    target = i.operands[0]
    if isinstance(target, Vector):
        parts = dict(enumerate(target.elements[:3]))
    else:
        parts = {"xyz".index(i.modifiers[1][-1] if "::" in i.modifiers[1] else i.modifiers[2]): target}
    targets = {n: d.destination(x, "b32") for n, x in parts.items() if not isinstance(x, Sink)}
    source = d.source(i.operands[1], "b128")

    def query(w: Warp, lanes: int) -> None:
        words = np.ascontiguousarray(w.regs[source]).view(np.uint32).reshape(32, 4)
        # Compilers query before they branch: the result is undefined, and only its use is an error.
        unknown = w.unknown[source] | to_bits(words[:, 0] == 0)
        for n, to in targets.items():
            w.put(to, np.ascontiguousarray(words[:, 1 + n]), unknown, lanes)

    return query
