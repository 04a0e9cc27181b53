"""Nodes, in a process that has served nothing yet."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from tests.organisations import ID, small, write
from tests.party.nodes import KEYS, ROWS, Node, align
from vfl_flower.party import session as between


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    between.live.clear()
    yield
    between.live.clear()


def context_of(
    folder: Path, own: Mapping[str, Any], keys: Mapping[str, Any], run_id: int = 1
) -> Context:
    alone: dict[str, Any] = {"partition-id": 0, "num-partitions": 1, "states": str(folder)}
    return Context(run_id, 2, {**alone, **own}, RecordDict(), {**KEYS, **keys})


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """An aligned real node with its own file; its rules, and the options of its run."""
    write(small(ROWS).drop(columns="label"), tmp_path / "a.csv")

    def build(own: Mapping[str, Any] | None = None, run_id: int = 1, **keys: Any) -> Context:
        of_file = {"file": str(tmp_path / "a.csv"), "id": ID, **(own or {})}
        given = {key.replace("_", "-"): value for key, value in keys.items()}
        context = context_of(tmp_path, of_file, given, run_id)
        align(context)
        return context

    return build


@pytest.fixture
def other_node(tmp_path: Path) -> Callable[..., Context]:
    """A real node without a file, where others have one that is nobody else's business."""
    table = small(ROWS)
    values = table[["f0", "f1"]].to_numpy()
    np.savez(tmp_path / "private.npz", X=values, y=table["label"].to_numpy())
    table.drop(columns=ID).to_csv(tmp_path / "private.csv", index=False)

    def build(dataset: str, own: Mapping[str, Any] | None = None) -> Context:
        return context_of(tmp_path, own or {}, {"dataset": dataset})

    return build
