"""Configuration and checks of a run that resumes or warm-starts an earlier run."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import KEYS, RunConfig, parse
from vfl_flower.label_holder.checkpoint import Checkpoint, has_finished, load
from vfl_flower.models.optimizers import kind_of
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.messages import Description, Predicted, Serving


def to_go_on_from(folder: str | Path) -> Checkpoint:
    """Read the checkpoint of an interrupted run; refuse a run that has finished."""
    found = load(folder)
    if found.finished and has_finished(Path(folder).expanduser()):
        raise ConfigError(f"The run in {folder} has finished. Leave the option resume out.")
    return found


_REACHED = ("stream-address", "stream-ports")  # where parties reach the label holder

_MAY_DIFFER = (  # a resumed run may change these options: they do not change its results
    *("transport", *_REACHED, "session-seconds", "parties", "out"),
    *("party-timeout", "on-party-failure", "checkpoint-every", "log-format", "resume"),
    *("serve-address", "serve-certificate", "serve-key", "serve-token"),
)


def configured(raw: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run, or of the earlier run that it continues."""
    given = parse(raw)
    if given.get("rerun"):
        return _repeated(given)
    folder = given.get("resume")
    if not folder:
        config = _grown(given) if given.get("grow") else resolve(raw)
        check_noise(config, given)
        return config
    config = to_go_on_from(folder).config
    if config.running.rerun:
        raise ConfigError(f"{folder} holds a rerun, which cannot be resumed. Start the rerun anew.")
    return _with_changes("resume", config, given)


def _with_changes(how: str, config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of an earlier run, with given options that change no result."""
    anew, values = {}, config.values()
    for name, now in given.items():
        then = values[name]
        if now == then or (name == "out" and how == "resume"):
            continue
        if name not in (*_MAY_DIFFER, how) or (name == "checkpoint-every" and how == "rerun"):
            was = "auto" if then is None else repr(then)
            raise ConfigError(
                f"{given[how]} holds a run with {name} = {was}, not {now!r}. Leave the option "
                f"out to {how} that run, or leave {how} out to start a new run."
            )
        anew[name] = now
    return config.with_values(anew)


def to_repeat(folder: str | Path) -> Checkpoint:
    """Read the last checkpoint of a run to repeat; refuse a run that cannot be repeated."""
    found = load(folder)
    if not found.finished:
        raise ConfigError(f"The run in {folder} was interrupted. Resume it first, by resume.")
    if found.config.data.dataset.startswith("memory:"):
        raise ConfigError(
            f"The run in {folder} had frames of a Python process, which have ended with it. "
            "Train on files, to repeat a run."
        )
    transcript = found.strategy.get("transcript")
    if transcript is None:
        raise ConfigError(f"An older version trained {folder}, and kept no transcript. Train anew.")
    if not transcript["whole"]:
        raise ConfigError(
            f"The run in {folder} cannot be repeated: it was resumed, began with an earlier model, "
            "or went on after a failure of a party. Train anew."
        )
    return found


def _repeated(given: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a rerun, without the folder of the run that it repeats."""
    config = to_repeat(given["rerun"]).config.with_values({"out": "", "rerun": ""})
    return _with_changes("rerun", config, given)


def reached_as_before(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with its model's address and ports of streams, where not given."""
    if not config.model:
        return config
    then = load(config.model).config.values()
    return config.with_values({name: then[name] for name in _REACHED if name not in given})


NOISE_ON_EMBEDDINGS = ("embedding-noise", "inner-noise", "embedding-bound")
"""Options that do nothing without a mechanism."""


def check_noise(config: RunConfig, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a user would take the run for one with noise."""
    idle = [name for name in NOISE_ON_EMBEDDINGS if name in given]
    if idle and config.privacy.mechanism == "none":
        raise ConfigError(
            f"{idle[0]} = {given[idle[0]]} adds no noise with privacy = 'none'. Set privacy = "
            f"'perturbed-embedding', or leave {idle[0]} out."
        )


def without_noise(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that several runs share, for a run whose embeddings get no noise."""
    return {name: value for name, value in keys.items() if name not in NOISE_ON_EMBEDDINGS}


_OF_ONE_RUN = (  # options that a warm start never inherits
    *("task", "model", "without", "repeats", "resume", "grow", "freeze", "out", "parties"),
)
_OF_MODEL = (  # options that a warm start must inherit
    *("target", "label-range", "columns", "missing", "missing-words", "text", "dates"),
    *(each.name for each in KEYS.values() if each.section == "models" and each.name != "metrics"),
)


def _grown(given: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run that warm-starts from an earlier run.

    With another strategy, it inherits only data, models, and how parties reach the label holder.
    """
    folder: str = given["grow"]
    found = load(folder)
    if not found.finished:
        raise ConfigError(f"The run in {folder} was interrupted. Resume it first, by resume.")
    then = found.config
    if not mechanism_of(then).may_grow:
        raise ConfigError(
            f"The run in {folder} has privacy = {then.privacy.mechanism!r}, whose epsilon counts "
            "that run alone. Leave grow out."
        )
    alike = given.get("strategy", then.strategy) == then.strategy
    earlier = then.values()
    inherited = {
        name: value
        for name, value in earlier.items()
        if (alike or KEYS[name].section in ("data", "models") or name in _REACHED)
        and name not in _OF_ONE_RUN
    }
    before = then.training.optimizer
    if kind_of(given.get("optimizer", before)) != kind_of(before):
        inherited |= {"party-lr": None, "server-lr": None}
    known = {name: value for name, value in inherited.items() if value is not None}
    config = resolve({"strategy": then.strategy, **known, **given})
    divided = () if then.data.own_data else (k.name for k in KEYS.values() if k.section == "data")
    kind = () if then.data.own_data == config.data.own_data else ("dataset",)
    values = config.values()
    for name in (*_OF_MODEL, *divided, *kind):
        was, now = earlier[name], values[name]
        if was != now:
            raise ConfigError(
                f"{folder} holds a model with {name} = {'auto' if was is None else repr(was)}, not "
                f"{now!r}. Leave the option out to start from that model, or leave grow out."
            )
    if aggregation_of(then).any_subset and not aggregation_of(config).any_subset:
        raise ConfigError(
            f"{folder} holds a model of any subset of its parties. Leave align and subsets out to "
            "start from that model, or leave grow out."
        )
    return config


def check_number(folder: str, found: Checkpoint, config: RunConfig, parties: int) -> None:
    """Raise `ConfigError` if the models of ``found`` do not fit so many parties."""
    then = found.parties
    if parties < then:
        raise ConfigError(
            f"The run in {folder} has {then} parties, but only {parties} are here. Start all of "
            "them, and give new parties the highest numbers."
        )
    if parties > then and not config.data.own_data:
        raise ConfigError(
            f"{config.data.dataset} is partitioned: {parties} parties would have other columns "
            f"than the {then} of the run in {folder}. Use data of your own to add parties."
        )
    if parties > then and not aggregation_of(config).any_subset:
        raise ConfigError(
            f"The model in {folder} needs all its parties, and cannot get new ones. Add "
            "subsets = 'sampled' to this run: it then learns to predict with any subset."
        )


class PartyState(NamedTuple):
    """Numbers of the last message that a party served, and of its checkpoint."""

    party: int
    exchange: int
    checkpoint: int


_OfCheckpoint = PartyState | Description | Predicted | Serving


def check_states(found: Checkpoint, states: Collection[_OfCheckpoint], whole: bool = True) -> None:
    """Refuse parties whose states belong to another run, or to an older checkpoint.

    An absent party's state may be as old as the last that it reported. ``whole``: all must be
    there.
    """
    marked = not found.run.isdecimal()  # checkpoints of older versions have a bare run number
    seats = {seat["party"]: seat for seat in found.strategy["seats"]}
    strange = {each.party for each in states} - seats.keys()
    if strange or (whole and len(states) != len(seats)):
        raise ConfigError(
            f"That run has {len(seats)} parties, but {len(states)} are here. "
            "Start exactly the parties of that run."
        )
    for state in states:
        seat, number = seats[state.party], state.checkpoint
        least = found.number if seat["alive"] else seat.get("checkpoint", 0)
        is_older = marked and not least <= number <= found.number
        if is_older or (seat["alive"] and state.exchange != seat["exchange"]):
            raise ConfigError(
                f"Party {state.party} has the state of checkpoint {number}, not of checkpoint "
                f"{found.number}. Restore its file of checkpoint {found.number}."
            )
