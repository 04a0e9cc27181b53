"""A trial of a sweep: one configuration, run in this process and stopped if it falls behind.

A trial says in JSON how it goes. It writes to a temporary folder. The sweep gets the files of a
trial that ends, and of no other.
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
"""A trial's message: ``evaluated``, a number and a figure; or how it ended. The trial waits for an
answer to an evaluation."""


class _StoppedError(VflError):
    """The trial falls behind."""


class _ImpossibleError(VflError):
    """No trial of this sweep can be judged."""


class _Watch(Callback):
    """Tells of each evaluation of the first seed; stops the run if the answer says so."""

    def __init__(self, tell: Callable[[Event], bool]) -> None:
        self._tell = tell
        self._evaluations = 0
        self._over = False

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Tell of the evaluation."""
        if self._over:
            return
        self._evaluations += 1
        try:
            figure = entry[chosen_by(entry)]
        except ConfigError as error:
            raise _ImpossibleError(str(error)) from None
        if self._tell({"evaluated": self._evaluations, "figure": figure}):
            raise _StoppedError("The trial falls behind.")

    def ended(self) -> None:
        """Tell of no other seed: the first one has decided."""
        self._over = True


def run_trial(job: Mapping[str, Any], tell: Callable[[Event], bool]) -> Event:
    """Run a configuration with each seed, and return how it ended.

    Parameters
    ----------
    job : ``parties``, ``keys``, ``node_configs``, ``seeds``, ``second``; and ``folder``, where the
        sweep will put the files.
    tell : takes an evaluation, and returns whether the trial is to stop.
    """
    with tempfile.TemporaryDirectory(prefix="vfl-sweep-") as place:
        folder = Path(place, "run")
        start = partial(run_local, observers=[_Watch(tell)])
        run = job["parties"], job["keys"], job["node_configs"], job["seeds"]
        try:
            found = _judged(repeated(start, *run, folder), job["second"])
            found |= {"ended": "finished", "files": _files(folder, job["folder"])}
        except _StoppedError:
            found = {"ended": "stopped"}
        except _ImpossibleError as error:
            return {"ended": "impossible", "failure": str(error)}
        except VflError as error:
            found = {"ended": "failed", "failure": error.outside}
        # A run that was stopped has spent its epsilon too.
        summaries = [json.loads(path.read_text()) for path in folder.rglob("summary.json")]
        claims = [Claim.of(each) for each in summaries if "seeds" not in each]
        if any(claims):
            found["claims"] = [claim.as_json() for claim in claims if claim]
        return found


def _judged(finished: Finished, second: str) -> Event:
    """Return the validation figure that ranks a configuration, and its cost."""
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


def _files(folder: Path, to: str) -> dict[str, str]:
    """Return path -> text of summaries and histories, as if written to a folder."""
    here, there = json.dumps(str(folder))[1:-1], json.dumps(to)[1:-1]
    paths = [*folder.rglob("summary.json"), *folder.rglob("history.jsonl")]
    return {str(path.relative_to(folder)): path.read_text().replace(here, there) for path in paths}


class Stepper:
    """Runs trials one after the other, each in a thread that waits for answers."""

    def __init__(self) -> None:
        self._said: SimpleQueue[Event | BaseException] = SimpleQueue()
        self._answers: SimpleQueue[bool] = SimpleQueue()

    def send(self, message: dict[str, Any] | bool) -> Event:
        """Begin a trial, or answer the last event; return the next event."""
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
