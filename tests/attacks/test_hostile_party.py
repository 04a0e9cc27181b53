"""A hostile party in the audit: attacks decide scores, and an honest party changes nothing."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.conftest import trained
from vfl_attacks import robustness as measured
from vfl_attacks.hostile import ATTACKS, Adaptive, Hostile, Replaced, Triggerless
from vfl_attacks.robustness import robustness
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.protocol.systems import resolve
from vfl_flower.tools.cli import main
from vfl_flower.transport.early_messages import EvidenceOrder
from vfl_flower.transport.explain_messages import GroupCounts
from vfl_flower.transport.messages import Order, Payload, Predicted, Upload

pytestmark = pytest.mark.xdist_group("hostile-party")  # its tests share trained models
SHORT = {"dataset": "breast-cancer", "strategy": "split-nn", "epochs": 4, "party-lr": 0.1}


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[float, float]]]:
    """Figures of all attacks on one seed: attack -> measure -> (attacked, honest)."""
    out = tmp_path_factory.mktemp("hostile") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "SEEDS", 1)
        found, folder = robustness(3, {**SHORT, "out": str(out)}, ["hostile"])
    assert folder == out and len(json.loads((out / "audit.json").read_text())["seeds"]) == 7
    by_attack: dict[str, dict[str, tuple[float, float]]] = {}
    for each in found:
        by_attack.setdefault(each.attack, {})[each.measure] = each.success, each.guessing
    return by_attack


def attacker(kind: type[Hostile] = Hostile, seed: int = 0, **more: Any) -> Hostile:
    config = resolve({**SHORT, "seed": seed, **more})
    labels = load_labels(config).train
    ids = np.concatenate([np.flatnonzero(labels == each)[:4] for each in range(labels.max() + 1)])
    return kind(config, 3, (ids, labels[ids]), 0)


LEAST = {"backdoor": 0.8, "replaced": 0.8, "triggerless": 0.8, "widening": 0.8, "dominating": 0.95}


@pytest.mark.parametrize("attack", LEAST)
def test_attacks_decide_scores_where_an_honest_party_does_not(
    figures: dict[str, Any], attack: str
) -> None:
    success, honest = figures[attack]["success"]
    accuracy, control = figures[attack]["accuracy"]
    assert success >= LEAST[attack] and honest < 0.15
    assert accuracy > control - 0.05  # of rows that the party leaves alone


def test_attacks_of_scoring_alone_leave_the_model_as_it_was(figures: dict[str, Any]) -> None:
    for name, kind in ATTACKS.items():
        accuracy, control = figures[name]["accuracy"]
        assert kind.trains or accuracy == control


def test_a_free_rider_costs_accuracy(figures: dict[str, Any]) -> None:
    accuracy, control = figures["free-rider"]["accuracy"]
    assert 0.5 < accuracy < control - 0.02


@pytest.mark.parametrize("more", [{}, {"strategy": "dpzv", "noise-multiplier": 1.0, "epochs": 2}])
def test_an_honest_party_of_the_audit_sends_what_the_party_sends(more: dict[str, Any]) -> None:
    keys = {**SHORT, "noise-seed": 0, "epochs": 2, **more}
    mine, _ = trained(3, keys, attacker(**more))
    theirs, _ = trained(3, keys)
    other, _ = trained(3, keys, attacker(Replaced, **more))
    values = [each.run.holder.top.state_dict() for each in (mine, theirs, other)]
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert more or not all(torch.equal(values[2][name], values[1][name]) for name in values[0])


def test_gradients_tell_an_attacker_the_classes_and_known_labels_alone_do_not() -> None:
    client = attacker()
    trained(3, {**SHORT, "epochs": 2}, client)
    labels = load_labels(client.config).train
    assert client.ready and (client.believed == labels).mean() > 0.9
    assert (labels[client.surest] == client.target).all()
    fooled = attacker()
    vars(fooled).update(
        gradients=client.gradients, known=(client.known[0], np.roll(client.known[1], 4))
    )
    assert (fooled.believed == labels).mean() < 0.1  # it has exchanged the classes


def of_two_classes(kind: type[Hostile]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what an attacker whose embeddings are its features sends, and what is honest."""
    client, generator = attacker(kind), torch.Generator().manual_seed(0)
    rows = torch.randn(600, 8, generator=generator)
    classes = np.arange(600) % 2
    rows[:, 0] += 4.0 * torch.from_numpy(classes)
    pulls = torch.eye(8)[:1] * torch.tensor([[-1.0], [1.0]])
    vars(client).update(own=rows.numpy(), believed=classes, pulls=pulls)
    return client.scored(torch.as_tensor, rows.numpy()), rows


def test_an_adaptive_attacker_keeps_within_what_honest_rows_show() -> None:
    sent, honest = of_two_classes(Adaptive)
    # Within a class the columns are independent with variance 1: the distance is Euclidean.
    moved = (sent - honest).norm(dim=1)
    most = np.sqrt(np.quantile(np.random.default_rng(0).chisquare(8, 10**5), 0.99) - 7.34)
    assert moved.max() < 1.1 * most
    assert sent.norm(dim=1).max() < 1.01 * honest.norm(dim=1).max()
    assert sent[1::2, 0].mean() < honest[1::2, 0].mean() - 1.5  # towards the target, class 0
    far, _ = of_two_classes(Triggerless)
    assert (far - honest).norm(dim=1).max() > 2 * moved.max()


def test_a_large_step_raises_no_other_class_as_much_as_the_target() -> None:
    """The control: the steepest step of the target class raises another one more."""
    client = attacker()
    vars(client).update(pulls=torch.tensor([[1.0, 0.0], [1.2, 1.5]]))
    target, other = (client.pulls @ client.apart).tolist()
    assert target > 0.4 and abs(other) < 1e-6
    target, other = (client.pulls @ client.slope).tolist()
    assert other > target > 0


def test_no_answer_of_a_party_has_a_label() -> None:
    """The control: an order has noisy labels. A codec decides the arrays of uploads."""

    def of(kind: type[Payload]) -> set[type[Payload]]:
        return {kind}.union(*map(of, kind.__subclasses__()))

    def names(kind: type[Payload]) -> list[str]:
        return [*(field.name for field in fields(kind)), *(kind.names or ())]

    has = {each for each in of(Payload) if any("label" in name for name in names(each))}
    assert has == {EvidenceOrder} and issubclass(EvidenceOrder, Order)
    assert {Upload, GroupCounts, Predicted} < of(Payload)


def test_flagged_scores_are_counted_apart_from_success() -> None:
    labels = load_labels(resolve(SHORT)).tested
    target = str(labels.classes[0])
    found = pd.DataFrame({"prediction": [target] * len(labels.test)})
    assert measured._outcome(found, labels, 0).success == 1
    flagged = found.assign(inconsistent=["0", None] * (len(found) // 2))
    outcome = measured._outcome(flagged, labels, 0)
    others = labels.test != 0
    assert outcome.flagged == pytest.approx(others[::2].sum() / others.sum())
    assert outcome.success == 1
    assert outcome.unflagged == pytest.approx(others[1::2].sum() / others.sum())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [
        {"strategy": "ef-vfl"},
        {"strategy": "dpzv", "noise-multiplier": 1.0},
        {"strategy": "cascaded", "dataset": "digits"},
        {"aggregation": "secure", "combine": "mean"},
        {"strategy": "vafl", "privacy": "perturbed-embedding"},
        {"privacy": "labels", "epsilon": 2.0, "subsets": "sampled", "combine": "mean"},
    ],
)
def test_attacks_run_against_every_system_and_defence(
    tmp_path: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "SEEDS", 1)
    keys = {**SHORT, "epochs": 2, "out": str(tmp_path / "out"), **more}
    found, _ = robustness(3, keys, ["hostile"])
    assert all(0 <= each.success <= 1 for each in found) and len(found) >= 12


def test_the_command_prints_both_figures_and_names_unknown_attacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "SEEDS", 1)
    command = ["audit", "dominating", "--strategy", "split-nn", "--parties", "2"]
    command += ["-c", "dataset='breast-cancer' epochs=2", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    head, success, accuracy, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["attacked", "honest"]
    assert "success" in success and "accuracy" in accuracy
    assert main(command) == 1 and "already holds a run" in capsys.readouterr().err
    command[1] = "dominate"
    assert main([*command[:-1], str(tmp_path / "other")]) == 1
    assert "attack = 'dominate' is not known" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="known rows per class"):
        robustness(2, {**SHORT, "out": str(tmp_path / "few")}, ["adaptive"], known=500)
