"""Private set intersection: ids as bytes, the group, both sides' steps, and threads."""

import builtins
import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import rbcl
from hypothesis import given, settings
from hypothesis import strategies as st

from vfl_flower.alignment import psi
from vfl_flower.alignment.psi import Blinding, Points, challenge, digest_of_all, match, shuffled
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.data.ids import WholeIds, by_id, chosen, encode_ids, encoded, id_kind

# --- ids ----------------------------------------------------------------------------------------


def test_a_number_and_its_digits_are_one_id_and_other_texts_are_others() -> None:
    assert list(encode_ids(np.array([1, -20]), "It")) == [b"i:1", b"i:-20"]
    texts = ["1", "-20", "01", "+1", "1.0", "-0", "é", "١"]
    expected = [b"i:1", b"i:-20", *(b"t:" + each.encode() for each in texts[2:])]
    assert list(encode_ids(np.array(texts), "It")) == expected
    assert [encoded(each) for each in texts] == expected


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "Int32", object, "category"])
def test_whole_numbers_of_any_type_agree(dtype: Any) -> None:
    column = pd.Series([7, 0, 100], dtype=dtype)
    assert list(encode_ids(column, "It")) == [b"i:7", b"i:0", b"i:100"]
    assert id_kind(column) == "whole numbers"


@pytest.mark.parametrize("dtype", [str, object, None, "string", "category"])
def test_texts_of_any_type_agree(dtype: Any) -> None:
    as_array = dtype in (str, object)
    column = np.array(["a", "bc"], dtype) if as_array else pd.Series(["a", "bc"], dtype=dtype)
    assert list(encode_ids(column, "It")) == [b"t:a", b"t:bc"]
    assert id_kind(column) == "texts"


@pytest.mark.parametrize(
    "numbers",
    [
        np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 70_000),
        np.array([10, 9, -1, -10, 100, 0, 2**63 - 1, -(2**63)]),
        np.array([2**64 - 1, 0, 2**63], np.uint64),
    ],
    ids=["pieces", "signs", "unsigned"],
)
def test_whole_numbers_are_kept_in_eight_bytes_and_read_as_encoded_ids(numbers: Any) -> None:
    ids, expected = encode_ids(numbers, "It"), [b"i:%d" % each for each in numbers.tolist()]
    assert isinstance(ids, WholeIds) and numbers.itemsize == 8
    assert list(ids) == expected and len(ids) == len(expected) and ids[-1] == expected[-1]
    rows = np.random.default_rng(1).permutation(len(ids))
    assert list(chosen(ids, rows)) == chosen(expected, rows) == [expected[row] for row in rows]
    assert np.array_equal(by_id(ids), by_id(expected))
    assert digest_of_all(ids) == digest_of_all(expected[::-1])


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
        (pd.Series([4711, 5, 4711, 4711]), "2 rows that repeat the id"),
        (pd.Series(["4711", "4711"]), "1 row that repeats the id"),
        (pd.Series([], dtype=object), "no rows"),
    ],
)
def test_ids_that_cannot_be_compared_are_refused_untold(column: Any, words: str) -> None:
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


BELIEVED = "80bd07262511cdde4863f8a7434cef696750681cb9510eea557088f76d9e5065"
HASHED = [  # RFC 9496, A.3: labels, whose SHA-512 is given, and the elements
    ("by using a finer grind.", "f8f0c87cf237953c5890aec3998169005dae3eca1fbb04548c635953c817f92a"),
    ("and is not a Ristretto as some believe.", BELIEVED),
]
MULTIPLES = [  # RFC 9496, A.1: of the generator, from the first
    "e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76",
    "6a493210f7499cd17fecb510ae0cea23a110e8d5b901f8acadd3095c73a3b919",
    "94741f5d5d52755ece4f23f044ee27d5d1ea1e2bd196b462166b16152a9d0259",
    "da80862773358b466ffadfe0b3293ab3d9fd53c5ea6c955358f568322daf6a57",
]
NONE = [  # RFC 9496, A.2: encodings of no element, of each kind
    "00ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",  # not canonical
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "01ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",  # negative
    "ed57ffd8c914fb201471d1c3d245ce3c746fcbe63a3679d51b6a516ebebe0e20",
    "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371",  # no square
    "3eb858e78f5a7254d8c9731174a94f76755fd3941c0ac93735c07ba14579630e",  # another product negative
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",  # s = -1
]


@pytest.mark.parametrize(("label", "element"), HASHED)
def test_hashing_to_the_group_is_that_of_rfc_9496(label: str, element: str) -> None:
    point = ctypes.create_string_buffer(32)
    psi._libsodium()[0](point, hashlib.sha512(label.encode()).digest())
    assert point.raw.hex() == element


def test_multiplying_is_that_of_rfc_9496() -> None:
    generator = points_of(MULTIPLES[0])
    for number, element in enumerate(MULTIPLES, 1):
        by = Blinding(number.to_bytes(32, "little"))
        assert by.again(generator).tobytes().hex() == element


def points_of(*encodings: str) -> Points:
    return np.frombuffer(bytes.fromhex("".join(encodings)), np.uint8).reshape(-1, 32)


@pytest.mark.parametrize("encoding", [*NONE, "00" * 32], ids=[*range(len(NONE)), "identity"])
def test_what_is_no_element_and_the_identity_are_refused(encoding: str) -> None:
    good = Blinding().of_ids([b"i:1", b"i:2"])
    Blinding().again(good)
    with pytest.raises(VflError, match="cannot be used: one is not an element of ristretto255, or"):
        Blinding().again(np.concatenate([good, points_of(encoding)]))


def test_a_blinded_id_is_the_same_in_every_version() -> None:
    """Sides of different versions compare ids; by rbcl's own functions, and its own order."""
    digest = hashlib.sha512(b"vfl-flower psi id|" + b"i:1").digest()
    secret = bytes(range(32))
    point = rbcl.crypto_core_ristretto255_from_hash(digest)
    blinded = rbcl.crypto_scalarmult_ristretto255(secret, point)
    assert Blinding(secret).of_ids([b"i:1"]).tobytes() == blinded
    assert blinded.hex() == "22bc23cb39fd208f8423d0ca0239e78e273a7f03d8cfda8c14f2a9cd443fcc28"


def test_libsodium_leaves_no_file_behind(tmp_path: Path) -> None:
    script = "from vfl_flower.alignment.psi import Blinding; Blinding().of_ids([b'i:1'])"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert not list(tmp_path.iterdir())


def test_an_unusable_temporary_folder_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rbcl", None)
    psi._libsodium.cache_clear()

    load = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "rbcl":
            raise OSError("failed to map segment from shared object")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    try:
        with pytest.raises(
            ConfigError, match=r"^libsodium cannot be loaded: .* Name another folder in"
        ):
            psi._libsodium()
    finally:
        monkeypatch.undo()
        psi._libsodium.cache_clear()


def test_blinding_by_both_sides_commutes_and_by_one_shows_nothing_in_common() -> None:
    ids = [b"i:%d" % number for number in range(50)]
    a, b = Blinding(), Blinding()
    assert (b.again(a.of_ids(ids)) == a.again(b.of_ids(ids))).all()
    once = [set(map(bytes, points)) for points in (a.of_ids(ids), b.of_ids(ids))]
    assert len(once[0] | once[1]) == 100


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


def test_points_that_end_in_zeros_are_told_apart() -> None:
    mine = np.zeros((2, 32), np.uint8)
    mine[:, 0], mine[1, 5] = 1, 1
    in_mine, in_theirs = match(mine, mine[::-1])
    assert sorted(zip(in_mine, in_theirs, strict=True)) == [(0, 1), (1, 0)]


NO_POINTS = [((2, 32), np.int8), ((2, 31), np.uint8), (32, np.uint8), ((1, 1, 32), np.uint8)]


@pytest.mark.parametrize(("shape", "dtype"), NO_POINTS)
def test_arrays_that_are_no_points_are_refused(shape: Any, dtype: Any) -> None:
    good = Blinding().of_ids([b"i:1"])
    for use in (Blinding().again, lambda p: match(p, good), lambda p: match(good, p)):
        with pytest.raises(VflError, match=r"^blinded ids that cannot be used"):
            use(np.zeros(shape, dtype))


def test_a_point_that_is_sent_twice_is_refused() -> None:
    points = Blinding().of_ids([b"i:1", b"i:2", b"i:3"])
    other = Blinding().of_ids([b"i:4"])
    twice = np.concatenate([points, points[:1]])
    for mine, theirs in ((points, twice), (twice, points), (other, twice), (twice, other)):
        with pytest.raises(VflError, match="more than once"):
            match(mine, theirs)


def test_an_element_has_no_second_encoding() -> None:
    points = Blinding().of_ids([b"i:1"])
    high, odd = np.zeros((2, 32), np.uint8)
    high[31], odd[0] = 128, 1
    for change in (high, odd):
        with pytest.raises(VflError, match="cannot be used: one is not an element"):
            Blinding().again(points | change)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, unique=True),
    st.lists(st.integers(0, 30), min_size=1, unique=True),
)
def test_who_knows_all_ids_answers_and_nobody_else(asked: list[int], known: list[int]) -> None:
    a = Blinding()
    ids = encode_ids(np.array(asked), "It")
    mine = [one if number in known else b"i:-1" for one, number in zip(ids, asked, strict=True)]
    question, answer = challenge(ids, a.of_ids(mine))
    assert (a.again(question) == answer).all() == (set(asked) <= set(known))
    assert question.shape == answer.shape == (1, 32)


def test_a_question_is_never_asked_twice() -> None:
    points = Blinding().of_ids([b"i:1", b"i:2"])
    first, second = (challenge([b"i:1", b"i:2"], points) for _ in range(2))
    assert (first[0] != second[0]).any() and (first[1] != second[1]).any()


def test_points_whose_sum_is_nothing_are_refused() -> None:
    point = Blinding((1).to_bytes(32, "little")).of_ids([b"i:1"])
    order = 2**252 + 27742317777372353535851937790883648493
    opposite = Blinding((order - 1).to_bytes(32, "little")).of_ids([b"i:1"])
    both = np.concatenate([point, opposite])
    challenge([b"i:1", b"i:2"], np.concatenate([point, point]))
    with pytest.raises(VflError, match=r"blinded ids that cannot be used: .* or is the identity"):
        challenge([b"i:1", b"i:2"], both)


def blind(ids: list[bytes]) -> tuple[Points, Points]:
    first = Blinding(bytes(range(32))).of_ids(ids)
    return first, Blinding(bytes(range(1, 33))).again(first)


def test_chunks_give_what_one_call_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [b"i:%d" % number for number in range(23)]
    alone = blind(ids)
    monkeypatch.setattr(psi, "_CHUNK", 9)
    for by_chunks, expected in zip(blind(ids), alone, strict=True):
        assert (by_chunks == expected).all()


def test_arrays_of_any_layout_are_blinded_alike() -> None:
    points = Blinding().of_ids([b"i:1", b"i:2", b"i:3"])
    spread = np.zeros((6, 64), np.uint8)
    spread[::2, ::2] = points
    blinding = Blinding()
    for same in (spread[::2, ::2], np.asfortranarray(points), points[::-1][::-1]):
        assert (blinding.again(same) == blinding.again(points)).all()
    read_only = points.copy()
    read_only.setflags(write=False)
    assert (blinding.again(read_only) == blinding.again(points)).all()


def test_one_of_many_that_is_no_element_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psi, "_CHUNK", 3)
    points = Blinding().of_ids([b"i:%d" % number for number in range(10)])
    Blinding().again(points)
    points[7] = 0
    with pytest.raises(VflError, match="cannot be used: one is not an element"):
        Blinding().again(points)


def test_matching_by_blocks_misses_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    points = Blinding().of_ids([b"i:%d" % number for number in range(50)])
    expected = match(points[:40], points[10:])
    for block in (1, 2, 7):
        monkeypatch.setattr(psi, "_BLOCK", block)
        for found, known in zip(match(points[:40], points[10:]), expected, strict=True):
            assert (found == known).all()
    assert len(expected[0]) == 30
