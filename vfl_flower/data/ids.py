"""Ids of rows: their kind, and their form as bytes."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.data.later import pd

_AT_ONCE = 65536  # ids to encode at a time
_DIGITS = re.compile(r"0|-?[1-9][0-9]*", re.ASCII)
_POWERS = 10 ** np.arange(20, dtype=np.uint64)

B = TypeVar("B", bytes, memoryview)
People = NDArray[np.uint64]  # a number for each person, [n]


def people_of_rows(dataset: str, rows: NDArray[Any]) -> People:
    """Return a number for the person of each row of a partitioned data set, [n]."""
    name = hashlib.blake2b(dataset.encode(), digest_size=8).digest()
    return rows.astype(np.uint64) ^ np.uint64(int.from_bytes(name))


def digests(parts: Iterable[bytes | memoryview], size: int, key: bytes = b"") -> NDArray[np.uint8]:
    """Return a digest of each part, keyed if there is a key, [n, size]."""
    made, hashed = bytearray(), hashlib.blake2b  # a list of all digests takes twice the memory
    for one in parts:
        made += hashed(one, digest_size=size, key=key).digest()
    return np.frombuffer(made, np.uint8).reshape(-1, size)


def cut(data: B, size: int) -> Iterator[B]:
    """Yield the parts of this size."""
    return (data[at : at + size] for at in range(0, len(data), size))


class WholeIds(Sequence[bytes]):
    """Encoded ids that are whole numbers [n]. They take 8 bytes each instead of 60."""

    def __init__(self, numbers: NDArray[Any]) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice | np.ndarray):
            return WholeIds(self._numbers[row])
        return b"i:%d" % int(self._numbers[row])

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self), _AT_ONCE):
            yield from [b"i:%d" % number for number in self._numbers[at : at + _AT_ONCE].tolist()]

    def in_order(self) -> NDArray[np.int64]:
        """Return all rows in the order of their encoded ids, [n].

        Encoded ids are compared digit by digit from the left, and a minus comes before all digits.
        So compare the numbers with zeros after them, and then their lengths.
        """
        negative = self._numbers < 0
        size = self._numbers.astype(np.uint64)
        size[negative] = -size[negative]  # modulo 2^64
        digits = np.maximum(np.searchsorted(_POWERS, size, side="right"), 1)
        if len(size) and digits.max() == len(_POWERS):  # 20 digits leave no room for zeros
            return np.argsort(self._numbers.astype("S20"), kind="stable")
        size *= _POWERS[len(_POWERS) - 1 - digits]
        return np.lexsort((digits, size, ~negative))


def chosen(ids: Sequence[bytes], rows: NDArray[Any]) -> Sequence[bytes]:
    """Return the ids of these rows."""
    if isinstance(ids, WholeIds):
        numbers: WholeIds = ids[rows]
        return numbers
    return [ids[row] for row in rows.tolist()]


def in_pieces(ids: Sequence[bytes], rows: NDArray[Any]) -> Iterator[Sequence[bytes]]:
    """Yield the ids of these rows in pieces, since all at once take much memory."""
    for at in range(0, len(rows), _AT_ONCE):
        yield chosen(ids, rows[at : at + _AT_ONCE])


def by_id(ids: Sequence[bytes]) -> NDArray[np.int64]:
    """Return all rows in the order of their ids, [n]."""
    if isinstance(ids, WholeIds):
        return ids.in_order()
    return np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64)


def id_kind(column: Any) -> str:
    """Return ``whole numbers`` or ``texts``, else pandas' name of the kind."""
    kind: str = pd.api.types.infer_dtype(np.asarray(column), skipna=True)
    return {"integer": "whole numbers", "string": "texts"}.get(kind, kind)


def encode_ids(column: Any, whose: str) -> Sequence[bytes]:
    """Encode ids of a NumPy or pandas column [n] as bytes.

    Ids are compared as texts. A number stands for its digits: 7 and "7" are one person, and "007"
    is another. Digits of a whole number become ``i:`` and these digits. Other texts become ``t:``
    and UTF-8. Errors count wrong ids, and never show them.

    whose : name of the column's file in errors: "The label holder's file".
    """
    values, kind = np.asarray(column), id_kind(column)
    if len(values) == 0:
        raise ConfigError(f"{whose} has no rows. Name a file with rows.")
    if missing := int(pd.isna(values).sum()):
        repeated = int(pd.Series(values).dropna().duplicated().sum())
        more = f", and {repeated} rows that repeat the id of an earlier row" * bool(repeated)
        raise ConfigError(
            f"{whose} has {missing} missing ids in {len(values)} rows{more}. Drop those rows."
        )
    made: Sequence[bytes]
    if kind == "whole numbers" and values.dtype.kind in "iu":
        ordered = np.sort(values)
        made, repeated = WholeIds(values), int((ordered[1:] == ordered[:-1]).sum())
    elif kind in ("whole numbers", "texts"):  # whole numbers of Python have any size
        made = list(map(encoded, values.tolist()))
        repeated = len(made) - len(set(made))
    else:
        raise ConfigError(
            f"{whose} has ids that are neither whole numbers nor texts but {kind}. "
            "Store them as one of the two, the same in every file."
        )
    if repeated:
        rows = "1 row that repeats" if repeated == 1 else f"{repeated} rows that repeat"
        raise ConfigError(
            f"{whose} has {rows} the id of an earlier row. Keep one row of each id. A party's file "
            "may instead set rows='last', 'mean' or 'sequence'."
        )
    return made


def encoded(one: int | str) -> bytes:
    """Encode one id, as `encode_ids` does."""
    text = one if isinstance(one, str) else str(int(one))
    return (b"i:" if _DIGITS.fullmatch(text) else b"t:") + text.encode("utf-8", "surrogatepass")


_FORMS: Mapping[str, Callable[[str], bool]] = {  # forms of ids that another side may not have
    "blanks": lambda text: text != "".join(text.split()),
    "leading zeros": lambda text: len(text) > 1 and text[0] == "0",
    "capital letters": lambda text: text != text.lower(),
    "small letters": lambda text: text != text.upper(),
    "letters of several Unicode forms": lambda text: text != normalize("NFKC", text),
}
_MISSED = 0.01  # share of a side's ids that would match too, from which on a hint is worth it
_FEWEST = 5  # such ids; fewer may be chance


def hint_of_forms(ids: Sequence[bytes], matched: NDArray[np.bool_]) -> str:
    """Return a hint if ids of one form match far more rarely than others, or the empty text.

    A side knows its own ids and which have ``matched``, and only its own log has the hint. So
    nobody learns more, as from a second comparison, of normalised ids.
    """
    if isinstance(ids, WholeIds) or matched.mean() > 1 - _MISSED:
        return ""
    least, hints = max(_MISSED * len(ids), _FEWEST), dict[tuple[int, ...], str]()
    texts = (each[2:].decode("utf-8", "surrogatepass") for each in ids)
    forms = (sum(has(text) << at for at, has in enumerate(_FORMS.values())) for text in texts)
    bits = np.fromiter(forms, np.uint8, len(ids))
    for at, name in enumerate(_FORMS):
        form = (bits >> at & 1).astype(bool)
        of_form = [(int(matched[some].sum()), int(some.sum())) for some in (form, ~form)]
        (low, rare), (high, others) = sorted(of_form, key=lambda each: each[0] / max(1, each[1]))
        due = rare * high / max(1, others)
        word = "with" if (low, rare) == of_form[0] else "without"
        if due - low >= least and low <= due / 10:
            hint = f"{low} of {rare} ids {word} {name} match, and {high} of {others} others"
            hints.setdefault((low, rare), hint)  # small letters are often the others' capitals
        elif not matched.any() and of_form[0][1] >= least:
            hint = f"{of_form[0][1]} of {len(ids)} ids have {name}, and none matches"
            hints.setdefault(of_form[0], hint)
    ask = ". If the other side writes the same ids otherwise, write them alike"
    return "; ".join(hints.values()) + ask * bool(hints)


def identities(columns: Mapping[str, Any], whose: str) -> list[bytes]:
    """Return what stands for an id of each row: a digest of its columns as they are written.

    Rows with equal columns get different digests, by their order.
    """
    pieces = zip(*map(written, columns.values()), strict=True)
    rows = ("\0".join(row) for some in pieces for row in zip(*some, strict=True))
    made = digests((row.encode("utf-8", "surrogatepass") for row in rows), 16)
    if not len(made) and columns:
        raise ConfigError(f"{whose} has no rows. Name a file with rows.")
    repeated = pd.Series(made.view(np.uint64)[:, 0])
    numbers = repeated.groupby(repeated).cumcount().tolist()
    each = zip(cut(made.tobytes(), 16), numbers, strict=True)
    return [f"p:{digest.hex()}.{number + 1}".encode() for digest, number in each]


def written(column: Any) -> Iterator[list[str]]:
    """Yield the texts of a NumPy or pandas column as it is written, in pieces."""
    for at in range(0, len(column), _AT_ONCE):
        values = np.asarray(column[at : at + _AT_ONCE], object)
        gaps = pd.isna(values).tolist()
        yield ["" if gap else str(each) for gap, each in zip(gaps, values.tolist(), strict=True)]
