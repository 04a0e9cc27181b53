"""The sets of labels that a party has answered in task "information", by person.

A label holder that chooses labels learns sums over people that it names. Two sets that differ in
one person show that person's bins. So the party counts sets of labels, and checks what all sets
together say about one person (`data.evidence.leverages`). It knows a person by the id in its own
file. So neither the order of rows nor another alignment makes two questions one.

The party writes a set to its disk before it answers. It forgets a set after 30 days.
"""

import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.data.evidence import MOST_TOLD, leverages
from vfl_flower.data.ids import People
from vfl_flower.records.ledger import content_in_file, opened, opened_by_party
from vfl_flower.transport.messages import Arrays
from vfl_flower.transport.node import refused, states_folder

_UNCOUNTED = "cannot count what it releases. See its own log."
MOST_LABELS, DAYS = 10, 30
"""Sets of labels that a party answers in so many days."""


def count_labels(
    context: Context,
    people: NDArray[np.uint64],
    labels: NDArray[np.uint8],
    question: bytes,
    min_rows: int,
) -> None:
    """Count labels below 4 of people [R], unless the party has answered the same question before.

    Ten sums over ``min_rows`` people are the most that all sets may say about one person.
    """
    path = states_folder(context) / f"party-{context.node_config.get('partition-id')}.information"
    with opened_by_party(path, _UNCOUNTED, content_in_file("sets")) as ledger:
        known = _recent(ledger.content("sets"))
        asked = np.frombuffer(question, np.uint8)
        if (known["questions"] == asked).all(1).any():
            return
        if len(known["times"]) >= MOST_LABELS:
            raise refused(
                context,
                f"to compute information values by more than {MOST_LABELS} sets of labels in "
                f"{DAYS} days. Send labels that it has answered, or wait",
            )
        known = _with(known, people, labels, asked)
        most = min(MOST_TOLD, MOST_LABELS / max(min_rows, 1))
        if _told(known["labels"]) > most:
            raise refused(
                context,
                "to compute information values by labels that differ in too few rows from "
                f"labels that it answered in {DAYS} days. Send labels that it has answered, or "
                "wait",
            )
        file = BytesIO()
        np.savez(file, allow_pickle=False, **known)
        ledger.write("sets", file.getvalue())


def without(path: Path, gone: Callable[[People], NDArray[np.bool_]], write: bool) -> int:
    """Remove people from the sets in a file, or only count them; return their number."""
    with opened(path) as ledger:
        known = _recent(ledger.content("sets"))
        left = ~gone(known["people"])
        if write and not left.all():
            parts = {"people": known["people"][left], "labels": known["labels"][:, left]}
            file = BytesIO()
            np.savez(file, allow_pickle=False, **{**known, **parts})
            ledger.write("sets", file.getvalue())
    return int((~left).sum())


def _recent(content: bytes) -> Arrays:
    """Return the sets of the last days. A clock that was set back ends none.

    "times" and "questions", [S], are time and digest of each set. "people" [P] are in ascending
    order. "labels" [S, P] is the label plus 1, or 0 if the set lacks the person.
    """
    if not content:
        none: Arrays = {"times": np.zeros(0, np.int64), "questions": np.zeros((0, 32), np.uint8)}
        return {**none, "people": np.zeros(0, np.uint64), "labels": np.zeros((0, 0), np.uint8)}
    with np.load(BytesIO(content), allow_pickle=False) as file:
        found = dict(file)
    recent = found["times"] > time.time() - 86400 * DAYS
    labels = found["labels"][recent]
    there = labels.any(0)
    times, questions = found["times"][recent], found["questions"][recent]
    parts = {"people": found["people"][there], "labels": labels[:, there]}
    return {"times": times, "questions": questions, **parts}


def _with(
    known: Arrays, people: NDArray[np.uint64], labels: NDArray[np.uint8], asked: NDArray[np.uint8]
) -> Arrays:
    """Return the sets with one more."""
    everybody = np.union1d(known["people"], people)
    together = np.zeros((len(known["times"]) + 1, len(everybody)), np.uint8)
    together[:-1, np.searchsorted(everybody, known["people"])] = known["labels"]
    together[-1, np.searchsorted(everybody, people)] = labels + 1
    return {
        "times": np.append(known["times"], np.int64(time.time())),
        "questions": np.concatenate([known["questions"], asked[None]]),
        "people": everybody,
        "labels": together,
    }


def _told(labels: NDArray[np.uint8]) -> float:
    """Return what these sets say at most about one person, as the share of a value's variance.

    A column's value may show the sum over all people with an equal label in one set. So each set
    has a sum for each label. People with the same labels in all sets are equal.
    """
    code = np.zeros(labels.shape[1], np.int64)
    for each in labels:
        code = 5 * code + each
    kinds, people = np.unique(code, return_counts=True)
    digits = kinds // 5 ** np.arange(len(labels))[:, None] % 5
    sums = (digits == np.arange(1, 5)[:, None, None]).reshape(-1, len(kinds))
    told = leverages(sums[sums.any(1)], people).max()
    return round(float(told), 9)  # a group of five people has 0.2
