"""Alignment with a label holder that does not keep to the protocol, and what follows from ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context

from tests.aligning import IDS, NAME, ROWS, STRANGE, LabelHolder, asked, node_in
from tests.organisations import (
    ID,
    Recorder,
    change,
    common,
    cut,
    forget_alignments,
    read,
    small,
    write,
)
from vfl_flower import client_app
from vfl_flower.alignment import at_party, pieces, psi
from vfl_flower.alignment.psi import Blinding
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.data.ids import encode_ids
from vfl_flower.launch import engines
from vfl_flower.party.inputs import own_source
from vfl_flower.party.state import load_about, load_arrays, load_scalars
from vfl_flower.transport.early_messages import Aligned, AlignOrder, CommonOrder, ConfirmOrder
from vfl_flower.transport.messages import DescribeOrder, Description, EmbedOrder, TrainOrder, Upload
from vfl_flower.transport.wire import pack

SHORT = {"epochs": 1, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}


@pytest.fixture
def node(tmp_path: Path) -> Context:
    return node_in(tmp_path)


def served(node: Context) -> Description:
    """Return the party's description when the run begins, after its alignment."""
    return asked(node, DescribeOrder(outputs=1), Description)


def assert_gives_no_rows(node: Context) -> None:
    assert "rows" not in load_arrays(node.state, "aligned")
    with pytest.raises(VflError, match="was not told which of its rows are common"):
        served(node)
    assert not load_scalars(node.state)  # it has begun no run


# --- which rows a party gives -------------------------------------------------------------------


def test_a_party_is_told_where_it_lacks_a_row(node: Context) -> None:
    node.run_config["align"] = "any"
    holder = LabelHolder(node, IDS[:55] + STRANGE[:5])
    holder.align()
    places = np.full(60, -1)
    places[5:] = holder.places
    holder.tell(places, holder.sent)
    holder.confirm()
    description = served(node)
    assert description.train_rows + description.test_rows == 60
    rows = load_arrays(node.state, "aligned")["rows"]
    assert (rows[:5] == -1).all() and set(rows[5:]) == set(range(55))
    mine = int((_train_rows(rows) >= 0).sum())
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=2, coordinated=True)
    upload = asked(node, order, Upload)
    assert 0 < len(upload.arrays["embedding"]) < 60 and mine > 30
    absent = np.flatnonzero(_train_rows(rows) < 0)[:1].astype(np.int32)
    assert len(absent)
    with pytest.raises(VflError, match="was asked for rows that it does not have"):
        asked(node, EmbedOrder(exchange=2, arrays={"ids": absent}), Upload)


def _train_rows(rows: Any) -> Any:
    return rows[np.random.default_rng(0).permutation(len(rows))[12:]]


def test_more_rows_than_ids_are_refused(node: Context) -> None:
    node.node_config["min-rows"] = 1
    holder = LabelHolder(node, IDS[:1])
    holder.align()
    with pytest.raises(VflError, match="was told 60 rows, but was sent only 1 ids"):
        holder.tell(ROWS, np.zeros(60))
    assert_gives_no_rows(node)
    holder.tell(holder.places, holder.sent)  # the one that it knows
    holder.confirm()
    assert load_arrays(node.state, "aligned")["rows"].tolist() == [0]


@pytest.mark.parametrize("known", [0, 1, 59])
def test_rows_of_strangers_are_refused_however_many_are_made_up(node: Context, known: int) -> None:
    holder = LabelHolder(node, IDS[:known] + STRANGE[known:])
    holder.align()
    places, sent = holder.places, holder.sent
    assert len(places) == known  # it names the others too, by ids that it has made up
    places = np.concatenate([places, np.setdiff1d(ROWS, places)])
    sent = np.concatenate([sent, np.setdiff1d(ROWS, sent)])
    holder.tell(places, sent)
    with pytest.raises(VflError, match="other ids than the label holder has shown to know"):
        holder.confirm()
    assert_gives_no_rows(node)
    with pytest.raises(VflError, match="was told to use rows, but was told none"):
        holder.confirm()  # nor may it try again


def test_strangers_are_found_in_a_sample(node: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_party, "_SAMPLE", 20)
    LabelHolder(node, IDS).all()
    assert "rows" in load_arrays(node.state, "aligned")
    holder = LabelHolder(node, IDS[:20] + STRANGE[:40])
    holder.align()
    holder.tell(ROWS[np.argsort(~np.isin(ROWS, holder.places))], ROWS)
    with pytest.raises(VflError, match="has shown to know"):
        holder.confirm()
    assert_gives_no_rows(node)


@pytest.mark.parametrize("guess", ["own", "again", "question", "of the first", "of another"])
def test_no_seen_point_answers_about_strangers(node: Context, guess: str) -> None:
    holder = LabelHolder(node, STRANGE)
    holder.align()
    holder.tell(ROWS, ROWS)
    arrays = holder.answer.arrays
    guesses = {
        "own": arrays["own"][:1],
        "again": arrays["again"][:1],
        "question": holder.question,
        "of the first": holder.a.again(arrays["again"][:1]),
        "of another": Blinding().again(holder.question),
    }
    with pytest.raises(VflError, match="has shown to know"):
        holder.confirm(guesses[guess])
    assert_gives_no_rows(node)


def test_rows_are_told_once_by_alignment(node: Context) -> None:
    holder = LabelHolder(node, IDS)
    with pytest.raises(VflError, match="was not asked about"):
        holder.tell(ROWS, ROWS)
    with pytest.raises(VflError, match="was told to use rows, but was told none"):
        holder.confirm(np.zeros((1, 32), np.uint8))
    holder.align()
    holder.tell(holder.places, holder.sent)
    with pytest.raises(VflError, match="was not asked about"):
        holder.tell(holder.places[1:], holder.sent[1:])
    holder.confirm()
    served(node)
    with pytest.raises(VflError, match="was not asked about"):
        holder.tell(holder.places[1:], holder.sent[1:])


LACKED, UNASKED = "rows that it does not have", "rows that it was not asked about"


@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        *((each, LACKED) for each in (ROWS + 1, ROWS - 2, ROWS * 0 - 1, ROWS[:0])),
        *((each, UNASKED) for each in (ROWS.astype(int), ROWS.astype(float), ROWS[:, None], None)),
        (ROWS // 2, "a row more than once"),
    ],
)
def test_a_party_refuses_rows_that_cannot_be(node: Context, places: Any, sentence: str) -> None:
    LabelHolder(node, IDS).align()
    given = {} if places is None else {"places": places}
    with pytest.raises(VflError, match=f"was told {sentence}"):
        asked(node, CommonOrder(arrays=given))
    assert_gives_no_rows(node)


@pytest.mark.parametrize("held", [[-1], [len(IDS)], [1, 1], [[3]], [], [0.5], [3]])
def test_a_party_refuses_a_number_of_test_rows_that_cannot_be(node: Context, held: Any) -> None:
    holder, is_right = LabelHolder(node, IDS), held == [3]
    holder.align()
    kind = np.float32 if held == [0.5] else np.int32
    order = CommonOrder(arrays={"places": ROWS, "held": np.array(held, kind)})
    with nullcontext() if is_right else pytest.raises(VflError, match="wrong number of test rows"):
        asked(node, order)


@pytest.mark.parametrize("name", ["", "0" * 31, "0" * 10_000, "../" * 10 + "ab", "A" * 32])
def test_an_alignment_has_a_name_of_32_hexadecimal_digits(node: Context, name: str) -> None:
    holder = LabelHolder(node, IDS)
    holder.align()
    holder.tell(holder.places, holder.sent)
    answer = {"answer": psi.answer(holder.about, holder.question)}
    sentence = r"by an alignment without a valid name|alignment must have at most 128"
    with pytest.raises(VflError, match=sentence):
        asked(node, ConfirmOrder(alignment=name, arrays=answer))
    assert_gives_no_rows(node)


# --- a party's own rules ------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "fewest"), [({}, 50), ({"min-rows": 7}, 7)])
def test_fewer_rows_than_allowed_are_refused(
    node: Context, own: dict[str, int], fewest: int
) -> None:
    node.node_config.update(own)
    sentence = rf"was asked to align {fewest - 1} rows, and aligns no fewer than {fewest}: its rule"
    with pytest.raises(VflError, match=sentence):
        LabelHolder(node, IDS[: fewest - 1]).align()
    assert not node.state
    holder = LabelHolder(node, IDS)
    holder.align()
    with pytest.raises(VflError, match=sentence):
        holder.tell(holder.places[1 - fewest :], holder.sent[1 - fewest :])
    assert_gives_no_rows(node)
    LabelHolder(node, IDS[:fewest]).all()
    assert served(node).train_rows < fewest


def test_a_party_that_compares_ids_has_as_many_rows_as_it_allows(node: Context) -> None:
    node.node_config.update({"align": "ids", "min-rows": 61})
    with pytest.raises(VflError, match="was asked to align 60 rows, and aligns no fewer than 61"):
        asked(node, by("ids"), Aligned)
    node.node_config["min-rows"] = 60
    with pytest.raises(VflError, match="was sent 60 blinded digests instead of one"):
        asked(node, replace(by("psi"), method="ids"), Aligned)
    asked(node, by("ids"), Aligned)


def of_all(blinding: Blinding, ids: list[bytes]) -> AlignOrder:
    return AlignOrder(method="ids", arrays={"ids": blinding.of_ids([psi.digest_of_all(ids)])})


def by(method: str) -> AlignOrder:
    ids = of_all(Blinding(), IDS)
    return ids if method == "ids" else replace(ids, method=method, arrays=blinded())


def blinded() -> dict[str, Any]:
    return {"ids": Blinding().of_ids(IDS)}


@pytest.mark.parametrize(("own", "method"), [({}, "psi"), ({"align": "ids"}, "ids")])
def test_a_party_aligns_by_its_node_configuration_alone(
    node: Context, own: dict[str, str], method: str
) -> None:
    node.node_config.update(own)
    node.run_config["align"] = "ids"  # which the label holder writes
    for other in {"psi", "ids", "none"} - {method}:
        with pytest.raises(VflError, match=f"aligns only by '{method}', .* by '{other}'. Set"):
            asked(node, by(other), Aligned)
    assert not node.state
    asked(node, by(method), Aligned)


def test_in_a_simulation_the_run_decides_unless_a_node_configuration_does(node: Context) -> None:
    node.node_config["simulated"] = True
    for method in ("psi", "ids"):
        asked(node, by(method), Aligned)
    with pytest.raises(VflError, match="was asked to align by 'none'"):
        asked(node, by("none"), Aligned)
    node.node_config["align"] = "psi"
    with pytest.raises(VflError, match="was asked to align by 'ids'"):
        asked(node, by("ids"), Aligned)
    LabelHolder(node, IDS[:1]).all()
    node.node_config["min-rows"] = 2
    with pytest.raises(VflError, match="aligns no fewer than 2"):
        LabelHolder(node, IDS[:1]).align()


def test_a_run_that_starts_all_parties_fixes_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink = MagicMock()
    monkeypatch.setattr(engines, "SuperLink", superlink)
    monkeypatch.setattr(engines, "run_on", lambda *arguments: tmp_path)
    organisations = cut(tmp_path, small())
    keys = {**organisations.keys, "out": str(tmp_path / "run"), "align": "ids"}
    engines.run_supernodes(2, keys, organisations.node_configs)
    organisations.words = [{"align": "psi"}, {}]
    engines.run_supernodes(2, keys, organisations.node_configs)
    engines.run_supernodes(2, {"dataset": "breast-cancer", "out": str(tmp_path / "other")})
    calls = superlink.return_value.__enter__.return_value.supernode.call_args_list
    assert [call.args[2].get("align") for call in calls] == ["ids", "ids", "psi", "ids", None, None]


def test_the_label_holder_limits_the_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    organisations = cut(tmp_path, small())
    monkeypatch.setattr(pieces, "MOST", 54)
    organisations.run("run", SHORT)
    monkeypatch.setattr(pieces, "MOST", 53)
    forget_alignments()
    with pytest.raises(ConfigError, match=r"^Party 0 sent 54 blinded ids, more than 53"):
        organisations.run("other", SHORT)


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        (blinded()["ids"].astype(np.int64), "they are int64"),
        (blinded()["ids"][:, :31], r"they are uint8 of shape \(60, 31\)"),
        (blinded()["ids"].ravel(), "they are uint8 of shape"),
        (np.pad(blinded()["ids"], ((1, 0), (0, 0))), "one is not an element of ristretto255, or"),
        (blinded()["ids"] | 1, "one is not an element of ristretto255, or is the identity"),
        (None, "they are float64"),
    ],
)
def test_a_party_refuses_points_that_are_none(node: Context, points: Any, sentence: str) -> None:
    given = {} if points is None else {"ids": points}
    order = AlignOrder(method="psi", arrays=given)
    with pytest.raises(VflError, match=f"was sent blinded ids .*{sentence}"):
        asked(node, order, Aligned)
    node.node_config["align"] = "ids"
    given = {name: array[:1] for name, array in given.items()}
    with pytest.raises(VflError, match="was sent blinded ids that cannot be used"):
        asked(node, replace(order, method="ids", arrays=given), Aligned)


# --- whether all have the same ids --------------------------------------------------------------


def test_who_has_other_ids_gets_no_rows_where_all_are_to_have_the_same(node: Context) -> None:
    node.node_config["align"] = "ids"
    for ids in (IDS[1:], IDS + STRANGE[:1], [*IDS[1:], STRANGE[0]], STRANGE):
        a = Blinding()
        question = asked(node, of_all(a, ids), Aligned).arrays["question"]
        with pytest.raises(VflError, match="Party 0 has other ids than the label holder has shown"):
            answer = {"answer": a.again(question)}
            asked(node, ConfirmOrder(alignment=NAME, arrays=answer))
        assert_gives_no_rows(node)
    a = Blinding()
    question = asked(node, of_all(a, IDS[::-1]), Aligned).arrays["question"]
    asked(node, ConfirmOrder(alignment=NAME, arrays={"answer": a.again(question)}))
    assert served(node).alignment == NAME


@pytest.mark.parametrize("method", ["psi", "ids"])
def test_a_party_that_asks_nonsense_is_refused(tmp_path: Path, method: str) -> None:
    organisations = cut(tmp_path, small(), known=1)

    class Asking:
        def __init__(self, question: Any) -> None:
            self.question = question

        def __call__(self, message: Any, context: Context) -> Any:
            reply = client_app.app(message, context)
            if "arrays" in reply.content and "question" in reply.content["arrays"]:
                found = {} if self.question is None else {"question": self.question}
                reply.content["arrays"] = pack(found)
            return reply

    questions = None, np.zeros((1, 32), np.uint8), np.zeros((2, 32), np.uint8)
    for number, question in enumerate(questions):
        client: Any = Asking(question)
        with pytest.raises(ConfigError, match=r"^Party 0 asked an invalid question: "):
            organisations.run(f"run-{number}", {**SHORT, "align": method}, client)


# --- that ids stay as they were -----------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        lambda frame: frame[::-1],
        lambda frame: frame.assign(**{ID: frame[ID] + 1}),
        lambda frame: frame[1:],
        lambda frame: frame.assign(**{ID: frame[ID].where(frame.index != 3, 4)}),
    ],
    ids=["another order", "other ids", "one fewer", "another"],
)
def test_a_file_that_changes_while_or_after_it_aligns_is_refused(node: Context, how: Any) -> None:
    path = Path(str(node.node_config["file"]))
    holder = LabelHolder(node, IDS)
    holder.align()
    change(path, how)
    with pytest.raises(VflError, match="has other ids than a moment ago: its file has changed"):
        holder.tell(holder.places, holder.sent)
    write(small().drop(columns="label"), path)
    holder.tell(holder.places, holder.sent)
    holder.confirm()
    served(node)
    change(path, how)
    with pytest.raises(VflError, match="has lost or changed rows of its file since they were"):
        served(node)


# --- what follows from ids ----------------------------------------------------------------------

SIX_DIGITS = [482_113, 733_951, 905_277]  # that the label holder would like to know


def digests(ids: list[bytes]) -> Iterator[bytes]:
    """Yield the forms that a digest of these ids may have in a message."""
    texts = [b"\n".join(ids), b"".join(one + b"\n" for one in ids), b"".join(ids)]
    texts += [b"vfl-flower psi id|" + texts[0], b"all:" + hashlib.sha256(texts[0]).digest()]
    for text in texts:
        for algorithm in (hashlib.sha256, hashlib.sha512, hashlib.sha1, hashlib.md5):
            yield algorithm(text).digest()
            yield algorithm(text).hexdigest().encode()
        yield Blinding((1).to_bytes(32, "little")).of_ids([text]).tobytes()  # H(id) itself


def sets_of(ids: list[bytes]) -> Iterator[list[bytes]]:
    """All, in two orders, and each alone."""
    yield ids
    yield sorted(ids)
    yield from ([one] for one in ids)


@pytest.mark.parametrize("method", ["psi", "ids"])
def test_nothing_that_a_party_sends_follows_from_ids_alone(tmp_path: Path, method: str) -> None:
    table = small()
    table.loc[: len(SIX_DIGITS) - 1, ID] = SIX_DIGITS
    organisations = cut(tmp_path, table, known=1 if method == "ids" else 0.95)
    recorder = Recorder()
    for out in ("run", "again"):  # the second is told the rows of the first
        organisations.run(out, {**SHORT, "align": method}, recorder)  # type: ignore[arg-type]
    organisations.predict("run")
    sent = b"".join(recorder.sent)
    known = [list(encode_ids(read(file)[ID], "It")) for file in organisations.files]
    known.append(list(encode_ids(np.array(common(organisations)), "It")))
    assert not [
        one for ids in known for some in sets_of(ids) for one in digests(some) if one in sent
    ]
    of_old = hashlib.sha256(b"".join(one + b"\n" for one in known[-1])).hexdigest().encode()
    assert [one for some in sets_of(known[-1]) for one in digests(some) if one in of_old]


def test_a_partys_digest_of_its_ids_stays_in_its_own_state(node: Context) -> None:
    LabelHolder(node, IDS).all()
    description = served(node)
    digest = own_source(node).digest(load_arrays(node.state, "aligned")["rows"])
    assert digest in load_about(node.state)
    assert digest not in str(description)


def test_predictions_are_for_as_many_rows_as_a_party_allows(tmp_path: Path) -> None:
    organisations = cut(tmp_path, small(), known=1)
    organisations.run("run", SHORT)
    organisations.words = [{"min-rows": 30}, {}]  # type: ignore[dict-item]
    for rows in (30, 29):
        write(pd.DataFrame({ID: 1000 + np.arange(rows)}), tmp_path / f"{rows}.csv")
    out = str(tmp_path / "said.csv")
    assert len(organisations.predict("run", tmp_path / "30.csv", out=out)) == 30
    with pytest.raises(PartyError, match="was asked to align 29 rows, and aligns no fewer than 30"):
        organisations.predict("run", tmp_path / "29.csv", out=str(tmp_path / "none.csv"))
