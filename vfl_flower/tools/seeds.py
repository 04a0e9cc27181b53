"""Run one configuration with several seeds; report means and standard deviations.

The results folder has the form of a run's folder. Its summary and history hold means, and
``deviation`` beside figures that differ. Its epsilon covers all seeds together.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from vfl_flower.config.files import write_json, write_whole
from vfl_flower.label_holder.earlier_run import configured
from vfl_flower.launch.engines import Engine, Finished
from vfl_flower.protocol.privacy.together import Claim, together
from vfl_flower.results.model_card import FILES, write_card
from vfl_flower.results.report.read import read
from vfl_flower.results.report.sections import comparison
from vfl_flower.tools.runner import check_anew, run_each

_NAMES = ("party", "best_party")  # numbers that are names
_OF_ALL = {"epsilon", "delta", "gaussian_mu"}  # figures of all runs together
_OF_ONE_RUN = {"epsilon_of_paper", "epsilon_secret_batches"}  # no theorem composes them
_MEASURES = ("test_", "validation_", "train_")  # their deviation is reported even if it is 0


def repeated(
    start: Engine,
    parties: int,
    keys: Mapping[str, Any],
    node_configs: Sequence[Mapping[str, Any]],
    seeds: int,
) -> Finished:
    """Run a configuration with ``seed``, seed + 1, ..., one after the other, into ``out``."""
    run = partial(start, parties, node_configs=node_configs)
    if seeds == 1:
        return run(keys)
    config = configured(keys)
    check_anew(config, "--seeds")
    folder, first = Path(str(keys["out"])), config.training.seed
    every = {f"seed {seed}": {**keys, "seed": seed} for seed in range(first, first + seeds)}
    for each in run_each(every, folder, run, partial(_write, folder)).values():
        if (each.folder / FILES[0]).is_file():
            write_card(each.folder)  # with the figures of all seeds
    return Finished(folder)


def table(folder: Path) -> str:
    """Return the figures of each seed as text, with their mean and deviation, but no epsilon."""
    whole = read([folder])[0]
    titles = {f"seed {seed}": folder / f"seed-{seed}" for seed in whole.summary["seeds"]}
    runs = [replace(read([place])[0], title=title) for title, place in titles.items()]
    means = {key: each for key, each in whole.summary.items() if key not in ("deviation", "seeds")}
    deviations = {key: whole.summary["deviation"].get(key) for key in means}
    runs.append(replace(whole, title="mean", summary=means))
    runs.append(replace(whole, title="deviation", summary=deviations))
    for run in runs:
        run.summary.update(dict.fromkeys(_OF_ALL))
    return comparison(runs).in_terminal()


def _write(folder: Path, finished: Mapping[str, Finished]) -> None:
    """Write the summary and history of runs that differ in their seeds."""
    summaries = [each.summary for each in finished.values()]
    of_first = {key: summaries[0][key] for key in ("seed", "config")}
    seeds = [each["seed"] for each in summaries]
    lines = ""
    # Some runs may have stopped early: the mean ends with the shortest.
    for of_runs in zip(*(each.history for each in finished.values()), strict=False):
        # Total bytes, so that they have a deviation.
        entries = [{**each, "bytes": each["bytes_up"] + each["bytes_down"]} for each in of_runs]
        lines += json.dumps(mean(entries)) + "\n"
    write_whole(folder / "history.jsonl", lines.encode())
    write_json(folder / "summary.json", {**_of_all(summaries), **of_first, "seeds": seeds})


def _of_all(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means, but one epsilon: all runs learn from the same people."""
    summaries = _with_equal_curves(summaries)
    means: dict[str, Any] = mean(summaries)
    claims = [claim for each in summaries if (claim := Claim.of(each))]
    if not claims or len(summaries) == 1:
        return means
    of_one = dict.fromkeys(means.keys() & _OF_ONE_RUN)
    deviation = {
        k: v for k, v in means.pop("deviation", {}).items() if k not in _OF_ALL | _OF_ONE_RUN
    }
    spent = dict.fromkeys(means.keys() & _OF_ALL)
    if len(claims) == len(summaries):
        spent |= together(claims)[0].figures()
    return {**means, **of_one, **spent, **({"deviation": deviation} if deviation else {})}


def _with_equal_curves(summaries: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return summaries with curves of equally many points; other numbers of bins are left out."""
    assessments = [each["assessment"] for each in summaries if each.get("assessment")]
    if len(assessments) < len(summaries):
        return [{**each, "assessment": None} for each in summaries]
    curves: list[dict[str, Any]] = [{} for _ in assessments]
    for name in assessments[0]["curves"]:
        same = [each["curves"][name] for each in assessments]
        fewest = min(len(each["x"]) for each in same)
        if "rows" in same[0] and any(len(each["x"]) > fewest for each in same):
            continue
        for mine, each in zip(curves, same, strict=True):
            at, every = np.linspace(0, len(each["x"]) - 1, fewest), np.arange(len(each["x"]))
            is_long = len(every) > fewest
            mine[name] = {
                axis: np.interp(at, every, values).tolist() if is_long else values
                for axis, values in each.items()
            }
    return [
        {**summary, "assessment": {**each, "curves": mine}}
        for summary, each, mine in zip(summaries, assessments, curves, strict=True)
    ]


def mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, also inside mappings and lists of one form.

    A mapping gets ``deviation`` of each number that differs, and of each measure of the model. A
    value that differs and is not a number becomes None.
    """
    first = values[0]
    if all(each == first for each in values):
        return first
    if all(isinstance(each, dict) for each in values):
        means = {
            key: mean([each[key] for each in values])
            for key in first
            if all(key in each for each in values)
        }
        means |= {key: None for key in _NAMES if key in means and means[key] != first[key]}
        columns = {key: [each[key] for each in values] for key in means if key not in _NAMES}
        spreads = {key: stdev(each) for key, each in columns.items() if _are_numbers(each)}
        deviation = {k: each for k, each in spreads.items() if each or k.startswith(_MEASURES)}
        return {**means, **({"deviation": deviation} if deviation else {})}
    if all(isinstance(each, list) and len(each) == len(first) for each in values):
        return [mean(each) for each in zip(*values, strict=True)]
    return fmean(values) if _are_numbers(values) else None


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
