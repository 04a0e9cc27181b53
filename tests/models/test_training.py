"""Optimizers, schedules, clipping and precision: what torch does, in windows too."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.conftest import MANY, Start, nightly
from tests.stepping import by_gradient
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.losses import loss_per_row
from vfl_flower.models.optimizers import Rates, build_optimizer
from vfl_flower.models.tops import build_top
from vfl_flower.models.training import (
    arrays_of,
    autocast,
    flat,
    load_optimizer,
    optimizer_tensors,
    step_along,
)
from vfl_flower.protocol.directions import differences as zeroth_order
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.estimators.first_order import descend
from vfl_flower.protocol.estimators.zeroth_order import ZerothOrder
from vfl_flower.protocol.privacy.scalars import NoisyScalars
from vfl_flower.protocol.systems import resolve, sized

LENGTHS = [4, 4, 3]
ROWS = sum(LENGTHS)
FEATURES, SIZE, PARTIES = 5, 6, 2
PER_EPOCH, EPOCHS = 7, 6
TOTAL = PER_EPOCH * EPOCHS


def config_of(**keys: Any) -> RunConfig:
    keys = {"bottom_model": "mlp", "bottom_hidden": 8, "epochs": EPOCHS, **keys}
    keys = {"embedding_activation": "tanh", "optimizer": "sgd", **keys}
    return sized(resolve({key.replace("_", "-"): value for key, value in keys.items()}), MANY)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


# --- schedules ----------------------------------------------------------------------------------

Scheduler = Callable[[torch.optim.Optimizer], Any]


def warming(optimizer: torch.optim.Optimizer, steps: int) -> lr_scheduler.LinearLR:
    return lr_scheduler.LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1)


SCHEDULES: dict[str, tuple[dict[str, Any], Scheduler]] = {
    "constant": ({}, lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
    "step": (
        {"lr_schedule": "step", "lr_step": 2, "lr_decay": 0.3},
        lambda o: lr_scheduler.StepLR(o, 2 * PER_EPOCH, 0.3),
    ),
    "cosine": ({"lr_schedule": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, TOTAL)),
    "one-cycle": (
        {"lr_schedule": "one-cycle"},
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, TOTAL, cycle_momentum=False),
    ),
    "warm-up": ({"warm_up": 1.0}, lambda o: warming(o, PER_EPOCH)),
    "warm-up, step": (
        {"warm_up": 2.0, "lr_schedule": "step", "lr_step": 3},
        lambda o: lr_scheduler.ChainedScheduler(
            [warming(o, 2 * PER_EPOCH), lr_scheduler.StepLR(o, 3 * PER_EPOCH, 0.1)]
        ),
    ),
    "warm-up, cosine": (
        {"warm_up": 1.0, "lr_schedule": "cosine"},
        lambda o: lr_scheduler.ChainedScheduler(
            [warming(o, PER_EPOCH), lr_scheduler.CosineAnnealingLR(o, TOTAL)]
        ),
    ),
}
every_schedule = pytest.mark.parametrize(("keys", "theirs"), SCHEDULES.values(), ids=SCHEDULES)


@every_schedule
def test_a_schedule_is_that_of_torch_step_by_step(keys: dict[str, Any], theirs: Scheduler) -> None:
    rates = Rates(config_of(**keys).training, 0.3, PER_EPOCH)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = theirs(optimizer)
    expected = []
    for _ in range(TOTAL):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [rates.of(step) for step in range(TOTAL)] == pytest.approx(expected, rel=1e-9)
    assert rates.factors(3, 5).tolist() == pytest.approx([each / 0.3 for each in expected[3:8]])
    assert rates.of(10 * TOTAL) == rates.of(TOTAL - 1)  # of who takes over what others have not
    assert rates.constant == (set(expected) == {0.3})


def test_a_schedule_goes_by_epochs_whatever_their_steps() -> None:
    for keys, _ in SCHEDULES.values():
        many, few = (Rates(config_of(**keys).training, 0.3, each) for each in (1000, 500))
        assert [many.of(2 * step + 1) for step in range(500 * EPOCHS)] == pytest.approx(
            [few.of(step) for step in range(500 * EPOCHS)], abs=0.003
        )


@pytest.mark.parametrize("schedule", ["step", "cosine", "one-cycle"])
@pytest.mark.parametrize("per_epoch", [1, 2, 2.5, 3])
def test_a_short_run_has_rates_too(schedule: str, per_epoch: float) -> None:
    training = config_of(epochs=1, lr_schedule=schedule, warm_up=0.5).training
    for step in range(5):
        assert 0 <= Rates(training, 1.0, per_epoch).of(step) <= 1


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"lr_step": 3}, "lr-step is for lr-schedule = 'step', and not for 'constant'"),
        ({"lr_schedule": "cosine", "lr_decay": 0.5}, "lr-decay is for lr-schedule = 'step'"),
        ({"warm_up": 6.5}, "warm-up = 6.5 is longer than epochs = 6. Make it shorter"),
        ({"warm_up": -1.0}, "warm-up = -1.0 must be at least 0"),
        ({"lr_schedule": "sine"}, "lr-schedule = 'sine' is not known: did you mean 'cosine'"),
        ({"optimizer": "adamax"}, "optimizer = 'adamax' is not known: did you mean 'adam'"),
        ({"precision": "float16"}, "precision = 'float16' is not known: did you mean 'bfloat16'"),
        ({"precision": "bfloat16", "strategy": "cascaded"}, "rounds off the differences that"),
        ({"precision": "bfloat16", "server_update": "zeroth-order"}, "rounds off the differences"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        config_of(**keys)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


# --- steps --------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}
CYCLE = {"lr_schedule": "one-cycle", "clip_gradient": 0.7}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_torch_with_its_schedule_and_clipping(name: str) -> None:
    config = config_of(optimizer=name, weight_decay=0.1, **CYCLE)
    model = build_bottom(config, 0, torch.zeros(FEATURES), SIZE)
    expected = copy.deepcopy(model)
    ours, theirs = build_optimizer(config, model, 0.05, 5), OPTIMIZERS[name](expected.parameters())
    scheduler = lr_scheduler.OneCycleLR(theirs, 0.05, 5 * EPOCHS, cycle_momentum=False)
    norms = []
    for step in range(5 * EPOCHS):
        gradients = [drawn(*p.shape, seed=step) * 0.02 * step for p in model.parameters()]
        for p, gradient in zip(expected.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
        norms.append(float(nn.utils.clip_grad_norm_(expected.parameters(), 0.7)))
        theirs.step()
        scheduler.step()
        if step == 11:  # as after an interruption
            kept, ours = arrays_of(optimizer_tensors(ours)), build_optimizer(config, model, 0.05, 5)
            load_optimizer(ours, kept)
        step_along(ours, gradients, step)
    assert min(norms) < 0.7 < max(norms)  # some are clipped
    assert_same_parameters(model, expected)


def test_only_what_is_linear_in_gradients_is_plain() -> None:
    model = nn.Linear(2, 1)
    for keys, plain in (
        ({}, True),
        ({"lr_schedule": "cosine", "warm_up": 1.0}, True),
        ({"weight_decay": 0.1}, False),
        ({"clip_gradient": 1.0}, False),
        ({"optimizer": "nesterov"}, False),
        ({"optimizer": "adamw"}, False),
    ):
        optimizer = build_optimizer(config_of(**keys), model, 0.1)
        assert optimizer.param_groups[0]["plain"] == plain


KEYS: dict[str, dict[str, Any]] = {
    "sgd, cosine, warm-up": {"lr_schedule": "cosine", "warm_up": 2.0, "regulariser_weight": 0.3},
    "sgd, one cycle, weight decay": {"weight_decay": 0.2, **CYCLE},
    "nesterov, step": {"optimizer": "nesterov", "lr_schedule": "step", "lr_step": 1},
    "adamw, one cycle": {"optimizer": "adamw", "weight_decay": 0.1, **CYCLE},
}
every_kind = pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)


@every_kind
def test_a_window_of_a_party_is_its_steps_each_at_its_own_rate(keys: dict[str, Any]) -> None:
    config = config_of(**keys)
    model = build_bottom(config, 0, torch.zeros(FEATURES), SIZE)
    expected, x, rows = copy.deepcopy(model), drawn(ROWS, FEATURES), 3 * drawn(ROWS, SIZE, seed=1)
    ours, theirs = (build_optimizer(config, each, 0.1, 3) for each in (model, expected))
    for window in range(3):
        first = len(LENGTHS) * window
        met = copy.deepcopy(expected)
        descend(model, ours, x, None, rows, LENGTHS, config.training, first=first)
        both = zip(x.split(LENGTHS), rows.split(LENGTHS), strict=True)
        for step, (of_x, of_rows) in enumerate(both):
            objective = (met(of_x) * of_rows).sum()
            for p in met.parameters():
                objective = objective + config.training.regulariser_weight * p.square().sum() / 2
            gradients = torch.autograd.grad(objective, list(met.parameters()))
            step_along(theirs, gradients, first + step)
    assert_same_parameters(model, expected)


@every_kind
def test_a_window_of_the_top_model_is_its_steps_each_at_its_own_rate(keys: dict[str, Any]) -> None:
    config = config_of(**keys)
    top = build_top(config, [SIZE] * PARTIES, 3)
    expected, h = copy.deepcopy(top), 5 * drawn(ROWS, PARTIES * SIZE)
    labels = torch.randint(3, (ROWS,), generator=torch.Generator().manual_seed(1))
    ours, theirs = (build_optimizer(config, each, 0.1, 3) for each in (top, expected))
    for window in range(3):
        first = len(LENGTHS) * window
        by_gradient(top, ours, h, labels, LENGTHS, LENGTHS, first=first)
        both = zip(h.split(LENGTHS), labels.split(LENGTHS), strict=True)
        for step, (of_h, of_labels) in enumerate(both):
            loss = loss_per_row(expected(of_h), of_labels).mean()
            gradients = torch.autograd.grad(loss, list(expected.parameters()))
            step_along(theirs, gradients, first + step)
    assert_same_parameters(top, expected)


@every_kind
@pytest.mark.parametrize("stacked", [True, False])
def test_a_window_along_directions_is_its_steps_each_at_its_own_rate(
    stacked: bool, keys: dict[str, Any]
) -> None:
    config = config_of(strategy="cascaded", **{"optimizer": "sgd", **keys})
    model = BottomModel([nn.Linear(FEATURES, SIZE)], ["none"])
    expected, scalars = copy.deepcopy(model), torch.tensor([0.5, -1.0, 2.0])
    ours, theirs = (build_optimizer(config, each, 0.1, 3) for each in (model, expected))
    for window in range(3):
        first, directions = 3 * window, Directions(config.estimator, b"key", model)
        u = directions.stack(3)
        zeroth_order.descend(ours, directions, u if stacked else None, scalars, first)
        for step, (scalar, of_step) in enumerate(zip(scalars, u, strict=True)):
            parts = (scalar * of_step).split([p.numel() for p in expected.parameters()])
            shapes = [p.shape for p in expected.parameters()]
            gradients = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            step_along(theirs, gradients, first + step)
    assert_same_parameters(model, expected)


def test_the_estimate_of_a_zeroth_order_step_is_clipped() -> None:
    config = config_of(strategy="cascaded", optimizer="sgd", clip_gradient=0.5)
    model = BottomModel([nn.Linear(FEATURES, SIZE)], ["none"])
    before = flat(model)
    directions = Directions(config.estimator, b"key", model)
    optimizer = build_optimizer(config, model, 1.0)
    zeroth_order.descend(optimizer, directions, None, torch.tensor([100.0]))
    assert float((flat(model) - before).norm()) == pytest.approx(0.5, rel=1e-4)


# --- precision ----------------------------------------------------------------------------------


def test_one_cycle_of_few_steps_has_no_way_up() -> None:
    training = resolve({"lr-schedule": "one-cycle", "epochs": 1}).training
    assert Rates(training, 1.0, 10 / 3).of(0) == 1.0


def test_a_mechanism_that_clips_takes_no_rounded_gradients() -> None:
    config = resolve({"strategy": "dpzv", "epsilon": 1.0})
    estimator = ZerothOrder(config)
    NoisyScalars(config).check(estimator)
    with pytest.raises(ConfigError, match="so a row could add more than"):
        NoisyScalars(config.with_values(BFLOAT16)).check(estimator)


BFLOAT16 = {"precision": "bfloat16"}


@pytest.mark.parametrize("kind", ["linear", "mlp", "cnn", "lstm"])
def test_a_bottom_model_in_bfloat16_gives_float32_and_the_same_again(kind: str) -> None:
    config = config_of(bottom_model=kind, bottom_hidden=4, embedding_activation="none", **BFLOAT16)
    model = build_bottom(config, 0, torch.zeros(4, 4), SIZE)
    plain = config.with_values({"precision": "float32"})
    exact = build_bottom(plain, 0, torch.zeros(4, 4), SIZE)
    x, rows = drawn(ROWS, 4, 4), drawn(ROWS, SIZE, seed=1)
    try:
        h = model(x)
    except ConfigError as error:
        assert kind == "lstm" and "this processor" in str(error)
        pytest.skip("this processor has no LSTM in bfloat16")
    assert h.dtype == torch.float32 and torch.equal(h, model(x))
    expected = exact(x)
    assert not torch.equal(h, expected)
    torch.testing.assert_close(h, expected, rtol=0.05, atol=0.03)
    assert torch.equal(h, h.bfloat16().float()), "it was not computed in bfloat16"
    for found, of_exact in zip(
        torch.autograd.grad(h, list(model.parameters()), rows),
        torch.autograd.grad(expected, list(exact.parameters()), rows),
        strict=True,
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, of_exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("top_model", ["linear", "mlp", "sum"])
def test_the_top_model_in_bfloat16_is_torch_under_autocast(top_model: str) -> None:
    config = config_of(top_model=top_model, **BFLOAT16)
    size = 3 if top_model == "sum" else SIZE
    top = build_top(config, [size] * PARTIES, 3)
    h, labels = drawn(ROWS, PARTIES * size), torch.arange(ROWS) % 3
    leaf = h.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = top.rest(top.first(leaf))
    loss = loss_per_row(outputs.float(), labels).mean()
    wanted = [leaf, *top.parameters()]
    of_rows, *of_top = torch.autograd.grad(loss, wanted)
    before = [p.detach().clone() for p in top.parameters()]
    optimizer = build_optimizer(config, top, 1.0) if of_top else None
    rows, losses = by_gradient(top, optimizer, h, labels, [ROWS], [ROWS])
    assert rows is not None and rows.dtype == torch.float32
    torch.testing.assert_close(losses[0], loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(rows, of_rows, rtol=0.02, atol=1e-3)
    for p, then, gradient in zip(top.parameters(), before, of_top, strict=True):
        assert p.dtype == torch.float32
        torch.testing.assert_close(then - p.detach(), gradient, rtol=0.02, atol=2e-3)


def test_float32_takes_no_other_path() -> None:
    with autocast(nn.Linear(1, 1), "float32"):
        assert not torch.is_autocast_enabled("cpu")
    with autocast(nn.Linear(1, 1), "bfloat16"):
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    "keys",
    [
        nightly(
            {"bottom-model": "cnn", "optimizer": "nesterov", "party-lr": 0.02, "server-lr": 0.02}
        ),
        {"strategy": "ef-vfl", "labels": "shared", "codec": "identity"},
        {"privacy": "perturbed-embedding", "embedding-noise": 0.01, "noise-seed": 0},
    ],
    ids=str,
)
def test_a_run_in_bfloat16_learns_what_one_in_float32_does(run: Start, keys: Any) -> None:
    keys = {"epochs": 2, "bottom-hidden": 8, "batch-size": 128, **keys}
    exact, rounded = run(2, keys), run(2, {**keys, "precision": "bfloat16"})
    one, other = (each.summary["test_loss"] for each in (exact, rounded))
    assert one != other and abs(one - other) < 0.05 + 0.1 * one
    assert math.isclose(exact.summary["bytes_up"], rounded.summary["bytes_up"])
    assert all(array.dtype == "float32" for array in rounded.parameters("party-0").values())


# --- devices ------------------------------------------------------------------------------------


@every_kind
def test_steps_of_a_window_bring_nothing_back_from_their_device(keys: dict[str, Any]) -> None:
    """A tensor on `meta` has no numbers, and reading one is an error."""
    config = config_of(**keys)
    top = build_top(config, [SIZE] * PARTIES, 3).to("meta")
    model = build_bottom(config, 0, torch.zeros(FEATURES), SIZE).to("meta")
    of_top, of_model = (build_optimizer(config, each, 0.1) for each in (top, model))
    with torch.device("meta"):
        h, x, sent = (torch.zeros(ROWS, n) for n in (PARTIES * SIZE, FEATURES, SIZE))
        labels = torch.zeros(ROWS, dtype=torch.int64)
    rows, losses = by_gradient(top, of_top, h, labels, LENGTHS, LENGTHS)
    assert rows is not None and rows.device == losses.device == torch.device("meta")
    descend(model, of_model, x, None, sent, LENGTHS, config.training)
    with pytest.raises(RuntimeError):  # or nothing would be seen here
        losses[0].item()


def test_no_model_goes_to_the_cpu_to_be_one_vector() -> None:
    assert flat(nn.Linear(3, 2, device="meta")).device.type == "meta"
