"""Our own result: what an epsilon of labels costs, by schedule, estimator, codec and mechanism.

The page docs/results/label-privacy.md has the method. Noise has no seed here. Each run counts its
epsilon alone, so each has a folder of secrets for itself.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import mean
from typing import Any

from benchmarks.common import PARTIES, quiet_run
from benchmarks.papers.page import figure, half_interval
from benchmarks.papers.rows import (
    MEGABYTES,
    PERCENT,
    Data,
    Histories,
    History,
    Job,
    Keys,
    Picture,
    Row,
    last,
    optional,
    value,
)
from vfl_attacks.canary import canary
from vfl_flower.config.errors import ConfigError
from vfl_flower.protocol.systems import resolve

EPSILONS = (0.5, 1.0, 2.0, 4.0)
CODECS: dict[str, Keys] = {
    "no codec": {},
    "top-k": {"codec": "top-k", "compression": "error-feedback"},
}
SCHEDULES = ("synchronous", "asynchronous")
FIRST, ZEROTH = "first order", "zeroth order"
LABELS, SCALARS, WITHOUT = "noise on labels", "noise on scalars", "no noise"
FIRST_ORDER: dict[tuple[str, str], Keys] = {
    ("synchronous", "no codec"): {"strategy": "split-nn"},
    ("asynchronous", "no codec"): {"strategy": "vafl", "epochs": 40},
    ("synchronous", "top-k"): {"strategy": "ef-vfl"},
    ("asynchronous", "top-k"): {"strategy": "ef-vfl", "quorum": 1},
}
ZEROTH_ORDER: Keys = {  # the optimizer and the batch size that first order has by default
    "strategy": "cascaded",
    "optimizer": "adam",
    "batch-size": 128,
}
DPZV_MODELS: Keys = {"bottom-model": "mlp", "top-model": "mlp", "party-lr": 0.005}
DPZV_RATES: Keys = {"party-lr": 0.015, "server-lr": 0.15}
"""Three times the defaults of `dpzv`, from epsilon 1 on: more noise needs smaller rates."""
DPZV: dict[str, Keys] = {  # as many steps of the top model in both
    "synchronous": {"quorum": PARTIES, "perturbs": "all", "epochs": 200, "eval-every": 200},
    "asynchronous": {"epochs": 50, "eval-every": 50},
}
Pair = tuple[Sequence[History], Sequence[History]]
METHODS = ((FIRST, LABELS), (ZEROTH, LABELS), (ZEROTH, SCALARS), (FIRST, SCALARS))


def keys_of(schedule: str, estimator: str, codec: str, mechanism: str) -> Keys:
    """Return the options of a combination, without the data and without an epsilon."""
    if (estimator, mechanism) == (ZEROTH, SCALARS):
        keys = {"strategy": "dpzv", **DPZV_MODELS, **DPZV[schedule], **CODECS[codec]}
    elif estimator == ZEROTH:
        quorum = {"quorum": PARTIES} if schedule == "synchronous" else {}
        keys = {**ZEROTH_ORDER, **quorum, **CODECS[codec]}
    else:
        keys = FIRST_ORDER[schedule, codec]
    plain = {"optimizer": "sgd"} if estimator == FIRST else {}
    privacy = {LABELS: {"privacy": "labels"}, SCALARS: {"privacy": "scalar"}, WITHOUT: plain}
    return {**keys, **privacy[mechanism], "window": 8, "validation-fraction": "auto"}


def name_of(schedule: str, estimator: str, codec: str, mechanism: str) -> str:
    """Return the name of a combination: its panel and its line."""
    words = (estimator, mechanism, schedule) if mechanism != WITHOUT else (estimator, schedule)
    return f"{codec} | {', '.join(words)}"


def runs(data: Data) -> dict[str, Job]:
    """Return every combination that the software accepts, at every epsilon and without noise."""
    made = {}
    for codec, (estimator, mechanism), schedule in product(CODECS, METHODS, SCHEDULES):
        if (estimator, mechanism) == (FIRST, SCALARS):
            continue  # `refused` has the reason
        of = schedule, estimator, codec, mechanism
        common = {**keys_of(*of), "dataset": data.part}
        for epsilon in EPSILONS:
            name = f"{name_of(*of)} | epsilon {epsilon:g}"
            rates = DPZV_RATES if mechanism == SCALARS and epsilon >= 1 else {}
            made[name] = Job(PARTIES, {**common, **rates, "epsilon": epsilon})
        if mechanism == LABELS:
            of = schedule, estimator, codec, WITHOUT
            common = {**keys_of(*of), "dataset": data.part}
            made[f"{name_of(*of)} | {WITHOUT}"] = Job(PARTIES, common)
    return made


def games(data: Data) -> dict[str, Job]:
    """Return one game against each mechanism's epsilon, at every epsilon."""
    of = {
        LABELS: keys_of("synchronous", FIRST, "no codec", LABELS),
        **{
            f"{SCALARS}, {schedule}": keys_of(schedule, ZEROTH, "no codec", SCALARS)
            for schedule in SCHEDULES
        },
    }
    return {
        f"{name} | epsilon {epsilon:g}": Job(PARTIES, {**keys, "epsilon": epsilon})
        for name, keys in of.items()
        for epsilon in (EPSILONS if name == LABELS else (4.0,))
    }


# --- a run and a game, each in a process of its own -----------------------------------------------


def summary_of(parties: int, keys: Mapping[str, Any]) -> History:
    """Return a run's summary as the one entry of its history, with the processor's seconds."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"VFL_HOME": home, "XDG_STATE_HOME": home}
        summary, _ = quiet_run(parties, without_noise_seed(keys))
    used = time.process_time() - start
    return [{**summary, "epoch": summary["epochs"], "cpu_seconds": used}]


def game_of(parties: int, keys: Mapping[str, Any]) -> History:
    """Return the epsilon that a run claims and the one that a canary shows, as one entry."""
    found = canary(resolve(without_noise_seed(keys)))
    assert found is not None  # each of these mechanisms claims an epsilon
    claimed = {"epsilon": found.claimed, "epsilon_shown": found.shown, "delta": found.delta}
    return [{"epoch": 0, **claimed, "trials": found.trials}]


def without_noise_seed(keys: Mapping[str, Any]) -> Keys:
    """Return the keys without the seed of noise: with it, no epsilon holds."""
    return {key: each for key, each in keys.items() if key != "noise-seed"}


# --- tables of the page ---------------------------------------------------------------------------

REACHED = last("test_accuracy", PERCENT)
COMBINATIONS = [
    (schedule, estimator, codec, mechanism)
    for codec, (estimator, mechanism), schedule in product(CODECS, METHODS[:3], SCHEDULES)
]


def by_epsilon(histories: Histories) -> list[str]:
    """Return a table of accuracies: a line for each combination, a column for each epsilon."""
    at = [*(f"epsilon {epsilon:g}" for epsilon in EPSILONS), WITHOUT]
    lines = _head("", *at)
    for of in COMBINATIONS:
        names = [f"{name_of(*of)} | {each}" for each in at[:-1]]
        names.append(f"{name_of(*of[:3], WITHOUT)} | {WITHOUT}" if of[3] == LABELS else "")
        cells = [figure(REACHED, histories[each])[0] if each else "" for each in names]
        lines.append(f"| {name_of(*of).replace(' | ', ', ')} | {' | '.join(cells)} |")
    return lines


def price(histories: Histories) -> list[str]:
    """Return a table of the points that noise on labels costs, at each epsilon."""
    lines = _head("", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS))
    for of in COMBINATIONS:
        if of[3] == LABELS:
            without = histories[f"{name_of(*of[:3], WITHOUT)} | {WITHOUT}"]
            found = [histories[f"{name_of(*of)} | epsilon {epsilon:g}"] for epsilon in EPSILONS]
            cells = [difference(without, each) for each in found]
            lines.append(f"| {of[2]}, {of[1]}, {of[0]} | {' | '.join(cells)} |")
    return lines


def pairs(histories: Histories) -> dict[tuple[str, float], Pair]:
    """Return runs with noise on labels and on scalars, by codec and schedule, and by epsilon."""
    return {
        (f"{codec}, {schedule}", epsilon): (
            histories[f"{name_of(schedule, FIRST, codec, LABELS)} | epsilon {epsilon:g}"],
            histories[f"{name_of(schedule, ZEROTH, codec, SCALARS)} | epsilon {epsilon:g}"],
        )
        for codec, schedule, epsilon in product(CODECS, SCHEDULES, EPSILONS)
    }


def claim(histories: Histories) -> list[str]:
    """Return the table that tests the claim, with and without a codec, in both schedules."""
    lines = _head("", *(f"epsilon {each:g}" for each in EPSILONS), "MB, labels", "MB, scalars")
    found = pairs(histories)
    for name in dict.fromkeys(name for name, _ in found):
        mine = [found[name, epsilon] for epsilon in EPSILONS]
        cells = [difference(*pair) for pair in mine]
        cells += [span(megabytes(each)) for each in zip(*mine, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def gain(histories: Histories) -> list[str]:
    """Return the least and the most points that labels gain in a pair, from epsilon 1 on."""
    found = pairs(histories).items()
    means = [mean(points(*pair)) for (_, epsilon), pair in found if epsilon >= 1]
    return [f"{min(means):.1f} to {max(means):.1f}"]


def extremes(histories: Histories) -> list[str]:
    """Return a table of the worst labels with noise and the best scalars, at each epsilon."""
    lines = _head("epsilon", "noise on labels, worst", "noise on scalars, best", "difference")
    for epsilon in EPSILONS:
        mine = [pair for (_, each), pair in pairs(histories).items() if each == epsilon]
        labels, scalars = zip(*mine, strict=True)
        worst, best = min(labels, key=reached), max(scalars, key=reached)
        cells = [figure(REACHED, worst)[0], figure(REACHED, best)[0], difference(worst, best)]
        lines.append(f"| {epsilon:g} | {' | '.join(cells)} |")
    return lines


def refused(histories: Histories) -> list[str]:
    """Return a table of the combinations that the software refuses, with its words."""
    lines = _head("combination", "reason")
    for codec, schedule in product(CODECS, SCHEDULES):
        of = schedule, FIRST, codec, SCALARS
        try:
            resolve({**keys_of(*of), "epsilon": 1.0})
        except ConfigError as error:
            lines.append(f"| {name_of(*of).replace(' | ', ', ')} | {error} |")
    return lines


def reached(histories: Sequence[History]) -> float:
    """Return the mean accuracy over seeds, in percent."""
    return mean(REACHED(each) or 0.0 for each in histories)


def points(one: Sequence[History], other: Sequence[History]) -> list[float]:
    """Return by how many points one is more accurate than another, by seed."""
    return [(REACHED(a) or 0.0) - (REACHED(b) or 0.0) for a, b in zip(one, other, strict=True)]


def difference(one: Sequence[History], other: Sequence[History]) -> str:
    """Return the mean of `points`, and half of its 95 % interval."""
    found = points(one, other)
    return f"{mean(found):+.1f} ± {half_interval(found):.1f}"


def megabytes(runs_of: Sequence[Sequence[History]]) -> list[float]:
    """Return the megabytes of all these runs."""
    return [value(history[-1], "megabytes") for each in runs_of for history in each]


def minutes(histories: Histories) -> list[str]:
    """Return the processor's minutes of all runs."""
    used = sum(value(history[-1], "cpu_seconds") for each in histories.values() for history in each)
    return [f"{used / 60:.0f}"]


def span(numbers: Sequence[float]) -> str:
    """Return the least and the most of these numbers."""
    least, most = (f"{each:.0f}" for each in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"


def above(histories: Histories) -> list[str]:
    """Return how many games show more than the claim, and the most that one shows beyond it."""
    ends = [history[-1] for each in histories.values() for history in each]
    beyond = [end["epsilon_shown"] - end["epsilon"] for end in ends]
    found = sum(each > 0 for each in beyond)
    most = f", by at most {max(beyond):.3f}" if found else ""
    return [f"{found} of {len(ends)} games: more than the claim is shown{most}"]


def _head(*titles: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]


ROWS = {
    "label-privacy": Row(
        "our own: accuracy and bytes by epsilon of labels, MNIST",
        runs,
        {
            "test accuracy, %": REACHED,
            **MEGABYTES,
            "seconds of one core": last("cpu_seconds"),
            "epsilon": optional("epsilon"),
            "delta": optional("delta"),
        },
        (Picture("epsilon", "test_accuracy", "epsilon", "test accuracy", ends=True),),
        seeds=3,
        missing="none",
        tables={
            "by epsilon": by_epsilon,
            "price": price,
            "claim": claim,
            "gain": gain,
            "minutes": minutes,
            "extremes": extremes,
            "refused": refused,
        },
        run=summary_of,
    ),
    "label-privacy-canary": Row(
        "our own: the least epsilon that a game shows of each mechanism",
        games,
        {"claimed": last("epsilon"), "shown, at least": last("epsilon_shown")},
        seeds=3,
        tables={"above": above},
        run=game_of,
    ),
}
