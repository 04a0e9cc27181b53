"""Every zeroth-order system, black boxes, codecs, and what no paper has combined: all learns."""

import math
from typing import Any

import pytest

from tests.conftest import ALL_ROWS, Start
from tests.pairwise import pairwise
from vfl_flower.config.errors import ConfigError

CHANCE = 0.1  # on digits
MAJORITY = 0.68  # of the test rows of breast-cancer

SGD = {**ALL_ROWS, "window": 16, "noise-seed": 0, "optimizer": "sgd", "batch-size": 32}
LINEAR = {**SGD, "bottom-hidden": 16, "embedding-size": 10, "top-model": "linear"}
SUM = {**SGD, "bottom-model": "linear", "top-model": "sum", "party-lr": 0.01}
ZEROTH_SERVER = {"server-update": "zeroth-order", "server-lr": 0.01}


BOTH = {"party-lr": 0.02, "server-lr": 0.02}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        ("asyrevel", {**LINEAR, **BOTH, "epochs": 5}),
        ("asyrevel", {**LINEAR, **BOTH, "epochs": 5, "directions": "sphere"}),
        ("synrevel", {**SUM, "epochs": 3}),
        ("syn-zoo", {**LINEAR, **BOTH, "epochs": 10}),
        ("cascaded", {**LINEAR, "epochs": 3}),
    ],
)
def test_zeroth_order_systems_learn(run: Start, strategy: str, keys: dict[str, Any]) -> None:
    assert run(4, {**keys, "strategy": strategy}).summary["test_accuracy"] > 4 * CHANCE


@pytest.mark.one_by_day
@pytest.mark.parametrize("parties", [1, 4])
@pytest.mark.parametrize(
    "more",
    [SUM, LINEAR, {**LINEAR, "server-update": "zeroth-order", "party-lr": 0.01}],
    ids=["no top model", "first-order server", "zeroth-order server"],
)
def test_dpzv_learns(run: Start, parties: int, more: dict[str, Any]) -> None:
    private = {"strategy": "dpzv", "noise-multiplier": 0.5, "clip": 5.0, "top-clip": 5.0}
    rates = {"party-lr": 0.03, "server-lr": 0.1}
    summary = run(parties, {**rates, **private, "epochs": 20 // parties, **more}).summary
    assert summary["schedule"] == ("async" if parties > 1 else "sync")
    assert summary["test_accuracy"] > 3 * CHANCE


@pytest.mark.one_by_day
@pytest.mark.parametrize("server_update", ["zeroth-order", "first-order"])
def test_parties_learn_by_one_difference_for_all(run: Start, server_update: str) -> None:
    keys: dict[str, Any] = {"strategy": "synrevel", "perturbs": "all"}
    keys["server-update"] = server_update
    keys |= {"dataset": "breast-cancer", "epochs": 10, "noise-seed": 0, **BOTH}
    assert run(3, keys).summary["test_accuracy"] > 0.8


POISSON = {"sampling": "poisson"}
PERTURBED = {"privacy": "perturbed-embedding", "embedding-noise": 0.01, "embedding-bound": 10.0}
DELAYED = {"window": 4, "max-delay": 8, "delay": "exponential", "epochs": 2}
FIRST_SERVER = {"server-update": "first-order", "server-lr": 0.1}
COMBINATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "t-sync, zeroth-order parties": (
        *("vafl-t", {**LINEAR, "estimator": "zeroth-order", "party-lr": 0.01}),
    ),
    "async, zeroth-order server": ("vafl", {**LINEAR, **ZEROTH_SERVER, "party-lr": 0.1}),
    "zeroth order, no top model": ("cascaded", SUM),
    "zeroth order, sync, Poisson": ("synrevel", {**SUM, **POISSON}),
    "zeroth order, both": ("asyrevel", {**LINEAR, **FIRST_SERVER, **DELAYED, **POISSON}),
    "zeroth order, momentum": (
        *("cascaded", {**LINEAR, "optimizer": "momentum", "party-lr": 0.001, "server-lr": 0.02}),
    ),
    "zeroth order, adam": (
        *("cascaded", {**LINEAR, "optimizer": "adam", "party-lr": 0.003, "server-lr": 0.003}),
    ),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize(("strategy", "keys"), COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_combinations_that_no_paper_has_learn(
    run: Start, strategy: str, keys: dict[str, Any]
) -> None:
    assert run(4, {"epochs": 3, **keys, "strategy": strategy}).summary["test_accuracy"] > 3 * CHANCE


LINEAR_PARTIES = {
    **{**ALL_ROWS, "bottom-model": "linear", "top-model": "linear", "embedding-size": 10},
    **{"window": 8, "noise-seed": 0},
}
LESS_NOISE = {**PERTURBED, "embedding-noise": 0.1, "embedding-bound": 4.0}
WITH_CODECS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("split-nn", "vafl", "vafl-t"), LINEAR_PARTIES),
    "vafl, perturbed embedding": {**LINEAR_PARTIES, **LESS_NOISE},
    **dict.fromkeys(("asyrevel", "synrevel", "cascaded", "syn-zoo"), SUM),
    "dpzv": {**SUM, "noise-multiplier": 0.5, "clip": 5.0, "party-lr": 0.03},
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", WITH_CODECS)
def test_every_system_learns_through_every_codec_and_uploads_less(run: Start, name: str) -> None:
    keys = {"epochs": 3, "eval-every": 3, "strategy": name.split(",")[0], **WITH_CODECS[name]}
    whole = run(2, keys).summary["bytes_up"]
    for codec, most in (({"codec": "top-k", "keep": 0.25}, 0.3), ({"codec": "qsgd"}, 0.35)):
        for compression in ("direct", "error-feedback"):
            summary = run(2, {**keys, **codec, "compression": compression}).summary
            assert summary["test_accuracy"] > 3 * CHANCE, (codec, compression)
            assert summary["bytes_up"] < most * whole, (codec, compression)


@pytest.mark.one_by_day
@pairwise(
    labels=["private", "shared"], codec=["top-k", "qsgd"], compression=["direct", "error-feedback"]
)
def test_ef_vfl_learns_through_a_codec_in_both_directions(
    run: Start, labels: str, codec: str, compression: str
) -> None:
    both = {"codec": codec, "downlink-codec": codec}
    both |= {"compression": compression, "downlink-compression": compression}
    keys = {"strategy": "ef-vfl", "labels": labels, "epochs": 5, "eval-every": 5}
    assert run(4, {**LINEAR_PARTIES, **keys, **both}).summary["test_accuracy"] > 5 * CHANCE


TINY = {"dataset": "breast-cancer", "batch-size": 2, "sampling": "poisson", "epochs": 1}


@pytest.mark.one_by_day
@pytest.mark.parametrize("window", [9, 1])
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "split-nn"},
        {"strategy": "frozen"},
        {"strategy": "local-only"},
        {"strategy": "vafl", "optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01},
        {"strategy": "asyrevel"},
        {"strategy": "cascaded", "bottom-model": "linear", "top-model": "sum"},
        {"strategy": "split-nn", "combine": "mean"},
        {"strategy": "dpzv", "calibration": "secret", "noise-multiplier": 3.0},
        {"strategy": "ef-vfl", "labels": "shared", "codec": "qsgd"},
        {"strategy": "vafl", "codec": "top-k", "compression": "error-feedback"},
        {"strategy": "dpzv", "calibration": "paper", "noise-multiplier": 3.0, "codec": "qsgd"},
    ],
    ids=str,
)
def test_poisson_mini_batches_may_have_no_rows(
    run: Start, keys: dict[str, Any], window: int
) -> None:
    summary = run(2, {**TINY, **keys, "window": window}).summary
    assert summary["epochs"] == 1.0
    assert math.isfinite(summary["test_loss"])


# --- models without a gradient ------------------------------------------------------------------

BLACK_BOX = {"strategy": "cascaded", "top-model": "sum", "mu": 1.0, "noise-seed": 0, "window": 15}


@pytest.mark.one_by_day
@pytest.mark.parametrize("kind", ["scorecard", "binarised"])
def test_black_box_parties_learn_by_zeroth_order(run: Start, kind: str) -> None:
    # The top model has no parameters, so that what is learnt, the parties have learnt.
    keys = {**BLACK_BOX, "bottom-model": kind, "dataset": "breast-cancer", "eval-every": 10}
    still, learning = (
        run(4, {**keys, "party-lr": rate, "epochs": int(10 * rate) or 1}).summary["test_accuracy"]
        for rate in (0.0, 1.0)
    )
    assert still < MAJORITY + 0.02 and learning > MAJORITY + 0.12


@pytest.mark.parametrize("kind", ["scorecard", "binarised"])
@pytest.mark.parametrize("strategy", ["split-nn", "vafl", "local-only", "centralised"])
def test_a_first_order_system_refuses_a_black_box_with_a_sentence(
    run: Start, kind: str, strategy: str
) -> None:
    with pytest.raises(ConfigError) as error:
        run(4, {"strategy": strategy, "bottom-model": kind})
    sentence = str(error.value)
    assert sentence.startswith(f"bottom-model = '{kind}' has no gradient")
    assert f"'{strategy}'" in sentence and "'cascaded'" in sentence
    assert "\n" not in sentence and sentence.endswith(".")


@pytest.mark.one_by_day
@pytest.mark.parametrize("kind", ["scorecard", "binarised"])
def test_black_boxes_may_be_frozen_and_a_system_made_zeroth_order_trains_them(
    run: Start, kind: str
) -> None:
    keys = {"bottom-model": kind, "epochs": 2, "window": 16}
    assert run(4, {**keys, "strategy": "frozen"}).summary["test_accuracy"] > 3 * CHANCE
    made = {**keys, "strategy": "vafl", "estimator": "zeroth-order", "mu": 1.0}
    assert run(4, {**made, "noise-seed": 0}).summary["failure"] is None
