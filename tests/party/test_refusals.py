"""Every rule of a party holds for every message, first, whatever the run configuration says."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from tests.aligning import IDS, NAME
from tests.party.nodes import DESCRIBE, KEYS, Node, asked, gradient, refused, restarted, train
from tests.party.test_rules import BROKEN, Case
from vfl_flower import client_app
from vfl_flower.alignment import psi, store
from vfl_flower.alignment.psi import Blinding
from vfl_flower.config.errors import ConfigError
from vfl_flower.party import builder, state_file
from vfl_flower.party.state import load_about
from vfl_flower.protocol.aggregation import keys as sum_keys
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference.party import model, scoring
from vfl_flower.tasks.information import party as information
from vfl_flower.transport import early_messages, explain_messages
from vfl_flower.transport.flower_internals import state_to_bytes
from vfl_flower.transport.messages import (
    Arrays,
    CheckpointOrder,
    DescribeOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    GrowOrder,
    Order,
    PredictOrder,
    RejoinOrder,
    RestoreOrder,
    ResumeOrder,
    ScoreOrder,
    ServeOrder,
    Turn,
)
from vfl_flower.transport.shared_actor import SharedActorOrder
from vfl_flower.transport.stream.messages import SessionOrder

MASKED = {"aggregation": "secure", "combine": "mean"}
SEEN = {"aggregation": "secure", "sum-peers": "first-seen"}
RULES: dict[str, Case] = {
    **BROKEN,
    "no masks": (SEEN, {}, MASKED, "aggregation = 'plain': its rule is aggregation = 'secure'."),
    "an activation": (
        *(SEEN, {**MASKED, "embedding-activation": "relu"}, MASKED),
        "embedding-activation = 'relu' in masked sums",
    ),
    "arguments of a model": (
        *({}, {"bottom-model": "mlp", "model-args": "x=1"}, {}),
        "model-args = 'x=1' from others",
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "train": {},
    "align": {"task": "align"},
    "predict": {"task": "predict", "model": "/x"},
    "explain": {"task": "explain", "model": "/x"},
    "grow": {"grow": "/x"},
    "resume": {"resume": "/x"},
}
OF_MODEL = "predict", "explain"
BLINDED = Blinding().of_ids(IDS)
SET: Arrays = {"names": np.zeros((30, 16), np.uint8), "proofs": np.zeros((30, 32), np.uint8)}
EARLY: list[early_messages.EarlyOrder] = [
    early_messages.SetOrder(arrays=SET),
    early_messages.AlignOrder(method="psi", arrays={"ids": BLINDED}),
    early_messages.AlignOrder(method="psi", anew=False, arrays={"ids": BLINDED}),
    early_messages.CommonOrder(arrays={"places": np.arange(60, dtype=np.int32)}),
    early_messages.ConfirmOrder(alignment=NAME, arrays={"answer": BLINDED[:2]}),
    early_messages.ReuseOrder(alignment=NAME, arrays={"proofs": np.zeros((1, 32), np.uint8)}),
    early_messages.OpenSetOrder(arrays=SET),
    early_messages.KeyOrder(),
    *(
        early_messages.InformationOrder(),
        early_messages.ColumnBinsOrder(),
        early_messages.EvidenceOrder(kept=0.75),
    ),
]
LATER: list[Order] = [
    *(train(2, gradient=gradient()), EvaluateOrder(exchange=2), RestoreOrder(exchange=2, number=1)),
    *(EmbedOrder(exchange=2), CheckpointOrder(exchange=2, number=2), early_messages.AgreeOrder()),
    *(ScoreOrder(arrays={"rows": np.zeros(1, np.int32)}), early_messages.SeekOrder(known=1)),
    explain_messages.PermuteOrder(party=0, first=0, count=1, repeat=0, start=0, stop=1),
    *(
        explain_messages.FiguresOrder(metric="auc", grain=0.0, rows=1),
        explain_messages.ReasonsOrder(request="a", total=0.0),
    ),
    *(RejoinOrder(exchange=5, outputs=1), early_messages.KeyOrder(), *EARLY),
]
OF_STATE: list[Order] = [
    *(ResumeOrder(run="1", number=1), PredictOrder(run="1", number=1)),
    *(ServeOrder(run="1", number=1), explain_messages.ExplainOrder(run="1", number=1, repeats=1)),
    explain_messages.GroupsOrder(
        run="1", number=1, least=1, arrays={"cells": np.zeros(12, np.uint8)}
    ),
]


def refuses(said: str, what: str) -> bool:
    """Whether a party's answer is the sentence by which it refuses."""
    return re.match(f"failed: Party 0 refuses {what}", said) is not None


@pytest.fixture
def touching_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing of the party's data read, no key made and nothing computed."""

    def touched(*_: Any, **__: Any) -> Any:
        raise AssertionError

    for where, names in (
        (client_app, ["aligning_source"]),
        (builder, ["load_block", "Party"]),
        (model, ["own_source"]),
        (scoring, ["own_source"]),
        (information, ["own_source"]),
        (sum_keys, ["lasting_key"]),
        (psi, ["_libsodium"]),
        (store, ["save_state"]),
    ):
        for name in names:
            monkeypatch.setattr(where, name, touched)


def kinds(of: type[Order] = Order) -> Iterator[type[Order]]:
    for kind in of.__subclasses__():
        yield from kinds(kind)
        if hasattr(kind, "kind") and not kind.__module__.startswith("tests."):
            yield kind


def test_the_table_has_every_message() -> None:
    named = {type(order) for order in (*EARLY, *LATER, *OF_STATE)} | {DescribeOrder, GrowOrder}
    assert set(kinds()) - {SharedActorOrder, SessionOrder} == named  # those two carry others


@pytest.mark.usefixtures("touching_nothing")
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
@pytest.mark.parametrize("case", RULES.values(), ids=list(RULES))
def test_every_rule_holds_for_every_message_before_a_run_has_begun(
    node: Node, case: Case, variant: dict[str, Any]
) -> None:
    own, breaks, keeps, what = case
    context = node(own)
    before = list(context.state)

    def is_refused(order: Order) -> bool:
        said = refused(context, order)
        assert list(context.state) == before
        return said in contradictions or refuses(said, what)

    contradictions = []  # such as of masked sums and grow
    for keys in (breaks, keeps):
        try:
            resolve({**KEYS, **keys, **variant})
        except ConfigError as error:
            contradictions.append(f"failed: {error}")
    context.run_config = {**KEYS, **breaks, **variant}
    told = json.dumps({**KEYS, **breaks})
    for order in EARLY:
        assert is_refused(order)
        assert is_refused(replace(order, config=told))
    kept = json.dumps({**KEYS, **keeps})
    whole = not {"grow", "resume"} & variant.keys() and variant.get("task") not in OF_MODEL
    for order in EARLY if whole else ():  # the order's options do not take that back
        assert is_refused(replace(order, config=kept))
    assert is_refused(DESCRIBE)
    rejoin = RejoinOrder(exchange=9, outputs=1)
    if {"grow", "resume"} & variant.keys():
        assert re.search("has (no|lost the) state", refused(context, rejoin))
    else:
        assert is_refused(rejoin)
    grow = GrowOrder(outputs=1, run="1", number=1, parties=1, config=told)
    assert is_refused(grow)
    for later in LATER:
        if isinstance(later, Turn) and not isinstance(later, RejoinOrder):
            assert "has no state of this run" in refused(context, later)
    context.run_config = {**KEYS, **keeps, **variant}
    for order in EARLY:  # nor does a run configuration take back what an order tells
        assert is_refused(replace(order, config=told))


BEGUN = {name: case for name, case in RULES.items() if name != "data of no file"}


@pytest.mark.parametrize("case", BEGUN.values(), ids=list(BEGUN))
def test_every_rule_holds_for_every_message_of_a_run_that_began_without_it(
    node: Node, case: Case, request: pytest.FixtureRequest
) -> None:
    own, breaks, keeps, what = case
    permits = ("noise-seed", "embedding-activation", "model-args")
    permitted = {key: breaks[key] for key in permits if key in breaks}
    if "model-args" in breaks:
        breaks = {**breaks, "model-args": ""}  # which then is given by force
        permitted = {}
    context = node(permitted, **breaks)
    asked(context, DESCRIBE, Description)
    if "model-args" in breaks:
        text = load_about(context.state).replace('"model-args": ""', '"model-args": "x=1"')
        context.state["about"] = ConfigRecord({"about": text})
    state_file.save(context, 1)
    for key in permitted:
        del context.node_config[key]
    context.node_config.update(own)
    context.run_config = {**KEYS, **keeps}
    request.getfixturevalue("touching_nothing")
    before = state_to_bytes(context.state)
    for order in LATER:
        assert refuses(refused(context, order), what), order
        assert state_to_bytes(context.state) == before
    restarted(context)
    rejoin = RejoinOrder(exchange=5, outputs=1)
    assert refuses(refused(context, rejoin), what)
    for order in OF_STATE:
        for variant in VARIANTS.values():
            later = node(own, run_id=2, **keeps)
            later.run_config = {**KEYS, **keeps, **variant}
            assert refuses(refused(later, order), what), order


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
@pytest.mark.parametrize("checked", [True, False])
def test_ids_are_told_only_to_a_run_that_keeps_to_the_rules(
    node: Node, variant: dict[str, Any], checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without the function that decides, each order is served."""
    own, breaks, keeps, what = BROKEN["systems"]
    align = EARLY[1]
    if not checked:
        monkeypatch.setattr(client_app, "check_order", lambda context, order: None)
        context = node(own)
        context.run_config = {**KEYS, **breaks, **variant}
        assert asked(context, align, early_messages.Aligned).arrays["again"].shape == (60, 32)
        return
    context = node(own)
    context.run_config = {**KEYS, **breaks, **variant}
    refused(context, align, what)
    context.run_config = {**KEYS, **keeps, **variant}
    if "resume" in variant or "grow" in variant or variant.get("task") in OF_MODEL:
        context.run_config = {"dataset": KEYS["dataset"], **variant}
    told = json.dumps({**KEYS, **keeps})
    assert (
        len(asked(context, replace(align, config=told), early_messages.Aligned).arrays["own"]) == 60
    )


def test_a_configuration_that_cannot_be_read_is_refused(node: Node) -> None:
    context = node()
    for text in ("{", "[]", "3", '{"epochs": "x"}', '{"no-such-key": 1}'):
        refused(context, replace(EARLY[0], config=text))
