"""What a party insists on: rules of its own, in its node configuration, which nobody else can set.

They are checked at the party before anything is computed, whatever a run configuration or an order
asks. What gives a protection away (a named path, a comparison of digests, a public seed of noise)
is done only if the party's own node configuration says the same as the run configuration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from flwr.app import Context

from vfl_flower.axes import estimators
from vfl_flower.axes.privacy.ledger import ledger_of
from vfl_flower.config import RunConfig, parse
from vfl_flower.errors import ConfigError
from vfl_flower.flower_internals import in_ray
from vfl_flower.models import rates
from vfl_flower.registry import BOTTOMS
from vfl_flower.systems import (
    check_gradient,
    load_system,
    optimizer_kind,
    refuse_places,
    sized,
)

log = logging.getLogger("flwr")

_OTHERS = (  # keys of a node configuration that are no rules
    *("partition-id", "num-partitions", "simulated", "states"),
    *("file", "source", "held", "id", "columns", "missing", "text"),
    *("model", "model-args", "embedding-size"),
    *("images", "image-size", "tokenizer", "text-length", "sequence-length", "augment"),
)
OWN_TRAINING = (  # keys of training that a party may have otherwise for its own model
    *("party-lr", "optimizer", "weight-decay", "lr-schedule", "lr-step", "lr-decay", "warm-up"),
    "clip-gradient",
)
_DUE = {
    "str": "a text in quotes",
    "int": "a whole number, at least 0,",
    "float": "a number, at least 0,",
}


@dataclass(frozen=True)
class Rules:
    """Keys of a node configuration, by their names with hyphens; None is no rule."""

    align: str = "psi"
    """How ids may be compared: ``ids`` permits that method, and no other."""
    min_rows: int = 50
    """Fewest rows that all must have in common; in a simulation only if it is named."""
    max_ids: int = 10_000_000
    """Most ids that it is asked about, of all label holders, in all runs; others than before."""
    max_ids_per_day: int | None = None
    """Most of these ids in a day of UTC."""
    alignment_days: int = 30
    """Days for which an alignment is kept and used again; 0: none is."""
    systems: str = ""
    """Systems that it takes part in, with commas between them; empty: all."""
    min_embedding_noise: float = 0.0
    """Least ``embedding-noise`` over ``embedding-bound``, of all embeddings that it uploads."""
    max_epochs: int | None = None
    """Most passes over its rows that a model of its is trained for, by all runs of it."""
    max_uploads: int | None = None
    """Most embeddings of one row that it uploads in a run, and all that go on or begin by it."""
    max_predictions: int | None = None
    """Most rows that it embeds for predictions, by all models that it keeps."""
    aggregation: str = ""
    """``secure``: takes part in no run in which the label holder gets its embeddings unmasked."""
    sum_peers: str = ""
    """Keys of the other parties for masked sums, as in ``1:HEX 2:HEX``, or ``first-seen``.

    Without it a party takes the first keys that it sees, unless its rule is aggregation='secure'.
    """
    embedding_activation: str = ""
    """The one ``embedding-activation``, besides none, that it lets a run with masked sums have."""
    noise_seed: int | None = None
    """The one ``noise-seed`` that it lets a run on its own data have."""
    dataset: str = ""
    """The one ``dataset`` with a path in it that it reads for others."""
    stream_address: str = ""
    """Where to connect to: hosts, each with :PORT or without, and commas; empty: this machine."""

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Rules:
        """The rules in a node configuration.

        Raises
        ------
        ConfigError
            If a value is of another type than its rule, or a key is none that is known.
        """
        return _rules_of(tuple((key, type(value), value) for key, value in node_config.items()))


@lru_cache(maxsize=4096)  # each message asks
def _rules_of(node_config: tuple[tuple[str, type, Any], ...]) -> Rules:
    values = {key: value for key, _, value in node_config}
    whose = f"Party {values.get('partition-id')}'s node configuration"
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key in _TYPES:
            due = _TYPES[key]
            name = "float" if due == "float" and type(value) is int else type(value).__name__
            if name != due or (due != "str" and not 0 <= value < math.inf):
                raise ConfigError(f"{whose} gives {key} = {value!r}, where {_DUE[due]} is due.")
            given[key.replace("-", "_")] = value
        elif key not in (*_OTHERS, *OWN_TRAINING):
            _check_own_key(key, whose, "source" in values)
    return Rules(**given)


_TYPES = {
    spec.name.replace("_", "-"): str(spec.type).removesuffix(" | None") for spec in fields(Rules)
}


def _check_own_key(key: str, whose: str, has_source: bool) -> None:
    """Refuse a key that nobody reads: a source has keys of its own, unless they are like a rule."""
    known = [*_TYPES, *_OTHERS, *OWN_TRAINING]
    close = get_close_matches(key, known, 1, 0.85 if has_source else 0.6)
    if close or not has_source:
        hint = f"did you mean {close[0]}?" if close else f"rules are {', '.join(_TYPES)}."
        raise ConfigError(f"{whose} has a key {key!r} that there is not: {hint}")


def _own_model(context: Context, config: RunConfig) -> RunConfig:
    """A run's configuration with the bottom model that the party's own node configuration names.

    Raises
    ------
    ConfigError
        If it cannot be that, or has no gradient where the system needs one.
    """
    node, whose = context.node_config, f"Party {context.node_config.get('partition-id')}'s"
    own: dict[str, Any] = {}
    for name, (key, kind, due) in _MODEL.items():
        if name in node:
            own[key] = node[name]
            if type(node[name]) is not kind:
                raise ConfigError(
                    f"{whose} node configuration gives {name} = {node[name]!r}, where {due} is due."
                )
    if not own:
        return config
    if "bottom-model" in own:
        BOTTOMS.check(own["bottom-model"], f"{whose} model")
        own = {"model-args": "", **own}
    config = config.with_values(own)
    check_gradient(config, f"{whose} model")
    return config


_MODEL: dict[str, tuple[str, type, str]] = {  # key of a node configuration -> of the run's
    "model": ("bottom-model", str, _DUE["str"]),
    "model-args": ("model-args", str, _DUE["str"]),
    "embedding-size": ("embedding-size", int, "a whole number"),
}


def simulated(context: Context) -> bool:
    """Whether all parties are of one owner: in one process, or under Ray."""
    return bool(context.node_config.get("simulated")) or in_ray()


def refused(context: Context, what: str) -> ConfigError:
    """The sentence by which a party refuses, for the label holder; its own log has it too."""
    sentence = f"Party {context.node_config.get('partition-id')} refuses {what}."
    log.warning("%s", sentence)
    return ConfigError(sentence)


def check(context: Context, config: RunConfig, rows: int | None = None) -> Rules:
    """A party's rules, if a run so configured keeps to them.

    Parameters
    ----------
    rows : to train on, which decide what the configuration leaves open, if they are known.

    Raises
    ------
    ConfigError
        Which rule it breaks, or what it names that a node does not take from others.
    """
    rules, one_owner = Rules.of(context.node_config), simulated(context)
    if not one_owner:
        refuse_places(config.values())
        _check_arguments(context, config.models.bottom_args)
    if not one_owner or rules.dataset:
        _check_dataset(context, config.data.dataset, rules.dataset)
    tokenizer = config.data.tokenizer
    if tokenizer and not one_owner and context.node_config.get("tokenizer") != tokenizer:
        raise refused(context, f"tokenizer = {tokenizer!r}, a folder that others name")
    if rules.systems:
        _check_system(context, config, rules.systems)
    aggregation = config.models.aggregation
    if rules.aggregation and aggregation != rules.aggregation:
        rule = f"its rule is aggregation = {rules.aggregation!r}"
        raise refused(context, f"aggregation = {aggregation!r}: {rule}")
    if config.secure and not (one_owner and not rules.aggregation):
        _check_activation(context, config.models.embedding_activation, rules.embedding_activation)
    epochs = (config if rows is None else sized(config, rows)).training.epochs
    if epochs is not None and rules.max_epochs is not None and epochs > rules.max_epochs:
        raise refused(context, f"epochs = {epochs}: its rule is max-epochs = {rules.max_epochs}")
    if rules.min_embedding_noise:
        _check_noise(context, config, rules.min_embedding_noise)
    of_its_own = config.data.own_data or rules.min_embedding_noise
    if of_its_own and not (one_owner and rules.noise_seed is None):
        _check_seed(context, config.privacy.noise_seed, rules.noise_seed)
    return rules


def own_config(context: Context, config: RunConfig) -> RunConfig:
    """A run's configuration with what a party's node configuration says of its own model.

    Raises
    ------
    ConfigError
        If a value is none that its key can have, or contradicts others.
    """
    given = {key: value for key, value in context.node_config.items() if key in OWN_TRAINING}
    try:
        config = with_own(config, parse(given))
        rates.check(config.training)
    except ConfigError as error:
        party = context.node_config.get("partition-id")
        raise ConfigError(f"In party {party}'s node configuration, {error}") from None
    return _own_model(context, config)


def with_own(config: RunConfig, own: Mapping[str, Any]) -> RunConfig:
    """Return a run's configuration with a party's own training.

    A schedule of its own replaces all parts of the run's. An optimizer of another kind has its own
    default rate.
    """
    if not own:
        return config
    left = {"lr-step": None, "lr-decay": None} if "lr-schedule" in own else {}
    of_run = config.training.optimizer
    if optimizer_kind(own.get("optimizer", of_run)) != optimizer_kind(of_run):
        left["party-lr"] = None
    return config.with_values({**left, **own})


def _check_arguments(context: Context, arguments: str) -> None:
    """Refuse arguments that others name, with which code that is installed here would be run."""
    own = context.node_config
    if arguments and "model" not in own and own.get("model-args") != arguments:
        raise refused(
            context,
            f"model-args = {arguments!r}, which others name: its own node configuration gives "
            f"{_or_none('model-args', own.get('model-args'))}",
        )


def _check_dataset(context: Context, dataset: str, permitted: str) -> None:
    """Refuse what the party has not named too; ``files:`` is the label holder's path."""
    named = dataset == permitted and not dataset.startswith("memory:")
    if ":" in dataset and not dataset.startswith("files:") and not named:
        raise refused(
            context,
            f"dataset = {dataset!r}, which others name: its own node configuration gives "
            f"{_or_none('dataset', permitted or None)}",
        )


def _check_seed(context: Context, seed: int, permitted: int | None) -> None:
    if seed >= 0 and seed != permitted:
        raise refused(
            context,
            f"noise-seed = {seed}, by which others know its noise and its first model: its own "
            f"node configuration gives {_or_none('noise-seed', permitted)}",
        )


def _check_activation(context: Context, activation: str | None, permitted: str) -> None:
    """Refuse, where sums are masked, an activation by which units can stop to learn.

    Where a unit has stopped at all parties but one, its sum is that party's own embedding.
    """
    if activation not in (None, "none", permitted):
        raise refused(
            context,
            f"embedding-activation = {activation!r} in masked sums, by which a sum can become its "
            "own embedding: its own node configuration gives "
            f"{_or_none('embedding-activation', permitted or None)}",
        )


def _check_system(context: Context, config: RunConfig, systems: str) -> None:
    system, rule = config.strategy, f"its rule is systems = {systems!r}"
    if system not in [name.strip() for name in systems.split(",")]:
        raise refused(context, f"strategy = {system!r}: {rule}")
    own = RunConfig.of(load_system(system).defaults)
    if estimators.choose(config) is not estimators.choose(own):  # else the name says nothing
        raise refused(
            context, f"strategy = {system!r} with another estimator or labels than its own: {rule}"
        )


def _check_noise(context: Context, config: RunConfig, least: float) -> None:
    rule = f"its rule is min-embedding-noise = {least:g}"
    privacy = config.privacy
    if ledger_of(config).noise_on != "embeddings":
        raise refused(context, f"privacy = {privacy.mechanism!r}: {rule}")
    noise, bound = privacy.embedding_noise, privacy.embedding_bound
    if not noise / bound >= least:  # which is what an epsilon follows from
        what = f"embedding-noise = {noise:g} at embedding-bound = {bound:g}"
        raise refused(context, f"{what}: {rule} times that bound")


def _or_none(key: str, value: Any) -> str:
    return f"no {key}" if value is None else f"{key} = {value!r}"
