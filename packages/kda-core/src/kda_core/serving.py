"""Decoding and verification of drafts over a pool of states, without writing the states in every step.

A decode step that updates the states in a pool reads and writes each of them. Here a step only reads them, and stores a record of each
token instead of the new state. The records determine the state after any number of tokens, so rejecting a draft costs nothing.

=======================  ======================================================================================================
`Journal`                the records of a layer, `length` of them for each slot
`journal_decode_kda`     o of T tokens of each sequence, from the pool and the records; if the records are full, it folds first
`journal_advance`        accepts the first of these tokens: once in a step, for all layers
`journal_fold`           writes the state to the pool, before another function reads the pool
`journal_reset`          drops the records, after a fold of all layers or when a slot gets another sequence
`verify_kda`             o of T drafts from the pool alone, which it never writes; `journal_fold` with `accepted` commits
`bind`                   a call that is validated once, for little host time
=======================  ======================================================================================================

``docs/serving.md`` has examples. Only backends that declare the feature ``journal`` serve these functions. They have no fallback.
"""

from kda_core.binding import BoundCall, bind
from kda_core.journal import Journal
from kda_core.journal_api import (
    journal_advance,
    journal_decode_kda,
    journal_fold,
    journal_reset,
    verify_kda,
)

__all__ = [
    "BoundCall",
    "Journal",
    "bind",
    "journal_advance",
    "journal_decode_kda",
    "journal_fold",
    "journal_reset",
    "verify_kda",
]
