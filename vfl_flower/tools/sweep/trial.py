"""A trial of a sweep: one configuration, run in this process and stopped if it falls behind.

`vfl_flower.tools.sweep` starts this file as a process, which runs trials one after the other. A
trial writes to a temporary folder. The sweep gets the files of a trial that ends, and of no other.
"""

import json
import logging
import math
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import make_folder, write_whole
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.launch.engines import run_local
from vfl_flower.protocol.privacy.together import Claim
from vfl_flower.results.figures import chosen_by
from vfl_flower.tools.runner import IMPOSSIBLE
from vfl_flower.tools.seeds import repeated
from vfl_flower.tools.sweep.study import Study, of_trial, search_of


class _StoppedError(VflError):
    """The trial falls behind."""


class _ImpossibleError(VflError):
    """No trial of this sweep can be judged."""


class _Watch(Callback):
    """Reports each evaluation of the first seed; stops the run if the answer says so."""

    def __init__(self, report: Callable[[float, int], bool]) -> None:
        self._report = report
        self._evaluations = 0
        self._over = False

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Report the evaluation."""
        if self._over:
            return
        self._evaluations += 1
        try:
            figure = entry[chosen_by(entry)]
        except ConfigError as error:
            raise _ImpossibleError(str(error)) from None
        if self._report(figure, self._evaluations):
            raise _StoppedError("The trial falls behind.")

    def ended(self) -> None:
        """Report no other seed: the first one has decided."""
        self._over = True


def run_trial(
    about: Mapping[str, Any],
    keys: Mapping[str, Any],
    to: Path,
    report: Callable[[float, int], bool],
) -> dict[str, Any]:
    """Run a configuration with each seed, and return how it ended; nothing if it was stopped.

    ``report`` takes a figure and the number of its evaluation, and returns whether to stop. A run
    that was stopped has spent its epsilon too.
    """
    with tempfile.TemporaryDirectory(prefix="vfl-sweep-") as place:
        folder = Path(place, "run")
        start = partial(run_local, observers=[_Watch(report)])
        outcome: dict[str, Any] = {}
        try:
            own = {**keys, "out": str(folder)}
            run = repeated(start, about["parties"], own, about["node_configs"], about["seeds"])
        except VflError as error:
            if isinstance(error, _ImpossibleError):
                raise
            if not isinstance(error, _StoppedError):
                outcome = {"failure": error.outside}
        else:
            summary = run.summary
            figures = {**run.history[-1], **{k: v for k, v in summary.items() if v is not None}}
            key = chosen_by(figures)
            outcome = {
                "metric": key,
                "figure": figures[key],
                "deviation": figures.get("deviation", {}).get(key),
                "seconds": summary["seconds"],
            }
            _copy(folder, to)
        summaries = [json.loads(path.read_text()) for path in folder.rglob("summary.json")]
        claims = [Claim.of(each) for each in summaries if "seeds" not in each]
        if any(claims):
            outcome["claims"] = [claim.as_json() for claim in claims if claim]
        return outcome


def _copy(folder: Path, to: Path) -> None:
    """Copy summaries and histories to a folder, as if the trial had written them there."""
    here, there = json.dumps(str(folder))[1:-1], json.dumps(str(to))[1:-1]
    for path in [*folder.rglob("summary.json"), *folder.rglob("history.jsonl")]:
        make_folder((to / path.relative_to(folder)).parent)
        text = path.read_text().replace(here, there)
        write_whole(to / path.relative_to(folder), text.encode())


def run_trials(job: Mapping[str, Any]) -> None:
    """Run trials of a job, which `sweep` has written, until the study has enough."""
    about, folder = job["about"], Path(job["folder"])
    searched = search_of(about["search"], about["keys"])
    study = Study(folder, searched, job["seed"], job["warm_up"])
    while following := study.next(job["trials"]):
        trial, own = following

        def report(figure: float, evaluation: int, trial: Any = trial) -> bool:
            if not math.isfinite(figure):
                return False
            with warnings.catch_warnings(action="ignore"):  # reported already, before a kill
                trial.report(figure, evaluation)
            return bool(trial.should_prune())

        keys = of_trial(about["keys"], own)
        try:
            outcome = run_trial(about, keys, folder / "trials" / str(trial.number), report)
        except _ImpossibleError as error:
            study.ended(trial, {"failure": str(error)})
            raise
        study.ended(trial, outcome)


def main() -> None:
    """Read a job from standard input. SIGTERM ends the process, and removes the trial's folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    try:
        run_trials(json.load(sys.stdin))
    except _ImpossibleError:
        sys.exit(IMPOSSIBLE)


if __name__ == "__main__":
    main()
