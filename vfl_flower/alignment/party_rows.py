"""The rows that a party was told to use, in its state.

The party's rules decide whether it uses the rows. Between messages the record "aligned" of the
party's state has arrays:

from step 0 : "set" (its name), "key", "points.0" ..., "at", "known", "asked" and "shown" of a set
    (`blinded_ids`), and "file", a digest of all ids. While ids come in pieces: "turn" and "sent"
    (`pieces.begun`), and no "shown".
from step 5 : "told", the rows; "places"; and "secret" (psi) or "answer" (ids), to check the label
    holder's answer.
from step 6 : "rows", "name", "digest" of the rows' ids, "method"; and "held", the number of test
    rows, if the label holder has told it.
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
from vfl_flower.data.match_rules import parse
from vfl_flower.data.row_mask import Alignment
from vfl_flower.data.source import Source
from vfl_flower.transport.messages import Arrays
from vfl_flower.transport.node import simulated
from vfl_flower.transport.wire import pack, record_of, unpack

_RECORD = "aligned"
IDS, PSI = np.zeros(1, np.uint8), np.ones(1, np.uint8)
"""Methods, as the record encodes them."""
_OF_LATER_RUNS = "file", "answer"  # arrays that only `reuse` reads


# --- the rows of a run ----------------------------------------------------------------------------


def confirmed(context: Context) -> Arrays:
    """Return arrays for `use` in another run: the confirmed rows and their proof.

    The arrays that only later runs need leave the party's state.
    """
    kept = saved_state(context)
    use(context, kept)
    return kept


def use(context: Context, arrays: Arrays) -> None:
    """Make a party use rows as if the label holder had just confirmed them."""
    _check_rules(context, arrays)
    save_state(context, **{name: arrays[name] for name in arrays if name not in _OF_LATER_RUNS})


def common_rows(context: Context, own: Source) -> Alignment:
    """Return the party's rows for a run, in its own data; -1 for a row that it lacks."""
    if not is_aligned(context):
        raise VflError("was not told which of its rows are common to all. Start the run anew.")
    kept = saved_state(context)
    rows: Places = kept["rows"]
    _check_rules(context, kept)  # the owner may have made the rules stricter
    mine = rows[rows >= 0]
    if mine.max() >= len(own.ids) or not np.array_equal(kept["digest"], digest_of(own, mine)):
        raise VflError(
            "has lost or changed rows of its file since they were aligned. Restore the file, or "
            "align anew."
        )
    held_out = int(kept["held"][0]) if "held" in kept else 0
    return Alignment(text_of(kept["name"]), rows, held_out=held_out)


def is_aligned(context: Context) -> bool:
    """Return whether a party has been told its rows."""
    return "rows" in saved_state(context)


# --- rules ----------------------------------------------------------------------------------------


def rules_of(context: Context, method: str) -> Rules:
    """Return the party's rules.

    In a simulation by one owner, `align` and `min-rows` restrict nothing unless they are named.
    """
    rules, named = Rules.of(context.node_config), context.node_config
    if simulated(context) and "align" not in named:
        rules = replace(rules, align=method)
    if simulated(context) and "min-rows" not in named:
        rules = replace(rules, min_rows=1)
    if simulated(context) and "match-bits" not in named:
        rules = replace(rules, match_bits=0.0)
    return rules


def _check_rules(context: Context, kept: Arrays) -> None:
    method = "psi" if kept["method"].any() else "ids"
    rules = rules_of(context, method)
    check_method(rules, method)
    check_fewest(rules, int((kept["rows"] >= 0).sum()))
    used = parse("; ".join(text_of(kept["rules"]).splitlines())) if "rules" in kept else ()
    if rules.match and (new := set(used) - set(parse(rules.match))):
        raise VflError(
            f"matched people by {min(map(str, new))}, and its rule is match = {rules.match!r}. "
            "Align anew."
        )
    if used and min(kept.get("bits", [0.0])) < rules.match_bits:
        raise VflError(
            f"matched people by keys that are easier to guess than its rule match-bits = "
            f"{rules.match_bits:g} permits. Align anew."
        )


def check_method(rules: Rules, method: str) -> None:
    """Raise `VflError` unless the rules allow this method."""
    if method != rules.align or method not in ("psi", "ids"):
        raise VflError(
            f"aligns only by {rules.align!r}, by its node configuration, and was asked to align by "
            f"{method!r}. Set align = {rules.align!r}, or have its owner change its rule."
        )


def check_fewest(rules: Rules, rows: int) -> None:
    """Raise `VflError` if the rules demand more rows."""
    if rows < rules.min_rows:
        raise VflError(
            f"was asked to align {rows} rows, and aligns no fewer than {rules.min_rows}: its rule "
            f"min-rows. Use {rules.min_rows} rows or more at once, or ask its owner for a lower "
            "min-rows."
        )


def check_file(kept: Arrays, file: NDArray[np.uint8]) -> None:
    """Raise `VflError` unless the file has the digest that the record has."""
    if not np.array_equal(kept["file"], file):
        raise VflError("has other ids than a moment ago: its file has changed. Start the run anew.")


# --- the party's state ----------------------------------------------------------------------------


def digest_of(own: Source, rows: Places | None = None) -> NDArray[np.uint8]:
    """Return the digest of these rows' ids, or of all ids. It never leaves the party."""
    digest = own.whole_digest if rows is None else own.digest(rows)
    return np.frombuffer(bytes.fromhex(digest), np.uint8)


def text_of(array: NDArray[Any]) -> str:
    """Return the text in an array of bytes."""
    return array.tobytes().decode()


def save_state(context: Context, **arrays: NDArray[Any]) -> None:
    """Replace the arrays of the record. An array that the record has already is not copied."""
    views, record = saved_state(context), ArrayRecord()
    for name, array in arrays.items():
        view = views.get(name, array[:0])
        if name in views and (view.shape, view.ctypes.data) == (array.shape, array.ctypes.data):
            record[name] = record_of(context.state, _RECORD, ArrayRecord)[name]
        else:
            record.update(pack({name: array}))
    context.state[_RECORD] = record


def saved_state(context: Context) -> Arrays:
    """Return the arrays of the record."""
    if _RECORD not in context.state:
        return {}
    return unpack(record_of(context.state, _RECORD, ArrayRecord))
