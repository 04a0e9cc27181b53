"""Nothing leaves a party but what follows from sums on the noise's grid, to the last bit.

Each run is played in two worlds, whose features differ. The noise of both worlds is chosen so that
every sum is the same. Then every message of every party must be the same, byte by byte.
"""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.conftest import nightly
from tests.stepping import by_gradient
from vfl_flower.config.errors import VflError
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.data.at_party import ArrayBlock
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.tops import build_top
from vfl_flower.party.party import Party
from vfl_flower.party.stacked import FEWEST
from vfl_flower.protocol.aggregation.masks import Masks, to_fixed
from vfl_flower.protocol.batches import step_means
from vfl_flower.protocol.privacy import noise
from vfl_flower.protocol.privacy.noise import (
    Perturbation,
    ScalarNoise,
    clipped_noisy_means,
    grid_step,
    on_grid,
)
from vfl_flower.protocol.system import load_system
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.messages import Arrays, EvaluateOrder

ROWS = 48
PERTURBED = {"privacy": "perturbed-embedding", "embedding-bound": 1.0, "embedding-noise": 4.0}
SHORT = {"epochs": 2, "batch-size": 16, "embedding-size": 3, "bottom-hidden": 4}
OnGrid = Callable[[Tensor, NDArray[np.float64], float], Tensor]


def rounded(value: Tensor, noise_: NDArray[np.float64], bound: float) -> Tensor:
    """The sum as it once was, which rounds by the value wherever there is a gradient."""
    step = grid_step(bound, value.shape[-1] if value.ndim > 1 else 1)
    drawn = torch.from_numpy(np.rint((1 + noise._FINE) * noise_ / step)).to(value.device)
    total = (((value.double() / step).round() + drawn) * step).to(value.dtype)
    return value + (total - value).detach() if value.requires_grad else total


def same_sums(add: OnGrid) -> OnGrid:
    """Make noise whose sums are the next of a sequence, whatever the value is."""
    generator = np.random.default_rng(0)

    def added(value: Tensor, drawn: NDArray[np.float64], bound: float) -> Tensor:
        assert value.isfinite().all()
        step = grid_step(bound, value.shape[-1] if value.ndim > 1 else 1)
        sums = generator.integers(-(2**14), 2**14, value.shape)
        places = (value.detach().double() / step).round().numpy()
        return add(value, (sums - places) * step / (1 + noise._FINE), bound)

    return added


def messages_of(
    folder: Path, keys: dict[str, Any], add: OnGrid, parties: int, seed: int
) -> list[tuple[Any, ...]]:
    """All that parties send in a run and for predictions, on features that this seed draws."""
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((ROWS, 2 * parties)) * 10.0**seed
    np.savez(folder / "rows.npz", X=features.astype(np.float32), y=np.arange(ROWS) % 2)
    sent: list[tuple[Any, ...]] = []
    pull = LocalGrid.pull_messages

    def recorded(grid: LocalGrid, ids: Any) -> Any:
        messages = pull(grid, ids)
        for message in messages:
            payload = getattr(message, "payload", None)
            assert payload is not None, "a party has failed"
            arrays = {name: (each.dtype, each.tobytes()) for name, each in payload.arrays.items()}
            said = [
                (each.name, getattr(payload, each.name))
                for each in fields(payload)
                if each.name not in ("arrays", "peak_memory_mb")
            ]
            sent.append((type(payload).__name__, arrays, said))
        return messages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "on_grid", same_sums(add))
        patch.setattr(LocalGrid, "pull_messages", recorded)
        out = folder / f"run-{seed}"
        given = {**PERTURBED, **SHORT, "dataset": f"npz:{folder / 'rows.npz'}", **keys}
        run_local(parties, {**given, "out": str(out)})
        predict_local({"model": str(out)})
    assert {kind for kind, *_ in sent} >= {"Description", "Upload", "Predicted"}
    return sent


def same_in_both_worlds(
    folder: Path, keys: dict[str, Any], add: OnGrid = on_grid, parties: int = 2
) -> bool:
    one, other = (messages_of(folder, keys, add, parties, seed) for seed in (0, 1))
    assert len(one) == len(other)
    return one == other


TWO_SIDED = {"strategy": "synrevel", "differences": "two-sided"}
FEEDBACK = {"codec": "qsgd", "compression": "error-feedback"}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "split-nn", "window": 3, "precision": "bfloat16"},
        {"strategy": "vafl", "inner-noise": 0.1, "optimizer": "adam", "max-delay": 2},
        {"strategy": "ef-vfl", "labels": "shared", "local-steps": 2},
        {"strategy": "ef-vfl", **FEEDBACK, "bottom-model": "tests.towers:Half"},
        {"strategy": "cascaded", "codec": "float16"},
        {**TWO_SIDED, **FEEDBACK},
        {"strategy": "vafl", "presence": 0.6, "embedding-activation": "tanh"},
        {"strategy": "frozen", "embedding-activation": "sigmoid"},
        *(
            nightly({"strategy": name, **more})
            for name in SYSTEMS.known
            if name not in ("local-only", "centralised", "intersection-only", "dpzv")
            for more in (
                {},
                {"codec": "float16", "compression": "error-feedback", "window": 2},
                {"codec": "top-k", "compression": "direct", "embedding-activation": "relu"},
                {"inner-noise": 0.3, "presence": 0.5},
            )
            if name != "frozen" or "codec" not in more
        ),
        *(
            nightly({"strategy": name, "precision": "bfloat16", "optimizer": "momentum"})
            for name in SYSTEMS.known
            if name not in ("local-only", "centralised", "intersection-only")
            and load_system(name).gradients
        ),
    ],
    ids=lambda keys: ", ".join(map(str, keys.values())),
)
def test_what_parties_send_follows_from_the_sums_alone(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    assert same_in_both_worlds(tmp_path, keys)


@pytest.mark.nightly
@pytest.mark.parametrize("keys", [{}, {"precision": "bfloat16"}, {"optimizer": "adam"}], ids=str)
def test_of_many_parties_too(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Others of as many are computed together."""
    assert same_in_both_worlds(tmp_path, {"strategy": "vafl", **keys}, parties=FEWEST)


@pytest.mark.nightly
def test_masked_sums_of_noisy_embeddings_follow_from_the_noisy_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Masks are drawn anew in each world. So this compares what they hide.
    hidden: list[list[bytes]] = []
    hide = Masks.hide

    def recorded(masks: Masks, arrays: Arrays) -> Arrays:
        hidden[-1] += [to_fixed(each, 3).tobytes() for each in arrays.values()]
        return hide(masks, arrays)

    monkeypatch.setattr(Masks, "hide", recorded)
    keys = {"aggregation": "secure", "combine": "mean", "strategy": "split-nn"}
    for seed in (0, 1):
        hidden.append([])
        messages_of(tmp_path, keys, on_grid, 3, seed)
    assert hidden[0] and hidden[0] == hidden[1]


# --- one sum --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [False, True])
def test_a_sum_is_on_the_grid_and_its_gradient_is_that_of_the_value(gradient: bool) -> None:
    value = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) / 2
    drawn = 4 * np.random.default_rng(0).standard_normal(value.shape)

    def off_grid(add: OnGrid) -> int:
        places = add(value, drawn, 1.0).detach().double() / grid_step(1.0, 3)
        return int((places != places.round()).sum())

    value.requires_grad_(gradient)
    assert off_grid(on_grid) == 0
    assert (off_grid(rounded) > 10) == gradient  # the control
    if gradient:
        weights = torch.randn(value.shape)
        on_grid(value, drawn, 1.0).backward(weights)
        assert value.grad is not None and torch.equal(value.grad, weights)


@pytest.mark.parametrize("add", [on_grid, rounded])
def test_a_sum_of_zero_does_not_tell_the_sign_of_the_value(add: OnGrid) -> None:
    signs = [
        float(add(torch.tensor([[value]]), np.array([[small]]), 1.0).signbit())
        for value in (1e-9, -1e-9)
        for small in (1e-9, -1e-9)
    ]
    assert any(signs) == (add is rounded)  # the control


def test_an_embedding_that_is_not_a_number_does_not_show() -> None:
    # A label holder can drive weights up, until a record's features decide whether it overflows.
    config = resolve({"strategy": "vafl", **PERTURBED})
    perturb = Perturbation(config.privacy, b"secret", 1, (4,), last=0)
    z = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [torch.inf, -torch.inf], [3e38, 3e38]])
    sent = perturb(0, z)
    assert sent.isfinite().all()
    assert torch.equal(sent[1:], perturb(0, torch.zeros(4, 2))[1:])


def test_a_model_that_diverges_under_noise_is_refused() -> None:
    features, ids = np.ones((4, 1), np.float32), np.arange(4)
    block = ArrayBlock(features, features, "", None, "", ids, ids)
    party = Party(resolve({"strategy": "vafl", **PERTURBED}), 0, 1, 1, block)
    with torch.no_grad():
        next(party.learner.model.parameters()).fill_(torch.nan)
    with pytest.raises(VflError, match="parameters that are not finite"):
        party.evaluate(EvaluateOrder(exchange=1))


# --- noise on scalars and the top model -----------------------------------------------------------


def change_of(changed: Callable[[Tensor], Any]) -> float:
    """By how much one label changes what noise is added to, over what the noise is for, 2 C / U."""
    seen: list[tuple[Tensor, float]] = []
    with pytest.MonkeyPatch.context() as patch:

        def keep(value: Tensor, drawn: NDArray[np.float64], bound: float) -> Tensor:
            seen.append((value.double(), bound))
            return on_grid(value, drawn, bound)

        patch.setattr(noise, "on_grid", keep)
        for label in (-1.0, 1.0):
            changed(torch.tensor([label]))
    (one, bound), (other, _) = seen
    return float((one - other).norm()) / (2 * bound)


def test_one_label_changes_a_mean_of_many_rows_by_no_more_than_the_noise_is_for() -> None:
    rows = 50_021
    added = ScalarNoise(resolve({"strategy": "dpzv", "clip": 1.0, "epsilon": 1.0}), 1.0)
    generator, spare = torch.Generator().manual_seed(0), noise._FINE / 2  # the rest is for the grid

    def worst(mean: Callable[[Tensor, list[int], list[int], ScalarNoise], Tensor]) -> float:
        changes = []
        for _ in range(5):
            others = 2 * torch.rand(rows - 1, generator=generator) - 0.1

            def sent(one: Tensor, others: Tensor = others) -> Tensor:
                return mean(torch.cat([one, others]), [rows], [rows], added)

            changes.append(change_of(sent))
        return max(changes)

    def in_32_bits(of_rows: Tensor, *of: Any) -> Tensor:
        return added.added_to(step_means(of_rows.clamp(-1, 1), *of[:2]), of[1])

    assert worst(clipped_noisy_means) <= 1 + spare
    assert worst(in_32_bits) > 1 + spare  # the control


@pytest.mark.parametrize("top", ["mlp", "tests.towers:Top"])
def test_one_label_changes_a_gradient_by_no_more_than_the_noise_is_for(top: str) -> None:
    rows = 50_021
    keys = {"strategy": "dpzv", "top-clip": 1e-3, "epsilon": 1.0, "top-model": top}
    config = sized(resolve({**keys, "embedding-size": 2}), rows)
    model = build_top(config, [2, 2], 1)
    h = torch.rand(rows, 4, generator=torch.Generator().manual_seed(0)) + 3
    labels, added = torch.ones(rows, dtype=torch.int64), ScalarNoise(config, 1.0)
    passes = type(model).passes

    def gradients(label: Tensor) -> None:
        labels[0] = int(label > 0)
        optimizer = build_optimizer(config, model, 0.0)
        by_gradient(model, optimizer, h, labels, [rows], [rows], noise=added)

    def in_32_bits(label: Tensor) -> None:
        def rounded(*given: Any, sums: torch.dtype, **more: Any) -> Any:
            return passes(*given, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model), "passes", rounded)
            gradients(label)

    assert change_of(gradients) == pytest.approx(1, abs=1e-6)
    assert change_of(in_32_bits) != pytest.approx(1, abs=1e-6)  # the control
