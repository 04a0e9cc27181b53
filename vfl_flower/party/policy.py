"""What a party insists on: rules of its own, in its node configuration, which nobody else can set.

They are checked at the party before anything is computed, whatever a run configuration or an order
asks. What gives a protection away (a named path, a comparison of digests, a public seed of noise)
is done only if the party's own node configuration says the same as the run configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flwr.app import Context

from vfl_flower.config import renamed
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.node_rules import OWN_TRAINING, Rules
from vfl_flower.config.plugins import BOTTOMS
from vfl_flower.config.run_config import RunConfig, parse
from vfl_flower.models import rates
from vfl_flower.protocol import estimators
from vfl_flower.protocol.privacy.ledger import ledger_of
from vfl_flower.protocol.systems import (
    check_gradient,
    load_system,
    optimizer_kind,
    refuse_places,
    sized,
)
from vfl_flower.transport.node import refused, simulated

log = logging.getLogger("flwr")


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


_TEXT = "a text in quotes"
_MODEL: dict[str, tuple[str, type, str]] = {  # key of a node configuration -> of the run's
    "model": ("bottom-model", str, _TEXT),
    "model-args": ("model-args", str, _TEXT),
    "embedding-size": ("embedding-size", int, "a whole number"),
}


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
    permitted = [renamed.accepted("strategy", name.strip()) for name in systems.split(",")]
    if system not in permitted:
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
