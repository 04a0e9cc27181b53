"""The study of a sweep: which configuration is tried next, and how earlier trials ended.

All workers write Optuna's journal. A trial that a sweep has left runs again with the same number
and configuration, which follows from the seed, that number, and the trials that ended before.
"""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import alone_in, told
from vfl_flower.config.run_config import KEYS, RunConfig, parse
from vfl_flower.label_holder.earlier_run import without_noise
from vfl_flower.protocol.privacy.together import Claim, together

try:
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState
except ImportError:
    raise VflError(
        "A sweep needs Optuna, which is not installed. Run: pip install 'vfl-flower[sweep]'."
    ) from None

optuna.logging.set_verbosity(optuna.logging.ERROR)
Distribution = IntDistribution | FloatDistribution | CategoricalDistribution
Search = dict[str, Distribution]
"""Option -> the range or the choices of its values."""

_NAME = "sweep"
_ENDS = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "stopped"}


class Study:
    """The trials of a sweep. None is stopped in the first ``warm_up`` evaluations."""

    def __init__(self, folder: Path, search: Search, seed: int, warm_up: int) -> None:
        self._search = search
        self._folder, self._seed = folder, seed
        journal = folder / "study.journal"
        with told(journal):
            journal.touch(0o600)
            with alone_in(journal):  # cut off a last line that a kill has left incomplete
                os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
        self._storage = optuna.storages.JournalStorage(_backend(journal))
        self._study = optuna.create_study(
            study_name=_NAME,
            storage=self._storage,
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=warm_up),
        )

    def take_up(self, about: Mapping[str, Any]) -> None:
        """Note what all trials have in common, and queue the trials that an earlier call left."""
        now = json.loads(json.dumps(about))
        then = self._study.user_attrs.get("about", now)
        if other := next((key for key in now if then.get(key) != now[key]), ""):
            raise ConfigError(
                f"{self._folder} has a sweep whose {other} differs: name another folder by --out."
            )
        self._study.set_user_attr("about", now)
        study_id = self._storage.get_study_id_from_name(_NAME)
        for trial in self._trials(TrialState.RUNNING):  # when the last process ended
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
            begun = trial.user_attrs.get("begun", 1)
            self._storage.set_trial_user_attr(trial_id, "begun", begun + 1)
            self._storage.set_trial_state_values(trial_id, TrialState.WAITING)

    def left(self, most: int) -> int:
        """Return how many trials of so many have not begun."""
        begun = [each for each in self._trials() if each.state != TrialState.WAITING]
        return max(0, most - len(begun))

    def next(self, most: int) -> tuple[optuna.Trial, dict[str, Any]] | None:
        """Begin the next trial, and return it with its options; None after so many trials."""
        with alone_in(self._folder):  # else two workers would begin the last trial
            if not self.left(most):
                return None
            waiting = self._trials(TrialState.WAITING)
            number = waiting[0].number if waiting else len(self._trials())
            own = np.random.SeedSequence([self._seed, number]).generate_state(1)[0]
            self._study.sampler = optuna.samplers.TPESampler(seed=int(own))
            trial = self._study.ask({**self._search})
        return trial, self._keys(trial.params)

    def ended(self, trial: optuna.Trial, outcome: Mapping[str, Any]) -> None:
        """Record how a trial ended, so that next trials avoid stopped and failed ones."""
        for name in ("metric", "deviation", "seconds", "failure", "claims"):
            if name in outcome:
                trial.set_user_attr(name, outcome[name])
        if "figure" in outcome:
            self._study.tell(trial, outcome["figure"])
        else:
            self._study.tell(trial, state=TrialState.PRUNED)

    @property
    def tried(self) -> list[dict[str, Any]]:
        """The trials that are over, by number, as the file of a sweep has them."""
        return [_tried(each, self._keys(each.params)) for each in self._trials(*_ENDS)]

    @property
    def metric(self) -> str:
        """The figure that trials are judged by; empty before one has finished."""
        found = (trial.user_attrs.get("metric", "") for trial in self._trials())
        return next(filter(None, found), "")

    def together(self) -> list[Claim]:
        """Return what all runs of all trials have spent together, each as often as it began."""
        return together(
            Claim(**claim)
            for trial in self._trials()
            for claim in trial.user_attrs.get("claims", ())
            for _ in range(trial.user_attrs.get("begun", 1))
        )

    def importance(self) -> dict[str, float]:
        """Return option -> share of the figures' variance that it explains, by fANOVA, if any."""
        failed = {each["number"] for each in self.tried if each["figure"] is None}
        trials = [each for each in self._trials(*_ENDS) if each.number not in failed]
        if len({each.value for each in trials}) < 2:
            return {}
        study = optuna.create_study(direction="maximize")
        for each in trials:
            study.add_trial(
                optuna.trial.create_trial(
                    value=each.value, params=each.params, distributions=each.distributions
                )
            )
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=self._seed)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        return {key: float(share) for key, share in found.items()}

    def _trials(self, *states: TrialState) -> list[optuna.trial.FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def _keys(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that were drawn, with the numbers of a range to three digits."""
        keys = {key: drawn[key] for key in self._search}
        for key, of in self._search.items():
            if isinstance(of, FloatDistribution):
                keys[key] = min(max(float(f"{keys[key]:.3g}"), of.low), of.high)
        return keys


def _tried(trial: optuna.trial.FrozenTrial, keys: Mapping[str, Any]) -> dict[str, Any]:
    of = trial.user_attrs
    failure = of.get("failure", "")
    return {
        "number": trial.number,
        "keys": keys,
        "state": "failed" if failure else _ENDS[trial.state],
        "figure": None if failure else trial.value,
        "deviation": of.get("deviation"),
        "seconds": of.get("seconds"),
        "failure": failure,
    }


def _backend(journal: Path) -> Any:
    """Return Optuna's journal, with a lock that ends with the process that holds it."""

    class Lock:
        def acquire(self) -> bool:
            self._held = ExitStack()
            self._held.enter_context(alone_in(journal))
            return True

        def release(self) -> None:
            self._held.close()

    lock: Any = Lock()
    return JournalFileBackend(str(journal), lock)


_RANGE = re.compile(r"(?P<low>[^:|]+?)\.\.(?P<high>[^:|]+)(?P<log>:log)?")
_HOW = "write OPTION=a..b, OPTION=a..b:log or OPTION=x|y|z, with spaces between options"
NOT_SEARCHED = {  # trials could not be compared, or would not all train
    *("strategy", "task", "model", "without", "resume", "out", "observer", "seed", "parties"),
    *("dataset", "label", "target", "id", "test-fraction", "validation-fraction"),
}


def search_of(texts: Sequence[str], given: Mapping[str, Any]) -> Search:
    """Return the ranges and choices of ``--search``, which may name no option that is given."""
    try:
        words = [word for text in texts for word in shlex.split(text)]
    except ValueError:
        raise ConfigError(f"--search {' '.join(texts)!r} has a quote that is left open.") from None
    if not words:
        raise ConfigError(f"--search names nothing: {_HOW}.")
    found: Search = {}
    for word in words:
        name, equals, said = word.partition("=")
        if not equals or not said:
            raise ConfigError(f"--search {word!r} cannot be read: {_HOW}.")
        if name in found:
            raise ConfigError(f"--search names {name} twice: leave one out.")
        if name in given:
            raise ConfigError(f"{name} is in -c and in --search: leave it out of one.")
        found[name] = _of(word, name, said)
    return found


def ends(search: Search, last: bool) -> dict[str, Any]:
    """Return the first or the last value of each option."""
    values = {
        key: of.choices if isinstance(of, CategoricalDistribution) else (of.low, of.high)
        for key, of in search.items()
    }
    return {key: each[-1 if last else 0] for key, each in values.items()}


def of_trial(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a trial, without noise on embeddings if it chose no privacy."""
    keys = {**shared, **own}
    return without_noise(keys) if own.get("privacy") == "none" else keys


def _of(word: str, name: str, said: str) -> Distribution:
    if name not in KEYS:
        parse({name: ""})  # raises, with the name that was perhaps meant
    if name in NOT_SEARCHED:
        raise ConfigError(
            f"{name} cannot be searched, as it decides what a trial does or what it is measured "
            "by: set it for all by -c."
        )
    kind = KEYS[name].type
    match = _RANGE.fullmatch(said) if kind in (int, float) else None
    if match:
        low, high = _value(name, match["low"]), _value(name, match["high"])
        if low >= high:
            raise ConfigError(f"--search {word!r} is no range: write the lower number first.")
        if match["log"] and low <= 0:
            raise ConfigError(f"--search {word!r} has no logarithm: let it begin above 0.")
        of = IntDistribution if kind is int else FloatDistribution
        return of(low, high, log=bool(match["log"]))
    values = tuple(_value(name, each) for each in said.split("|"))
    if len(values) == 1:
        what = "a..b or x|y" if kind in (int, float) else "x|y"
        raise ConfigError(f"--search {word!r} is one value: write {name}={what}, or set it by -c.")
    if len(set(values)) < len(values):
        raise ConfigError(f"--search {word!r} names a value twice: leave one out.")
    return CategoricalDistribution(values)


def _value(name: str, text: str) -> Any:
    kind = KEYS[name].type
    value: Any = text
    if kind is bool:
        value = {"true": True, "false": False}.get(text, text)
    elif kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"--search: {name} = {text} must be {what}; {_HOW}.") from None
    RunConfig.of(parse({name: value}))
    return value
