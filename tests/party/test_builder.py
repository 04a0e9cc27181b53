"""The table of checks holds: each way to build a party refuses what it checks, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flwr.app import Context

from tests.organisations import change
from tests.party.nodes import DESCRIBE, Node, asked, begun, gradient, restarted, train
from tests.party.test_earlier_models import order as grow_order
from vfl_flower.config.errors import VflError
from vfl_flower.party import state_file
from vfl_flower.party.builder import CHECKS
from vfl_flower.transport.flower_internals import state_to_bytes
from vfl_flower.transport.messages import Description, Predicted, PredictOrder, ResumeOrder


def scaled(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(f0=3 * table["f0"] + 1)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "parties": ({"num-partitions": 2}, "gives num-partitions = 2. Start its SuperNode with"),
    "data": ({}, "does not have the data that this run began with"),
    "model": ({"model": "mlp"}, "Party 0's model is 'mlp', but the run began with 'linear'"),
    "training": ({"party-lr": 0.5}, "trains its model otherwise than when the run began"),
}


def goes_on(node: Node, context: Context, own: dict[str, Any]) -> None:
    """Serve the next message in another process."""
    kept = state_to_bytes(context.state)
    context.node_config.update(own)
    restarted(context, kept)
    asked(context, train(2, epoch=1, gradient=gradient()))


def resumes(node: Node, context: Context, own: dict[str, Any]) -> None:
    asked(node(own, run_id=2), ResumeOrder(run="1", number=1), Description)


def grows(node: Node, context: Context, own: dict[str, Any]) -> None:
    asked(node(own, run_id=2, grow="x"), grow_order(), Description)


def predicts(node: Node, context: Context, own: dict[str, Any]) -> None:
    asked(node(own, run_id=2), PredictOrder(run="1", number=1), Predicted)


WAYS: list[tuple[str, Callable[[Node, Context, dict[str, Any]], None]]] = [
    *(("resume", goes_on), ("resume", resumes), ("grow", grows), ("predict", predicts))
]


@pytest.mark.parametrize("changed", [*CHANGES, "nothing"])
@pytest.mark.parametrize(("way", "build"), WAYS, ids=[build.__name__ for _, build in WAYS])
def test_a_way_refuses_what_its_row_of_the_table_names(
    node: Node,
    tmp_path: Path,
    way: str,
    build: Callable[[Node, Context, dict[str, Any]], None],
    changed: str,
) -> None:
    context = begun(node())
    state_file.save(context, 1)
    restarted(context, state_to_bytes(context.state))
    own, sentence = CHANGES.get(changed, ({}, ""))
    if changed == "data":
        change(tmp_path / "a.csv", scaled)
    if changed in CHECKS[way]:
        with pytest.raises(VflError, match=sentence):
            build(node, context, own)
    else:
        build(node, context, own)


def test_every_way_checks_the_model_and_each_that_trains_on_how_it_is_trained() -> None:
    assert all("model" in checks for way, checks in CHECKS.items() if way != "begin")
    assert "training" in CHECKS["resume"] and "training" in CHECKS["rerun"]


@pytest.mark.parametrize(("told", "known"), [(0, 2), (1, 2), (3, 3), (1024, 1024), (1025, 2)])
def test_a_party_is_told_of_more_parties_but_not_of_fewer_or_of_any_number(
    node: Node, told: int, known: int
) -> None:
    context = node({"num-partitions": 2})
    order = replace(DESCRIBE, of_parties=told)
    assert asked(context, order, Description).parties == known
