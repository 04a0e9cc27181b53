"""The rows of a step: every epoch uses every row once, and both sides know which."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import resolve
from vfl_flower.batches import Window, draw_window, steps_per_epoch
from vfl_flower.config import RunConfig
from vfl_flower.data import load_labels
from vfl_flower.label_holder import LabelHolder
from vfl_flower.party import Party
from vfl_flower.records import TrainOrder


def windows_of_epoch(
    config: RunConfig, rows: int, party: int | None, epoch: int, window: int
) -> list[Window]:
    steps = steps_per_epoch(config, rows)
    return [
        draw_window(config, rows, party, epoch, first, min(window, steps - first))
        for first in range(0, steps, window)
    ]


rows_batch_window = given(
    rows=st.integers(1, 300),
    batch=st.integers(1, 400),
    window=st.integers(1, 40),
    party=st.none() | st.integers(0, 9),
    epoch=st.integers(0, 50),
)


@rows_batch_window
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
    lengths = np.concatenate([each.lengths for each in windows])
    assert len(lengths) == steps_per_epoch(config, rows)
    assert (lengths[:-1] == batch).all()
    assert 1 <= lengths[-1] <= batch


@rows_batch_window
def test_the_window_does_not_change_the_mini_batches(
    rows: int, batch: int, window: int, party: int | None, epoch: int
) -> None:
    config = resolve({"batch-size": batch})
    by_one = [w.ids.tolist() for w in windows_of_epoch(config, rows, party, epoch, 1)]
    by_many: list[list[int]] = []
    for each in windows_of_epoch(config, rows, party, epoch, window):
        parts = np.split(each.ids, np.cumsum(each.lengths)[:-1])
        by_many += [part.tolist() for part in parts]
    assert by_many == by_one


def test_a_batch_far_larger_than_the_data_is_the_whole_data() -> None:
    window = draw_window(resolve({"batch-size": 10**9}), 20, None, 0, 0, 1)
    assert sorted(window.ids.tolist()) == list(range(20))
    assert window.lengths.tolist() == [20]


def test_orders_differ_between_epochs_parties_and_seeds() -> None:
    def order(party: int | None = None, epoch: int = 0, seed: int = 0) -> tuple[int, ...]:
        config = resolve({"batch-size": 200, "seed": seed})
        return tuple(draw_window(config, 200, party, epoch, 0, 1).ids.tolist())

    orders = [order(), order(0), order(1), order(epoch=1), order(0, epoch=1), order(seed=1)]
    assert len(set(orders)) == len(orders)
    assert order(1, 2, 3) == order(1, 2, 3)


@pytest.mark.parametrize("coordinated", [True, False])
def test_both_sides_use_the_same_rows(coordinated: bool) -> None:
    config = resolve({"dataset": "breast-cancer", "batch-size": 20})
    parties = [Party(config, index, 2, 1) for index in range(2)]
    holder = LabelHolder(config, load_labels(config), {0: 32, 1: 32})
    order = TrainOrder(exchange=1, epoch=2, first=20, steps=3, coordinated=coordinated)
    used = []
    for party in parties:
        upload = party.train(order)
        arrival = holder.receive(party.index, order, upload)
        assert arrival.window.lengths.tolist() == [20, 20, 15]  # 455 rows, 23 steps
        assert ("ids" in upload.arrays) != coordinated
        used.append(arrival.window.ids)
        with torch.no_grad():
            h = party.model(torch.from_numpy(party.block.train[arrival.window.ids]))
        rows = torch.from_numpy(arrival.window.ids).long()
        torch.testing.assert_close(holder.table[rows][:, holder.columns[party.index]], h)
    assert (used[0].tolist() == used[1].tolist()) == coordinated
