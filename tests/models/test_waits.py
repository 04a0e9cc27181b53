"""The CPU waits for a GPU in a step only where something leaves the GPU, or is checked before.

A pretended GPU counts the waits, so no GPU is needed. `test_cuda` compares what is learned.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Start
from tests.fake_gpu import FakeGpu, FakeTensor, fake_gpu
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.party.learner import Learner
from vfl_flower.party.party import Party
from vfl_flower.party.stacked import Stack

CANCER: dict[str, Any] = {
    **{"dataset": "breast-cancer", "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8},
    **{"batch-size": 150, "epochs": 1, "noise-seed": 0},
}
WINDOWS = {"window": 4, "batch-size": 64}  # several windows in an epoch
Wait = tuple[str, str]

# Each wait that a step may have, and why it is needed.
UPLOAD = ("channel.py:encode", "to the CPU")  # a message takes the bytes of the embeddings
CODED = ("channel.py:send", "to the CPU")  # the same: a codec encodes them in NumPy
STACKED = ("stacked.py:embed", "to the CPU")  # the same, once for all parties of a stack
ANSWER = ("first_order.py:answer", "to the CPU")  # the gradient rows, once for all parties
SCALARS = ("zeroth_order.py:_scalars", "to the CPU")  # the same in zeroth order
TOP = ("channel.py:encode", "to the CPU")  # the top model, where all parties hold the labels
ROWS = ("arrays.py:peak", "to the CPU")  # no party may get a gradient beyond the bound
LOSSES = ("arrays.py:peak", "to the CPU")  # a loss that is not finite gets no answer
DIFFERENCES = LOSSES  # nor does a difference beyond the bound
MASK = ("subsets.py:copies", "to the CPU")  # NumPy draws the subsets of each row's parties
FINITE = ("learner.py:noise", "a value")  # noise would hide that the model has diverged
# With error feedback the table on the GPU holds the sums, which are checked before they stay.
SUMS = [("arrays.py:peak", "to the CPU")]

FIRST = {"upload": [UPLOAD], "answer": [ROWS, LOSSES, ANSWER]}
ADAM = {"optimizer": "adamw", "party-lr": 0.01, "server-lr": 0.01, "lr-schedule": "one-cycle"}
Step = tuple[int, dict[str, Any], dict[str, list[Wait]]]
STEPS: dict[str, Step] = {
    "one step": (3, {"optimizer": "sgd", "party-lr": 0.1}, FIRST),
    "adam, clipped": (3, {**ADAM, "clip-gradient": 0.5}, FIRST),
    "a window": (3, {**WINDOWS, "optimizer": "sgd", "lr-schedule": "cosine"}, FIRST),
    "mixed precision": (3, {**ADAM, "precision": "bfloat16"}, FIRST),
    "parties in turns": (3, {"strategy": "vafl", **WINDOWS, "window": 2}, FIRST),
    "failures": (3, {"strategy": "vafl", **ADAM, "on-party-failure": "continue"}, FIRST),
    "stacked": (30, ADAM, {"embed stack": [STACKED], "answer": [ROWS, LOSSES, ANSWER]}),
    "own class weights": (3, {"class-weights": "balanced"}, FIRST),
    "rows that parties lack": (
        3,
        {"presence": 0.7, "combine": "mean", "subsets": "sampled"},
        {**FIRST, "answer": [MASK, ROWS, LOSSES, ANSWER]},
    ),
    "codec": (
        3,
        {"strategy": "ef-vfl", "codec": "float16", "compression": "error-feedback"},
        {"upload": [CODED], "receive": SUMS, "answer": [ROWS, LOSSES, ANSWER]},
    ),
    "shared labels": (
        3,
        {"strategy": "ef-vfl", "labels": "shared", "codec": "identity", **ADAM},
        {"upload": [UPLOAD], "answer": [LOSSES, TOP]},
    ),
    "cascaded": (
        3,
        {"strategy": "cascaded", **WINDOWS},
        {"upload": [UPLOAD, UPLOAD], "answer": [DIFFERENCES, LOSSES, SCALARS]},
    ),
    "asyrevel": (
        3,
        {"strategy": "asyrevel", **WINDOWS},
        {"upload": [UPLOAD, UPLOAD], "answer": [DIFFERENCES, LOSSES, SCALARS]},
    ),
    "dpzv": (
        3,
        {"strategy": "dpzv", "noise-multiplier": 1.0, **WINDOWS},
        {"upload": [UPLOAD, UPLOAD], "answer": [LOSSES, SCALARS]},
    ),
    "noise on embeddings": (
        3,
        {"strategy": "vafl", "privacy": "perturbed-embedding", **WINDOWS, "window": 2},
        {"upload": [FINITE, UPLOAD], "learn": [FINITE], "answer": [ROWS, LOSSES, ANSWER]},
    ),
}
CALLS = {
    **{"learn": (Party, "learn"), "upload": (Party, "upload_window")},
    **{"learn stack": (Stack, "learn"), "embed stack": (Stack, "embed")},
    **{"receive": (LabelHolder, "receive"), "answer": (LabelHolder, "answer")},
}


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as made:
        yield made


@pytest.fixture
def calls(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[Wait]]]:
    """Each part of a step, and its waits."""
    found: list[tuple[str, list[Wait]]] = []
    depth = [0]

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = len(gpu.waits)
            depth[0] += 1
            try:
                return method(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:  # a stack's part contains its parties' parts
                    found.append((name, gpu.waits[before:]))

        return call

    for name, (owner, method) in CALLS.items():
        monkeypatch.setattr(owner, method, watched(name, getattr(owner, method)))
    return found


@pytest.mark.one_by_day
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_waits_for_what_leaves_the_gpu_alone(
    step: Step, calls: list[tuple[str, list[Wait]]], run: Start
) -> None:
    parties, keys, expected = step
    run(parties, {**CANCER, **keys, "device": "cuda"})
    check(calls, expected)


def check(calls: list[tuple[str, list[Wait]]], expected: dict[str, list[Wait]]) -> None:
    parts = {name for name, _ in calls}
    assert parts >= expected.keys() and {"receive", "answer"} <= parts
    for name, waits in calls:
        # A party has nothing to learn before its first feedback.
        assert not waits or sorted(waits) == sorted(expected.get(name, [])), name
    needed = {wait for waits in expected.values() for wait in waits}
    assert needed == {wait for _, waits in calls for wait in waits}


PLANTED: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "of the label holder": (LabelHolder, "count", lambda holder, losses: losses[0].item()),
    "of a party": (
        Learner,
        "features",
        lambda learner, _: float(next(learner.model.parameters()).sum()),
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wait_that_no_message_needs_is_found(
    planted: str, calls: list[tuple[str, list[Wait]]], monkeypatch: pytest.MonkeyPatch, run: Start
) -> None:
    """The control: one value is read a step, as a line of a log would read it."""
    owner, name, read = PLANTED[planted]
    method = getattr(owner, name)

    def reads(self: Any, *args: Any) -> Any:
        read(self, *args)
        return method(self, *args)

    monkeypatch.setattr(owner, name, reads)
    parties, keys, expected = STEPS["one step"]
    run(parties, {**CANCER, **keys, "device": "cuda"})
    with pytest.raises(AssertionError):
        check(calls, expected)


# --- the pretended GPU --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "cause"),
    [
        (lambda x: x.cpu(), "to the CPU"),
        (lambda x: x.sum().item(), "a value"),
        (lambda x: x.tolist(), "to the CPU"),
        (lambda x: float(x.sum()), "a value"),
        (lambda x: bool((x > 0).all()), "a value"),
        (lambda x: x.nonzero(), "aten.nonzero"),
        (lambda x: x[x > 0], "a mask as an index"),
        (lambda x: x[torch.tensor([0, 1])], "an index on the CPU"),
        (lambda x: x.unique(), "aten._unique2"),
        (lambda x: torch.equal(x, x), "aten.equal"),
        (lambda x: torch.zeros(3).copy_(x), "to the CPU"),
        (lambda x: x.copy_(torch.zeros(3)), "to the GPU, blocking"),
        (lambda x: torch.zeros(3).to(x.device), "to the GPU, blocking"),
        (lambda x: torch.zeros(3).to(x), "to the GPU, blocking"),
        (lambda x: torch.tensor([1.0], device=x.device), "to the GPU, blocking"),
        (lambda x: x.repeat_interleave(torch.ones_like(x).long()), "repeat_interleave"),
    ],
)
def test_the_pretended_gpu_notes_each_way_to_wait(
    read: Callable[[torch.Tensor], Any], cause: str, gpu: FakeGpu
) -> None:
    x = torch.ones(3, device="cuda")
    assert isinstance(x, FakeTensor) and x.device.type == "cuda" and not gpu.waits
    read(x)
    assert [why.split(" without")[0] for _, why in gpu.waits] == [cause]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: (x + 1).sum() * torch.tensor(2.0),
        lambda x: torch.zeros(3).to(x.device, non_blocking=True),
        lambda x: torch.where(x > 0, x, 1.0),
        lambda x: x.repeat_interleave(torch.ones_like(x).long(), output_size=3),
        lambda x: torch.optim.Adam([x.requires_grad_()]),
    ],
)
def test_it_notes_no_other_operation(read: Callable[[torch.Tensor], Any], gpu: FakeGpu) -> None:
    read(torch.ones(3, device="cuda"))
    assert not gpu.waits and gpu.operations


def test_it_refuses_what_a_gpu_refuses(gpu: FakeGpu) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="numpy"):
        x.numpy()
    with pytest.raises((TypeError, RuntimeError)):
        np.asarray(x)
