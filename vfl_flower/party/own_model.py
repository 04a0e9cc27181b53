"""The bottom model and the training that a party's own node configuration sets."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Context

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.node_rules import OWN_TRAINING
from vfl_flower.config.plugins import BOTTOMS, OPTIMIZERS
from vfl_flower.config.run_config import KEYS, RunConfig, parse
from vfl_flower.models import optimizers
from vfl_flower.models.optimizers import kind_of
from vfl_flower.protocol.systems import check_gradient


def own_config(context: Context, config: RunConfig) -> RunConfig:
    """Return a run's configuration with the party's own model and training."""
    given = {key: value for key, value in context.node_config.items() if key in OWN_TRAINING}
    party = context.node_config.get("partition-id")
    if isinstance(named := given.get("optimizer"), str) and OPTIMIZERS.is_place(named):
        OPTIMIZERS.load(named, f"Party {party}'s optimizer")  # errors must not show its file
    try:
        config = with_own(config, parse(given))
        optimizers.check(config.training)
    except ConfigError as error:
        raise ConfigError(f"In party {party}'s node configuration, {error}") from None
    return _own_model(context, config)


def with_own(config: RunConfig, own: Mapping[str, Any]) -> RunConfig:
    """Return a run's configuration with a party's own training.

    Its schedule replaces the run's as a whole. Another kind of optimizer has another default rate.
    """
    if not own:
        return config
    left = {"lr-step": None, "lr-decay": None} if "lr-schedule" in own else {}
    of_run = config.training.optimizer
    if kind_of(own.get("optimizer", of_run)) != kind_of(of_run):
        left["party-lr"] = None
    return config.with_values({**left, **own})


def _own_model(context: Context, config: RunConfig) -> RunConfig:
    """Return a run's configuration with the node configuration's bottom model."""
    node, whose = context.node_config, f"Party {context.node_config.get('partition-id')}'s"
    own: dict[str, Any] = {}
    for name, key in _MODEL.items():
        if name in node:
            own[key] = KEYS[key].typed(node[name], f"{whose} {name}")
    if not own:
        return config
    if "bottom-model" in own:
        BOTTOMS.check(own["bottom-model"], f"{whose} model")
        own = {"model-args": "", **own}
    config = config.with_values(own)
    check_gradient(config, f"{whose} model")
    return config


_MODEL = {  # option of a node configuration -> option of the run
    "model": "bottom-model",
    "model-args": "model-args",
    "embedding-size": "embedding-size",
}
