"""A row of a page of results: configurations to run, and what to print and draw of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

Keys = dict[str, Any]
History = Sequence[Mapping[str, Any]]
Histories = Mapping[str, Sequence[History]]
"""The histories of a row's runs, by seed."""
Column = Callable[[History], float | None]
"""A figure of a run, from its history; none where it was not reached."""
Run = Callable[[int, Mapping[str, Any]], History]
"""A function from a number of parties and keys to a history."""


@dataclass(frozen=True)
class Data:
    """Data sets, as key ``dataset`` names them.

    part : MNIST with its first 10,000 training rows.
    """

    mnist: str
    credit: str
    credit_one_hot: str
    cifar: str
    table: str
    part: str


@dataclass(frozen=True)
class Job:
    """A run: so many parties, and its keys.

    Parameters
    ----------
    like : name of the job whose tuned rates this one takes, such as its variant without noise.
        By default, its own are tuned, if the row's are.
    seeds : at most so many of the row's seeds; None is all.
    """

    parties: int
    keys: Keys
    like: str = ""
    seeds: int | None = None


@dataclass(frozen=True)
class Picture:
    """Curves: a panel for each of what stands before the bar in the jobs' names.

    x, y : names in history entries, "megabytes" being all bytes so far.
    ends : whether a curve goes through the ends of several jobs. Their names differ after the last
        bar only.
    """

    x: str
    y: str
    x_label: str
    y_label: str
    ends: bool = False


@dataclass(frozen=True)
class Row:
    """A table or figure of a paper or of our own, or several that the same runs give.

    Parameters
    ----------
    about : what the paper shows, and by what.
    jobs : the runs, by "panel | line".
    columns : what is printed of each.
    theirs : by job, what the paper has in the place of the first column.
    training : "accuracy" or "gradient": what entries say of the training rows too.
    seeds : unless the command says otherwise.
    tuned : whether learning rates are chosen on validation rows, by `tuning`.
    missing : what a table prints of a figure that no run has.
    tables : further tables for the page, by name, as lines of Markdown.
    run : computes the history of a job from its parties and keys. None trains the job's model.
    """

    about: str
    jobs: Callable[[Data], dict[str, Job]]
    columns: Mapping[str, Column]
    pictures: Sequence[Picture] = ()
    theirs: Mapping[str, str] = field(default_factory=dict)
    training: str = ""
    seeds: int = 5
    tuned: bool = False
    missing: str = "not reached"
    tables: Mapping[str, Callable[[Histories], list[str]]] = field(default_factory=dict)
    run: Run | None = None


def scaled(keys: Keys, factor: float) -> Keys:
    """Return both learning rates, multiplied by a factor."""
    return {name: float(f"{factor * keys[name]:.3g}") for name in ("party-lr", "server-lr")}


def value(entry: Mapping[str, Any], name: str) -> float:
    """A figure of an entry."""
    if name == "megabytes":
        return float(entry["bytes_up"] + entry["bytes_down"]) / 1e6
    return float(entry[name])


def optional(name: str) -> Column:
    """Return a figure at the end of a run; none if the run has no such figure."""
    return lambda history: history[-1].get(name)


def last(name: str, times: float = 1.0) -> Column:
    """A figure at the end of a run."""
    return lambda history: times * value(history[-1], name)


def best(name: str, times: float = 1.0) -> Column:
    """The highest of a figure that any evaluation found."""
    return lambda history: times * max(value(entry, name) for entry in history)


def until(name: str, target: float, spent: str, times: float = 1.0, falls: bool = False) -> Column:
    """Return the cost at which a figure first reached its target; none if it never did."""

    def column(history: History) -> float | None:
        sign = -1 if falls else 1
        there = (e for e in history if sign * value(e, name) >= sign * target)
        first = next(there, None)
        return None if first is None else times * value(first, spent)

    return column


def within(name: str, spent: str, limit: float, times: float = 1.0) -> Column:
    """The best of a figure while no more than the limit was spent; none before the first."""

    def column(history: History) -> float | None:
        there = [value(entry, name) for entry in history if value(entry, spent) <= limit]
        return times * max(there) if there else None

    return column


def sent(history: History) -> float | None:
    """Megabytes of a run, up and down; none of a baseline, which sends no messages."""
    return value(history[-1], "megabytes") or None


PERCENT = 100.0
ACCURACY = {"test accuracy, %": last("test_accuracy", PERCENT)}
TRAINED = {"training accuracy, %": last("train_accuracy", PERCENT)}
MEGABYTES = {"MB": sent}
EPOCHS = {"epochs": last("epoch")}
