"""Holes in what is claimed of epsilons, each shown by an attack that must not succeed."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vfl_flower
from tests.releases import epsilon, learned_from
from vfl_attacks.canary import of_labels, shown_at_least
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.label_holder import checkpoint
from vfl_flower.protocol.privacy.accountant import Accountant, delta_of
from vfl_flower.protocol.privacy.labels import RandomisedLabels
from vfl_flower.protocol.privacy.noise import Perturbation
from vfl_flower.protocol.systems import resolve

SURE = 0.9999
NOISY = {"privacy": "labels", "epsilon": 1.0, "strategy": "split-nn"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))


# --- the last bits of what is sent (Mironov, 2012) ------------------------------------------------


def test_the_last_bits_of_embeddings_tell_nothing() -> None:
    rows, delta = 200_000, 5e-7
    keys = {"privacy": "perturbed-embedding", "embedding-noise": 16.0, "embedding-bound": 1.0}
    config = resolve({"strategy": "vafl", **keys})
    assert delta_of(config, rows) == delta
    scores = []
    for side in (1.0, -1.0):
        perturb = Perturbation(config.privacy, side.hex().encode(), 1, (rows,), last=0)
        sent = perturb(0, torch.full((rows, 1), side)).double().numpy()[:, 0]
        # From -1, numbers in [1, 2) have noise in [2, 3), which has coarser bits.
        scores.append(((sent >= 1) & (sent < 2) & (sent * 2.0**22 % 1 != 0)).astype(float))
    assert shown_at_least(scores[0], scores[1], delta, SURE) <= epsilon(config, rows, 1)


# --- labels that are drawn more than once ---------------------------------------------------------


def _drawn(keys: dict[str, Any]) -> tuple[np.ndarray, float]:
    config = resolve({**NOISY, "test-fraction": 0.0, **keys})
    labels = load_labels(config)
    noisy, spent = learned_from(config, labels)
    assert labels.places is not None and spent is not None
    return noisy.train[np.argsort(labels.places)], spent


def test_labels_in_memory_are_not_drawn_anew_unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    # As by cross-validation, or of frames that are shuffled or sorted between runs.
    seen: list[tuple[np.ndarray, np.ndarray, float]] = []
    labels_of = RandomisedLabels.labels

    def spied(self: RandomisedLabels, labels: Any, accountant: Accountant) -> Any:
        noisy = labels_of(self, labels, accountant)
        seen.append((labels.places, noisy.train, accountant.figures()["epsilon"]))
        return noisy

    monkeypatch.setattr(RandomisedLabels, "labels", spied)
    generator = np.random.default_rng(0)
    rows, runs = 2000, 3
    x, y = generator.normal(size=(rows, 4)).astype(np.float32), generator.integers(0, 2, rows)
    votes = np.zeros(rows)
    for _ in range(runs):
        order = generator.permutation(rows)
        keys = {**NOISY, "epochs": 1, "batch-size": rows, "test-fraction": 0.0}
        vfl_flower.train(keys, [x[order, :2], x[order, 2:]], y[order])
        places, noisy, spent = seen[-1]
        votes[order[places]] += noisy
    told = ((votes > runs / 2) == y).mean()
    assert told < np.e / (1 + np.e) + 0.05 or spent == runs  # a draw tells 0.73 of them


@pytest.mark.parametrize(
    ("file", "label", "dtype"), [("b.npz", "label", np.int32), ("b.csv", "other", np.int64)]
)
def test_the_same_labels_in_another_file_are_the_same_draw(
    tmp_path: Path, file: str, label: str, dtype: type
) -> None:
    import pandas as pd

    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(500, 2)), generator.integers(0, 2, 500)
    first, other = tmp_path / "a.csv", tmp_path / file
    pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "label": y}).to_csv(first, index=False)
    if file.endswith("npz"):
        np.savez(other, X=x, y=y.astype(dtype))
    else:
        pd.DataFrame({"a": x[:, 0], "b": x[:, 1], label: y}).to_csv(other, index=False)
    one, spent = _drawn({"dataset": f"csv:{first}"})
    kind = file.split(".")[1]
    two, then = _drawn({"dataset": f"{kind}:{other}", "label": label})
    assert np.array_equal(one, two) or then > spent


# --- what lies beside the model -------------------------------------------------------------------


def test_a_model_that_is_given_away_holds_no_digest_of_true_labels(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    data, out = tmp_path / "data.npz", tmp_path / "run"
    np.savez(data, X=generator.normal(size=(200, 4)), y=generator.integers(0, 2, 200))
    keys = {**NOISY, "epochs": 1, "dataset": f"npz:{data}", "out": str(out)}
    from vfl_flower.launch.engines import run_local

    run_local(2, keys)
    about, labels = checkpoint.load(out).about_labels, load_labels(resolve(keys))
    told = []
    for guess in (0, 1):  # an attacker who knows all other labels tries both
        train = labels.train.copy()
        train[0] = guess
        told.append(
            hashlib.sha256(train.tobytes() + labels.test.tobytes()).hexdigest() == about["labels"]
        )
    assert told == [False, False]


# --- the audit ------------------------------------------------------------------------------------


def test_the_claim_of_a_game_is_that_of_the_run_and_its_draws_are_nobodys(tmp_path: Path) -> None:
    assert of_labels(resolve({**NOISY, "epsilon": 2.0}), rows=500).claimed == 2.0
    assert of_labels(resolve({**NOISY, "epsilon": 1.0}), rows=500).claimed == 1.0
    assert not (tmp_path / "home" / "labels.draws").exists()
