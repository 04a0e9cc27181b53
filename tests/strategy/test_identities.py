"""Identities 1, 2, 5 and 6 of the design: federated training is the training it stands for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from numpy.typing import NDArray
from torch.nn import functional
from torch.optim import lr_scheduler

from strategies.baselines.local_only import Alone
from tests.conftest import ALL_ROWS, FASTER, Start
from vfl_flower import client_app
from vfl_flower.config.options import TrainingConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import run_local
from vfl_flower.models.bottoms import build_bottom, embedding_size, learn_bins
from vfl_flower.models.optimizers import Rates
from vfl_flower.models.tops import build_top
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import resolve, sized


def centralised(
    keys: dict[str, Any], parties: int, own: list[dict[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """The joined model after ordinary training on joined data, by plain PyTorch.

    ``own`` : keys of training that each party has otherwise.
    """
    labels = load_labels(resolve(keys))
    config = sized(resolve(keys), len(labels.train))
    y = torch.from_numpy(labels.train)
    x = [torch.from_numpy(load_features(config, m, parties).train) for m in range(parties)]
    size = embedding_size(config, labels.outputs)
    bottoms = [build_bottom(config, m, x[m][0], size) for m in range(parties)]
    for bottom, rows in zip(bottoms, x, strict=True):
        learn_bins(bottom, rows.numpy())
    top = build_top(config, [size] * parties, labels.outputs)
    steps = -(-len(y) // config.training.batch_size)
    configs = [resolve({**keys, **each}) for each in own or [{}] * parties]
    trainings = [sized(each, len(y)).training for each in configs]
    rates = [each.party_lr for each in trainings] + [config.training.server_lr]
    optimizers = [
        OfTorch(training, model, rate, steps)
        for training, model, rate in zip(
            [*trainings, config.training], [*bottoms, top], rates, strict=True
        )
        if list(model.parameters())
    ]
    for epoch in range(config.training.epochs):
        order = torch.from_numpy(
            sampling_of(config, len(y)).window(None, epoch, 0, steps, b"").ids
        ).long()
        for ids in order.split(config.training.batch_size):
            outputs = top(torch.cat([b(x[m][ids]) for m, b in enumerate(bottoms)], dim=1))
            if labels.outputs == 1:
                loss = functional.binary_cross_entropy_with_logits(outputs[:, 0], y[ids].float())
            else:
                loss = functional.cross_entropy(outputs, y[ids])
            for bottom in bottoms:
                for p in bottom.parameters():
                    loss = loss + 0.5 * config.training.regulariser_weight * p.square().sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    assert all(each.clipped == bool(each.training.clip_gradient) for each in optimizers)
    named = {"top": top, **{f"party-{m}": bottom for m, bottom in enumerate(bottoms)}}
    return {
        name: {key: p.detach().numpy() for key, p in model.named_parameters()}
        for name, model in named.items()
    }


class OfTorch:
    """One model's training, by torch's own optimizers, schedulers and clipping."""

    def __init__(
        self, training: TrainingConfig, model: torch.nn.Module, rate: float, per_epoch: int
    ) -> None:
        self.training, self.parameters = training, list(model.parameters())
        self.clipped = False
        more: dict[str, Any] = {"lr": rate, "weight_decay": training.weight_decay}
        kind: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(training.optimizer)
        if not kind:
            kind = torch.optim.SGD
            more["momentum"] = 0.0 if training.optimizer == "sgd" else 0.9
            more["nesterov"] = training.optimizer == "nesterov"
        optimizer = self.optimizer = kind(self.parameters, **more)
        total = training.epochs * per_epoch
        schedulers: dict[str, Any] = {
            "constant": lambda: lr_scheduler.ConstantLR(optimizer, 1.0),
            "step": lambda: lr_scheduler.StepLR(optimizer, (training.lr_step or 10) * per_epoch),
            "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, total),
            "one-cycle": lambda: lr_scheduler.OneCycleLR(
                optimizer, rate, total, cycle_momentum=False
            ),
        }
        self.scheduler = schedulers[training.lr_schedule]()

    def step(self) -> None:
        """One step along the gradients of a loss, which are then gone."""
        if self.training.clip_gradient:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.clip_gradient)
            self.clipped |= bool(norm > self.training.clip_gradient)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


ONE_CYCLE: dict[str, Any] = {
    **{"optimizer": "adamw", "lr-schedule": "one-cycle", "weight-decay": 0.1},
    **{"clip-gradient": 0.2, "party-lr": 0.003, "server-lr": 0.002},
}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {
            "regulariser-weight": 0.01,
            "top-model": "linear",
            "combine": "mean",
            "embedding-activation": "sigmoid",
        },
        {"optimizer": "momentum", "party-lr": 0.05, "server-lr": 0.05},
        {"optimizer": "adam", "party-lr": 0.003, "server-lr": 0.003, "bottom-model": "cnn"},
        {"dataset": "breast-cancer", "bottom-model": "linear", "top-model": "sum", "epochs": 4},
        ONE_CYCLE,
        {
            **{"optimizer": "nesterov", "lr-schedule": "cosine", "weight-decay": 0.01},
            **{"party-lr": 0.02, "server-lr": 0.05, "clip-gradient": 0.03},
        },
        {
            **{"lr-schedule": "step", "lr-step": 1, "epochs": 4, "dataset": "breast-cancer"},
            **{"party-lr": 0.4, "server-lr": 0.2, "embedding-activation": "tanh"},
        },
    ],
    ids=[
        *("mlp", "l2-mean", "momentum", "adam-cnn", "logistic-regression"),
        *("adamw, one cycle", "nesterov, cosine", "sgd, step"),
    ],
)
def test_sync_first_order_is_centralised_sgd(run: Start, keys: dict[str, Any]) -> None:
    keys = {**ALL_ROWS, "batch-size": 29, "epochs": 1, **keys}  # 50 steps an epoch on digits
    atol = 5e-5 if keys.get("optimizer") == "adam" else 1e-5  # Adam enlarges rounding
    federated = run(4, keys)
    assert federated.summary["steps"] >= 50
    assert_equal_models(federated, centralised(keys, 4), atol)


def assert_equal_models(federated: Run, models: dict[str, dict[str, Any]], atol: float) -> None:
    for name, expected in models.items():
        found = federated.parameters(name) if expected else {}
        assert set(found) == set(expected)
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, atol=atol, rtol=0, err_msg=name + key)


OWN: list[dict[str, Any]] = [
    {"party-lr": 0.05, "optimizer": "sgd", "lr-schedule": "step", "lr-step": 1, "lr-decay": 0.5},
    {"party-lr": 0.004, "clip-gradient": 0.1},
    {"optimizer": "nesterov", "party-lr": 0.02, "weight-decay": 0.0, "lr-schedule": "constant"},
]


def test_a_party_trains_its_model_as_it_says_itself(tmp_path: Path) -> None:
    keys = {**ALL_ROWS, "batch-size": 29, "epochs": 1, **ONE_CYCLE, "out": str(tmp_path / "run")}
    federated = run_local(3, keys, node_configs=OWN)
    assert_equal_models(federated, centralised(keys, 3, OWN), 1e-5)


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["vafl", "frozen", "local-only", "ef-vfl"])
def test_schedules_end_with_the_run_whoever_waits_for_whom(
    run: Start, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cycle, at the top model, has its last rate at its last step and no sooner."""
    seen: list[float] = []
    of = Rates.of

    def watched(self: Rates, step: int) -> float:
        if self.lr == 0.125:
            seen.append(of(self, step))
        return of(self, step)

    monkeypatch.setattr(Rates, "of", watched)
    keys = {"dataset": "breast-cancer", "epochs": 2, "lr-schedule": "one-cycle"}
    finished = run(3, {**keys, "server-lr": 0.125, "strategy": strategy})
    last = 0.125 / 25 / 1e4
    times = 3 if strategy == "local-only" else 1
    assert len(seen) == times * finished.summary["steps"]
    assert seen[-1] == pytest.approx(last) and seen.count(seen[-1]) == times
    assert max(seen) > 0.12


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "ef-vfl"},
        {"strategy": "cvfl", "window": 8, "optimizer": "momentum", "party-lr": 0.05},
        {"strategy": "ef-vfl", "labels": "shared"},
        {"strategy": "cvfl", "labels": "shared", "optimizer": "adam", "party-lr": 0.003},
        {"strategy": "ef-vfl", "labels": "shared", "combine": "sum", "regulariser-weight": 0.01},
        {"strategy": "ef-vfl", "labels": "shared", "dataset": "breast-cancer", "combine": "mean"},
        {"strategy": "ef-vfl", "labels": "shared", **ONE_CYCLE},
        {"strategy": "ef-vfl", "labels": "shared", "optimizer": "nesterov", "weight-decay": 0.01},
    ],
    ids=str,
)
def test_ef_vfl_without_compression_is_split_nn_bit_for_bit(
    run: Start, keys: dict[str, Any]
) -> None:
    plain = {key: value for key, value in keys.items() if key != "labels"}
    one = run(2, {"batch-size": 29, "epochs": 1, **plain, "strategy": "split-nn"})
    other = run(2, {"batch-size": 29, "epochs": 1, **keys, "codec": "identity"})
    same_models(one, other, parties=2)
    assert one.summary["bytes_up"] == other.summary["bytes_up"]


RATES = {"party-lr": 0.2, "server-lr": 0.2, "noise-seed": 0}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("parties", "keys", "like"),
    [
        (1, {"strategy": "vafl", **RATES}, {**RATES}),
        (4, {"strategy": "vafl-t", "quorum": 4, "epochs": 3}, {"strategy": "split-nn"}),
        (3, {"strategy": "asyrevel", "quorum": 3, "noise-seed": 0}, {"strategy": "synrevel"}),
    ],
    ids=str,
)
def test_who_waits_for_all_is_synchronous_bit_for_bit(
    run: Start, parties: int, keys: dict[str, Any], like: dict[str, Any]
) -> None:
    keys = {"epochs": 1, **keys}
    rest = {key: value for key, value in keys.items() if key not in ("strategy", "quorum")}
    same_models(run(parties, keys), run(parties, {**rest, **like}), parties)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "vafl", "epochs": 1},
        {"strategy": "asyrevel", "noise-seed": 2, "epochs": 1},
        {"strategy": "cascaded", "noise-seed": 2, "epochs": 1},
        {"strategy": "syn-zoo", "noise-seed": 2, "epochs": 1},
        {
            **{"strategy": "dpzv", "noise-seed": 2, "epochs": 1, "noise-multiplier": 1.0},
            "top-model": "linear",
        },
    ],
    ids=lambda keys: str(keys["strategy"]),
)
def test_the_same_seed_gives_the_same_run(run: Start, keys: dict[str, Any]) -> None:
    keys = {"delay": "exponential", "window": 4, "batch-size": 128, **keys}
    one, again, other = run(4, keys), run(4, keys), run(4, {**keys, "seed": 1})
    same_models(one, again)
    timeless = [
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in each.history]
        for each in (one, again)
    ]
    assert timeless[0] == timeless[1]
    top, other_top = one.parameters("top"), other.parameters("top")
    assert any((top[key] != other_top[key]).any() for key in top)


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["asyrevel", "cascaded", "syn-zoo", "dpzv"])
def test_without_a_noise_seed_no_run_can_be_repeated(run: Start, strategy: str) -> None:
    keys = {"dataset": "breast-cancer", "window": 15, "epochs": 1, "strategy": strategy}
    if strategy == "dpzv":
        keys |= {"noise-multiplier": 1.0}
    one, other = (run(2, keys).parameters("party-1") for _ in range(2))
    for name, values in one.items():
        assert (values != other[name]).any()


# --- identity 6 ---------------------------------------------------------------------------------

NOT_PRIVATE = {"strategy": "cascaded", "differences": "two-sided", "directions": "scaled-sphere"}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("window", "calibration", "more"),
    [
        (1, "known", {}),
        (8, "known", {}),
        (8, "known", {"quorum": 3}),
        (1, "known", {"quorum": 3, "perturbs": "all"}),
        (8, "secret", {}),
        (8, "paper", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("server_update", ["first-order", "zeroth-order"])
def test_dpzv_without_noise_is_cascaded_bit_for_bit(
    run: Start, window: int, calibration: str, more: dict[str, Any], server_update: str
) -> None:
    sampling = "shuffle" if calibration == "known" else "poisson"
    both: dict[str, Any] = {
        **{**ALL_ROWS, **FASTER, "server-lr": 0.05, "dataset": "breast-cancer"},
        **{"noise-seed": 0, "window": window, "epochs": 1},
    }
    both |= {"server-update": server_update, "sampling": sampling, **more}
    both |= {"bottom-model": "mlp", "top-model": "mlp"}
    without = {"noise-multiplier": 0.0, "clip": 1e30, "top-clip": 1e30}
    private = run(3, {**both, "strategy": "dpzv", **without, "calibration": calibration})
    other = run(3, {**both, **NOT_PRIVATE})
    same_models(private, other, parties=3)
    one, two = ([entry["test_loss"] for entry in finished.history] for finished in (private, other))
    assert one == two


def test_scalars_of_dpzv_carry_noise_of_the_calibrated_deviation(run: Start) -> None:
    """Two runs in which nobody learns send the same scalars, but for the noise."""

    def scalars(**keys: Any) -> tuple[NDArray[Any], dict[str, Any]]:
        found: dict[tuple[Any, Any], NDArray[Any]] = {}

        def watched(message: Message, context: Context) -> Message:
            sent: Any = message.content.array_records["arrays"]
            if "difference" in sent:
                place = context.node_config["partition-id"], message.content["scalars"]["exchange"]
                found[place] = sent["difference"].numpy()
            return client_app.app(message, context)

        client: Any = watched
        still = {"strategy": "dpzv", "party-lr": 0.0, "server-lr": 0.0, "noise-seed": 0}
        data = {"dataset": "breast-cancer", "batch-size": 4, "window": 114, "clip": 0.3}
        summary = run(3, {**still, **data, "epochs": 5, **keys}, client).summary
        return np.concatenate([found[place] for place in sorted(found)]), summary

    clean, _ = scalars(**{"noise-multiplier": 0.0})
    noisy, summary = scalars(**{"epsilon": 0.2, "delta": 1e-3})
    assert np.abs(clean).max() <= 0.3  # clipped
    rows = np.full(114, 4)
    rows[-1] = 455 - 4 * 113  # of the last mini-batch, whose mean shows more of each
    deviation = summary["noise_multiplier"] * 0.3 / np.tile(rows, 3 * 5)
    noise = (noisy - clean) / deviation
    count = 3 * 5 * 114
    assert noise.shape == (count,)
    assert abs((noise[113::114] ** 2).mean() - 1) < 5 * np.sqrt(2 / 15)
    assert abs(noise.mean()) < 5 / np.sqrt(count)
    assert abs((noise**2).mean() - 1) < 5 * np.sqrt(2 / count)
    assert summary["noise_multiplier"] > 1


def test_frozen_is_split_nn_without_party_learning(run: Start) -> None:
    keys = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 2, "optimizer": "sgd"}
    frozen = run(4, {**keys, "strategy": "frozen"})
    still = run(4, {**keys, "strategy": "split-nn", "party-lr": 0.0})
    for key, values in still.parameters("top").items():
        np.testing.assert_allclose(frozen.parameters("top")[key], values, atol=1e-5)
    assert frozen.summary["exchanges"] == 4
    assert frozen.summary["bytes_up"] == 4 * 455 * 32 * 4


@pytest.mark.parametrize("own", [{}, {"bottom-model": "tests.towers:Half"}], ids=["mlp", "own"])
def test_joined_is_the_ceiling_that_split_nn_reaches(run: Start, own: dict[str, str]) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 1, **ONE_CYCLE, **own}
    joined, split = run(2, {"strategy": "centralised", **keys}), run(2, keys)
    assert joined.summary["bytes_up"] == joined.summary["exchanges"] == 0
    assert joined.summary["test_loss"] == pytest.approx(split.summary["test_loss"], abs=1e-5)


@pytest.mark.parametrize("validates", [True, False])
def test_local_only_never_chooses_by_test_rows(validates: bool) -> None:
    def ended(loss: float, accuracy: float) -> Any:
        entry = {"train_loss": loss, "validation_loss": None, "test_accuracy": accuracy}
        entry |= {"train_loss": 1 - loss, "validation_loss": loss} if validates else {}
        history = SimpleNamespace(chosen=entry, entries=[entry, {**entry, "train_loss": None}])
        return SimpleNamespace(run=SimpleNamespace(history=history))

    runs = {0: ended(0.2, 0.7), 1: ended(0.3, 0.9)}  # test rows would choose party 1
    assert Alone._best(SimpleNamespace(_finished=runs)) == (0, runs[0])  # type: ignore[arg-type]


def test_after_local_only_every_party_has_the_model_of_its_run(run: Start) -> None:
    alone = run(2, {"strategy": "local-only", "epochs": 1, "batch-size": 128})
    for party in range(2):
        config = resolve({})
        shape = load_features(config, party, 2).train.shape[1:]
        first = dict(build_bottom(config, party, torch.zeros(shape), 32).named_parameters())
        for key, values in alone.parameters(f"party-{party}").items():
            assert (values != first[key].detach().numpy()).any()


def test_a_window_of_many_steps_is_many_steps_of_delayed_sgd(run: Start) -> None:
    # Same steps, same messages' bytes, fewer messages.
    keys = {**ALL_ROWS, "epochs": 1}
    one, eight = run(4, keys).summary, run(4, {**keys, "window": 8}).summary
    assert one["steps"] == eight["steps"] == 45
    assert one["bytes_up"] == eight["bytes_up"] == one["bytes_down"] == 4 * 1437 * 32 * 4
    assert (one["exchanges"], eight["exchanges"]) == (4 * 45, 4 * 6)


def same_models(one: Run, other: Run, parties: int = 4) -> None:
    for name in ("top", *(f"party-{party}" for party in range(parties))):
        for key, values in one.parameters(name).items():
            np.testing.assert_array_equal(other.parameters(name)[key], values)
