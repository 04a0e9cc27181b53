"""What an earlier run decides of a run that resumes it, or grows from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import KEYS, RunConfig, parse
from vfl_flower.label_holder.checkpoint import Checkpoint, load
from vfl_flower.models.optimizers import kind_of
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.systems import resolve


def to_go_on_from(folder: str | Path) -> Checkpoint:
    """Read the checkpoint of a run that was cut short.

    Raises
    ------
    ConfigError
        As `load`; or if that run has finished.
    """
    found = load(folder)
    if found.finished and _has_results(Path(folder).expanduser()):
        raise ConfigError(f"The run in {folder} has finished: there is nothing to resume.")
    return found


def _has_results(folder: Path) -> bool:
    try:
        failure = json.loads((folder / "summary.json").read_text())["failure"]
        return failure is None
    except (OSError, ValueError, KeyError, TypeError):
        return False


_MAY_DIFFER = (  # options that can change when a run is resumed: they do not change its results
    *("transport", "stream-address", "stream-ports", "session-seconds", "parties"),
    *("party-timeout", "on-party-failure", "checkpoint-every", "resume"),
)


def configured(raw: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run, as `resolve` does.

    With ``resume`` it is the configuration of the run to resume. With ``grow``, options that are
    not given are those of the run whose models this run begins by.

    Raises
    ------
    ConfigError
        As `resolve`; or if the run to resume has finished, or the run to grow from has not; or if
        it had another value for an option that is given.
    """
    given = parse(raw)
    folder = given.get("resume")
    if not folder:
        return _grown(given) if given.get("grow") else resolve(raw)
    found = to_go_on_from(folder)
    anew = {}
    for name, now in given.items():
        then = KEYS[name].of(found.config)
        if now == then or name == "out":
            continue
        if name not in _MAY_DIFFER:
            was = "auto" if then is None else repr(then)
            raise ConfigError(
                f"{folder} holds a run with {name} = {was}, not {now!r}: leave the option "
                "out to go on with that run, or leave resume out to begin another."
            )
        anew[name] = now
    return found.config.with_values(anew)


_OF_ONE_RUN = (  # options that a run never inherits from the run that it grows from
    *("task", "model", "without", "resume", "grow", "freeze", "out", "parties"),
)
_OF_MODEL = (  # options that it must inherit
    *("target", "label-range", "columns", "missing", "text"),
    *(each.name for each in KEYS.values() if each.section == "models" and each.name != "metrics"),
)


def _grown(given: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run that grows from an earlier run, with its models.

    Options that are not given are those of the earlier run. With another strategy, only options of
    data and models are inherited.
    """
    folder: str = given["grow"]
    found = load(folder)
    if not found.finished:
        raise ConfigError(f"The run in {folder} was cut short: go on with it first, by resume.")
    then = found.config
    if not mechanism_of(then).may_grow:
        raise ConfigError(
            f"The run in {folder} has privacy = {then.privacy.mechanism!r}, whose epsilon counts "
            "that run alone: leave grow out."
        )
    alike = given.get("strategy", then.strategy) == then.strategy
    inherited = {
        each.name: each.of(then)
        for each in KEYS.values()
        if (alike or each.section in ("data", "models")) and each.name not in _OF_ONE_RUN
    }
    before = then.training.optimizer
    if kind_of(given.get("optimizer", before)) != kind_of(before):
        inherited |= {"party-lr": None, "server-lr": None}
    known = {name: value for name, value in inherited.items() if value is not None}
    config = resolve({"strategy": then.strategy, **known, **given})
    divided = () if then.data.own_data else (k.name for k in KEYS.values() if k.section == "data")
    kind = () if then.data.own_data == config.data.own_data else ("dataset",)
    for name in (*_OF_MODEL, *divided, *kind):
        was, now = KEYS[name].of(then), KEYS[name].of(config)
        if was != now:
            raise ConfigError(
                f"{folder} holds a model with {name} = {'auto' if was is None else repr(was)}, not "
                f"{now!r}: leave the option out to begin by that model, or leave grow out."
            )
    if aggregation_of(then).any_subset and not aggregation_of(config).any_subset:
        raise ConfigError(
            f"{folder} holds a model of any subset of its parties: leave align and subsets out to "
            "begin by that model, or leave grow out."
        )
    return config


def check_number(folder: str, found: Checkpoint, config: RunConfig, parties: int) -> None:
    """Raise `ConfigError` if so many parties cannot begin by the models of ``found``."""
    then = found.parties
    if parties < then:
        raise ConfigError(
            f"The run in {folder} is of {then} parties, and {parties} are here: start all of them, "
            "the new ones with the highest numbers."
        )
    if parties > then and not config.data.own_data:
        raise ConfigError(
            f"{config.data.dataset} is divided, so that {parties} parties would have other columns "
            f"than the {then} of the run in {folder}: new parties need data of their own."
        )
    if parties > then and not aggregation_of(config).any_subset:
        raise ConfigError(
            f"The model in {folder} predicts only with all its parties, and cannot get new ones: "
            "add subsets = 'sampled' to this run. Then it learns to predict by any subset."
        )


class PartyState(NamedTuple):
    """A party's state: numbers of the last message served, and of the checkpoint."""

    party: int
    exchange: int
    checkpoint: int


class _OfCheckpoint(Protocol):
    @property
    def party(self) -> int: ...

    @property
    def exchange(self) -> int: ...
    @property
    def checkpoint(self) -> int: ...


def check_states(found: Checkpoint, states: Collection[_OfCheckpoint], whole: bool = True) -> None:
    """Refuse parties of another run, or with older states than a checkpoint.

    A party that was away at the checkpoint may have an older state, back to the last state that it
    has told of.

    Parameters
    ----------
    whole : whether all parties must be there.

    Raises
    ------
    ConfigError
        Which party has another state.
    """
    marked = not found.run.isdecimal()  # else it is an older version's
    seats = {seat["party"]: seat for seat in found.strategy["seats"]}
    if len(states) != len(seats) and (whole or not {each.party for each in states} <= seats.keys()):
        raise ConfigError(f"That run is of {len(seats)} parties, and {len(states)} are here.")
    for state in states:
        seat, number = seats[state.party], state.checkpoint
        least = found.number if seat["alive"] else seat.get("checkpoint", 0)
        is_older = marked and not least <= number <= found.number
        if is_older or (seat["alive"] and state.exchange != seat["exchange"]):
            raise ConfigError(
                f"Party {state.party} has the state of checkpoint {number}, and not of checkpoint "
                f"{found.number}: put back its file of checkpoint {found.number}."
            )
