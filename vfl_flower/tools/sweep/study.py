"""The study of a sweep: which configuration is tried next, and what came of those before.

It is Optuna's, kept in its journal in the results folder, which one process writes. Of a trial that
was running when that process ended, the journal has the configuration: it is run again, by the same
number. What is drawn for a trial follows from the seed, its number, and the trials told of before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import make_folder, told, write_whole
from vfl_flower.protocol.privacy.together import Claim, together
from vfl_flower.tools.sweep.search import Choice, Range

if TYPE_CHECKING:
    import optuna

_NAME = "sweep"


@dataclass(frozen=True)
class Tried:
    """A trial that is over.

    state : "finished"; "stopped", for which ``figure`` is the last of its curve; or "failed".
    deviation : of the figure, by several seeds.
    second : what is to be small, where there is such.
    """

    number: int
    keys: Mapping[str, Any]
    state: str
    figure: float | None = None
    deviation: float | None = None
    second: float | None = None
    seconds: float | None = None
    failure: str = ""


class Study:
    """The trials of a sweep, those of before included.

    Parameters
    ----------
    folder : where the journal is.
    about : what all trials have in common; a study of another thing is refused.
    second : whether there is a second objective; nothing is stopped early then, since what does
        worse may cost less.
    warm_up : evaluations of a trial before which it is not stopped.

    Raises
    ------
    ConfigError
        If the folder has a study of something else.
    VflError
        If Optuna is not installed.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        search: Sequence[Range | Choice],
        second: bool,
        seed: int,
        warm_up: int,
    ) -> None:
        try:
            import optuna
        except ImportError:
            raise VflError(
                "A sweep needs Optuna, which is not installed: pip install 'vfl-flower[sweep]'."
            ) from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna = optuna
        self._search = {each.key: each for each in search}
        self._seed, self._second = seed, second
        make_folder(folder)
        journal = folder / "study.journal"
        _mend(journal)
        storage = optuna.storages.JournalStorage(_backend(journal))
        self._study = optuna.create_study(
            study_name=_NAME,
            storage=storage,
            directions=["maximize", "minimize"] if second else ["maximize"],
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=warm_up),
        )
        now = json.loads(json.dumps(about))
        then = self._study.user_attrs.setdefault("about", now)
        if then != now:
            other = next(key for key in now if then.get(key) != now[key])
            raise ConfigError(
                f"{folder} has a sweep whose {other} differs: name another folder by --out."
            )
        self._study.set_user_attr("about", now)
        self._running: dict[int, optuna.Trial] = {}
        study_id = storage.get_study_id_from_name(_NAME)
        for trial in self._trials(optuna.trial.TrialState.RUNNING):  # when the last process ended
            trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
            begun = trial.user_attrs.get("begun", 1)
            storage.set_trial_user_attr(trial_id, "begun", begun + 1)
            storage.set_trial_state_values(trial_id, optuna.trial.TrialState.WAITING)

    def following(self, most: int) -> int | None:
        """The number of the trial that `next` gives; none if there are as many already."""
        waiting = self._trials(self._optuna.trial.TrialState.WAITING)
        number = waiting[0].number if waiting else len(self._trials())
        return number if number < most else None

    def next(self, most: int) -> tuple[int, dict[str, Any]] | None:
        """The number and the keys of the next trial, if there are not as many already."""
        number = self.following(most)
        if number is None:
            return None
        own = np.random.SeedSequence([self._seed, number]).generate_state(1)[0]
        self._study.sampler = self._optuna.samplers.TPESampler(seed=int(own))
        drawn = {key: self._distribution(each) for key, each in self._search.items()}
        trial = self._study.ask(drawn)
        self._running[trial.number] = trial
        return trial.number, self._keys(trial.params)

    def evaluated(self, number: int, evaluation: int, figure: float) -> bool:
        """Take a point of a trial's curve; whether the trial is to stop, by the others' curves."""
        if self._second or not math.isfinite(figure):
            return False
        trial = self._running[number]
        if evaluation not in self._trials()[number].intermediate_values:  # of before a kill
            trial.report(figure, evaluation)
        return bool(trial.should_prune())

    def finished(self, number: int, event: Mapping[str, Any]) -> None:
        """A trial has ended, and this is what it is judged by."""
        trial = self._running.pop(number)
        for name in ("metric", "deviation", "seconds"):
            trial.set_user_attr(name, event[name])
        trial.set_user_attr("claims", event.get("claims", []))
        values = [event["figure"], *([event["second"]] if self._second else [])]
        self._study.tell(trial, values)

    def ended_early(self, number: int, event: Mapping[str, Any]) -> None:
        """A trial was stopped, or has failed; what is tried next keeps away from either."""
        trial = self._running.pop(number)
        trial.set_user_attr("failure", event.get("failure", ""))
        trial.set_user_attr("claims", event.get("claims", []))
        self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)

    @property
    def tried(self) -> list[Tried]:
        """The trials that are over, by number."""
        states = self._optuna.trial.TrialState
        found = []
        for trial in self._trials(states.COMPLETE, states.PRUNED):
            of = trial.user_attrs
            state = "finished" if trial.state == states.COMPLETE else "stopped"
            state = "failed" if of.get("failure") else state
            figure, second = (*(trial.values or ()), None, None)[:2]
            found.append(
                Tried(
                    number=trial.number,
                    keys=self._keys(trial.params),
                    state=state,
                    figure=None if state == "failed" else figure,
                    deviation=of.get("deviation"),
                    second=second,
                    seconds=of.get("seconds"),
                    failure=of.get("failure", ""),
                )
            )
        return found

    @property
    def metric(self) -> str:
        """What trials are judged by; empty before one has finished."""
        found = (trial.user_attrs.get("metric", "") for trial in self._trials())
        return next(filter(None, found), "")

    def together(self) -> list[Claim]:
        """What all runs of all trials have spent together, by what it protects.

        A trial that was begun again counts so many times, since its first run left nothing.
        """
        return together(
            Claim(**claim)
            for trial in self._trials()
            for claim in trial.user_attrs.get("claims", ())
            for _ in range(trial.user_attrs.get("begun", 1))
        )

    def frontier(self) -> list[int]:
        """Numbers of the trials that no other beats in both; by one objective the best alone."""
        if not any(each.state == "finished" for each in self.tried):
            return []
        return [trial.number for trial in self._study.best_trials]

    def importance(self) -> dict[str, float]:
        """Key -> the share of the figures' variance that it explains, by fANOVA; largest first.

        Trials that were stopped count with what they had reached; none if all reached the same.
        """
        trials = [each for each in self.tried if each.figure is not None]
        if len({each.figure for each in trials}) < 2:
            return {}
        study = self._optuna.create_study(direction="maximize")
        by_number = {trial.number: trial for trial in self._trials()}
        for each in trials:
            of = by_number[each.number]
            study.add_trial(
                self._optuna.trial.create_trial(
                    params=of.params, distributions=of.distributions, value=each.figure
                )
            )
        evaluator = self._optuna.importance.FanovaImportanceEvaluator(seed=self._seed)
        found = self._optuna.importance.get_param_importances(study, evaluator=evaluator)
        return {key: float(share) for key, share in found.items()}

    def _trials(self, *states: optuna.trial.TrialState) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def _keys(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What a trial sets of the keys that are searched."""
        return {key: each.value(params[key]) for key, each in self._search.items()}

    def _distribution(self, each: Range | Choice) -> Any:
        of = self._optuna.distributions
        if isinstance(each, Choice):
            return of.CategoricalDistribution(each.values)
        if isinstance(each.low, int) and isinstance(each.high, int):
            return of.IntDistribution(each.low, each.high, log=each.log)
        return of.FloatDistribution(each.low, each.high, log=each.log)


def _backend(journal: Path) -> Any:
    """Optuna's journal in a file of which nobody else writes: the folder is locked."""
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    class Held(JournalFileOpenLock):  # Optuna's own would outlive a process that was killed
        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    return JournalFileBackend(str(journal), Held(str(journal)))


def _mend(journal: Path) -> None:
    """Make the journal if there is none, or leave out a line of which only a part was written."""
    with told(journal):
        if not journal.exists():
            journal.touch(0o600)
        content = journal.read_bytes()
    if content and not content.endswith(b"\n"):
        write_whole(journal, content[: content.rfind(b"\n") + 1])
