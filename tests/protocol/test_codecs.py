"""Codecs: what is decoded is the paper's operator, in few bytes, and nothing else decodes."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor

from tests.conftest import Start
from vfl_flower.config.errors import VflError
from vfl_flower.config.options import CodecConfig
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol import estimators
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.codecs.bits import BitReader, number_bits, place_bits, read_places
from vfl_flower.protocol.codecs.channel import Channel, Codec
from vfl_flower.protocol.codecs.halves import BFloat16, Float16, Identity
from vfl_flower.protocol.codecs.qsgd import QSGD
from vfl_flower.protocol.codecs.top_k import TopK
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.messages import Arrays

Vector = NDArray[np.float32]

LARGEST = 2.0**100  # about 1e30
VALUES = st.floats(-LARGEST, LARGEST, width=32) | st.sampled_from([0.0, 1.0, -1.0, 2.0, 1e-20])
MODERATE = st.floats(2**-10, 1024, width=32).flatmap(lambda v: st.sampled_from([v, -v, 0.0]))
KEEP = st.integers(1, 1000).map(lambda n: n / 1000)
SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=5)
IDENTITY = Identity(CodecConfig())
FLOAT16, BFLOAT16 = Float16(CodecConfig()), BFloat16(CodecConfig())


def vectors(elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[Vector]]:
    """The vectors of a window, one for each of its steps; some have no entries."""

    def of(sizes: list[int]) -> st.SearchStrategy[list[Vector]]:
        return st.tuples(*(hnp.arrays(np.float32, n, elements=elements) for n in sizes)).map(list)

    return SIZES.flatmap(of)


def top_k(keep: float) -> TopK:
    return TopK(CodecConfig(codec="top-k", keep=keep))


def qsgd(bits: int) -> QSGD:
    return QSGD(CodecConfig(codec="qsgd", bits=bits))


def sizes_of(each: list[Vector]) -> NDArray[np.int64]:
    return np.array([len(v) for v in each], np.int64)


def encoded(codec: Codec, each: list[Vector], key: str = "key") -> Arrays:
    return codec.encode("h", np.concatenate(each)[:, None], sizes_of(each), key)


def decoded(codec: Codec, each: list[Vector], arrays: Arrays) -> list[Vector]:
    sizes = sizes_of(each)
    rows = codec.decode("h", arrays, (int(sizes.sum()), 1), sizes)
    assert rows.dtype == np.float32
    return np.split(rows[:, 0], np.cumsum(sizes)[:-1])


def squares(v: NDArray[Any]) -> float:
    return float(np.square(v, dtype=np.float64).sum())


def nbytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def normal(*shape: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# --- the operators ------------------------------------------------------------------------------


@given(vectors(VALUES), KEEP)
@example([np.zeros(7, np.float32), np.array([-3.0], np.float32)], 0.001)
def test_top_k_keeps_the_largest_entries_of_every_vector(each: list[Vector], keep: float) -> None:
    codec = top_k(keep)
    arrays = encoded(codec, each)
    kept = [math.ceil(Fraction(str(keep)) * len(v)) for v in each]
    total = sum(map(len, each))
    places = read_places(BitReader("h.bits", arrays), sum(kept), total)
    assert len(arrays["h.values"]) == len(places)
    start = 0
    for v, found, k in zip(each, decoded(codec, each, arrays), kept, strict=True):
        mine = places[(places >= start) & (places < start + len(v))] - start
        start += len(v)
        largest = np.argsort(-np.abs(v), kind="stable")[:k]  # of equals the first
        assert mine.tolist() == sorted(largest.tolist())
        rest = np.delete(np.arange(len(v)), mine)
        assert not found[rest].any()
        # float16 over the power of two above the peak: 11 bits, and at least 2^-25 of that power.
        power = 2.0 ** max(math.frexp(np.abs(v).max(initial=0.0))[1], -126)
        rounding = np.maximum(np.abs(v[mine]) * 2.0**-11, power * 2.0**-25)
        error = np.abs(found.astype(np.float64) - v)[mine]
        assert (error <= rounding).all()
        # Contractive, with alpha = k / d.
        if len(v):
            bound = (1 - k / len(v)) * squares(v) + squares(rounding)
            assert squares(found.astype(np.float64) - v) <= bound * (1 + 1e-9)


def test_top_k_of_32_bits_sends_exact_values_and_all_entries_unchanged_if_it_keeps_all() -> None:
    rows, sizes = normal(*SHAPE), TWO
    exact = TopK(CodecConfig(codec="top-k", keep=0.3, bits=32))
    found = exact.decode("h", exact.encode("h", rows, sizes, ""), SHAPE, sizes)
    kept = found != 0
    assert np.array_equal(found[kept], rows[kept]) and 0 < kept.sum() < rows.size
    rounded = top_k(0.3)
    halves = rounded.decode("h", rounded.encode("h", rows, sizes, ""), SHAPE, sizes)
    assert np.array_equal(halves != 0, kept) and (halves[kept] != rows[kept]).any()
    whole = TopK(CodecConfig(codec="top-k", keep=1.0, bits=32))
    assert np.array_equal(whole.decode("h", whole.encode("h", rows, sizes, ""), SHAPE, sizes), rows)


@pytest.mark.nightly
@given(vectors(MODERATE), st.integers(1, 16), st.integers(0, 3))
def test_qsgd_gives_one_of_the_two_next_levels(each: list[Vector], bits: int, key: int) -> None:
    s = 2**bits
    arrays = encoded(qsgd(bits), each, str(key))
    for v, found in zip(each, decoded(qsgd(bits), each, arrays), strict=True):
        norm, d = math.sqrt(squares(v)), len(v)
        if norm == 0:
            assert not found.any()
            continue
        tau = 1 + min(d / s**2, math.sqrt(d) / s)
        levels = np.abs(found) * s * tau / norm
        rounding = 1e-5 * (1 + levels)
        assert (np.abs(levels - levels.round()) <= rounding).all()
        exact = s * np.abs(v, dtype=np.float64) / norm
        assert (np.abs(levels - exact) < 1 + rounding).all()
        assert (levels <= s + rounding).all()
        assert (np.sign(found) == np.sign(v))[found != 0].all()


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("d", [3, 40])
def test_qsgd_is_contractive_in_expectation_and_unbiased_up_to_tau(bits: int, d: int) -> None:
    v, s, copies = normal(d), 2**bits, 50
    tau = 1 + min(d / s**2, math.sqrt(d) / s)
    each = [v] * copies
    found = np.concatenate(
        [decoded(qsgd(bits), each, encoded(qsgd(bits), each, str(key))) for key in range(100)]
    ).astype(np.float64)
    errors = np.square(found - v).sum(1)
    deviation = errors.std() / math.sqrt(len(errors))
    assert errors.mean() <= (1 - 1 / tau) * squares(v) + 5 * deviation
    off = tau * found.mean(0) - v
    assert (np.abs(off) <= 5 * tau * found.std(0) / math.sqrt(len(found)) + 1e-6).all()


@pytest.mark.parametrize("codec", [top_k(0.3), qsgd(2)], ids=["top-k", "qsgd"])
def test_equal_keys_give_equal_messages_and_others_draw_anew(codec: Codec) -> None:
    rows, sizes = normal(50, 4), np.array([120, 80])
    one, again, other = (codec.encode("h", rows, sizes, key) for key in ("a", "a", "b"))
    assert one.keys() == again.keys()
    assert all(np.array_equal(one[name], again[name]) for name in one)
    same = all(np.array_equal(one[name], other[name]) for name in one)
    assert same == isinstance(codec, TopK)
    renamed = codec.encode("g", rows, sizes, "a")
    same = all(np.array_equal(array, renamed["g" + name[1:]]) for name, array in one.items())
    assert same == isinstance(codec, TopK)


@given(vectors(VALUES))
@example([(1e-12 * normal(9)).astype(np.float32)])  # which float16 by itself would lose
def test_float16_rounds_to_eleven_bits_of_a_number_or_of_its_vector(each: list[Vector]) -> None:
    arrays = encoded(FLOAT16, each)
    assert nbytes(arrays) == 2 * sum(map(len, each)) + len(each)
    for v, found in zip(each, decoded(FLOAT16, each, arrays), strict=True):
        power = 2.0 ** max(math.frexp(np.abs(v).max(initial=0.0))[1], -126)
        rounding = np.maximum(np.abs(v, dtype=np.float64) * 2.0**-11, power * 2.0**-25)
        assert (np.abs(found.astype(np.float64) - v) <= rounding).all()


@pytest.mark.nightly
@given(vectors(st.floats(-(2.0**127), 2.0**127, width=32)))
def test_bfloat16_is_torch_s_and_rounds_to_eight_bits(each: list[Vector]) -> None:
    arrays = encoded(BFLOAT16, each)
    assert arrays["h"].dtype == np.uint16 and nbytes(arrays) == 2 * sum(map(len, each))
    for v, found in zip(each, decoded(BFLOAT16, each, arrays), strict=True):
        assert torch.equal(torch.from_numpy(v).bfloat16().float(), torch.from_numpy(found))
        rounding = np.maximum(np.abs(v, dtype=np.float64) * 2.0**-8, 2.0**-133)
        assert (np.abs(found.astype(np.float64) - v) <= rounding).all()


@pytest.mark.one_by_day
@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
@given(vectors(MODERATE))
def test_what_has_been_rounded_is_not_rounded_again(codec: Codec, each: list[Vector]) -> None:
    once = decoded(codec, each, encoded(codec, each))
    again = decoded(codec, once, encoded(codec, once))
    for one, other in zip(once, again, strict=True):
        assert one.tobytes() == other.tobytes()


@given(vectors(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_identity_changes_no_bit(each: list[Vector]) -> None:
    for v, found in zip(each, decoded(IDENTITY, each, encoded(IDENTITY, each)), strict=True):
        assert v.tobytes() == found.tobytes()


@pytest.mark.parametrize(
    "codec", [top_k(0.5), qsgd(4), FLOAT16, BFLOAT16], ids=["top-k", "qsgd", "float16", "bfloat16"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_not_sent(codec: Codec, value: float) -> None:
    with pytest.raises(VflError, match=r"'h' has values that are not finite\. Lower the learning"):
        encoded(codec, [np.array([1.0, value, 2.0], np.float32)])


@pytest.mark.one_by_day
@pytest.mark.parametrize("codec", ["float16", "bfloat16"])
@pytest.mark.parametrize("compression", ["direct", "error-feedback"])
def test_a_run_in_two_bytes_takes_half_of_them_and_learns_the_same(
    run: Start, codec: str, compression: str
) -> None:
    keys: dict[str, Any] = {"dataset": "breast-cancer", "batch-size": 64, "epochs": 2}
    both = {"codec": codec, "downlink-codec": codec}
    both |= {"compression": compression, "downlink-compression": compression}
    exact, rounded = run(2, keys), run(2, {**keys, **both})
    for name in ("bytes_up", "bytes_down"):
        assert 0 <= rounded.summary[name] - exact.summary[name] / 2 <= rounded.summary["exchanges"]
    assert rounded.summary["test_loss"] == pytest.approx(exact.summary["test_loss"], rel=0.01)
    assert rounded.summary["test_loss"] != exact.summary["test_loss"]


# --- bits ---------------------------------------------------------------------------------------

PLACES = st.integers(1, 2**20).flatmap(
    lambda total: st.tuples(st.just(total), st.sets(st.integers(0, total - 1), max_size=300))
)
DENSE = st.integers(1, 300).flatmap(
    lambda total: st.tuples(st.just(total), st.sets(st.integers(0, total - 1)))
)


@given(PLACES | DENSE)
def test_places_round_trip_in_few_bits(drawn: tuple[int, set[int]]) -> None:
    total, places = drawn[0], np.array(sorted(drawn[1]), np.int64)
    bits = place_bits(places, total)
    reader = BitReader("p", {"p": np.packbits(bits)})
    assert read_places(reader, len(places), total).tolist() == places.tolist()
    reader.finish()
    few = min(len(places), total - len(places))
    assert len(bits) <= min(total, few * (2 + math.log2(total / few))) if few else len(bits) == 0


@pytest.mark.parametrize("bits", [4, 2, 1])
def test_bytes_of_a_large_block_through_qsgd(bits: int) -> None:
    d, s = 60_000 * 16, 2**bits
    rows = normal(60_000, 16)
    arrays = qsgd(bits).encode("h", rows, np.array([d]), "key")
    # Entries that are not rounded to zero: each by chance s |v| / ||v||, which is below one.
    expected = s * np.abs(rows).sum(dtype=float) / math.sqrt(squares(rows))
    most = expected + 5 * math.sqrt(expected)
    sign = 1  # a bit; all levels are 1, which takes none
    norm, counts, head, padding = 4, 2 * 4, 6 / 8, 1
    rest = norm + counts + head + padding
    assert nbytes(arrays) <= most * (sign + 2 + math.log2(d / most)) / 8 + rest


def test_signs_of_a_block_without_negative_entries_take_no_bits() -> None:
    v = normal(1000)
    signed, unsigned = (encoded(qsgd(4), [each]) for each in (v, np.abs(v)))
    (found,) = decoded(qsgd(4), [v], unsigned)
    assert found.any() and (found >= 0).all()
    assert abs(nbytes(signed) - nbytes(unsigned) - np.count_nonzero(found) / 8) <= 1


# --- what does not decode -----------------------------------------------------------------------

SHAPE, TWO = (6, 5), np.array([20, 10])  # two vectors
LOSSY: dict[str, Codec] = {  # top-k keeps 4 and 2 entries
    **{"top-k": top_k(0.2), "qsgd": qsgd(2)},
    **{"float16": FLOAT16, "bfloat16": BFLOAT16},
}
NO_SIGN = np.packbits(number_bits(np.array([0, 2]), 5))


def sent(codec: Codec, sizes: NDArray[np.int64] = TWO) -> Arrays:
    return codec.encode("h", normal(*SHAPE), sizes, "key")


MESSAGES = {name: sent(codec) for name, codec in LOSSY.items()}
every_array = pytest.mark.parametrize(
    ("codec", "name"), [(codec, name) for codec, arrays in MESSAGES.items() for name in arrays]
)

Alter = Callable[[Arrays], Arrays]


def altered(name: str, change: Callable[[Any], Any]) -> Alter:
    return lambda arrays: {**arrays, name: change(arrays[name].copy())}


def first(value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[0] = value
        return array

    return change


def at(*places: int) -> Alter:
    """These six places of 30, in whatever order: of each, two low bits as they are."""
    ids = np.array(places)
    growth = np.zeros(6 + (30 >> 2), np.uint8)
    growth[(ids >> 2) + np.arange(6)] = 1
    bits = np.concatenate([growth, number_bits(ids & 3, 2)])
    return lambda arrays: {**arrays, "h.bits": np.packbits(bits)}


def refused(codec: str, arrays: Arrays) -> str:
    with pytest.raises(VflError) as error:
        LOSSY[codec].decode("h", arrays, SHAPE, TWO)
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


@every_array
@pytest.mark.parametrize(
    "change",
    [
        lambda array: array[:-1],
        lambda array: np.concatenate([array, array[:1]]),
        lambda array: array[None],
        lambda array: array.astype(np.float64),
    ],
    ids=["truncated", "too long", "two axes", "another type"],
)
def test_an_array_of_another_length_or_type_is_refused(
    codec: str, name: str, change: Callable[[Any], Any]
) -> None:
    sentence = refused(codec, altered(name, change)(MESSAGES[codec]))
    assert f"{name!r} is " in sentence or sentence == "'h' has impossible counts."


@every_array
def test_a_missing_array_is_refused(codec: str, name: str) -> None:
    arrays = {key: array for key, array in MESSAGES[codec].items() if key != name}
    assert refused(codec, arrays) == f"array {name!r} is missing."


@pytest.mark.parametrize(
    ("codec", "alter", "sentence"),
    [
        ("top-k", at(0, 1, 2, 3, 20, 31), "'h.bits' does not hold 6 increasing places below 30"),
        ("top-k", at(1, 0, 2, 3, 20, 21), "'h.bits' does not hold 6 increasing places below 30"),
        ("top-k", at(0, 1, 2, 2, 20, 21), "'h.bits' does not hold 6 increasing places below 30"),
        ("top-k", at(0, 1, 2, 3, 4, 21), "'h' keeps a wrong number of entries"),
        ("top-k", at(0, 1, 2, 20, 21, 22), "'h' keeps a wrong number of entries"),
        ("top-k", altered("h.bits", np.zeros_like), "'h.bits' does not hold 6 increasing places"),
        ("top-k", altered("h.bits", lambda bits: bits | 255), "'h.bits' does not hold 6"),
        ("top-k", altered("h.values", first(1.01)), "values above the peak"),
        ("top-k", altered("h.values", first(-2)), "values above the peak"),
        ("top-k", altered("h.values", first(np.nan)), "'h.values' has values that are not finite"),
        ("top-k", altered("h.values", first(np.inf)), "'h.values' has values that are not finite"),
        ("qsgd", altered("h.norms", first(np.nan)), "'h.norms' has values that are not finite"),
        ("qsgd", altered("h.norms", first(np.inf)), "'h.norms' has values that are not finite"),
        ("qsgd", altered("h.norms", first(-1e-9)), "'h' has a negative norm"),
        ("qsgd", altered("h.counts", lambda n: n[:0]), "'h' has impossible counts"),
        ("qsgd", altered("h.counts", lambda n: n * 0 + 31), "'h' has impossible counts"),
        ("qsgd", altered("h.counts", first(255)), "'h' has impossible counts"),
        ("qsgd", altered("h.counts", lambda n: n + 1), "'h' has impossible counts"),
        ("qsgd", altered("h.counts", lambda n: -n.astype(np.int8)), "'h.counts' is int8"),
        ("qsgd", altered("h.bits", lambda _: NO_SIGN), "'h' does not say whether it has signs"),
        ("float16", altered("h.values", first(1.01)), "values above the peak"),
        ("float16", altered("h.values", first(np.nan)), "'h.values' has values that are not fin"),
        ("bfloat16", altered("h", lambda bits: bits | 0x7F80), "'h' has values that are not fin"),
        ("bfloat16", altered("h", lambda bits: bits.view(np.int16)), "'h' is int16 of shape"),
        ("qsgd", lambda _: sent(qsgd(4)), "'h' has a level above 4"),
        ("top-k", lambda _: sent(top_k(0.2), TWO[::-1]), "'h' keeps a wrong number of entries"),
    ],
)
def test_what_no_codec_would_send_is_refused(codec: str, alter: Alter, sentence: str) -> None:
    assert sentence in refused(codec, alter(MESSAGES[codec]))


def test_places_that_could_be_are_not_refused() -> None:
    found = LOSSY["top-k"].decode("h", at(0, 1, 2, 3, 20, 29)(MESSAGES["top-k"]), SHAPE, TWO)
    assert np.flatnonzero(found).tolist() == [0, 1, 2, 3, 20, 29]


def test_places_as_a_bit_for_each_entry_are_counted_too() -> None:
    arrays = sent(top_k(0.5))
    assert arrays["h.bits"].nbytes == 4
    with pytest.raises(VflError, match=r"'h\.bits' does not hold 15 increasing places below 30"):
        top_k(0.5).decode("h", {**arrays, "h.bits": arrays["h.bits"] * 0}, SHAPE, TWO)


@pytest.mark.one_by_day
@given(st.data())
@pytest.mark.parametrize("codec", LOSSY)
def test_random_bytes_decode_to_finite_rows_or_are_refused(codec: str, data: st.DataObject) -> None:
    arrays = {}
    for name, array in MESSAGES[codec].items():
        if data.draw(st.booleans(), name):
            count = data.draw(st.just(len(array)) | st.integers(0, 40), "count")
            lengths = {"min_size": count * array.itemsize, "max_size": count * array.itemsize}
            array = np.frombuffer(data.draw(st.binary(**lengths), "bytes"), array.dtype)
        arrays[name] = array
    try:
        rows = LOSSY[codec].decode("h", arrays, SHAPE, TWO)
    except VflError:
        return
    assert rows.shape == SHAPE and rows.dtype == np.float32
    assert np.isfinite(rows).all()


# --- channels -----------------------------------------------------------------------------------

CODECS: dict[str, dict[str, Any]] = {
    "top-k": {"codec": "top-k", "keep": 0.3},
    "qsgd": {"codec": "qsgd", "bits": 2},
    "float16": {"codec": "float16"},
    "bfloat16": {"codec": "bfloat16"},
}
every_codec = pytest.mark.parametrize("keys", CODECS.values(), ids=CODECS.keys())


def uplink(config: RunConfig, table: Tensor) -> Channel:
    """One end of a link of embeddings, as the estimator of the configuration makes it."""
    return estimators.choose(config)(config).uplink(table)


def windows(*lengths: list[int], rows: int = 40, distinct: bool = True) -> list[Window]:
    generator = np.random.default_rng(0)
    found = []
    for each in lengths:
        ids = generator.permutation(rows)[: sum(each)].astype(np.int32)
        found.append(Window(ids, np.array(each, np.int32), distinct=distinct))
    return found


@every_codec
@pytest.mark.parametrize("distinct", [True, False])
def test_both_ends_of_a_channel_know_the_same_and_come_nearer(
    keys: dict[str, Any], distinct: bool
) -> None:
    config = resolve({**keys, "compression": "error-feedback"})
    ends = [uplink(config, torch.zeros(40, 6)) for _ in range(2)]
    truth = torch.from_numpy(normal(40, 6))
    errors = []
    for number, window in enumerate(windows(*[[10, 0, 20, 10]] * 30, distinct=distinct)):
        rows = truth[torch.from_numpy(window.ids).long()]
        arrays = ends[0].send("h", rows, window, str(number))
        found = ends[1].receive("h", arrays, window)
        one, other = (end.surrogate for end in ends)
        assert one is not None and other is not None
        assert torch.equal(one, other)
        assert torch.equal(found, one[torch.from_numpy(window.ids).long()])
        errors.append((one - truth).norm().item())
    assert errors[-1] < 0.05 * errors[0] < 0.05 * truth.norm().item()


@every_codec
@pytest.mark.parametrize("compression", ["direct", "error-feedback"])
def test_a_window_without_rows_goes_through_a_channel(
    keys: dict[str, Any], compression: str
) -> None:
    config = resolve({**keys, "compression": compression})
    one, other = (uplink(config, torch.zeros(40, 6)) for _ in range(2))
    (window,) = windows([0, 0])
    found = other.receive("h", one.send("h", torch.zeros(0, 6), window, "key"), window)
    assert found.shape == (0, 6)


@every_codec
def test_rows_of_a_step_are_one_vector_and_other_steps_do_not_matter(keys: dict[str, Any]) -> None:
    config = resolve(keys)
    (window,) = windows([10, 20])
    rows = torch.from_numpy(normal(30, 6))
    louder = torch.cat([rows[:10], 100 * rows[10:]])
    found = []
    for each in (rows, louder):
        arrays = uplink(config, torch.zeros(0, 6)).send("h", each, window, "key")
        found.append(uplink(config, torch.zeros(0, 6)).receive("h", arrays, window))
    assert torch.equal(found[0][:10], found[1][:10])
    assert not torch.equal(found[0][10:], found[1][10:])


@every_codec
@pytest.mark.parametrize("gone", [0, 7, 12, 29])
def test_under_scalar_privacy_a_record_changes_no_other_row(
    keys: dict[str, Any], gone: int
) -> None:
    config = resolve({"strategy": "dpzv", **keys})
    (window,) = windows([10, 20])
    rows = torch.from_numpy(normal(30, 6))
    rows[gone] *= 100
    others = np.delete(np.arange(30), gone)
    lengths = window.lengths - np.array([gone < 10, gone >= 10], np.int32)
    found = []
    for each, ids in ((rows, window), (rows[others], Window(window.ids[others], lengths))):
        arrays = uplink(config, torch.zeros(0, 6)).send("h", each, ids, "key")
        found.append(uplink(config, torch.zeros(0, 6)).receive("h", arrays, ids))
    assert torch.equal(found[0][others], found[1])


def test_a_frame_that_would_take_a_surrogate_beyond_all_bounds_is_refused() -> None:
    config = resolve({"codec": "top-k", "keep": 0.5, "compression": "error-feedback"})
    window = windows([1])[0]
    link = uplink(config, torch.zeros(40, 4))
    arrays = uplink(config, torch.zeros(40, 4)).send("h", torch.ones(1, 4), window, "key")
    largest = {**arrays, "h.exponents": np.full(1, 19, np.int8)}  # 2^19, below a million
    largest["h.values"] = np.ones_like(arrays["h.values"])
    link.receive("h", largest, window)
    assert link.surrogate is not None
    known = link.surrogate.clone()
    for exponent in (19, 127):
        largest["h.exponents"] = np.full(1, exponent, np.int8)
        with pytest.raises(VflError, match="'h' has values beyond 1,000,000, and no model"):
            link.receive("h", largest, window)
        assert torch.equal(link.surrogate, known) and known.max() == 2**19


@pytest.mark.parametrize("codec", [top_k(0.5), qsgd(4), IDENTITY, FLOAT16, BFLOAT16])
def test_names_are_the_arrays_names(codec: Codec) -> None:
    assert set(codec.names("h")) == encoded(codec, [normal(30)]).keys()
