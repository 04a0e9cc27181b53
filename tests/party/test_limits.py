"""How much a party gives away: counts that no restart makes less."""

import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from numpy.typing import NDArray

from tests.full_disk import full_after
from tests.ledgers import numbers_in
from tests.organisations import small, write
from tests.party.nodes import ROWS, Node, align, asked, begun, gradient, refused, restarted, train
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.party import limits, state_file
from vfl_flower.party import session as between
from vfl_flower.protocol.batches import steps_per_epoch
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport import messages
from vfl_flower.transport.flower_internals import state_to_bytes

# --- how often, how long ------------------------------------------------------------------------


def counted(tmp_path: Path) -> NDArray[Any]:
    """Uploads of each row that the party has uploaded."""
    (path,) = tmp_path.glob("*.uploads")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return np.array([*numbers_in(path, "uploads").values()])


TOO_OFTEN = "^failed: Party 0 refuses to upload a row more often than it allows: .* max-uploads = 2"


def test_uploads_of_a_row_end_whatever_asks_for_them(node: Node, tmp_path: Path) -> None:
    context = begun(node({"max-uploads": 2}))
    ids = np.array([3, 7], np.int32)
    asked(context, messages.EmbedOrder(exchange=2, arrays={"ids": ids, "gradient": gradient()}))
    asked(context, messages.EvaluateOrder(exchange=3))
    counts = counted(tmp_path)
    assert counts.sum() == 48 + 2 + 12 and len(counts) == ROWS and counts.max() == 2
    (path,) = tmp_path.glob("*.uploads")
    assert not any(str(who).encode() in path.read_bytes() for who in range(1000, 1000 + ROWS))
    before = state_to_bytes(context.state)

    def computes_nothing(*_: Any) -> Any:
        raise AssertionError("it was computed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", computes_nothing)
        for order in (train(4), messages.EmbedOrder(exchange=4, arrays={"ids": ids[:1]})):
            refused(context, order, TOO_OFTEN)
    assert (counted(tmp_path) == counts).all() and state_to_bytes(context.state) == before
    asked(context, messages.EvaluateOrder(exchange=4))
    refused(context, messages.EvaluateOrder(exchange=5), TOO_OFTEN)
    without = np.setdiff1d(np.arange(48), ids).astype(np.int32)
    asked(context, messages.EmbedOrder(exchange=5, arrays={"ids": without}))
    assert counted(tmp_path).min() == counted(tmp_path).max() == 2


def again_from_an_older_state(context: Context, kept: bytes) -> None:
    restarted(context, kept)


def again_from_the_start(context: Context, kept: bytes) -> None:
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)


def again_in_another_order(context: Context, kept: bytes) -> None:
    align(context, np.arange(ROWS)[::-1])
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)


def again_from_another_file(context: Context, kept: bytes) -> None:
    """Of the same people and some more, in another order."""
    path = Path(str(context.node_config["file"])).with_name("b.csv")
    write(small(ROWS + 20).drop(columns="label")[::-1], path)
    context.node_config["file"] = str(path)
    align(context, np.arange(20, 20 + ROWS))
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)


@pytest.mark.parametrize(
    "again",
    [
        *(again_from_an_older_state, again_from_the_start),
        *(again_in_another_order, again_from_another_file),
    ],
)
def test_no_restart_makes_the_count_of_uploads_less(
    node: Node, again: Callable[[Context, bytes], None], tmp_path: Path
) -> None:
    context = node({"max-uploads": 2})
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)
    kept = state_to_bytes(context.state)
    asked(context, train(1))
    asked(context, train(2, gradient=gradient()))
    again(context, kept)
    refused(context, train(1), TOO_OFTEN)
    context.node_config["max-uploads"] = 3
    asked(context, train(1))  # but for the rule, it would have been served


@pytest.mark.parametrize("lost", [False, True])
def test_a_party_without_a_state_goes_on_with_its_count_or_not_at_all(
    other_node: Callable[..., Context], tmp_path: Path, lost: bool
) -> None:
    context = other_node("breast-cancer", {"max-uploads": 2})
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)
    asked(context, train(1, steps=2))
    asked(context, train(2, steps=2, gradient=gradient(16)))
    restarted(context)
    rejoin = messages.RejoinOrder(exchange=9, outputs=1)
    if lost:
        next(tmp_path.glob("*.uploads")).unlink()
        refused(context, rejoin, "since it has no count of its earlier uploads")
        return
    asked(context, rejoin, messages.Description)
    refused(context, train(10, steps=2), TOO_OFTEN)
    asked(context, train(10, steps=2, first=2))  # other rows


def test_runs_that_go_on_from_one_another_share_a_count(node: Node, tmp_path: Path) -> None:
    context = begun(node({"max-uploads": 2}))
    state_file.save(context, 1)
    for run, after in ((2, None), (3, TOO_OFTEN)):  # both from the same checkpoint
        later = node({"max-uploads": 2}, run_id=run)
        described = asked(later, messages.ResumeOrder(run="1", number=1), messages.Description)
        assert described.exchange == 1
        if after is None:
            asked(later, train(2, gradient=gradient()))
            continue
        refused(later, train(2, gradient=gradient()), after)
    assert len(list(tmp_path.glob("*.uploads"))) == 1


def test_a_count_that_is_lost_or_damaged_or_was_never_made_ends_the_run(
    node: Node, tmp_path: Path
) -> None:
    context = begun(node({"max-uploads": 2}))
    (path,) = tmp_path.glob("*.uploads")
    whole = path.read_bytes()
    for content in (b"", whole[:-4], whole[:-1], bytes(len(whole)), whole[:-1] + b"\7"):
        path.write_bytes(content)
        refused(context, train(2, gradient=gradient()), r"releases\. See its own log")
    path.unlink()
    unknown = (
        "refuses to continue, since it has no count of its earlier uploads: its rule is max-up"
    )
    refused(context, train(2, gradient=gradient()), unknown)
    before_the_rule = begun(node(run_id=5))
    before_the_rule.node_config["max-uploads"] = 100
    refused(before_the_rule, train(2, gradient=gradient()), unknown)


def test_a_pair_is_two_uploads_and_without_test_rows_evaluations_add_up(
    node: Node, tmp_path: Path
) -> None:
    context = node({"max-uploads": 3}, strategy="syn-zoo", **{"test-fraction": 0.0})
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)
    asked(context, train(1, steps=8))
    assert (counted(tmp_path) == 2).all()
    difference = np.zeros(8, np.float32)
    asked(context, messages.EvaluateOrder(exchange=2, arrays={"difference": difference}))
    assert (counted(tmp_path) == 3).all()
    refused(context, messages.EvaluateOrder(exchange=3), "max-uploads = 3")


def test_a_disk_that_keeps_no_count_ends_the_run(node: Node) -> None:
    context = node({"max-uploads": 2})
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)
    sentence = r"cannot count what it releases\. See its own log"
    with full_after(0), pytest.raises(VflError, match=sentence):
        asked(context, train(1))
    asked(context, train(1))  # when there is room again


def test_epochs_end_whatever_the_orders_say(node: Node) -> None:
    context = node({"max-epochs": 2}, epochs=2)
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)
    of_epoch = steps_per_epoch(resolve(context.run_config), 48)
    assert of_epoch == 6
    asked(context, train(1))
    asked(context, train(2, gradient=gradient()))  # the same epoch again
    sentence = "refuses step 13, of 6 an epoch: its rule is max-epochs = 2"
    for order in (train(3, 1, gradient=gradient()), train(3, 1, epoch=1, gradient=gradient())):
        refused(context, order, sentence)
    asked(context, messages.EvaluateOrder(exchange=3, arrays={"gradient": gradient()}))


@pytest.mark.parametrize("most", [0, 20, 60, None])
def test_predictions_are_counted_over_runs_and_restarts(
    node: Node, tmp_path: Path, most: int | None
) -> None:
    context = node()
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)
    state_file.save(context, 1)
    own = {"min-rows": 20, **({} if most is None else {"max-predictions": most})}
    served = 0
    for run in range(2, 6):
        between.live.clear()
        predicting = node(own, run_id=run)
        align(predicting, np.arange(20))
        try:
            order = messages.PredictOrder(run="1", number=1)
            served += len(asked(predicting, order, messages.Predicted).arrays["embedding"])
        except VflError as error:
            assert str(error) == (
                f"failed: Party 0 refuses to predict 20 rows: its rule is max-predictions = {most}."
            )
    assert served == (80 if most is None else most)
    if most:
        file = tmp_path / "party-0.predictions"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert numbers_in(file, "rows")[0] == most


def test_a_row_that_one_upload_has_several_times_counts_as_often(tmp_path: Path) -> None:
    path = tmp_path / "a.uploads"
    counted = limits.Limits(Rules(max_uploads=3), path=path)
    counted.count(np.array([7, 3, 7, 9, 7]))
    assert numbers_in(path, "uploads") == {3: 1, 7: 3, 9: 1}
    for rows, times in (([7], 1), ([3, 9, 3, 3], 1), ([1, 1, 1, 1], 1), ([5, 5], 2)):
        with pytest.raises(ConfigError, match="max-uploads = 3"):
            counted.count(np.array(rows), times=times)
    assert numbers_in(path, "uploads") == {3: 1, 7: 3, 9: 1}  # a refused upload counts nowhere
    counted.count(np.array([9, 3, 3]))
    counted.count(np.array([5]), times=3)
    assert numbers_in(path, "uploads") == {3: 3, 5: 3, 7: 3, 9: 2}


def test_predictions_of_a_day_are_counted_ahead_for_that_day_alone(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = [20_000 * 86_400.0]
    monkeypatch.setattr(time, "time", lambda: today[0])
    context = node({"max-predictions-per-day": 1000})
    budget = limits.PredictionBudget(context, Rules.of(context.node_config))
    budget.take(4)
    path = tmp_path / "party-0.predictions"
    assert numbers_in(path, "rows") == {0: 10, 20_000: 10}  # a hundredth of the limit at a time
    today[0] += 86_400
    budget.take(3)  # not out of yesterday's, which are given back
    assert numbers_in(path, "rows") == {0: 14, 20_000: 4, 20_001: 10}
    budget.close()
    assert numbers_in(path, "rows") == {0: 7, 20_000: 4, 20_001: 3}


def test_predictions_by_a_model_are_uploads_of_its_run(node: Node) -> None:
    context = begun(node({"max-uploads": 2}))
    state_file.save(context, 1)
    order = messages.PredictOrder(run="1", number=1)
    asked(context, order, messages.Predicted)
    for run in (1, 2):
        refused(node({"max-uploads": 2}, run_id=run), order, TOO_OFTEN)
