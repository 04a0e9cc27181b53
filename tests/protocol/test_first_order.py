"""First-order steps of a window, against the same steps done one after the other by hand."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import MANY
from tests.pairwise import pairwise
from tests.stepping import by_gradient
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.losses import loss_per_row
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.tops import build_top
from vfl_flower.party.learner import Learner
from vfl_flower.party.party import Party
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.estimators.first_order import FirstOrder, descend
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.transport.messages import TrainOrder

LENGTHS = [4, 4, 3]
ROWS = sum(LENGTHS)
FEATURES, SIZE, PARTIES = 5, 6, 2


def config_of(**keys: Any) -> RunConfig:
    keys = {"embedding_activation": "tanh", "optimizer": "sgd", **keys}
    keys = {"bottom_model": "mlp", "bottom_hidden": 8, **keys}
    return sized(resolve({key.replace("_", "-"): value for key, value in keys.items()}), MANY)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(outputs: int = 3) -> tuple[Tensor, Tensor]:
    h = torch.randn(ROWS, PARTIES * SIZE, generator=generator())
    return h, torch.randint(max(2, outputs), (ROWS,), generator=generator(1))


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# --- the label holder ---------------------------------------------------------------------------


@pairwise(top_model=["linear", "mlp"], outputs=[1, 3], optimizer=["sgd", "momentum", "adam"])
def test_answer_over_a_window_is_its_steps_in_order(
    top_model: str, outputs: int, optimizer: str
) -> None:
    config = config_of(top_model=top_model, optimizer=optimizer)
    h, labels = data(outputs)
    top = build_top(config, [SIZE] * PARTIES, outputs)
    by_hand = copy.deepcopy(top)
    theirs = build_optimizer(config, by_hand, 0.1)
    ours = build_optimizer(config, top, 0.1)
    unasked = copy.deepcopy(top)
    divisors = [4, 5, 2]  # as Poisson sampling has them
    rows, losses = by_gradient(top, ours, h, labels, LENGTHS, divisors)
    given = build_optimizer(config, unasked, 0.1), h, labels, LENGTHS, divisors
    none, same = by_gradient(unasked, *given, rows_wanted=False)
    assert none is None and torch.equal(losses, same)
    assert all(map(torch.equal, top.parameters(), unasked.parameters()))

    assert not losses.requires_grad
    expected, before = [], []
    for h_step, labels_step, divisor in zip(
        h.split(LENGTHS), labels.split(LENGTHS), divisors, strict=True
    ):
        leaf = h_step.clone().requires_grad_()
        loss = loss_per_row(by_hand(leaf), labels_step).sum() / divisor
        gradient, *of_top = torch.autograd.grad(loss, [leaf, *by_hand.parameters()])
        expected.append(gradient)
        before.append(loss.detach())
        for p, of_p in zip(by_hand.parameters(), of_top, strict=True):
            p.grad = of_p
        theirs.step()
    torch.testing.assert_close(rows, torch.cat(expected))
    torch.testing.assert_close(losses, torch.stack(before))
    assert_same_parameters(top, by_hand)


@pytest.mark.parametrize("outputs", [1, 3])
def test_sums_over_rows_are_divided_by_what_the_sampling_says(outputs: int) -> None:
    config = config_of(top_model="sum")
    top = build_top(config, [outputs] * PARTIES, outputs)
    h = torch.randn(7, PARTIES * outputs, generator=generator())
    labels = torch.randint(max(2, outputs), (7,), generator=generator(1))
    rows, losses = by_gradient(top, None, h, labels, [5, 0, 2], [4, 4, 4])  # Poisson, batches of 4
    row_losses = loss_per_row(top(h), labels)
    expected = torch.stack([row_losses[:5].sum(), torch.zeros(()), row_losses[5:].sum()]) / 4
    torch.testing.assert_close(losses, expected)
    (gradient,) = torch.autograd.grad(loss_per_row(top(h.requires_grad_()), labels).sum() / 4, [h])
    torch.testing.assert_close(rows, gradient)


def test_a_step_without_rows_leaves_the_top_model_alone() -> None:
    config = config_of(top_model="mlp")
    tops = [build_top(config, [SIZE] * PARTIES, 3) for _ in range(2)]
    h, labels = data()
    for top, lengths in zip(tops, ([4, 0, 7], [4, 7]), strict=True):
        optimizer = build_optimizer(config, top, 0.1)
        by_gradient(top, optimizer, h, labels, lengths, [5] * len(lengths))
    assert_same_parameters(*tops)


# --- the party ----------------------------------------------------------------------------------


def party(config: RunConfig) -> tuple[BottomModel, Tensor, Tensor]:
    x = torch.randn(ROWS, FEATURES, generator=generator(2))
    gradient_rows = torch.randn(ROWS, SIZE, generator=generator(3))
    return build_bottom(config, 0, torch.zeros(FEATURES), SIZE), x, gradient_rows


REGULARISERS: list[dict[str, Any]] = [
    {},
    {"regulariser_weight": 0.3},
    {"regulariser_weight": 0.3, "regulariser": "nonconvex"},
]


def gradients_at(
    model: BottomModel, x: Tensor, gradient_rows: Tensor, config: RunConfig | None = None
) -> list[Tensor]:
    """Of <h, rows> + lambda g(theta), at the model's parameters; g(w) = w^2 / 2, or Eq. (22)."""
    objective = (model(x) * gradient_rows).sum()
    if config:
        for p in model.parameters():
            w2 = p.square()
            g = w2 / 2 if config.training.regulariser == "l2" else w2 / (2 * (1 + w2))
            objective = objective + config.training.regulariser_weight * g.sum()
    return list(torch.autograd.grad(objective, list(model.parameters())))


ORDER = TrainOrder(exchange=1, epoch=0, first=0, steps=len(LENGTHS), coordinated=True)
WINDOW = Window(np.arange(ROWS, dtype=np.int32), np.array(LENGTHS, np.int32), distinct=True)


def with_data(config: RunConfig, x: Tensor) -> Learner:
    """A party as its estimator sees it, with these training rows."""
    rows = x.numpy()
    return Party(config, 0, PARTIES, 3, FeatureBlock(rows, rows[:0], "")).learner


def test_embedding_is_the_forward_pass() -> None:
    config = config_of(embedding_size=SIZE)
    model, x, _ = party(config)
    blocks = FirstOrder(config).embed(with_data(config, x), ORDER, WINDOW)
    assert blocks.keys() == {"embedding"}
    torch.testing.assert_close(blocks["embedding"].detach(), model(x).detach())


def test_update_from_the_embeddings_at_hand_repeats_no_pass_and_gives_the_same() -> None:
    config, results = config_of(regulariser_weight=0.1, embedding_size=SIZE), []
    for at_hand in (True, False):
        model, x, gradient_rows = party(config)
        end, estimator = with_data(config, x), FirstOrder(config)
        before = [p.detach().clone() for p in end.model.parameters()]
        estimator.embed(end, ORDER, WINDOW)
        if not at_hand:  # as in another process
            end.trace = None
        passes: list[nn.Module] = []
        end.model.register_forward_hook(lambda model, *_, passes=passes: passes.append(model))
        estimator.update(end, {"gradient": gradient_rows}, ORDER, WINDOW)
        assert len(passes) == (0 if at_hand else 1)
        results.append([p.detach() for p in end.model.parameters()])
        # The same as from the model, its rows and the answer alone, at the configured rate.
        optimizer = build_optimizer(config, model, config.training.party_lr)
        descend(model, optimizer, x, None, gradient_rows, LENGTHS, config.training)
        assert_same_parameters(end.model, model)
        assert not any(map(torch.equal, results[-1], before))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("keys", REGULARISERS, ids=str)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_update_is_the_loop_of_torch_over_two_windows(name: str, keys: dict[str, Any]) -> None:
    config = config_of(optimizer=name, **keys)
    model, x, gradient_rows = party(config)
    expected = copy.deepcopy(model)
    ours, theirs = (build_optimizer(config, each, 0.05) for each in (model, expected))
    for window in range(2):
        window_rows = gradient_rows * (window + 1)
        descend(model, ours, x, None, window_rows, LENGTHS, config.training)
        uploaded_with = copy.deepcopy(expected)
        for x_step, rows in zip(x.split(LENGTHS), window_rows.split(LENGTHS), strict=True):
            gradients = gradients_at(uploaded_with, x_step, rows, config)
            for p, g in zip(expected.parameters(), gradients, strict=True):
                p.grad = g
            theirs.step()
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("kind", ["linear", "mlp", "cnn", "lstm"])
def test_one_step_is_gradient_descent_for_every_model(kind: str) -> None:
    config = config_of(bottom_model=kind, bottom_hidden=3)
    model = build_bottom(config, 0, torch.zeros(4, 4), SIZE)
    x = torch.randn(ROWS, 4, 4, generator=generator(2))
    rows = torch.randn(ROWS, SIZE, generator=generator(3))
    gradients = gradients_at(model, x, rows)
    before = [p.detach().clone() for p in model.parameters()]
    descend(model, build_optimizer(config, model, 0.1), x, None, rows, [ROWS], config.training)
    for p, q, g in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(p.detach(), q - 0.1 * g)
