"""Every epsilon that is claimed, attacked: what canaries show must not exceed it.

Each game is also played with a broken mechanism: noise off, the top model without noise, labels
drawn anew each time, or half the sensitivity. The game must then show more than the claim, or it
would prove nothing.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.conftest import nightly
from tests.pairwise import pairwise
from tests.protocol.test_last_bits import rounded
from vfl_attacks.canary import canary, of_embeddings, of_labels, of_scalars, shown_at_least
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.batches import step_means
from vfl_flower.protocol.estimators import zeroth_order
from vfl_flower.protocol.privacy import noise
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.protocol.systems import resolve

SURE = 0.9999  # so that no test of these fails by chance
SCALAR = {"strategy": "dpzv", "delta": 1e-5}


@pytest.fixture(autouse=True)
def own_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path))


def test_the_bound_is_below_what_a_mechanism_spends_and_not_far() -> None:
    generator = np.random.default_rng(0)
    for epsilon in (0.5, 1.0, 3.0):
        kept = 1 / (1 + math.exp(-epsilon))
        one, other = (
            np.where(generator.random(20_000) < kept, side, -side) for side in (1.0, -1.0)
        )
        assert 0.8 * epsilon < shown_at_least(one, other, 0.0) <= epsilon
    same = generator.standard_normal((2, 20_000))
    assert shown_at_least(same[0], same[1], 0.0) < 0.1


# --- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["split-nn", "cascaded"])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_noise_on_labels_holds(strategy: str, epsilon: float) -> None:
    config = resolve({"strategy": strategy, "privacy": "labels", "epsilon": epsilon})
    found = of_labels(config, rows=40_000, runs=5, confidence=SURE)
    assert found.claimed == epsilon
    assert 0.7 * epsilon < found.shown <= epsilon


def test_labels_drawn_anew_for_each_run_would_spend_more() -> None:
    config = resolve({"privacy": "labels", "epsilon": 1.0})
    assert of_labels(config, rows=10_000, runs=5, confidence=SURE, anew=True).shown > 1.5


# --- scalars ------------------------------------------------------------------------------------

PLAYS = 30


@pytest.mark.one_by_day
@pairwise(
    epsilon=[4.0, 1.0],
    more=[{}, {"quorum": 2}, {"quorum": 2, "perturbs": "all"}],
    server_update=["first-order", "zeroth-order"],
)
def test_noise_on_scalars_and_top_model_holds(
    epsilon: float, more: dict[str, Any], server_update: str
) -> None:
    config = resolve({**SCALAR, "epsilon": epsilon, "server-update": server_update, **more})
    found = of_scalars(config, PLAYS, confidence=SURE)
    assert found.claimed == pytest.approx(epsilon, rel=1e-6)
    assert found.at_most is not None and 0.6 * epsilon < found.shown <= epsilon <= found.at_most


def without_noise_on_top(config: RunConfig, multiplier: float) -> ScalarNoise:
    # As DPZV has it: scalars of mini-batches without a person tell that person's label.
    found = ScalarNoise(config, multiplier)
    found.of_top = False
    return found


def half(config: RunConfig, multiplier: float) -> ScalarNoise:
    return ScalarNoise(config, multiplier / 2)


def two_thirds(config: RunConfig, multiplier: float) -> ScalarNoise:
    return ScalarNoise(config, multiplier / 1.5)


@pytest.mark.parametrize("noise_of", [half, without_noise_on_top, nightly(two_thirds)])
def test_too_little_noise_refutes_the_claim(
    noise_of: Callable[[RunConfig, float], ScalarNoise],
) -> None:
    found = of_scalars(resolve({**SCALAR, "epsilon": 4.0}), PLAYS, noise_of, SURE)
    assert found.claimed == pytest.approx(4, rel=1e-6)
    assert found.shown > found.claimed


@pytest.mark.one_by_day
@pytest.mark.parametrize("of", ["scalars", "the top model"])
def test_a_clip_that_is_ignored_refutes_the_claim(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if of == "scalars":

        def unclipped(
            of_rows: Tensor, lengths: list[int], divisors: list[int], noise: ScalarNoise
        ) -> Tensor:
            means = step_means(of_rows.to(noise.sums), lengths, divisors)
            return noise.added_to(means, divisors).to(of_rows.dtype)

        monkeypatch.setattr(zeroth_order, "clipped_noisy_means", unclipped)

    def wide(config: RunConfig, multiplier: float) -> ScalarNoise:
        found = ScalarNoise(config, multiplier)
        if of == "the top model":  # its gradients are clipped later, and have the same noise
            found.top_clip *= 3
            found.added_to_gradients = lambda gradients, divisor: ScalarNoise(  # type: ignore[method-assign]
                config, multiplier
            ).added_to_gradients(gradients, divisor)
        return found

    found = of_scalars(resolve({**SCALAR, "epsilon": 1.0}), PLAYS, wide, SURE)
    assert found.shown > found.claimed


# --- embeddings ---------------------------------------------------------------------------------


PERTURBED = {"privacy": "perturbed-embedding", "embedding-noise": 4.0, "embedding-bound": 1.0}
GRADIENTS: list[dict[str, Any]] = [{"strategy": "vafl"}, {"strategy": "ef-vfl", "labels": "shared"}]
OTHERS: list[dict[str, Any]] = [
    {"strategy": "split-nn", "precision": "bfloat16"},
    {"strategy": "cascaded"},
    {"strategy": "cascaded", "differences": "two-sided"},
]


def test_perturbed_embeddings_hold_and_half_their_sensitivity_would_not() -> None:
    found = of_embeddings(resolve({"strategy": "vafl", **PERTURBED}), 200_000, confidence=SURE)
    assert 0.4 * found.claimed < found.shown <= found.claimed
    # A record against none in its place, as the figure once was: as if noise were twice as large.
    doubled = resolve({"strategy": "vafl", **PERTURBED, "embedding-noise": 8.0})
    assert of_embeddings(doubled, rows=1000).claimed < found.shown


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", [*GRADIENTS, *OTHERS], ids=str)
def test_training_uploads_hold(keys: dict[str, Any]) -> None:
    uploads = 2 if keys["strategy"] == "cascaded" else 1  # a pair, or one embedding
    for deviation in (4.0, 40.0):
        config = resolve({**PERTURBED, **keys, "embedding-noise": deviation})
        found = of_embeddings(config, 40_000, uploads, confidence=SURE)
        assert found.shown <= found.claimed
        assert found.shown > 0.2 * found.claimed or deviation > 4


@pytest.mark.parametrize("keys", GRADIENTS, ids=str)
def test_sums_that_round_by_the_value_refute_the_claim(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wherever there is a gradient, last bits once depended on the value: see `test_last_bits`.
    monkeypatch.setattr(noise, "on_grid", rounded)
    found = of_embeddings(resolve({**PERTURBED, **keys}), 40_000, 1, confidence=SURE)
    assert found.shown > 1.5 * found.claimed


# --- which game ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"privacy": "labels", "epsilon": 1.0, "noise-seed": 0},
        {"strategy": "dpzv", "noise-multiplier": 0.0},
        {"strategy": "dpzv", "calibration": "paper", "sampling": "poisson"},
    ],
)
def test_where_nothing_is_claimed_there_is_no_game(keys: dict[str, Any]) -> None:
    assert canary(resolve(keys)) is None
