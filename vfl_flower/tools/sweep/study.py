"""The study of a sweep: which configuration is tried next, and how earlier trials ended.

It is Optuna's, in a journal in the results folder that one process writes. If that process ends
during a trial, the trial runs again with the same number and configuration. A configuration follows
from the seed, the trial's number, and the trials that have ended before.
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

    state : "finished"; "stopped", so that ``figure`` is the last of its curve; or "failed".
    deviation : of the figure, over several seeds.
    second : the figure to minimise, if there is one.
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
    """The trials of a sweep, including trials of earlier calls.

    Parameters
    ----------
    folder : where the journal is.
    about : what all trials have in common.
    second : whether there is a second objective. Then no trial is stopped early, since a worse
        trial may cost less.
    warm_up : evaluations of a trial before which it is not stopped.

    Raises
    ------
    ConfigError
        If the folder has another study.
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
                "A sweep needs Optuna, which is not installed. Run: "
                "pip install 'vfl-flower[sweep]'."
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
        """Return the number of the next trial; None if there are as many trials already."""
        waiting = self._trials(self._optuna.trial.TrialState.WAITING)
        number = waiting[0].number if waiting else len(self._trials())
        return number if number < most else None

    def next(self, most: int) -> tuple[int, dict[str, Any]] | None:
        """Return the number and the options of the next trial, or None as `following`."""
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
        """Take a point of a trial's curve; return whether the trial is to stop."""
        if self._second or not math.isfinite(figure):
            return False
        trial = self._running[number]
        if evaluation not in self._trials()[number].intermediate_values:  # else from before a kill
            trial.report(figure, evaluation)
        return bool(trial.should_prune())

    def ended(self, number: int, event: Mapping[str, Any]) -> None:
        """Record how a trial ended, so that next trials avoid stopped and failed ones."""
        trial = self._running.pop(number)
        for name in ("metric", "deviation", "seconds", "failure", "claims"):
            if name in event:
                trial.set_user_attr(name, event[name])
        if event["ended"] == "finished":
            values = [event["figure"], *([event["second"]] if self._second else [])]
            self._study.tell(trial, values)
        else:
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
        """The figure that trials are judged by; empty before one has finished."""
        found = (trial.user_attrs.get("metric", "") for trial in self._trials())
        return next(filter(None, found), "")

    def together(self) -> list[Claim]:
        """Return what all runs of all trials have spent together, by what it protects.

        A trial that began several times counts as often.
        """
        return together(
            Claim(**claim)
            for trial in self._trials()
            for claim in trial.user_attrs.get("claims", ())
            for _ in range(trial.user_attrs.get("begun", 1))
        )

    def frontier(self) -> list[int]:
        """Return the numbers of the Pareto front; for one objective, of the best trial."""
        if not any(each.state == "finished" for each in self.tried):
            return []
        return [trial.number for trial in self._study.best_trials]

    def importance(self) -> dict[str, float]:
        """Return option -> share of the figures' variance that it explains, by fANOVA.

        Trials that were stopped count with their last figure. Empty if all figures are equal.
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
        """Return the searched options of a trial."""
        return {key: each.value(params[key]) for key, each in self._search.items()}

    def _distribution(self, each: Range | Choice) -> Any:
        of = self._optuna.distributions
        if isinstance(each, Choice):
            return of.CategoricalDistribution(each.values)
        if isinstance(each.low, int) and isinstance(each.high, int):
            return of.IntDistribution(each.low, each.high, log=each.log)
        return of.FloatDistribution(each.low, each.high, log=each.log)


def _backend(journal: Path) -> Any:
    """Return Optuna's journal without its lock: one process writes it."""
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    class Held(JournalFileOpenLock):  # Optuna's own would outlive a process that was killed
        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    return JournalFileBackend(str(journal), Held(str(journal)))


def _mend(journal: Path) -> None:
    """Make the journal if there is none, or remove a last line that is incomplete."""
    with told(journal):
        if not journal.exists():
            journal.touch(0o600)
        content = journal.read_bytes()
    if content and not content.endswith(b"\n"):
        write_whole(journal, content[: content.rfind(b"\n") + 1])
