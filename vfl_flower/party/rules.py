"""What a party insists on: rules of its own, in its node configuration, which nobody else can set.

They are checked at the party before anything is computed, whatever a run configuration or an order
asks. What gives a protection away (a named path, a comparison of digests, a public seed of noise)
is done only if the party's own node configuration says the same as the run configuration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

from flwr.app import Context

from vfl_flower import renamed
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


def rule(default: Any, help: str, example: str, basic: bool = False) -> Any:
    """Return the dataclass field of one rule.

    Parameters
    ----------
    default : the default; ``None`` sets no rule.
    help : sentences. The first one is the summary that lists show.
    example : pairs for --node-config.
    basic : whether a new user needs the rule. `vfl list` shows only these rules.
    """
    return field(default=default, metadata={"help": help, "example": example, "basic": basic})


@dataclass(frozen=True)
class Rules:
    """Rules in a node configuration, by their names with hyphens. None sets no rule."""

    align: str = rule(
        "psi",
        "Sets the method by which ids may be compared. `ids` permits that method, and no other.",
        "align='ids'",
    )
    min_rows: int = rule(
        50,
        "Refuses a run whose participants have fewer common rows. In a simulation, the rule "
        "applies only if it is set.",
        "min-rows=100",
        basic=True,
    )
    max_ids: int = rule(
        10_000_000,
        "Limits the ids that label holders may ask about. The limit counts all label holders and "
        "all runs. It counts each id once.",
        "max-ids=100000",
    )
    max_ids_per_day: int | None = rule(
        None,
        "Limits the new ids that label holders may ask about in one day of UTC.",
        "max-ids-per-day=10000",
    )
    alignment_days: int = rule(
        30,
        "Sets the days for which the party keeps an alignment and uses it again. 0 keeps none.",
        "alignment-days=7",
    )
    systems: str = rule(
        "",
        "Names the systems that the party takes part in, separated by commas. The empty text "
        "permits all.",
        "systems='ef-vfl,vafl'",
        basic=True,
    )
    min_embedding_noise: float = rule(
        0.0,
        "Requires noise on all embeddings that the party uploads. The value is the least "
        "`embedding-noise`, divided by `embedding-bound`.",
        "min-embedding-noise=1.5",
    )
    max_epochs: int | None = rule(
        None,
        "Limits the passes over the party's rows that train one model. The limit counts all runs "
        "of that model.",
        "max-epochs=100",
        basic=True,
    )
    max_uploads: int | None = rule(
        None,
        "Limits how often the party uploads an embedding of the same row. The limit counts a run "
        "and all runs that resume it, grow from it or predict with it.",
        "max-uploads=200",
    )
    max_predictions: int | None = rule(
        None,
        "Limits the rows that the party embeds for predictions. The limit counts all models that "
        "the party keeps.",
        "max-predictions=1000",
    )
    aggregation: str = rule(
        "",
        "Sets the aggregation that the party insists on. With `secure`, it refuses a run in which "
        "the label holder gets its embeddings unmasked.",
        "aggregation='secure' sum-peers='first-seen'",
    )
    sum_peers: str = rule(
        "",
        "Gives the public keys of the other parties for masked sums, as in '1:HEX 2:HEX'. "
        "`first-seen` trusts the first keys that the party sees. The empty text does so too, "
        "unless the party has the rule aggregation='secure'.",
        "sum-peers='first-seen'",
    )
    embedding_activation: str = rule(
        "",
        "Permits one `embedding-activation` besides `none` in runs with masked sums.",
        "embedding-activation='tanh'",
    )
    noise_seed: int | None = rule(
        None,
        "Permits one `noise-seed` for runs on the party's data. Others then know its noise.",
        "noise-seed=0",
    )
    dataset: str = rule(
        "",
        "Permits one `dataset` that contains a path, which the party then reads for others.",
        "dataset='csv:shared.csv'",
    )
    stream_address: str = rule(
        "",
        "Names the hosts that the party may connect to, separated by commas. Each host may have "
        ":PORT. The empty text permits this machine only.",
        "stream-address='vfl.example.org:9500'",
    )

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


class Rule(NamedTuple):
    """A rule as `vfl list` describes it."""

    name: str
    type: str
    default: Any
    help: str
    example: str
    basic: bool


RULES: dict[str, Rule] = {
    name: Rule(name, _TYPES[name], spec.default, **spec.metadata)
    for spec in fields(Rules)
    for name in (spec.name.replace("_", "-"),)
}
"""Every rule, by its name."""


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
