"""Ids that come in pieces: the same alignment, and nothing more for a side that lies."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Message

from tests.aligning import IDS, STRANGE, LabelHolder, asked, count_of, in_a_later_run, node_in
from tests.organisations import (
    ID,
    Organisations,
    change,
    cut,
    forget_alignments,
    read,
    small,
    write,
)
from vfl_flower import client_app
from vfl_flower.alignment import pieces, store
from vfl_flower.alignment.at_label_holder import align
from vfl_flower.alignment.psi import match, outputs
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.data.at_label_holder import own_table
from vfl_flower.data.sources import source_of
from vfl_flower.data.split import Alignment
from vfl_flower.party import inputs
from vfl_flower.party.session import largest_order
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.early_messages import Aligned, AlignOrder, CommonOrder
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.wire import read_order, read_reply, to_reply

PIECE = 7


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", PIECE)


@pytest.fixture
def node(tmp_path: Path) -> Context:
    made = node_in(tmp_path)
    made.node_config["min-rows"] = 10
    return made


class Pieces:
    """The ClientApp, and the numbers of ids in all orders and answers of steps 1 and 2."""

    def __init__(self, lie: Callable[[AlignOrder, Aligned], Aligned] | None = None) -> None:
        self.lie, self.sizes = lie, list[tuple[int, int, int]]()

    def __call__(self, message: Message, context: Context) -> Message:
        reply: Message = client_app.app(message, context)
        if message.metadata.message_type != AlignOrder.kind:
            return reply
        order, answer = read_order(message, AlignOrder), read_reply(reply, Aligned)
        given = [order.arrays["ids"], answer.arrays["again"], answer.arrays.get("own", ())]
        self.sizes.append((len(given[0]), len(given[1]), len(given[2])))
        return to_reply(self.lie(order, answer), message) if self.lie else reply


def aligned(world: Organisations, client: Any = client_app.app, **keys: Any) -> tuple[Any, ...]:
    given = {**world.keys, **keys}
    config, nodes = resolve(given), world.node_configs
    grid = LocalGrid(client, len(nodes), given, config, nodes)
    own = own_table(config.data)
    made: Alignment = align(grid, config, own, str(grid.run_id))
    used = [np.asarray(own.id_column)[made.rows].tolist()]
    for party, context in enumerate(grid.contexts.values()):
        rows = store.saved_state(context)["rows"]
        ids = np.asarray(read(world.files[party])[ID])
        used.append([int(ids[row]) if row >= 0 else None for row in rows])
    return made, used


@pytest.mark.parametrize("method", ["psi", "any"])
def test_pieces_align_as_a_whole(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, client = cut(tmp_path, small()), Pieces()
    forget_alignments()
    _, used = aligned(world, client, align=method)
    assert all(max(sizes) <= PIECE for sizes in client.sizes)
    assert len(client.sizes) == 2 * (9 + 7)  # 60 ids, and 54 ids of each party
    for of_party in used[1:]:
        assert all(theirs in (mine, None) for mine, theirs in zip(used[0], of_party, strict=True))
    change(world.labels, lambda frame: frame[3:])  # the sets that both sides keep are as good
    change(world.files[0], lambda frame: frame[::-1])
    again, _ = aligned(world, small_set := Pieces(), align=method)
    assert [sum(each) for each in zip(*small_set.sizes, strict=True)] == [0, 0, 0]
    monkeypatch.setattr(pieces, "PIECE", 2**18)
    forget_alignments()
    whole, _ = aligned(world, whole_client := Pieces(), align=method)
    assert len(whole_client.sizes) == 2 and whole.known == again.known
    assert sorted(whole.rows) == sorted(again.rows)


def test_pieces_add_to_a_set(tmp_path: Path) -> None:
    world = cut(tmp_path, small())
    forget_alignments()
    aligned(world)
    new = [7000 + number for number in range(20)]
    for file in (world.labels, *world.files):
        more = read(file).iloc[[0] * 20].assign(who=new)
        write(pd.concat([read(file), more]), file)
    made, _ = aligned(world, client := Pieces())
    assert [sum(each) for each in zip(*client.sizes, strict=True)] == [40, 40, 40]
    assert len(made.rows) == 48 + 20 and len(client.sizes) == 2 * (3 + 2)


def test_a_long_alignment_tells_how_much_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pieces, "_TELL", -1.0)
    caplog.set_level("INFO", "flwr.notice")
    forget_alignments()
    aligned(cut(tmp_path, small()))
    lines = [line for line in caplog.messages if "left" in line]
    due = r"14 of about 240 ids of all sides are blinded: about \d\d:\d\d left\."
    assert re.fullmatch(due, lines[0])
    assert lines[-1].startswith("228 of about 228 ids")


class InPieces(LabelHolder):
    def send(self, piece: int, ids: list[bytes], more: bool, **words: Any) -> Aligned:
        arrays = {"ids": self.a.of_ids(ids)}
        words = {"method": "psi", "piece": piece, "more": more, **words}
        return asked(self.node, AlignOrder(arrays=arrays, **words), Aligned)


def test_own_ids_come_after_the_last_piece_alone(node: Context) -> None:
    holder = InPieces(node, IDS)
    first = holder.send(0, IDS[:7], True)
    assert "own" not in first.arrays and first.places == 0
    last = holder.send(1, IDS[7:14], False)
    own = [last.arrays["own"]]
    while sum(map(len, own)) < last.places:
        own.append(holder.send(1 + len(own), [], False).arrays["own"])
    assert last.places == 60 and len(own) == 9
    undone = holder.a.undone(np.concatenate([first.arrays["again"], last.arrays["again"]]))
    mine, _ = match(outputs(IDS[:14], undone), np.concatenate(own))
    assert len(mine) == 14
    assert len(np.unique(np.concatenate(own), axis=0)) == 60


def test_the_fewest_rows_are_of_all_pieces(node: Context) -> None:
    holder = InPieces(node, IDS)
    holder.send(0, IDS[:7], True)
    with pytest.raises(VflError, match="was asked to align 9 rows, and aligns no fewer than 10"):
        holder.send(1, IDS[7:9], False)
    holder.send(0, IDS[:7], True)
    with pytest.raises(VflError, match="was asked to align 7 rows"):  # the same ids again
        holder.send(1, IDS[:7], False)
    assert count_of(node)["asked"] == 7


def test_ids_are_counted_over_all_pieces(node: Context) -> None:
    node.node_config["max-ids"] = 20
    holder = InPieces(node, IDS)
    for piece in range(2):
        holder.send(piece, IDS[7 * piece : 7 * piece + 7], True)
    with pytest.raises(VflError, match="asked about 7 more ids: its rule is max-ids = 20"):
        holder.send(2, IDS[14:21], False)
    later = InPieces(in_a_later_run(node), IDS)
    later.a = holder.a
    later.send(0, IDS[:7], True)
    with pytest.raises(VflError, match="about 7 more ids"):  # nor does breaking off help
        later.send(1, STRANGE[:7], True)
    assert count_of(node)["asked"] == 14


@pytest.mark.parametrize("piece", [0, 1, 3, 2**40])
def test_a_piece_out_of_turn_is_refused(node: Context, piece: int) -> None:
    holder = InPieces(node, IDS)
    with pytest.raises(VflError, match=f"was sent piece {piece or 5} of the ids out of turn"):
        holder.send(piece or 5, IDS[:7], True)
    holder.send(0, IDS[:7], True)
    holder.send(1, IDS[7:14], True)
    before = store.saved_state(node)["key"].tobytes()
    if not piece:
        holder.send(0, IDS[:7], True)  # begins anew, by another secret
        assert store.saved_state(node)["key"].tobytes() != before
        return
    with pytest.raises(VflError, match=f"was sent piece {piece} of the ids out of turn"):
        holder.send(piece, IDS[14:21], False)
    holder.send(2, IDS[14:21], False)


@pytest.mark.parametrize(("ids", "more"), [(STRANGE[:1], False), ([], True), (STRANGE[:7], True)])
def test_no_id_follows_the_last_piece(node: Context, ids: list[bytes], more: bool) -> None:
    holder = InPieces(node, IDS)
    holder.send(0, IDS[:7], True)
    holder.send(1, IDS[7:14], False)
    with pytest.raises(VflError, match="was sent piece 2 of the ids out of turn"):
        holder.send(2, ids, more)
    for piece in range(2, 10):
        holder.send(piece, [], False)
    with pytest.raises(VflError, match="was sent piece 10 of the ids out of turn"):
        holder.send(10, [], False)


def test_a_piece_has_a_bounded_size(node: Context) -> None:
    holder = InPieces(node, IDS)
    with pytest.raises(VflError, match="was sent 8 ids at once, above the limit of 7"):
        holder.send(0, IDS[:8], True)
    with pytest.raises(VflError, match="was sent a blinded id more than once"):
        holder.send(0, [*IDS[:6], IDS[0]], True)
    assert "turn" not in store.saved_state(node)
    node.node_config["max-ids"] = 1000
    most = largest_order(node)
    assert most == 2**16 + 32 * 2**18 + 4 * 1000
    order = AlignOrder(method="psi", arrays={"ids": np.zeros((most // 32 + 1, 32), np.uint8)})
    with pytest.raises(VflError, match=r"more than the .* that it may have"):
        asked(node, order, Aligned)


def test_rows_are_told_after_all_pieces(node: Context) -> None:
    holder = InPieces(node, IDS)
    common = CommonOrder(arrays={"places": np.arange(10, dtype=np.int32)})
    for piece, ids, more in ((0, IDS[:7], True), (1, IDS[7:14], False), (2, [], False)):
        holder.send(piece, ids, more)
        with pytest.raises(VflError, match="was told rows that it was not asked about"):
            asked(node, common)
    for piece in range(3, 10):
        holder.send(piece, [], False)
    asked(node, common)


def test_a_file_is_read_once_in_an_alignment(
    node: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = source_of

    def counted(*words: Any) -> Any:
        reads.append(1)
        return read(*words)

    monkeypatch.setattr(inputs, "source_of", counted)
    inputs.forget_aligning()
    holder = InPieces(node, IDS)
    for piece in range(9):
        holder.send(piece, IDS[7 * piece : 7 * piece + 7], piece < 8)
    assert len(reads) == 1
    change(Path(str(node.node_config["file"])), lambda frame: frame[1:])
    with pytest.raises(VflError, match="has other ids than a moment ago"):
        holder.send(9, [], False)
    assert len(reads) == 2 and inputs._of_file.cache_info().currsize == 0


def test_a_party_without_sets_keeps_no_secret_after_the_last_piece(node: Context) -> None:
    node.node_config["alignment-days"] = 0
    InPieces(node, IDS).send(0, IDS[:7], True)
    assert "key" in store.saved_state(node)
    holder = InPieces(node, IDS)
    for piece in range(10):
        holder.send(piece, IDS[7 * piece : 7 * piece + 7] if piece < 2 else [], piece < 1)
    names = store.saved_state(node).keys()
    assert names == {"at", "shown", "asked", "file"}


def test_a_piece_does_not_tell_where_an_id_stands_in_the_file(node: Context) -> None:
    """Ids are shuffled over all pieces. Within each piece, they would be near each other."""
    holder = InPieces(node, IDS)
    holder.send(0, IDS[:7], True)
    at = store.saved_state(node)["at"]
    assert min(np.ptp(at[start : start + PIECE]) for start in range(0, 56, PIECE)) > PIECE


def on(piece: int, lie: Callable[[Aligned], Aligned]) -> Callable[[AlignOrder, Aligned], Aligned]:
    return lambda order, answer: lie(answer) if order.piece == piece else answer


def own(change: Callable[[Any], Any]) -> Callable[[Aligned], Aligned]:
    def lie(answer: Aligned) -> Aligned:
        given = answer.arrays.get("own", np.zeros((0, 32), np.uint8))
        return replace(answer, arrays={**answer.arrays, "own": change(given)})

    return lie


SEVEN = np.ones((7, 32), np.uint8)
LIES: dict[str, tuple[Any, str]] = {
    "own ids too early": (on(2, own(lambda _: SEVEN)), "sent 7 of 0 blinded ids, where 0 were"),
    "a short piece": (on(9, own(lambda a: a[1:])), "sent 6 of 54 blinded ids, where 7 were due"),
    "an empty piece": (on(9, own(lambda a: a[:0])), "sent 0 of 54 blinded ids, where 7 were due"),
    "a long piece": (on(9, own(lambda a: np.tile(a, (2, 1)))), "sent 14 of 54 .* where 7 were due"),
    "a piece twice": (on(9, own(lambda a: a * 0)), "sent a blinded id more than once"),
    "more places": (on(10, lambda answer: replace(answer, places=10**8)), "sent 7 of 100000000 b"),
    "fewer places": (on(10, lambda answer: replace(answer, places=0)), "sent 7 of 0 blinded ids, "),
    "a refusal in between": (
        on(3, lambda answer: replace(answer, why="match", arrays={})),
        "did not blind exactly the 7 ids",
    ),
}


@pytest.mark.parametrize(("lie", "sentence"), LIES.values(), ids=LIES)
def test_a_piece_of_a_party_that_lies_is_refused(tmp_path: Path, lie: Any, sentence: str) -> None:
    forget_alignments()
    with pytest.raises(ConfigError, match=rf"^Party 0 {sentence}"):
        aligned(cut(tmp_path, small()), Pieces(lie))
