"""Sweeps: try configurations side by side, and choose one by validation rows.

`search` reads the ranges, `study` chooses the next trial, `workers` run trials, `trial` is one of
them, and `results` writes what was found.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vfl_flower.config.errors import ConfigError, VflError, unknown
from vfl_flower.config.files import make_folder, write_whole
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.label_holder.figures import NO_VALIDATION, SECOND, VALIDATED
from vfl_flower.label_holder.progress import clock, say
from vfl_flower.label_holder.results import in_use
from vfl_flower.launch.engines import prepare, run_local
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.systems import FEW, sized
from vfl_flower.tools.sweep import results
from vfl_flower.tools.sweep.search import Choice, Range, of_trial, search_of
from vfl_flower.tools.sweep.study import Study
from vfl_flower.tools.sweep.workers import Workers

_WARM_UP = 0.25  # of a trial's evaluations, before which it is not stopped


def sweep(
    parties: int,
    keys: Mapping[str, Any],
    search: Sequence[str],
    trials: int,
    workers: Callable[[Path], Workers],
    *,
    node_configs: Sequence[Mapping[str, Any]] = (),
    seeds: int = 1,
    second: str = "",
) -> Path:
    """Try configurations up to a number of trials, including an earlier call's.

    Parameters
    ----------
    keys : options of all trials, ``strategy`` at least. ``out`` is the results folder. By default,
        it is a folder below runs/ whose name follows from the sweep.
    search : texts of ``--search``.
    workers : from the results folder to the workers.
    second : a figure to minimise besides, one of `SECOND`.

    Returns
    -------
    The results folder.

    Raises
    ------
    ConfigError
        If the sweep cannot work, before anything runs; or if there are no validation rows.
    VflError
        If all trials fail, or a worker ends by itself.
    """
    shared = {key: value for key, value in keys.items() if key != "out"}
    searched = search_of(search, shared)
    config = _check(parties, shared, searched, node_configs, second)
    about = {
        "parties": parties,
        "keys": shared,
        "search": [repr(each) for each in searched],
        "node_configs": [dict(each) for each in node_configs],
        "seeds": seeds,
        "second": second,
    }
    folder = _folder(str(keys.get("out", "")), about)
    rows = FEW if config.data.own_data else len(load_labels(config).train)  # else not known yet
    epochs = sized(config.with_values({"warm-up": 0.0}), rows).training.epochs
    evaluations = epochs / config.running.eval_every
    with in_use(folder, "sweep.lock"):
        seed = config.training.seed
        study = Study(folder, about, searched, bool(second), seed, int(_WARM_UP * evaluations))
        try:
            if study.following(trials) is not None:
                if config.data.apart:  # align once: the trials use the alignment again
                    with tempfile.TemporaryDirectory() as place:
                        align = {**shared, "task": "align", "out": str(Path(place, "run"))}
                        run_local(parties, align, node_configs=node_configs)
                with workers(folder) as crew:
                    _try(study, crew, folder, about, trials)
        finally:
            if study.metric:
                results.write(folder, study, about)
    if not study.metric:
        failures = [each.failure for each in study.tried if each.failure]
        raise VflError(f"No trial has come to its end. The last one: {failures[-1]}")
    return folder


def _check(
    parties: int,
    keys: Mapping[str, Any],
    searched: Sequence[Range | Choice],
    node_configs: Sequence[Mapping[str, Any]],
    second: str,
) -> RunConfig:
    """Check a sweep before anything runs; return the configuration of one trial."""
    if second and second not in SECOND:
        raise unknown("--second", second, list(SECOND))
    found: list[RunConfig] = []
    for end in (0, 1):
        own = {each.key: each.ends[end] for each in searched}
        try:
            found.append(prepare(parties, of_trial(keys, own), node_configs)[0])
        except ConfigError:  # perhaps only the values at this end do not go together
            if end and not found:
                raise
    for config in found:
        _check_ranked(config)
    config = found[0]
    if config.task != "train" or config.model or config.running.resume:
        raise ConfigError("A sweep trains every trial anew: leave task, model and resume out.")
    if second == "virtual-seconds" and config.schedule.delay == "none":
        raise ConfigError("--second virtual-seconds: there are none without delays; set delay.")
    return config


def _check_ranked(config: RunConfig) -> None:
    """Raise `ConfigError` if a configuration has no validation rows to rank by."""
    data = config.data
    if data.validation_fraction != 0 and (data.own_data or load_labels(config).validation):
        return
    if not mechanism_of(config).covers_validation:
        raise ConfigError(
            f"privacy = {config.privacy.mechanism!r} has no validation rows, and a sweep "
            "ranks its trials by them: use privacy = 'labels', or `vfl run` with fixed values."
        )
    raise ConfigError(NO_VALIDATION)


def _folder(out: str, about: Mapping[str, Any]) -> Path:
    """Return the results folder; by default one that the same sweep finds again."""
    if out:
        return Path(out).expanduser().absolute()
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    system = str(about["keys"]["strategy"]).rsplit("/", 1)[-1].replace(":", "-")
    return Path("runs", f"sweep-{system}-{digest}").absolute()


def _try(study: Study, crew: Workers, folder: Path, about: Mapping[str, Any], most: int) -> None:
    """Run trials up to a number, and tell the study how they end."""
    idle = list(range(crew.number))
    running: dict[int, int] = {}  # worker -> number of its trial
    began, before = time.monotonic(), len(study.tried)
    while True:
        while idle and (following := study.next(most)):
            number, own = following
            running[worker := idle.pop()] = number
            to = str(folder / "trials" / str(number))
            crew.send(worker, {**about, "keys": of_trial(about["keys"], own), "folder": to})
        if not running:
            return
        for worker, event in crew.wait():
            number = running[worker]
            if "evaluated" in event:
                stop = study.evaluated(number, event["evaluated"], event["figure"])
                crew.send(worker, stop)
                continue
            _take(study, number, event, folder)
            del running[worker]
            idle.append(worker)
            say(partial(_words, study, most, before, time.monotonic() - began))


def _words(study: Study, most: int, before: int, seconds: float) -> list[str]:
    """Return how far a sweep is, the best figure so far, and the time left.

    Parameters
    ----------
    before, seconds : trials of an earlier call, and how long the others have taken.
    """
    tried = study.tried
    said = [f"{len(tried)} of {most} trials"]
    if finished := [each for each in tried if each.state == "finished"]:
        best = max(finished, key=lambda each: each.figure or 0.0)
        said.append(f"best {VALIDATED[study.metric]} {best.figure:.4f} (trial {best.number})")
    left = seconds * (most - len(tried)) / max(1, len(tried) - before)
    return [*said, f"about {clock(left)} left"]


def _take(study: Study, number: int, event: Mapping[str, Any], folder: Path) -> None:
    """Write the files of a trial, and then tell the study how it ended."""
    if event["ended"] == "impossible":
        raise ConfigError(event["failure"])
    for name, text in event.get("files", {}).items():
        path = folder / "trials" / str(number) / name
        make_folder(path.parent)
        write_whole(path, text.encode())
    study.ended(number, event)
