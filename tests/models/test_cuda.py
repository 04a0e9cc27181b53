"""Runs on a GPU: what they are on the CPU, with models and tables there.

Where there is no GPU, `tests.fake_gpu` pretends to be one.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import Start, trained
from tests.fake_gpu import fake_gpu
from tests.stepping import by_gradient
from vfl_flower import client_app
from vfl_flower.launch.engines import run_local
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.tops import build_top
from vfl_flower.models.training import optimizer_tensors
from vfl_flower.party import session as between
from vfl_flower.protocol.estimators.first_order import descend
from vfl_flower.protocol.systems import resolve


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with nullcontext() if torch.cuda.is_available() else fake_gpu():
        yield


CANCER: dict[str, Any] = {
    **{"dataset": "breast-cancer", "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8},
    **{"batch-size": 64, "epochs": 1, "noise-seed": 0},
}
ADAMW: dict[str, Any] = {
    **{"optimizer": "adamw", "lr-schedule": "one-cycle", "weight-decay": 0.1},
    **{"clip-gradient": 0.5, "party-lr": 0.01, "server-lr": 0.01},
}
RUNS: dict[str, dict[str, Any]] = {
    "split-nn": ADAMW,
    "windows of plain steps": {"window": 4, "lr-schedule": "cosine"},
    "vafl": {"strategy": "vafl", "optimizer": "nesterov", "party-lr": 0.05, "window": 2},
    "error feedback both ways": {
        **{"strategy": "ef-vfl", "codec": "float16", "downlink-codec": "bfloat16"},
        **{"downlink-compression": "error-feedback"},
    },
    "shared labels": {"strategy": "ef-vfl", "labels": "shared", "codec": "identity", **ADAMW},
    "cascaded": {"strategy": "cascaded", "window": 4, "delay": "straggler"},
    "dpzv": {"strategy": "dpzv", "noise-multiplier": 1.0, "window": 4},
    "bounded delay": {"strategy": "vafl", "max-delay": 6, "window": 3, "delay": "exponential"},
    "perturbed": {"strategy": "vafl", "privacy": "perturbed-embedding", "window": 2},
    "joined": {"strategy": "centralised", **ADAMW},
    "stacked": {"epochs": 2, "optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01},
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu_is_the_run_on_the_cpu(run: Start, name: str) -> None:
    keys, number = {**CANCER, **RUNS[name]}, 30 if name == "stacked" else 3
    there, here = (run(number, {**keys, "device": each}) for each in ("cuda", "cpu"))
    for name in ("steps", "exchanges", "bytes_up", "bytes_down"):
        assert there.summary[name] == here.summary[name]
    assert there.summary["test_loss"] == pytest.approx(here.summary["test_loss"], rel=5e-3)
    joined = keys.get("strategy") == "centralised"
    parties = [] if joined else [f"party-{m}" for m in range(number)]
    for name in ("top", *parties):
        for key, values in here.parameters(name).items():
            assert there.parameters(name)[key] == pytest.approx(values, abs=5e-3), f"{name}.{key}"


@pytest.mark.nightly
def test_models_tables_and_states_of_optimizers_are_on_the_gpu() -> None:
    seen: list[torch.device] = []
    earlier = list(between.live.values())  # another test's parties may still be there

    def watched(message: Any, context: Any) -> Any:
        reply = client_app.app(message, context)
        for party in [each.party for each in between.live.values() if each not in earlier]:
            of_optimizer = [
                each
                for state in party.learner.optimizer.state.values()
                for each in state.values()
                if each.ndim  # torch keeps counts of steps on the CPU
            ]
            seen.extend(each.device for each in (*party.learner.model.parameters(), *of_optimizer))
            if party.learner.trace:
                x, embedded = party.learner.trace
                seen.extend(each.device for each in (x, *embedded))
        return reply

    client: Any = watched
    strategy, _ = trained(2, {**CANCER, **ADAMW, "device": "cuda"}, client)
    holder = strategy.run.holder
    assert holder.optimizer is not None
    tables = holder.table.rows, holder.held_out.table.rows, holder.labels, holder.held_out.labels
    seen += [each.device for each in (*tables, *holder.top.parameters())]
    assert len(seen) > 100 and {each.type for each in seen} == {"cuda"}
    assert all(each.dtype for each in optimizer_tensors(holder.optimizer).values())


class Copies(TorchDispatchMode):
    """Counts tensors that are copied from a GPU to the CPU, and numbers that are read there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if any(each.is_cuda for each in tensors):
            name = str(func)
            left = isinstance(result, torch.Tensor) and not result.is_cuda
            if left or "_local_scalar_dense" in name or "nonzero" in name:
                self.found.append(name)
        return result


@pytest.mark.parametrize("keys", [{}, ADAMW], ids=["sgd", "adamw"])
def test_between_the_steps_of_a_window_nothing_is_copied_to_the_cpu(keys: dict[str, Any]) -> None:
    config = resolve({**CANCER, **keys})
    top = build_top(config, [4, 4], 3).to("cuda")
    model = build_bottom(config, 0, torch.zeros(5), 4).to("cuda")
    optimizers = [build_optimizer(config, each, 0.1) for each in (top, model)]
    h, x, rows = (torch.randn(12, n, device="cuda") for n in (8, 5, 4))
    labels = torch.arange(12, device="cuda") % 3
    with Copies() as copies:
        by_gradient(top, optimizers[0], h, labels, [4, 4, 4], [4, 4, 4])
        descend(model, optimizers[1], x, None, rows, [4, 4, 4], config.training)
    assert copies.found == []
    with Copies() as copies:  # or it would see none
        float(h.sum().cpu())
    assert copies.found


def test_bfloat16_is_computed_there_and_repeats_exactly() -> None:
    for kind in ("mlp", "cnn", "lstm"):
        config = resolve({"precision": "bfloat16", "bottom-model": kind, "bottom-hidden": 8})
        model = build_bottom(config, 0, torch.zeros(4, 4), 6).to("cuda")
        x = torch.randn(9, 4, 4, device="cuda")
        one, again = model(x), model(x)
        assert one.dtype == torch.float32 and torch.equal(one, again), kind
        assert torch.equal(one, one.bfloat16().float()), kind


@pytest.mark.nightly
def test_a_run_that_was_cut_short_there_goes_on_there(tmp_path: Any) -> None:
    keys = {**CANCER, **ADAMW, "epochs": 4, "device": "cuda", "checkpoint-every": 5}
    whole = run_local(2, {**keys, "out": str(tmp_path / "whole")})

    class CutError(BaseException):
        """Somebody stops the run."""

    seen = []

    def stopped(message: Any, context: Any) -> Any:
        seen.append(message)
        if len(seen) == 40:
            raise CutError
        return client_app.app(message, context)

    client: Any = stopped
    with pytest.raises(CutError):
        run_local(2, {**keys, "out": str(tmp_path / "cut")}, client)
    resumed = run_local(2, {"resume": str(tmp_path / "cut")})
    for name in ("top", "party-0", "party-1"):
        for key, values in whole.parameters(name).items():
            assert resumed.parameters(name)[key] == pytest.approx(values, abs=1e-4)
