"""Private set intersection: ids as bytes, the curve, both sides' steps, and worker processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl_flower.data import psi
from vfl_flower.data.psi import Blinding, Points, encode_ids, id_kind, match, shuffled
from vfl_flower.errors import ConfigError, VflError

# --- ids ----------------------------------------------------------------------------------------


def test_a_number_and_its_text_are_different_ids() -> None:
    assert encode_ids(np.array([1, -20]), "It") == [b"i:1", b"i:-20"]
    assert encode_ids(np.array(["1", "é"]), "It") == [b"t:1", b"t:\xc3\xa9"]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "Int32", object, "category"])
def test_whole_numbers_of_any_type_agree(dtype: Any) -> None:
    column = pd.Series([7, 0, 100], dtype=dtype)
    assert encode_ids(column, "It") == [b"i:7", b"i:0", b"i:100"]
    assert id_kind(column) == "whole numbers"


@pytest.mark.parametrize(
    "column",
    [
        np.array(["a", "bc"]),
        np.array(["a", "bc"], object),
        pd.Series(["a", "bc"]),
        pd.Series(["a", "bc"], dtype="string"),
        pd.Series(["a", "bc"], dtype="category"),
    ],
)
def test_texts_of_any_type_agree(column: Any) -> None:
    assert encode_ids(column, "It") == [b"t:a", b"t:bc"]
    assert id_kind(column) == "texts"


def test_numbers_beyond_64_bits_are_whole_numbers() -> None:
    assert encode_ids(np.array([2**70, 1], object), "It") == [b"i:%d" % 2**70, b"i:1"]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pd.Series([4711, None, 4712], dtype="Int64"), "1 missing ids in 3 rows"),
        (pd.Series([4711, None, None]), "2 missing ids in 3 rows"),
        (pd.Series(["4711", None]), "1 missing ids in 2 rows"),
        (pd.Series([4711.0, 4712.5]), "but floating"),
        (pd.Series([4711, "4711"], dtype=object), "but mixed-integer"),
        (pd.Series([b"4711"]), "but bytes"),
        (pd.Series([True, False]), "but boolean"),
        (pd.Series(pd.to_datetime(["4711-01-01"]).astype("datetime64[s]")), "but datetime64"),
        (pd.Series([4711, 5, 4711, 4711]), "2 rows whose id is already"),
        (pd.Series(["4711", "4711"]), "1 rows whose id is already"),
        (pd.Series([], dtype=object), "no ids"),
    ],
)
def test_ids_that_cannot_be_compared_are_refused_without_their_values(
    column: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        encode_ids(column, "Party 1's file")
    message = str(raised.value)
    assert message.startswith("Party 1's file has ") and message.endswith(".")
    assert "471" not in message


def test_the_shuffled_order_is_a_permutation_that_follows_from_the_secret() -> None:
    order = shuffled(1000, b"secret")
    assert order.dtype == np.int64 and sorted(order) == list(range(1000))
    assert (order == shuffled(1000, b"secret")).all()
    assert (order != shuffled(1000, b"Secret")).mean() > 0.98


# --- the curve ----------------------------------------------------------------------------------

RFC_9380 = [  # u and Q.x of curve25519_XMD:SHA-512_ELL2_NU_
    (
        0x608D892B641F0328523802A6603427C26E55E6F27E71A91A478148D45B5093CD,
        0x51125222DA5E763D97F3C10FCC92EA6860B9CCBBD2EB1285728F566721C1E65B,
    ),
    (
        0x46F5B22494BFEAA7F232CC8D054BE68561AF50230234D7D1D63D1D9ABECA8DA5,
        0x7D56D1E08CB0CCB92BAF069C18C49BB5A0DCD927EFF8DCF75CA921EF7F3E6EEB,
    ),
    (
        0x235FE40C443766CE7E18111C33862D66C3B33267EFA50D50F9E8E5D252A40AAA,
        0x3FBE66B9C9883D79E8407150E7C2A1C8680BEE496C62FABE4619A72B3CABE90F,
    ),
    (
        0x001E92A544463BDA9BD04DDBE3D6EED248F82DE32F522669EFC5DDCE95F46F5B,
        0x227E0BB89DE700385D19EC40E857DB6E6A3E634B1C32962F370D26F84FF19683,
    ),
]


@pytest.mark.parametrize(("element", "u"), RFC_9380)
def test_the_map_to_the_curve_is_that_of_rfc_9380(element: int, u: int) -> None:
    assert psi._on_curve(element) == u


def test_every_id_lands_on_the_curve_and_not_on_its_twist() -> None:
    seen = set()
    for number in range(1000):
        element = int.from_bytes(psi._field_element(b"i:%d" % number), "little")
        u = psi._on_curve(element)
        seen.add(u)
        squared = u**3 + 486662 * u**2 + u
        assert pow(squared, (psi._P - 1) // 2, psi._P) == 1
    assert len(seen) == 1000


def test_a_blinded_id_is_the_same_in_every_version() -> None:
    """Sides of different versions compare ids. The point is that of an independent ladder."""
    point = Blinding(bytes(range(32))).of_ids([b"i:1"]).tobytes()
    assert point.hex() == "04fd84a333e1ba9f3d53fd46daebbd9bbacb42fe6ba9dd2335a9cabad7c2f208"


@given(st.integers(0, 2**255 - 20))
def test_squares_are_told_by_eulers_criterion(number: int) -> None:
    power = pow(number, (psi._P - 1) // 2, psi._P)
    assert psi._is_square(number) is (power in (0, 1))


# --- both sides ---------------------------------------------------------------------------------


def test_blinding_by_both_sides_commutes_and_by_one_shows_nothing_in_common() -> None:
    ids = [b"i:%d" % number for number in range(50)]
    a, b = Blinding(), Blinding()
    assert (b.again(a.of_ids(ids)) == a.again(b.of_ids(ids))).all()
    once = [set(map(bytes, points)) for points in (a.of_ids(ids), b.of_ids(ids))]
    assert len(once[0] | once[1]) == 100


def test_a_stored_secret_blinds_as_before() -> None:
    blinding = Blinding()
    again = Blinding(blinding.secret).of_ids([b"i:1"])
    assert (blinding.of_ids([b"i:1"]) == again).all()
    assert again.shape == (1, 32) and again.dtype == np.uint8


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=1, unique=True),
    st.lists(st.integers(-20, 20), min_size=1, unique=True),
)
def test_the_intersection_is_that_of_the_sets(mine: list[int], theirs: list[int]) -> None:
    a, b = Blinding(), Blinding()
    my_order, their_order = shuffled(len(mine), a.secret), shuffled(len(theirs), b.secret)
    sent = a.of_ids(encode_ids(np.array(mine)[my_order], "It"))
    answer = b.again(sent), b.of_ids(encode_ids(np.array(theirs)[their_order], "It"))
    in_mine, in_theirs = match(answer[0], a.again(answer[1]))
    found = np.array(mine)[my_order[in_mine]]
    assert (found == np.array(theirs)[their_order[in_theirs]]).all()
    assert sorted(found) == sorted(set(mine) & set(theirs))


def test_a_number_does_not_match_its_text() -> None:
    a, b = Blinding(), Blinding()
    mine, theirs = encode_ids(np.array([1, 2]), "It"), encode_ids(np.array(["1", "2"]), "It")
    assert match(b.again(a.of_ids(mine)), a.again(b.of_ids(theirs)))[0].size == 0


def test_points_that_end_in_zeros_are_told_apart() -> None:
    mine = np.zeros((2, 32), np.uint8)
    mine[:, 0], mine[1, 5] = 1, 1
    in_mine, in_theirs = match(mine, mine[::-1])
    assert sorted(zip(in_mine, in_theirs, strict=True)) == [(0, 1), (1, 0)]


@pytest.mark.parametrize("u", [0, 1, psi._P - 1, psi._P])
def test_a_point_of_small_order_is_refused(u: int) -> None:
    points = Blinding().of_ids([b"i:1", b"i:2"]).copy()
    points[1] = np.frombuffer(u.to_bytes(32, "little"), np.uint8)
    with pytest.raises(VflError, match="sent blinded ids that cannot be used"):
        Blinding().again(points)


@pytest.mark.parametrize(
    "points",
    [
        np.zeros((2, 32), np.int8),
        np.zeros((2, 31), np.uint8),
        np.zeros(32, np.uint8),
        np.zeros((1, 1, 32), np.uint8),
    ],
)
def test_arrays_that_are_no_points_are_refused(points: Any) -> None:
    good = Blinding().of_ids([b"i:1"])
    for use in (Blinding().again, lambda p: match(p, good), lambda p: match(good, p)):
        with pytest.raises(VflError, match="sent blinded ids that cannot be used"):
            use(points)


def test_a_point_that_is_sent_twice_is_refused() -> None:
    points = Blinding().of_ids([b"i:1", b"i:2", b"i:3"])
    other = Blinding().of_ids([b"i:4"])
    twice = np.concatenate([points, points[:1]])
    for mine, theirs in ((points, twice), (twice, points), (other, twice), (twice, other)):
        with pytest.raises(VflError, match="more than once"):
            match(mine, theirs)


def test_the_high_bit_makes_no_second_point() -> None:
    points = Blinding().of_ids([b"i:1"])
    again = points | np.array([0] * 31 + [128], np.uint8)
    blinding = Blinding()
    with pytest.raises(VflError, match="more than once"):
        match(points, blinding.again(np.concatenate([points, again])))


# --- worker processes ---------------------------------------------------------------------------


def blind(ids: list[bytes]) -> tuple[Points, Points]:
    first = Blinding(bytes(range(32))).of_ids(ids)
    return first, Blinding(bytes(range(1, 33))).again(first)


def test_workers_give_what_one_process_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [b"i:%d" % number for number in range(23)]
    alone = blind(ids)
    monkeypatch.setattr(psi, "_ALONE", 22)
    monkeypatch.setattr(psi, "_CHUNK", 9)
    for by_workers, expected in zip(blind(ids), alone, strict=True):
        assert (by_workers == expected).all()


def test_workers_find_a_point_of_small_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psi, "_ALONE", 1)
    points = Blinding(bytes(32)).of_ids([b"i:1"]).repeat(2, axis=0)
    points[1] = 0
    with pytest.raises(VflError, match="sent blinded ids that cannot be used"):
        Blinding().again(points)


def test_a_worker_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psi, "_ALONE", 1)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(VflError, match="ended with exit code 1") as raised:
        Blinding().of_ids([b"i:4711", b"i:4712"])
    assert "471" not in str(raised.value)


def test_workers_start_from_a_script_anywhere_and_import_neither_it_nor_torch(
    tmp_path: Path,
) -> None:
    """As from Flower's console scripts: the main module is not importable, and has no guard."""
    (tmp_path / "codecs.py").write_text("raise SystemExit('imported from the working directory')")
    (tmp_path / "flwr-clientapp").write_text(
        "import sys\n"
        f"sys.path[:] = [{str(Path.cwd())!r}] + sys.path[1:]\n"
        "from vfl_flower.data import psi\n"
        "assert not {'torch', 'flwr', 'pandas'} & set(sys.modules), 'heavy imports'\n"
        "psi._ALONE = 1\n"
        "print('main', psi.Blinding(bytes(range(32))).of_ids([b'i:1', b'i:2']).tobytes().hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "flwr-clientapp"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    expected = Blinding(bytes(range(32))).of_ids([b"i:1", b"i:2"])
    assert done.stdout == f"main {expected.tobytes().hex()}\n"
