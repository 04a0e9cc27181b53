"""A party that begins by a model of an earlier run: what it looks into, and its rules."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from tests.organisations import change
from tests.party.nodes import (
    DESCRIBE,
    KEYS,
    Node,
    asked,
    begun,
    gradient,
    refused,
    restarted,
    train,
)
from vfl_flower.party import state_file
from vfl_flower.party.state import load_arrays, load_scalars
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.messages import Description, GrowOrder, RejoinOrder


def order(run: str = "1", number: int = 1, parties: int = 1, **keys: Any) -> GrowOrder:
    """To begin by the model of a run, with these keys."""
    named = {name.replace("_", "-"): value for name, value in keys.items()}
    config = json.dumps(resolve({**KEYS, "grow": "runs/then", **named}).values())
    return GrowOrder(outputs=1, run=run, number=number, parties=parties, config=config)


def earlier(node: Node, own: dict[str, Any] | None = None, **keys: Any) -> Context:
    """A node that has kept a model that was trained for an epoch."""
    context = node(own, **keys)
    begun(context)
    state_file.save(context, 1)
    restarted(context)
    return context


def growing(node: Node, own: dict[str, Any] | None = None, run: int = 2) -> Context:
    """A node in a run that goes on from that one."""
    return node(own, run_id=run, grow="x")


def model(context: Context) -> dict[str, Any]:
    return {name: each.copy() for name, each in load_arrays(context.state, "model").items()}


def test_it_brings_its_model_and_says_how_old_that_is(node: Node) -> None:
    then, _ = state_file.load(earlier(node), "1", 1)
    later = growing(node)
    described = asked(later, order(), Description)
    assert described.exchange == 1
    for name, values in load_arrays(then, "model").items():
        np.testing.assert_array_equal(model(later)[name], values)
    asked(later, train(1))  # counted anew
    # A party that was not in that run begins with a new model, though a state lies there.
    new = growing(node, run=3)
    described = asked(new, order(parties=0), Description)
    assert described.exchange == 0
    weight = next(iter(model(new)))
    assert not np.array_equal(model(new)[weight], model(later)[weight])


def test_a_frozen_party_takes_no_feedback(node: Node) -> None:
    earlier(node, party_lr=0.5)
    for freeze in (True, False):
        later = growing(node, run=2 + freeze)
        asked(later, order(freeze=freeze, party_lr=0.5), Description)
        before = model(later)
        asked(later, train(1))
        if freeze:
            refused(later, train(2, gradient=gradient() + 1), "'gradient', which nobody uses")
            asked(later, train(2))
        else:
            asked(later, train(2, gradient=gradient() + 1))
        same = [np.array_equal(before[name], model(later)[name]) for name in before]
        assert all(same) if freeze else not any(same)
        assert load_scalars(later.state)["steps"] == (6 if freeze else 18)


def test_what_it_gave_away_then_counts_on(node: Node) -> None:
    rules = {"max-uploads": 2}
    earlier(node, rules)
    later = growing(node, rules)
    asked(later, order(), Description)
    asked(later, train(1))
    refused(later, train(2, gradient=gradient()), "to upload a row more often than it allows")
    anew = node(rules, run_id=3)  # the control: of another model nothing was given away
    begun(anew)
    asked(anew, train(2, gradient=gradient()))


def test_without_the_earlier_count_it_is_refused(node: Node, tmp_path: Path) -> None:
    earlier(node)
    refused(growing(node, {"max-uploads": 9}), order(), "has no count of its earlier uploads")


def test_epochs_of_the_earlier_run_count_for_its_model(node: Node) -> None:
    rules = {"max-epochs": 4}
    earlier(node, rules)
    refused(growing(node, rules), order(), "refuses step 30, of 6 an epoch")
    later = growing(node, rules, 3)
    asked(later, order(epochs=3), Description)
    state_file.save(later, 1)
    assert load_scalars(later.state)["epochs"] == 1
    frozen = growing(node, rules, 4)
    asked(frozen, order(freeze=True), Description)  # which trains nothing


def test_a_run_of_few_mini_batches_between_takes_no_epochs_away(node: Node) -> None:
    rules = {"max-epochs": 1}
    context = node(rules, epochs=1)
    asked(context, DESCRIBE, Description)
    asked(context, train(1, steps=2))  # a third of an epoch
    state_file.save(context, 1)
    restarted(context)
    frozen = growing(node, rules)  # which is one mini-batch an epoch, and trains nothing
    asked(frozen, order(batch_size=100, freeze=True, epochs=1), Description)
    refused(growing(node, rules, 3), order(run="2", epochs=1), "refuses step 12, of 6 an epoch")


def test_its_rules_are_of_the_configuration_that_the_order_brings(node: Node) -> None:
    earlier(node)
    refused(growing(node, {"systems": "vafl"}), order(), "its rule is systems = 'vafl'")
    asked(growing(node, {"systems": "vafl"}, 3), order(strategy="vafl"), Description)


@pytest.mark.parametrize(
    ("change_of", "sentence"),
    [
        ({"run": "../../etc"}, "Party 0 does not have checkpoint 1 of that run"),
        ({"run": "7"}, "Party 0 does not have checkpoint 1 of that run"),
        ({"config": "{"}, "was sent a configuration that cannot be read"),
        ({"config": "[1]"}, "was sent a configuration that cannot be read"),
        ({"config": '{"epoch": 3}'}, "runs an older version, and the label holder"),
        ({"config": '{"codec": "evil.py:Run"}'}, "codec names code, which a node does not take"),
        ({"config": '{"bottom-model": "a.b:C"}'}, "bottom-model names code, which a node does not"),
        ({"number": 0}, "Party 0 does not have checkpoint 0 of that run"),
    ],
)
def test_an_order_names_no_path_and_no_code(
    node: Node, change_of: dict[str, Any], sentence: str
) -> None:
    earlier(node)
    state_file.place(node(), 0).unlink()
    sent = order()
    changed = GrowOrder(**{**vars(sent), **change_of})
    refused(growing(node), changed, sentence)


def test_other_columns_are_refused(node: Node, tmp_path: Path) -> None:
    earlier(node)
    change(tmp_path / "a.csv", lambda frame: frame.rename(columns={"f0": "other"}))
    refused(growing(node), order(), "has other columns than its model was trained with")


def test_a_party_that_has_lost_all_does_not_begin_with_another_model(
    node: Node, tmp_path: Path
) -> None:
    earlier(node)
    later = growing(node)
    asked(later, order(), Description)
    asked(later, train(1))
    restarted(later)
    rejoin = RejoinOrder(exchange=5, outputs=1)
    asked(later, rejoin, Description)  # by the state that it kept when it began
    for path in tmp_path.glob("run-2-*.state"):
        path.unlink()
    restarted(later)
    refused(later, rejoin, "has lost the state from which it continued")
