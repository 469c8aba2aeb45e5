"""The functions of `kda_core.serving` that work with a `kda_core.journal.Journal`."""

from __future__ import annotations

import torch
from torch import Tensor

from kda_core.errors import ArgumentError, DeviceError, DtypeError, ShapeError, describe
from kda_core.journal import INDEX_DTYPES, Journal, check_types, journal_arguments
from kda_core.ops import run_fold, run_journal
from kda_core.slots import is_slot


def journal_decode_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    *,
    pool: Tensor,
    slots: Tensor,
    journal: Journal,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    first_slot: int = 0,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Computes T tokens of each of N sequences, and appends them to the records of their slots.

    The formula, the other arguments and the errors are those of `kda_core.fused_recurrent_kda`. If a slot has more than
    ``journal.length - T`` records, the call first writes the state of the slot to the pool, and then starts with no records. This depends
    on the number of records alone, so all layers do it in the same step. `journal_advance` must follow, once for all layers, also if no
    token is accepted.

    q, k, v, g and beta may be strided as in `kda_core.fused_recurrent_kda`. No input may require grad.

    Args:
        q, k: [N, T, H, K]. v: [N, T, HV, V]. g: [N, T, HV, K]. beta: [N, T, HV]. T is at most the `drafts` of the journal. For a
            sequence with fewer tokens, pad with any finite values.
        pool: [slots, HV, K, V], or [slots, HV, V, K] with ``journal.state_v_first``; as `initial_state` of `kda_core.chunk_kda` with slots.
        slots: [N] int32 or int64 on q's device, all different. A sequence whose index is below `first_slot` or beyond the pool is
            skipped: its o is zeros, and nothing of it is read or written.
        journal: of this layer and pool.
        out: o to write, [N, T, HV, V], contiguous.

    Returns:
        o [N, T, HV, V] in q's dtype.
    """
    given = journal_arguments("journal", journal, slots, first_slot)
    tensors = q, k, v, g, beta, A_log, dt_bias, pool, None, None
    values = (
        scale, False, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, False,
        lower_bound, False, False, journal.state_v_first, False, None, 64, False, False, True, backend, "off",
    )  # fmt: skip
    return run_journal(tensors, values, given, out, False)


def verify_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    *,
    pool: Tensor,
    slots: Tensor,
    records: Journal,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    first_slot: int = 0,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Computes T drafts of each of N sequences from the states in the pool, which it reads once and never writes.

    The arguments are those of `journal_decode_kda`. The call is one of `journal_decode_kda` in which no slot has records: it ignores
    ``records.spans``, and replaces all records of these slots. ``journal_fold(pool, slots, records, accepted=...)`` then
    writes the states after the accepted drafts to the pool, and does nothing for sequences of which none is accepted.

    Args:
        records: T is at most its rows, ``length + drafts``.

    Returns:
        o [N, T, HV, V] in q's dtype.
    """
    given = journal_arguments("records", records, slots, first_slot, verifies=True)
    tensors = q, k, v, g, beta, A_log, dt_bias, pool, None, None
    values = (
        scale, False, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, False,
        lower_bound, False, False, records.state_v_first, False, None, 64, False, False, True, backend, "off",
    )  # fmt: skip
    return run_journal(tensors, values, given, out, True)


def journal_fold(
    pool: Tensor,
    slots: Tensor,
    journal: Journal,
    *,
    accepted: Tensor | None = None,
    first_slot: int = 0,
    backend: str | None = None,
) -> None:
    """Writes the states of slots to the pool of one layer. The records stay as they are.

    After all layers are folded, `journal_reset` must follow once for the same slots, unless `accepted` is given.

    Args:
        pool, slots, journal, first_slot: as in `journal_decode_kda`.
        accepted: [N] int32 on the pool's device: the number of drafts of the last `verify_kda` that are accepted, clamped to
            [0, length + drafts]. None: all records of the slots, as ``journal.spans`` counts them.

    Raises:
        ArgumentError, ShapeError, DtypeError, DeviceError, StrideError, BackendError: as `kda_core.chunk_kda`.
    """
    verifies = accepted is not None
    name = "records" if verifies else "journal"
    given = journal_arguments(name, journal, slots, first_slot, verifies=verifies)
    check_types(given, pool, verifies=verifies)
    if accepted is not None and not isinstance(accepted, Tensor):
        raise DtypeError("accepted", "a torch.Tensor or None", describe(accepted))
    if backend is not None and not isinstance(backend, str):
        raise DtypeError("backend", "the name of a backend or None", describe(backend))
    run_fold(pool, given, accepted, journal.state_v_first, backend)


def journal_advance(
    journal: Journal, slots: Tensor, accepted: Tensor | int, T: int, *, first_slot: int = 0
) -> None:
    """Accepts the first tokens of the last `journal_decode_kda` of these slots, for all layers that share ``journal.spans``.

    Call it once after every step of `journal_decode_kda`, with the same T. It drops the records of the other tokens, which is the rollback.

    Args:
        journal: of any layer.
        slots, first_slot: those of the step.
        accepted: [N] int32 or int64 on the same device, clamped to [0, T]; or an int for all sequences.
        T: tokens of each sequence in the step.

    Raises:
        ArgumentError, ShapeError, DtypeError, DeviceError: the message names the argument, what was expected and what came.
    """
    _check_slots(journal, slots, first_slot)
    most = journal.u.shape[2] - journal.length
    if type(T) is not int or not 1 <= T <= most:
        raise ArgumentError("T", f"an int from 1 to {most}, the drafts of the journal", describe(T))
    if isinstance(accepted, Tensor):
        _check_index("accepted", accepted, slots)
        accepted = accepted.clamp(0, T)
    elif type(accepted) is not int or not 0 <= accepted <= T:
        raise ArgumentError("accepted", f"a tensor, or an int from 0 to {T}", describe(accepted))
    wanted, at = _places(journal, slots, first_slot)
    before = journal.spans.index_select(0, at)
    rows = journal.u.shape[2]
    first, count = before[:, 0].clamp(0, rows - 1), before[:, 1].clamp(0, journal.length)
    folds = count + T > journal.length
    start, kept = torch.where(folds, (first + count) % rows, first), torch.where(folds, 0, count)
    after = torch.stack([start, (kept + accepted).to(torch.int32)], 1)
    # a row without a slot adds nothing to slot 0, so no index has to be left out
    journal.spans.index_add_(0, at, torch.where(wanted.unsqueeze(1), after - before, 0))


def journal_reset(journal: Journal, slots: Tensor, *, first_slot: int = 0) -> None:
    """Drops the records of slots, for all layers that share ``journal.spans``. Their states are then those in the pool.

    Args:
        journal: of any layer.
        slots: [N] int32 or int64, all different; no slot below `first_slot` or beyond the journal changes.

    Raises:
        ArgumentError, ShapeError, DtypeError, DeviceError: as `journal_advance`.
    """
    _check_slots(journal, slots, first_slot)
    wanted, at = _places(journal, slots, first_slot)
    before = journal.spans.index_select(0, at)
    journal.spans.index_add_(0, at, torch.where(wanted.unsqueeze(1), -before, 0))


def _places(journal: Journal, slots: Tensor, first_slot: int) -> tuple[Tensor, Tensor]:
    """Returns which indices are slots [N], and the slots [N], 0 for an index that is none."""
    wanted = is_slot(slots, journal.spans, first_slot)
    return wanted, torch.where(wanted, slots, 0)


def _check_slots(journal: object, slots: Tensor, first_slot: int) -> None:
    if not isinstance(journal, Journal):
        raise DtypeError("journal", "a kda_core.serving.Journal", describe(journal))
    if type(first_slot) is not int or not 0 <= first_slot < 2**31:
        raise DtypeError("first_slot", "an int of at least 0 and below 2**31", describe(first_slot))
    if not isinstance(slots, Tensor) or slots.dim() != 1:
        raise ShapeError("slots", "a tensor [N]", describe(slots))
    _check_index("slots", slots, slots)
    if slots.device != journal.spans.device:
        raise DeviceError("slots", f"device {journal.spans.device} (that of the journal)", str(slots.device))


def _check_index(name: str, x: Tensor, slots: Tensor) -> None:
    """Checks a tensor of integers of the shape and device of `slots`."""
    if x.shape != slots.shape:
        raise ShapeError(name, f"[N] = {list(slots.shape)}", str(list(x.shape)))
    if x.dtype not in INDEX_DTYPES:
        raise DtypeError(name, " or ".join(map(str, INDEX_DTYPES)), str(x.dtype))
    if x.device != slots.device:
        raise DeviceError(name, f"device {slots.device} (that of slots)", str(x.device))
