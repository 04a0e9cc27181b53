"""Sweeps: try configurations side by side, and choose one by validation rows.

`study` reads the ranges and chooses the next trial, and `trial` is a process that runs trials.
"""

import fcntl
import hashlib
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import opened_to_append, write_json
from vfl_flower.config.run_config import RunConfig, packed
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.label_holder.progress import clock, say
from vfl_flower.label_holder.results import in_use
from vfl_flower.launch.engines import prepare
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.systems import FEW, sized
from vfl_flower.results.figures import NO_VALIDATION, VALIDATED
from vfl_flower.results.report import write_report
from vfl_flower.results.report.sweep import FILE, Swept
from vfl_flower.results.terminal import wrapped
from vfl_flower.tools.runner import align_once, check_anew, side_by_side
from vfl_flower.tools.sweep.study import Search, Study, ends, of_trial, search_of

_WARM_UP = 0.25  # of a trial's evaluations, before which it is not stopped


def sweep(
    parties: int,
    keys: Mapping[str, Any],
    search: Sequence[str],
    trials: int,
    node_configs: Sequence[Mapping[str, Any]] = (),
    seeds: int = 1,
    jobs: int = 0,
) -> Path:
    """Try configurations up to a number of trials, including an earlier call's; return the folder.

    ``jobs`` processes run trials side by side; 0 for one per core.
    """
    shared = {key: value for key, value in keys.items() if key != "out"}
    searched = search_of(search, shared)
    config = _check(parties, shared, searched, node_configs)
    about = {
        "parties": parties,
        "keys": shared,
        "search": list(search),
        "node_configs": [dict(each) for each in node_configs],
        "seeds": seeds,
    }
    folder = _folder(str(keys.get("out", "")), about)
    rows = FEW if config.data.own_data else len(load_labels(config).train)  # else not known yet
    epochs = sized(config.with_values({"warm-up": 0.0}), rows).training.epochs
    warm_up = int(_WARM_UP * epochs / config.running.eval_every)
    job = {"folder": str(folder), "about": about, "trials": trials, "warm_up": warm_up}
    job["seed"] = seed = config.training.seed
    with in_use(folder, "sweep.lock"), opened_to_append(folder / "workers.log") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # processes hold it too: wait for an earlier call's
        study = Study(folder, searched, seed, warm_up)
        study.take_up(about)
        try:
            if left := study.left(trials):
                if config.data.apart:
                    align_once(parties, shared, node_configs)
                number = min(left, jobs or len(os.sched_getaffinity(0)))
                _side_by_side(study, job, number, log)
        finally:
            if study.metric:
                write(folder, study, about)
    if not study.metric:
        failures = [each["failure"] for each in study.tried if each["failure"]]
        raise VflError(f"No trial has come to its end. The last one: {failures[-1]}")
    return folder


def _check(
    parties: int,
    keys: Mapping[str, Any],
    searched: Search,
    node_configs: Sequence[Mapping[str, Any]],
) -> RunConfig:
    """Check a sweep before anything runs; return the configuration of one trial."""
    found: list[RunConfig] = []
    for last in (False, True):
        try:
            own = {**of_trial(keys, ends(searched, last)), "out": "trial"}  # else it makes a folder
            found.append(prepare(parties, own, node_configs)[0])
        except ConfigError:  # perhaps only the values at this end do not go together
            if last and not found:
                raise
    for config in found:
        _check_ranked(config)
    check_anew(found[0], "A sweep")
    return found[0]


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


def _side_by_side(study: Study, job: Mapping[str, Any], jobs: int, log: BinaryIO) -> None:
    """Run trials in processes, and show how far they are. Raise an error if none can be judged."""
    began, before, told = time.monotonic(), len(study.tried), -1

    def look() -> None:
        nonlocal told
        if len(study.tried) != told:
            told = len(study.tried)
            say(partial(_words, study, job["trials"], before, time.monotonic() - began))

    if not side_by_side("vfl_flower.tools.sweep.trial", job, jobs, log, look):
        raise ConfigError(next(each["failure"] for each in study.tried[::-1] if each["failure"]))


def _words(study: Study, most: int, before: int, seconds: float) -> list[str]:
    """Return how far a sweep is, the best figure so far, and the time left."""
    tried = study.tried
    said = [f"{len(tried)} of {most} trials"]
    if any(each["state"] == "finished" for each in tried):
        first = best({"trials": tried})
        figure = f"{VALIDATED[study.metric]} {first['figure']:.4f}"
        said.append(f"best {figure} (trial {first['number']})")
    left = seconds * (most - len(tried)) / max(1, len(tried) - before)
    return [*said, f"about {clock(left)} left"]


def write(folder: Path, study: Study, about: Mapping[str, Any]) -> None:
    """Write ``sweep.json`` and ``report.html``."""
    found = {
        **about,
        "metric": study.metric,
        "importance": study.importance(),
        "together": [each.as_json() for each in study.together()],
        "trials": study.tried,
    }
    found["best"] = best(found)["number"]
    found["line"] = line(found)
    write_json(folder / FILE, found)
    write_report([folder])


def best(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the trial with the best figure; of equal ones, the first."""
    trials = [each for each in found["trials"] if each["state"] == "finished"]
    return max(trials, key=lambda each: (each["figure"], -each["number"]))


def table(folder: Path) -> str:
    """Return the best trials, what came of the others, and the line to paste."""
    swept = Swept(folder)
    found = [swept.best_trials().in_terminal(), wrapped(swept.sentence)]
    if swept.shares:
        shares = ", ".join(f"{key} {share or 0:.2f}" for key, share in swept.shares.items())
        found.append(wrapped(f"Importance: {shares}."))
    return "\n".join([*found, "The best configuration:", swept.found["line"]])


def line(found: Mapping[str, Any]) -> str:
    """Return the command that runs the best configuration."""
    keys = of_trial(found["keys"], best(found)["keys"])
    words = ["vfl", "run", "-c", pasted(packed(keys))]
    for each in found["node_configs"]:
        words += ["--node-config", pasted(each)]
    if not found["node_configs"]:
        words += ["--parties", str(found["parties"])]
    if found["seeds"] > 1:
        words += ["--seeds", str(found["seeds"])]
    return " ".join(_quoted(word) for word in words)


def pasted(keys: Mapping[str, Any]) -> str:
    """Return options as ``-c`` takes them."""
    return " ".join(f"{key}={_value(value)}" for key, value in keys.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"' if "'" in value else f"'{value}'"
    return str(value)


def _quoted(word: str) -> str:
    """Return a word for a shell; in double quotes if they are as good."""
    if shlex.quote(word) == word:
        return word
    return shlex.quote(word) if set(word) & set('"$`\\!') else f'"{word}"'
