"""A party's text about itself, written at the start and read by later messages.

The text does not change during a run. It lies in the party's state, in memory and on disk. It
records what the model needs later: configuration, data, bottom model and training.
"""

import json
from functools import lru_cache
from typing import Any, NamedTuple

from vfl_flower.config.node_rules import OWN_TRAINING
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.data.source import Preparation
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.training import fixed, kind_of


class About(NamedTuple):
    """A party's text about itself."""

    config: RunConfig  # of the run, as it was given
    parties: int
    outputs: int
    rows: int | None  # training rows of the run; None in states of older versions
    ids: str  # digest of the ids of the party's rows
    preparation: Preparation | None
    model: dict[str, Any]  # name, arguments and parameters of the bottom model
    augment: str | None
    training: dict[str, Any] | None  # options of the party's own training
    weights: Any  # digests of files that hold frozen weights; None without such files
    grown: bool  # whether the model began in an earlier run


def write(
    config: RunConfig,
    own: RunConfig,
    parties: int,
    outputs: int,
    block: FeatureBlock,
    rows: int,
    model: BottomModel,
    grown: bool,
) -> str:
    """Return the party's text about itself, in JSON. ``own`` has its model and training."""
    name = own.models.bottom.rpartition("/")[2]
    values: dict[str, Any] = {
        "config": config.values(),
        "parties": parties,
        "outputs": outputs,
        "ids": block.ids_digest,
        "model": {"name": name, "args": own.models.bottom_args, "kind": kind_of(model)},
        "rows": rows,
        "augment": getattr(block.augment, "__qualname__", type(block.augment).__name__),
        "training": {key: own.values()[key] for key in OWN_TRAINING},
        "preparation": block.preparation.as_json() if block.preparation else None,
    }
    if grown:
        values["grown"] = True
    if fixed(model):
        values["weights"] = fixed(model)
    return json.dumps(values)


@lru_cache(maxsize=64)
def read(text: str) -> About:
    """Read a party's text about itself."""
    values = json.loads(text)
    preparation = values["preparation"]
    return About(
        RunConfig.of(values["config"]),
        values["parties"],
        values["outputs"],
        values.get("rows"),
        values["ids"],
        Preparation(**preparation) if preparation else None,
        values.get("model", {"name": "none of this version", "args": ""}),
        values.get("augment"),
        values.get("training"),
        values.get("weights"),
        "grown" in values,
    )
