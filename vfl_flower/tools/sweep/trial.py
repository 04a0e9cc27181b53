"""A trial of a sweep: one configuration that is run in this process, and stopped if it is to be.

It says by JSON what comes of it. A trial writes to a folder of its own that is gone with it; who
sweeps gets the files of one that ended, and of others none.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.figures import SECOND, chosen_by
from vfl_flower.launch.engines import Finished, run_local
from vfl_flower.protocol.privacy.together import Claim
from vfl_flower.tools.seeds import repeated

Event = dict[str, Any]
"""What a trial says: ``evaluated``, a number and a figure, upon which it waits; or how it ended."""


class _StoppedError(VflError):
    """The trial is not worth going on with."""


class _ImpossibleError(VflError):
    """No trial of this sweep can be judged."""


class _Watch(Callback):
    """Tells what each evaluation found; stops the run if the answer says so."""

    def __init__(self, tell: Callable[[Event], bool]) -> None:
        self._tell = tell
        self._evaluations = 0
        self._over = False

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Tell, and stop if that is the answer."""
        if self._over:
            return
        self._evaluations += 1
        try:
            figure = entry[chosen_by(entry)]
        except ConfigError as error:
            raise _ImpossibleError(str(error)) from None
        if self._tell({"evaluated": self._evaluations, "figure": figure}):
            raise _StoppedError("It is not worth going on with.")

    def ended(self) -> None:
        """By the first seed it is judged; others run to their ends."""
        self._over = True


def run_trial(job: Mapping[str, Any], tell: Callable[[Event], bool]) -> Event:
    """Run a configuration, by as many seeds as there are, and say how it ended.

    Parameters
    ----------
    job : ``parties``, ``keys``, ``node_configs``, ``seeds``, ``second``; and ``folder``, where its
        files will lie.
    tell : is told of evaluations, and says whether the trial is to stop.
    """
    with tempfile.TemporaryDirectory(prefix="vfl-sweep-") as place:
        folder = Path(place, "run")
        start = partial(run_local, observers=[_Watch(tell)])
        run = job["parties"], job["keys"], job["node_configs"], job["seeds"]
        try:
            finished = repeated(start, *run, folder)
            judged = _judged(finished, job["second"])
        except _StoppedError:
            return {"ended": "stopped", **_claims(folder)}
        except _ImpossibleError as error:
            return {"ended": "impossible", "failure": str(error)}
        except VflError as error:
            return {"ended": "failed", "failure": str(error), **_claims(folder)}
        files = _files(folder, job["folder"])
        return {"ended": "finished", **judged, **_claims(folder), "files": files}


def _judged(finished: Finished, second: str) -> dict[str, Any]:
    """What a configuration is judged by: a figure of the validation rows, and what it spent."""
    summary = finished.summary
    figures = {**finished.history[-1], **{k: v for k, v in summary.items() if v is not None}}
    key = chosen_by(figures)
    found = {
        "metric": key,
        "figure": figures[key],
        "deviation": figures.get("deviation", {}).get(key),
        "seconds": summary["seconds"],
    }
    if second:
        keys, words, _ = SECOND[second]
        if any(summary.get(each) is None for each in keys):
            raise _ImpossibleError(
                f"--second {second}: these runs have no {words}; choose another."
            )
        found["second"] = sum(summary[each] for each in keys)
    return found


def _claims(folder: Path) -> Event:
    """What each run of a trial claims to have spent, also a run that was stopped."""
    summaries = [json.loads(path.read_text()) for path in folder.rglob("summary.json")]
    runs = (Claim.of(each) for each in summaries if "seeds" not in each)
    found = [claim.as_json() for claim in runs if claim]
    return {"claims": found} if found else {}


def _files(folder: Path, to: str) -> dict[str, str]:
    """Path -> text of summaries and histories, as if they had been written to a folder."""
    here, there = json.dumps(str(folder))[1:-1], json.dumps(to)[1:-1]
    paths = [*folder.rglob("summary.json"), *folder.rglob("history.jsonl")]
    return {str(path.relative_to(folder)): path.read_text().replace(here, there) for path in paths}


class Stepper:
    """Trials one after the other, each in a thread that waits when it has something to say."""

    def __init__(self) -> None:
        self._said: SimpleQueue[Event | BaseException] = SimpleQueue()
        self._answers: SimpleQueue[bool] = SimpleQueue()

    def send(self, message: dict[str, Any] | bool) -> Event:
        """Begin a trial, or answer the last event; returns the next."""
        if isinstance(message, bool):
            self._answers.put(message)
        else:
            Thread(target=self._run, args=(message,), daemon=True).start()
        event = self._said.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def _run(self, job: dict[str, Any]) -> None:
        try:
            self._said.put(run_trial(job, self._tell))
        except BaseException as error:
            self._said.put(error)

    def _tell(self, event: Event) -> bool:
        self._said.put(event)
        return self._answers.get()
