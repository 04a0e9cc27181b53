"""The rows of a step: every epoch uses every row once, and both sides know which."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tests.conftest import ALL_ROWS
from vfl_flower.config.errors import VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.party.party import Party
from vfl_flower.protocol.batches import Window, put, steps_per_epoch, take
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.messages import DescribeOrder, TrainOrder, Upload


def windows_of_epoch(
    config: RunConfig, rows: int, party: int | None, epoch: int, window: int
) -> list[Window]:
    steps = steps_per_epoch(config, rows)
    draw = sampling_of(config, rows).window
    firsts = range(0, steps, window)
    return [draw(party, epoch, first, min(window, steps - first), b"") for first in firsts]


@given(
    rows=st.integers(1, 300),
    batch=st.integers(1, 400),
    window=st.integers(1, 40),
    party=st.none() | st.integers(0, 9),
    epoch=st.integers(0, 50),
)
def test_windows_of_an_epoch_hold_every_row_once(
    rows: int, batch: int, window: int, party: int | None, epoch: int
) -> None:
    config = resolve({"batch-size": batch})
    windows = windows_of_epoch(config, rows, party, epoch, window)
    ids = np.concatenate([each.ids for each in windows])
    assert ids.dtype == np.int32
    assert sorted(ids.tolist()) == list(range(rows))
    for each in windows:
        assert each.lengths.sum() == len(each.ids)
        assert each.distinct  # so that `put` need not look
    lengths = np.concatenate([each.lengths for each in windows])
    assert len(lengths) == steps_per_epoch(config, rows)
    assert (lengths[:-1] == batch).all()
    assert 1 <= lengths[-1] <= batch
    by_one = [each.ids for each in windows_of_epoch(config, rows, party, epoch, 1)]
    assert np.array_equal(np.concatenate(by_one), ids)  # whatever the window is


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ({"batch-size": 20}, True),
        ({"batch-size": 21}, True),
        ({"batch-size": 19}, False),
        ({"batch-size": 20, "sampling": "poisson"}, False),  # which may leave some out
    ],
    ids=str,
)
@pytest.mark.parametrize("party", [None, 1])
def test_a_window_is_whole_if_it_is_all_rows_in_their_own_order(
    given: dict[str, Any], whole: bool, party: int | None
) -> None:
    for epoch in range(3):
        window = sampling_of(resolve(given), 20).window(party, epoch, 0, 1, b"")
        assert window.whole == whole
        assert not whole or window.ids.tolist() == list(range(20))


@pytest.mark.parametrize("distinct", [True, False])
def test_rows_are_taken_from_a_table_and_put_back(distinct: bool) -> None:
    table = torch.arange(24.0).view(6, 4)
    ids = np.array([4, 0, 3], np.int32)
    window = Window(ids, np.array([2, 1], np.int32), distinct=distinct)
    assert torch.equal(take(table, window), table[[4, 0, 3]])
    other = table.clone()
    put(other, window, -take(table, window))
    assert torch.equal(other[[4, 0, 3]], -table[[4, 0, 3]])
    assert torch.equal(other[[1, 2, 5]], table[[1, 2, 5]])
    columns = other[:, 1:3]  # of one party
    put(columns, window, torch.zeros(3, 2))
    assert (other[[4, 0, 3], 1:3] == 0).all()
    assert torch.equal(other[[4, 0, 3]][:, [0, 3]], -table[[4, 0, 3]][:, [0, 3]])


def test_a_whole_window_is_the_table_itself() -> None:
    table = torch.zeros(3, 2)
    window = Window(np.arange(3, dtype=np.int32), np.array([3], np.int32), whole=True)
    assert take(table, window) is table
    put(table, window, torch.ones(3, 2))
    assert (table == 1).all()


def test_of_a_row_that_is_put_twice_the_last_counts() -> None:
    table = torch.zeros(5)
    ids = np.array([3, 1, 4, 1, 3, 1], np.int32)
    window = Window(ids, np.array([3, 1, 2], np.int32))
    put(table, window, torch.arange(1.0, 7.0))
    assert table.tolist() == [0, 6, 0, 5, 3]
    empty = Window(ids[:0], np.array([0], np.int32))
    put(table, empty, take(table, empty))
    assert table.tolist() == [0, 6, 0, 5, 3]


@pytest.mark.parametrize("sampling", ["shuffle", "replacement", "poisson"])
def test_mini_batches_differ_between_all_that_name_them(sampling: str) -> None:
    def ids(
        party: int | None = 0, epoch: int = 0, first: int = 0, secret: bytes = b"", seed: int = 0
    ) -> frozenset[int]:
        config = resolve({"sampling": sampling, "batch-size": 50, "seed": seed})
        window = sampling_of(config, 200).window(party, epoch, first, 1, secret)
        return frozenset(window.ids.tolist())

    drawn = [ids(), ids(None), ids(1), ids(2), ids(epoch=1), ids(first=1), ids(seed=1)]
    if sampling == "poisson":
        drawn += [ids(secret=b"secret"), ids(secret=b"secreu")]
    assert len(set(drawn)) == len(drawn)
    assert ids(1, 2, 3) == ids(1, 2, 3)


@pytest.mark.parametrize("coordinated", [True, False])
def test_both_sides_use_the_same_rows(coordinated: bool) -> None:
    config = resolve({**ALL_ROWS, "dataset": "breast-cancer", "batch-size": 20})
    parties = [Party(config, index, 2, 1) for index in range(2)]
    holder = LabelHolder(config, load_labels(config), {0: 32, 1: 32})
    order = TrainOrder(exchange=1, epoch=2, first=20, steps=3, coordinated=coordinated)
    used = []
    for party in parties:
        upload = party.train(order)
        arrival = holder.receive(party.learner.index, order, upload)
        assert arrival.window.lengths.tolist() == [20, 20, 15]  # 455 rows, 23 steps
        assert ("ids" in upload.arrays) != coordinated
        used.append(arrival.window.ids)
        with torch.no_grad():
            h = party.learner.model(torch.from_numpy(party.inputs.block.train[arrival.window.ids]))
        rows = torch.from_numpy(arrival.window.ids).long()
        torch.testing.assert_close(holder.table.of(party.learner.index)[rows], h)
    assert (used[0].tolist() == used[1].tolist()) == coordinated


# --- Poisson sampling ---------------------------------------------------------------------------


def poisson(batch: int, **keys: int) -> RunConfig:
    return resolve({"sampling": "poisson", "batch-size": batch, **keys})


def taken(window: Window, rows: int) -> NDArray[np.bool_]:
    """Which rows each step took, [steps, rows]."""
    found = np.zeros((len(window.lengths), rows), bool)
    found[np.repeat(np.arange(len(window.lengths)), window.lengths), window.ids] = True
    return found


@given(
    rows=st.integers(1, 200),
    batch=st.integers(1, 300),
    steps=st.integers(1, 40),
    epoch=st.integers(0, 20),
    first=st.integers(0, 100),
    party=st.none() | st.integers(0, 9),
    secret=st.binary(max_size=16),
)
def test_poisson_windows_are_steps_of_rows_that_do_not_repeat(
    rows: int, batch: int, steps: int, epoch: int, first: int, party: int | None, secret: bytes
) -> None:
    config = poisson(batch)
    window = sampling_of(config, rows).window(party, epoch, first, steps, secret)
    assert window.ids.dtype == window.lengths.dtype == np.int32
    assert len(window.lengths) == steps
    assert window.lengths.sum() == len(window.ids)
    assert len(window.ids) == 0 or (window.ids.min() >= 0 and window.ids.max() < rows)
    for part in np.split(window.ids, np.cumsum(window.lengths)[:-1]):
        assert len(set(part.tolist())) == len(part)
    if batch >= rows:  # the rate is at most 1
        assert (window.lengths == rows).all()
    assert sampling_of(config, rows).divisors(window.lengths).tolist() == [min(batch, rows)] * steps
    assert not window.distinct  # other steps may take the same rows
    again = sampling_of(config, rows).draw(party, epoch, first, steps, secret)
    assert np.array_equal(again.ids, window.ids)
    assert np.array_equal(again.lengths, window.lengths)


# --- sampling with replacement ------------------------------------------------------------------


@given(
    rows=st.integers(1, 200),
    batch=st.integers(1, 300),
    party=st.none() | st.integers(0, 9),
    cut=st.integers(0, 40),
)
def test_a_mini_batch_with_replacement_does_not_depend_on_its_window(
    rows: int, batch: int, party: int | None, cut: int
) -> None:
    config = resolve({"sampling": "replacement", "batch-size": batch})
    sampling = sampling_of(config, rows)
    steps = sampling.per_epoch
    whole, cut = sampling.window(party, 3, 0, steps, b""), min(cut, steps - 1)
    parts = [(0, cut), (cut, steps - cut)] if cut else [(0, steps)]
    windows = [sampling.window(party, 3, first, each, b"") for first, each in parts]
    assert np.concatenate([each.ids for each in windows]).tolist() == whole.ids.tolist()
    assert set(whole.lengths.tolist()) == {min(batch, rows)}
    for step in np.split(whole.ids, steps):
        assert len(set(step.tolist())) == len(step) and step.min() >= 0 and step.max() < rows
    assert len(whole.ids) <= sampling.most_rows(steps)


def test_sampling_with_replacement_takes_every_row_by_the_same_chance_and_each_step_anew() -> None:
    rows, batch, epochs = 50, 20, 1700
    sampling = sampling_of(resolve({"sampling": "replacement", "batch-size": batch}), rows)
    windows = [sampling.window(0, epoch, 0, 3, b"") for epoch in range(epochs)]
    by_step = np.concatenate([taken(window, rows) for window in windows])
    q = batch / rows
    deviation = np.sqrt(q * (1 - q) / len(by_step))
    assert np.abs(by_step.mean(0) - q).max() < 5 * deviation
    both = (by_step[0::3] & by_step[1::3]).mean()  # of steps in a row; a shuffled epoch has none
    assert both == pytest.approx(q * q, abs=5 * np.sqrt(q * q * (1 - q * q) / (epochs * rows)))


@pytest.mark.parametrize("sampling", ["shuffle", "replacement", "poisson"])
def test_parties_draw_rows_independently_of_each_other(sampling: str) -> None:
    rows, batch, epochs = 60, 15, 400
    scheme = sampling_of(resolve({"sampling": sampling, "batch-size": batch}), rows)
    drawn = [
        np.concatenate([taken(scheme.window(p, e, 0, 4, b"%r" % p), rows) for e in range(epochs)])
        for p in (None, 0, 1, 2)
    ]
    both, q = 4 * epochs * rows, batch / rows
    for one, other in combinations(drawn, 2):
        assert (one & other).sum() / both == pytest.approx(q * q, abs=5 * q / np.sqrt(both))
        assert (one & one).sum() / both > 2 * q * q  # the control: a party with itself


@pytest.mark.parametrize(("epoch", "first", "steps"), [(4, 0, 4), (0, 3, 2), (0, 4, 1), (5, 0, 1)])
def test_steps_just_beyond_the_run_are_refused(epoch: int, first: int, steps: int) -> None:
    scheme = sampling_of(resolve({"batch-size": 15, "epochs": 2}), 60)  # two parties: 4 epochs
    scheme.check(TrainOrder(exchange=1, epoch=3, first=0, steps=4, coordinated=False), 2)
    scheme.check(TrainOrder(exchange=1, epoch=3, first=3, steps=1, coordinated=False), 2)
    order = TrainOrder(exchange=1, epoch=epoch, first=first, steps=steps, coordinated=False)
    with pytest.raises(VflError, match="the run has at most"):
        scheme.check(order, 2)


@pytest.mark.one_by_day
@pytest.mark.parametrize(("rows", "batch"), [(50, 2), (50, 20), (50, 45)])
@pytest.mark.parametrize("steps", [1, 100])
def test_poisson_sampling_takes_every_row_by_the_same_chance_and_each_step_anew(
    rows: int, batch: int, steps: int
) -> None:
    config, all_steps, q = poisson(batch), 5000, batch / rows
    draw, epochs = sampling_of(config, rows).window, range(all_steps // steps)
    windows = [draw(0, epoch, 0, steps, b"secret") for epoch in epochs]
    by_step = np.concatenate([taken(window, rows) for window in windows])
    deviation = np.sqrt(q * (1 - q) / all_steps)
    assert np.abs(by_step.mean(0) - q).max() < 5 * deviation  # of each row
    assert abs(by_step.mean() - q) < 5 * deviation / np.sqrt(rows)
    sizes = by_step.sum(1)  # binomial
    assert np.var(sizes) == pytest.approx(rows * q * (1 - q), rel=0.15)
    # Neither rows of a step, nor steps of a row, nor neighbours across both, go together.
    centred = (by_step - q) / np.sqrt(q * (1 - q))
    for one, other in (
        (centred[:, :-1], centred[:, 1:]),
        (centred[:-1], centred[1:]),
        (centred[:-1, -1:], centred[1:, :1]),
    ):
        assert abs((one * other).mean()) < 5 / np.sqrt(one.size)


def test_only_the_party_knows_the_rows_of_its_poisson_mini_batches() -> None:
    config = resolve(
        {**ALL_ROWS, "dataset": "breast-cancer", "batch-size": 20, "sampling": "poisson"}
    )
    holder = LabelHolder(config, load_labels(config), {0: 32, 1: 32})
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=3, coordinated=False)
    sent = []
    for _ in range(2):
        party = Party(config, 0, 2, 1)
        party.describe(DescribeOrder(outputs=1))  # draws its secret
        upload = party.train(order)
        arrival = holder.receive(0, order, upload)
        window = sampling_of(config, 455).window(0, 0, 0, 3, party.learner.secret)
        assert arrival.window.ids.tolist() == window.ids.tolist() == upload.arrays["ids"].tolist()
        assert arrival.window.lengths.tolist() == upload.arrays["lengths"].tolist()
        assert window.ids.tolist() != sampling_of(config, 455).window(0, 0, 0, 3, b"").ids.tolist()
        sent.append(window.ids.tolist())
    assert sent[0] != sent[1]


def test_of_a_row_that_a_poisson_window_has_twice_the_last_embedding_counts() -> None:
    config = resolve(
        {**ALL_ROWS, "dataset": "breast-cancer", "batch-size": 400, "sampling": "poisson"}
    )
    holder = LabelHolder(config, load_labels(config), {0: 32, 1: 32})
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=2, coordinated=False)
    party = Party(config, 1, 2, 1)
    upload = party.train(order)
    ids, (first, _) = upload.arrays["ids"], upload.arrays["lengths"]
    numbered = np.repeat(np.arange(len(ids), dtype=np.float32)[:, None], 32, axis=1)
    holder.receive(1, order, replace(upload, arrays={**upload.arrays, "embedding": numbered}))
    where = {row: place for place, row in enumerate(ids.tolist())}  # the last place of each
    assert len(set(ids[:first].tolist()) & set(ids[first:].tolist())) > 200
    assert {row: int(holder.table.of(1)[row, 0]) for row in where} == where
    assert (holder.table.of(0) == 0).all()


@given(
    lengths=hnp.arrays(np.int32, 3, elements=st.integers(-2, 6) | st.integers(-(2**31), 2**31 - 1)),
    ids=hnp.arrays(np.int32, st.integers(0, 12), elements=st.integers(-1, 10)),
    fit=st.booleans(),
)
def test_what_a_party_says_of_its_mini_batches_is_a_window_or_refused(
    lengths: NDArray[np.int32], ids: NDArray[np.int32], fit: bool
) -> None:
    if fit:  # else few examples would pass the first check
        lengths = np.clip(lengths, 0, len(ids) // 3)
        ids = ids[: lengths.sum()]
    config = resolve({"sampling": "poisson", "batch-size": 3, "top-model": "sum"})
    labels = Labels(np.zeros(10, np.int64), np.zeros(2, np.int64), ("a", "b"), "")
    holder = LabelHolder(config, labels, {0: 2})
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=3, coordinated=False)
    arrays = {"ids": ids, "lengths": lengths, "embedding": np.ones((len(ids), 2), np.float32)}
    upload = Upload(party=0, exchange=1, peak_memory_mb=1.0, arrays=arrays)
    steps = np.split(ids, np.cumsum(np.clip(lengths, 0, len(ids)))[:-1])
    sound = (
        (lengths >= 0).all()
        and lengths.sum(dtype=np.int64) == len(ids)
        and all(len(set(step.tolist())) == len(step) for step in steps)
        and not set(ids.tolist()) & {-1, 10}
    )
    if sound:
        window = holder.receive(0, order, upload).window
        assert np.array_equal(window.ids, ids) and np.array_equal(window.lengths, lengths)
    else:
        with pytest.raises(VflError):
            holder.receive(0, order, upload)
        assert (holder.table.rows == 0).all()
