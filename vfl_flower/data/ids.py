"""Ids of rows: their kind, and their form as bytes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from vfl_flower.config.errors import ConfigError


def id_kind(column: Any) -> str:
    """Return ``whole numbers`` or ``texts``, else pandas' name of the kind."""
    from pandas.api.types import infer_dtype  # lazy: worker processes do not need pandas

    kind: str = infer_dtype(np.asarray(column), skipna=True)
    return {"integer": "whole numbers", "string": "texts"}.get(kind, kind)


def encode_ids(column: Any, whose: str) -> list[bytes]:
    """Encode ids of a NumPy or pandas column [n] as bytes.

    Whole numbers become ``i:`` and decimals, texts ``t:`` and UTF-8. Whole numbers of any width
    agree. Texts agree if they are identical.

    Parameters
    ----------
    whose : name of the column's file in errors: "The label holder's file".

    Raises
    ------
    ConfigError
        If there are no ids, or some are missing, repeated, or neither whole numbers nor texts. The
        error counts them and never shows them.
    """
    from pandas import isna

    values, kind = np.asarray(column), id_kind(column)
    if len(values) == 0:
        raise ConfigError(f"{whose} has no rows. Name a file with rows.")
    missing = int(isna(values).sum())
    if missing:
        raise ConfigError(
            f"{whose} has {missing} missing ids in {len(values)} rows. Drop those rows."
        )
    if kind == "whole numbers":
        pieces = (values[at : at + 65536].tolist() for at in range(0, len(values), 65536))
        encoded = [b"i:%d" % number for piece in pieces for number in piece]
    elif kind == "texts":
        encoded = [b"t:" + text.encode("utf-8", "surrogatepass") for text in values.tolist()]
    else:
        raise ConfigError(
            f"{whose} has ids that are neither whole numbers nor texts but {kind}. "
            "Store them as one of the two, the same in every file."
        )
    repeated = len(encoded) - len(set(encoded))
    if repeated:
        raise ConfigError(
            f"{whose} has {repeated} rows that repeat the id of an earlier row. "
            "Keep one row of each id."
        )
    return encoded


def encoded(one: int | str) -> bytes:
    """Encode one id, as `encode_ids` does."""
    return b"i:%d" % one if isinstance(one, int) else b"t:" + one.encode("utf-8", "surrogatepass")


def encodings(text: str) -> list[bytes]:
    """Return each encoded id that a text on a command line may mean: a text or a whole number."""
    encoded = [b"t:" + text.encode("utf-8", "surrogateescape")]
    if re.fullmatch(r"0|-?[1-9][0-9]*", text):
        encoded.append(b"i:" + text.encode())
    return encoded
