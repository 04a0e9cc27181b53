"""A party's own learning rates, optimizer and schedule: what its node configuration may say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from tests.party.nodes import DESCRIBE, KEYS, Node, asked, begun, gradient, refused, train
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.launch.engines import run_local
from vfl_flower.models.training import flat
from vfl_flower.party import session as between
from vfl_flower.party.own_model import with_own
from vfl_flower.party.refusals import check_order
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.transport.early_messages import SetOrder
from vfl_flower.transport.messages import Description

CANCER = {"dataset": "breast-cancer", "bottom-hidden": 8, "embedding-size": 4, "batch-size": 64}


def moved(context: Context) -> float:
    """How far a window of gradient rows takes the model, at most."""
    begun(context)
    before = flat(between.resume(context).party.learner.model)
    asked(context, train(2, epoch=1, gradient=gradient() + 1))
    return float((flat(between.resume(context).party.learner.model) - before).abs().max())


def test_a_party_has_its_own_rate_whatever_the_run_says(node: Node) -> None:
    assert KEYS["party-lr"] == 0
    assert moved(node()) == 0
    assert moved(node({"party-lr": 0.05}, run_id=2)) == pytest.approx(0.05 * 48, rel=1e-4)
    assert moved(node({"party-lr": 0}, run_id=3, party_lr=0.5)) == 0
    assert moved(node({"party-lr": "auto"}, run_id=4)) == 0


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"party-lr": -0.5}, "party-lr = -0.5 must be at least 0."),
        ({"party-lr": "fast"}, "party-lr = 'fast' must be a number."),
        ({"optimizer": "lion"}, "optimizer = 'lion' is not known: choose one of sgd, momentum"),
        ({"warm-up": 5.0}, "warm-up = 5 is longer than epochs = 4. Make it shorter."),
        ({"lr-step": 2}, "lr-step is for lr-schedule = 'step', and not for 'constant'. Leave"),
        ({"lr-schedule": "cosine", "lr-decay": 0.5}, "lr-decay is for lr-schedule = 'step', and"),
    ],
)
def test_what_it_cannot_say_is_refused_before_anything_is_done(
    node: Node, own: dict[str, Any], sentence: str
) -> None:
    context = node(own)
    before = list(context.state)
    with pytest.raises(VflError) as raised:
        asked(context, DESCRIBE, Description)
    assert str(raised.value).startswith("failed: In party 0's node configuration, " + sentence)
    assert list(context.state) == before
    with pytest.raises(ConfigError, match="In party 0's node configuration"):
        check_order(context, SetOrder())


@pytest.mark.parametrize("key", ["server-lr", "party-lrs", "epochs", "precision"])
def test_keys_of_others_are_none_that_it_can_say(node: Node, key: str) -> None:
    refused(node({key: 1}), DESCRIBE, f"has an unknown option '{key}'")


def test_a_party_s_schedule_replaces_the_run_s() -> None:
    config = resolve({"lr-schedule": "step", "lr-step": 3, "lr-decay": 0.5, "optimizer": "adamw"})
    own = with_own(config, {"lr-schedule": "cosine"}).training
    assert (own.lr_schedule, own.lr_step, own.lr_decay) == ("cosine", None, None)
    assert own.optimizer == "adamw"
    own = with_own(config, {"lr-decay": 0.1}).training
    assert (own.lr_schedule, own.lr_step, own.lr_decay) == ("step", 3, 0.1)
    assert with_own(config, {}) is config


def test_a_party_s_own_optimizer_has_its_own_rate() -> None:
    def rate(of_run: dict[str, Any], of_party: dict[str, Any]) -> float:
        return sized(with_own(resolve(of_run), of_party), 5000).training.party_lr

    assert rate({"strategy": "vafl"}, {"optimizer": "adam"}) == 0.001
    assert rate({"party-lr": 0.7}, {"optimizer": "adamw"}) == 0.001
    assert rate({"party-lr": 0.7}, {"optimizer": "adamw", "party-lr": 0.03}) == 0.03
    assert rate({"party-lr": 0.7}, {"optimizer": "sgd"}) == 0.7
    assert rate({"party-lr": 0.7, "optimizer": "adam"}, {"optimizer": "adamw"}) == 0.7


def test_the_others_are_trained_as_the_run_says(tmp_path: Path) -> None:
    still: dict[str, Any] = {"party-lr": 0.0}

    def models(name: str, *own: dict[str, Any]) -> list[dict[str, Any]]:
        keys = {**CANCER, "epochs": 1, "out": str(tmp_path / name)}
        run = run_local(2, keys, node_configs=own)
        return [run.parameters(f"party-{party}") for party in range(2)]

    (one, other), (first_one, first_other) = models("one", still, {}), models("all", still, still)
    for name in one:
        np.testing.assert_array_equal(one[name], first_one[name])
        learns = "edges" not in name
        assert (other[name] != first_other[name]).any() == learns
