"""Noise on labels: what is drawn, that it is drawn once, and that models learn through it."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.conftest import ALL_ROWS, FASTER, MANY, Start
from tests.releases import learned_from
from tests.strategy.test_checkpoint import assert_equal_runs, interrupted, resumed
from vfl_attacks.audit import audit
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.labels import Labels, encode_labels
from vfl_flower.launch.engines import run_local
from vfl_flower.models.losses import Loss, loss_of, loss_per_row
from vfl_flower.protocol.privacy.labels import kept_share
from vfl_flower.protocol.systems import resolve, sized

NOISY = {**ALL_ROWS, "privacy": "labels", "epsilon": 1.0}
NUMBERS = {**NOISY, "target": "regression", "label-range": "0,10"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "labels.draws"


def config_of(**keys: Any) -> RunConfig:
    return sized(
        resolve({**NOISY, **{key.replace("_", "-"): value for key, value in keys.items()}}), MANY
    )


def drawn(labels: Labels, keys: Mapping[str, Any] = NOISY) -> tuple[Labels, float | None]:
    """Return the noisy labels of a new run, and the epsilon that it reports."""
    config = resolve(keys)
    return learned_from(config, labels)


def of_classes(classes: int, rows: int, label: int = 0) -> Labels:
    train = np.full(rows, label)
    return Labels(train, np.arange(classes), tuple(range(classes)), "", whole="these")


# --- what is drawn ------------------------------------------------------------------------------


def test_no_number_decides_whether_a_run_with_a_range_begins(tmp_path: Path) -> None:
    equal = np.full(300, 5.0)
    with pytest.raises(ConfigError, match="all the same"):  # the control: no epsilon, no range
        encode_labels(resolve({"target": "regression"}).data, equal, equal[:9], "")
    np.savez(tmp_path / "a.npz", X=np.random.default_rng(0).normal(size=(300, 4)), y=equal)
    keys: dict[str, Any] = {"dataset": f"npz:{tmp_path / 'a.npz'}"}
    keys |= {"target": "regression", "label-range": "0,10"}
    keys |= {"privacy": "labels", "epsilon": 3.0, "epochs": 1, "out": str(tmp_path / "run")}
    assert run_local(2, keys).summary["test_r2"] == 0  # as of all equal labels


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_a_label_is_kept_by_the_chance_of_randomised_response(classes: int, epsilon: float) -> None:
    rows = 200_000
    noisy, spent = drawn(of_classes(classes, rows), {**NOISY, "epsilon": epsilon})
    shares = np.bincount(noisy.train, minlength=classes) / rows
    kept = math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    assert kept_share(epsilon, classes) == pytest.approx(kept)
    assert shares[0] == pytest.approx(kept, abs=6e-3)  # five deviations, at least
    assert shares[1:] == pytest.approx((1 - kept) / (classes - 1), abs=6e-3)
    assert spent == epsilon


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_number_gets_laplace_noise_of_its_range_over_epsilon(epsilon: float) -> None:
    rows = 100_000
    data = resolve({**NUMBERS, "label-range": "-5,15"}).data
    values = np.tile([-100.0, -5.0, 3.0, 99.0], rows // 4)
    labels = replace(encode_labels(data, values, values[:4], ""), whole="numbers")
    keys = {**NUMBERS, "label-range": "-5,15", "epsilon": epsilon}
    noisy, _ = drawn(labels, keys)
    found = noisy.train * noisy.deviation + noisy.mean
    noise = found - np.clip(values, -5, 15)
    scale = 20 / epsilon
    assert noise.mean() == pytest.approx(0, abs=6 * scale * math.sqrt(2 / rows))
    assert np.abs(noise).mean() == pytest.approx(scale, rel=0.03)
    assert noise.std() == pytest.approx(scale * math.sqrt(2), rel=0.04)
    for at in (0.5, 1.0, 3.0):  # P(|noise| > at scale) = exp(-at)
        assert (np.abs(noise) > at * scale).mean() == pytest.approx(math.exp(-at), abs=0.012)
    # The scale of labels tells nothing about them.
    assert labels.mean == 5 and labels.deviation == pytest.approx(20 / math.sqrt(12))


# --- that it is drawn once ----------------------------------------------------------------------


def test_every_run_on_the_same_labels_has_the_same_noise() -> None:
    labels = load_labels(config_of())
    first, spent = drawn(labels)
    again, then = drawn(labels)
    assert np.array_equal(first.train, again.train) and spent == then == 1.0
    assert np.array_equal(first.test, labels.test)
    assert 0.6 < (first.train != labels.train).mean() < 0.9  # of ten classes, at epsilon 1
    # A part of them, by another test-fraction: those in both have one label.
    other = load_labels(config_of(test_fraction=0.5))
    part, spent = drawn(other, {**NOISY, "test-fraction": 0.5})
    assert first.places is not None and part.places is not None and spent == 1.0
    of_first = dict(zip(first.places.tolist(), first.train.tolist(), strict=True))
    of_part = zip(part.places.tolist(), part.train.tolist(), strict=True)
    both = [(of_first[place], label) for place, label in of_part]
    assert len(both) > 800 and all(one == two for one, two in both)


def test_labels_of_another_digest_are_drawn_anew() -> None:
    """Else two draws would show where labels have changed. The control: the same digest."""
    labels = of_classes(2, 200)
    first, again = drawn(labels)[0].train, drawn(labels)[0].train
    other = drawn(replace(labels, whole="others"))[0].train
    assert np.array_equal(first, again) and 20 < (first != other).sum() < 180


def test_another_epsilon_is_another_draw_and_the_sum_is_said() -> None:
    labels = load_labels(config_of())
    first, _ = drawn(labels)
    second, spent = drawn(labels, {**NOISY, "epsilon": 0.5})
    assert spent == 1.5
    same = (first.train == labels.train) & (second.train == labels.train)
    kept = [kept_share(each, 10) for each in (1.0, 0.5)]
    assert same.mean() == pytest.approx(kept[0] * kept[1], abs=0.04)  # independent
    assert drawn(labels)[1] == 1.5


def test_files_of_ids_have_one_draw_whatever_rows_are_common(tmp_path: Path) -> None:
    people = pd.DataFrame({"id": range(200), "label": [0, 1] * 100})
    people.to_csv(tmp_path / "labels.csv", index=False)
    seen = []
    for number, known in enumerate((range(200), range(50, 200))):
        features = pd.DataFrame({"id": list(known), "x": np.arange(len(known)) % 7})
        features.to_csv(tmp_path / f"features-{number}.csv", index=False)
        keys = {**NOISY, "dataset": f"files:{tmp_path}/labels.csv", "epochs": 1, "align": "psi"}
        node = {"file": f"{tmp_path}/features-{number}.csv"}
        run = run_local(1, {**keys, "out": str(tmp_path / f"{number}")}, node_configs=[node])
        assert run.summary["epsilon"] == 1.0
        seen.append(run)
    assert seen[0].summary["epsilon_protects"] == "labels of the training rows"


def test_noise_that_can_be_repeated_is_worth_no_epsilon(home: Path) -> None:
    labels, keys = load_labels(config_of()), {**NOISY, "noise-seed": 3}
    (one, spent), (other, _) = drawn(labels, keys), drawn(labels, keys)
    assert spent is None and np.array_equal(one.train, other.train)
    assert not home.exists()


@pytest.mark.nightly
def test_a_resumed_run_has_the_earlier_noise_or_is_refused(tmp_path: Path, home: Path) -> None:
    keys = {**NOISY, "dataset": "breast-cancer", "epochs": 4, "checkpoint-every": 3}
    whole = run_local(2, {**keys, "out": str(tmp_path / "whole")})
    folder = interrupted(tmp_path / "cut", keys, 2, 2)
    kept = home.read_bytes()
    home.unlink()
    with pytest.raises(ConfigError, match="noise on these labels differs from the noise of"):
        resumed(folder, 2)
    home.write_bytes(kept)
    assert_equal_runs(resumed(folder, 2), whole, 2)


# --- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_corrected_loss_is_least_where_the_true_one_is(outputs: int) -> None:
    # A label that is y by chance q is noted as y by chance T q: there its mean has no slope.
    classes, kept = max(2, outputs), 0.6
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, outputs, generator=generator, dtype=torch.float64)
    q = z.softmax(1)[0] if outputs > 1 else torch.stack([1 - z.sigmoid(), z.sigmoid()])[:, 0, 0]
    other = (1 - kept) / (classes - 1)
    noted = other + (kept - other) * q
    every = torch.arange(classes)
    rows = z.repeat(classes, 1).requires_grad_()
    loss = Loss(kept=kept)
    expected = (noted * loss.per_row(rows, every)).sum()
    (slope,) = torch.autograd.grad(expected, [rows])
    assert slope.sum(0).abs().max() < 1e-12
    assert (noted * loss_per_row(rows, every)).sum().detach() > 0
    (plain,) = torch.autograd.grad((noted * loss_per_row(rows, every)).sum(), [rows])
    assert plain.sum(0).abs().max() > 0.01  # which without the correction it has


@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize("kept", [1.0, 0.7])
def test_the_gradient_of_the_corrected_loss_is_autograds(outputs: int, kept: float) -> None:
    generator = torch.Generator().manual_seed(1)
    z = 3 * torch.randn(9, outputs, generator=generator, dtype=torch.float64)
    y = torch.randint(max(2, outputs), (9,), generator=generator)
    z.requires_grad_()
    loss = Loss(kept=kept)
    (expected,) = torch.autograd.grad(loss.per_row(z, y).sum(), [z])
    found = loss.gradient(z.detach(), loss.targets(y, outputs).double())
    torch.testing.assert_close(found, expected)


# --- runs ---------------------------------------------------------------------------------------

NAMES = "split-nn", "vafl", "ef-vfl", "cascaded", "syn-zoo", "frozen", "centralised", "local-only"
SHARED = {"strategy": "ef-vfl", "labels": "shared"}
SYSTEMS = [*({"strategy": name} for name in NAMES), SHARED, {**FASTER, "strategy": "dpzv"}]


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", SYSTEMS, ids=str)
def test_every_system_runs_on_noisy_labels(run: Start, keys: dict[str, Any]) -> None:
    more = {"dataset": "breast-cancer", "epochs": 4, "epsilon": 4.0}
    summary = run(2, {**NOISY, **more, **keys}).summary
    assert (summary["epsilon"], summary["delta"]) == (4.0, 0.0)
    for word in ("protects", "relation", "adversary"):
        assert summary[f"epsilon_{word}"]
    assert summary["test_accuracy"] > 0.6


@pytest.mark.nightly
def test_numbers_are_learned_through_the_noise(run: Start, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((64000, 4))
    y = 5 + x @ [1.0, -1.0, 0.5, 0.5]
    np.savez(tmp_path / "linear.npz", X=x, y=y)
    keys = {"dataset": f"npz:{tmp_path}/linear.npz", "party-lr": 0.05, "server-lr": 0.05}
    keys |= {"epochs": 2, "batch-size": 1024}
    summary = run(2, {**NUMBERS, **keys}).summary
    assert summary["test_r2"] > 0.4 and summary["epsilon"] == 1.0


@pytest.mark.nightly
def test_direct_inference_reads_no_more_labels_than_were_kept(tmp_path: Path) -> None:
    keys = {"strategy": "vafl", "epochs": 1, "epsilon": 2.0}
    for name, keep in (("noisy", kept_share(2.0, 10)), ("true", 1.0)):
        privacy = NOISY if name == "noisy" else {"epsilon": "auto"}
        given = {**privacy, **keys} if name == "noisy" else {**keys, **privacy}
        findings, claim, _ = audit(2, {**given, "out": str(tmp_path / name)})
        found = {each.attack: each.success for each in findings}
        # The noise is secret. Of 958 labels, 0.07 is more than four standard deviations.
        assert found["direct, designed queries*"] == pytest.approx(keep, abs=0.07)
        assert (claim is not None) == (name == "noisy")
        assert claim is None or claim.shown <= claim.claimed == 2.0


# --- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"privacy": "labels"}, "Set epsilon, such as 1.0"),
        ({**NOISY, "epsilon": 37.0}, "hides no label"),
        ({**NOISY, "delta": 1e-5}, "Leave `delta` and `noise-multiplier` out"),
        ({**NOISY, "noise-multiplier": 1.0}, "Leave `delta` and `noise-multiplier` out"),
        ({**NOISY, "target": "regression"}, "Set label-range, for example to '0,120'"),
        ({"label-range": "0,1"}, "label-range is for target = 'regression'"),
        ({**NUMBERS, "label-range": "1,1"}, "Give two numbers, the lower one first"),
        ({**NUMBERS, "label-range": "1"}, "Give two numbers, the lower one first"),
    ],
)
def test_what_cannot_be_is_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(keys)


def test_weights_of_classes_are_of_the_true_ones() -> None:
    # P(1) is 0.3, and ones weigh 5: without noise the logit is least at log(0.3 * 5 / 0.7).
    kept, share, weights = 0.7, 0.3, torch.tensor([1.0, 5.0], dtype=torch.float64)
    noted = (1 - kept) + (2 * kept - 1) * share
    z = torch.tensor([[math.log(share * 5 / (1 - share))]] * 2, dtype=torch.float64)
    z.requires_grad_()
    losses = Loss(weights, kept).per_row(z, torch.tensor([0, 1]))
    expected = (1 - noted) * losses[0] + noted * losses[1]
    (slope,) = torch.autograd.grad(expected, [z])
    assert abs(slope.sum().item()) < 1e-12
    gradient = Loss(weights, kept).gradient(
        z.detach(), Loss().targets(torch.tensor([0, 1]), 1).double()
    )
    torch.testing.assert_close(
        gradient * torch.tensor([[1 - noted], [noted]], dtype=torch.float64), slope
    )


def test_balanced_weights_follow_from_estimated_counts() -> None:
    true = np.repeat([0, 1], [9000, 1000])
    labels = Labels(true, np.array([0, 1]), (0, 1), "", whole="unbalanced")
    noisy, _ = drawn(labels, {**NOISY, "epsilon": 2.0})
    config = config_of(epsilon=2.0, class_weights="balanced")
    found = loss_of(config, noisy.train, 2, kept_share(2.0, 2), torch.device("cpu")).class_weights
    assert found is not None
    assert found.numpy() == pytest.approx([10 / 18, 5.0], rel=0.15)
