"""People of the label holder's file that a run or a prediction covers, and why others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEAN = "mean"
"""Stands in place of the classes where labels are numbers."""


def coverage(
    asked: int,
    aligned: int,
    scored: int,
    left_out: Mapping[str, int],
    by_party: Mapping[int, int],
    left_out_parties: Sequence[str] = (),
    rules: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the field ``coverage`` of a summary, or of the figures of predictions.

    Of the people ``asked``, so many parties as rows need have ``aligned``. ``left_out`` counts by
    reason, and ``rules`` are figures of each rule at each party. ``more`` says which ``file`` they
    come from, and how ``labels`` differ (`label_holder.about_data`).
    """
    return {
        "asked": asked,
        "aligned": aligned,
        "scored": scored,
        "left_out": {why: number for why, number in left_out.items() if number},
        "by_party": {str(party): by_party[party] for party in sorted(by_party)},
        "not_at": {str(party): asked - by_party[party] for party in sorted(by_party)},
        "left_out_parties": list(left_out_parties),
        **({"rules": list(rules)} if rules else {}),
        **more,
    }


def lines(found: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return a coverage as lines of a table: what, and the number of people."""
    by_party, left_out = found.get("by_party") or {}, found.get("left_out") or {}
    lacking = found.get("not_at") or {}
    return [
        ("in the label holder's file", found.get("asked")),
        *((f"at {names.get(each, each)}", number) for each, number in by_party.items()),
        *(
            (
                f"at {names.get(str(each['party']), each['party'])} by {each['rule']}",
                each["matched"],
            )
            for each in found.get("rules") or ()
            if each["matched"]
        ),
        ("aligned", found.get("aligned")),
        *((each, found[each]) for each in ("aligned without a label",) if found.get(each)),
        ("scored", found.get("scored")),
        *((f"left out: {why}", number) for why, number in left_out.items()),
        *((f"not at {names.get(each, each)}", number) for each, number in lacking.items()),
    ]
