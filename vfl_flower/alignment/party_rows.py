"""The rows that a party was told to use, in its state; its rules decide whether it uses them.

Between messages the record "aligned" of the party's state has arrays:

from step 0 : "set" (its name), "key", "points", "at", "known", "asked" and "shown" of a set
    (`blinded_ids`), and "file", a digest of all ids.
from step 5 : "told", the rows; "places"; and "secret" (psi) or "answer" (ids), by which the label
    holder's answer is checked.
from step 6 : "rows", "name", "digest" of the rows' ids, "method".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray

from vfl_flower.alignment.psi import Places
from vfl_flower.config.errors import VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.row_mask import Alignment
from vfl_flower.data.source import Source
from vfl_flower.transport.messages import Arrays
from vfl_flower.transport.node import simulated
from vfl_flower.transport.wire import pack, record_of, unpack

_RECORD = "aligned"
IDS, PSI = np.zeros(1, np.uint8), np.ones(1, np.uint8)
"""Methods, as the record has them."""
_OF_LATER_RUNS = "file", "answer"  # arrays that only `reuse` reads


# --- the rows of a run ----------------------------------------------------------------------------


def confirmed(context: Context) -> Arrays:
    """Return what `use` needs in another run: the rows that were just confirmed, and their proof.

    Arrays for later runs do not stay in the party's state.
    """
    kept = saved_state(context)
    use(context, kept)
    return kept


def use(context: Context, arrays: Arrays) -> None:
    """Have a party use rows as if they had just been confirmed.

    Raises
    ------
    VflError
        If its rules forbid it.
    """
    _check_rules(context, arrays)
    save_state(context, **{name: arrays[name] for name in arrays if name not in _OF_LATER_RUNS})


def common_rows(context: Context, own: Source) -> Alignment:
    """Return the rows of a party's own data that a run uses; -1 for a row that it lacks.

    Raises
    ------
    VflError
        If the party has not been told, or its ids have changed since.
    """
    if not is_aligned(context):
        raise VflError("was not told which of its rows are common to all.")
    kept = saved_state(context)
    rows: Places = kept["rows"]
    _check_rules(context, kept)  # they may be stricter by now
    mine = rows[rows >= 0]
    if mine.max() >= len(own.ids) or not np.array_equal(kept["digest"], digest_of(own, mine)):
        raise VflError("has lost rows of its file, or has others, since they were aligned.")
    return Alignment(text_of(kept["name"]), rows)


def is_aligned(context: Context) -> bool:
    """Return whether a party has been told its rows."""
    return "rows" in saved_state(context)


# --- rules ----------------------------------------------------------------------------------------


def rules_of(context: Context, method: str) -> Rules:
    """Return the party's rules; in a simulation by one owner, only those that it names."""
    rules, named = Rules.of(context.node_config), context.node_config
    if simulated(context) and "align" not in named:
        rules = replace(rules, align=method)
    if simulated(context) and "min-rows" not in named:
        rules = replace(rules, min_rows=1)
    return rules


def _check_rules(context: Context, kept: Arrays) -> None:
    method = "psi" if kept["method"].any() else "ids"
    rules = rules_of(context, method)
    check_method(rules, method)
    check_fewest(rules, int((kept["rows"] >= 0).sum()))


def check_method(rules: Rules, method: str) -> None:
    """Raise `VflError` unless the rules allow this method."""
    if method != rules.align or method not in ("psi", "ids"):
        raise VflError(
            f"aligns only by {rules.align!r}, as its node configuration has it, and was asked to "
            f"by {method!r}: give align = {rules.align!r}, or have it changed there."
        )


def check_fewest(rules: Rules, rows: int) -> None:
    """Raise `VflError` if the rules demand more rows."""
    if rows < rules.min_rows:
        raise VflError(
            f"was asked to align {rows} rows, and aligns no fewer than {rules.min_rows}: min-rows "
            "in its node configuration."
        )


# --- the party's state ----------------------------------------------------------------------------


def digest_of(own: Source, rows: Places | None = None) -> NDArray[np.uint8]:
    """Return the digest of these rows' ids, or of all; it never leaves the party."""
    rows = np.arange(len(own.ids)) if rows is None else rows
    return np.frombuffer(bytes.fromhex(own.digest(rows)), np.uint8)


def text_of(array: NDArray[Any]) -> str:
    """Return the text in an array of bytes."""
    return array.tobytes().decode()


def save_state(context: Context, **arrays: NDArray[Any]) -> None:
    """Replace the record by these arrays."""
    context.state[_RECORD] = pack(arrays)


def saved_state(context: Context) -> Arrays:
    """Return the arrays of the record."""
    if _RECORD not in context.state:
        return {}
    return unpack(record_of(context.state, _RECORD, ArrayRecord))
