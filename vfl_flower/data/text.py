"""A column of text, read through a tokenizer in a folder on this machine.

A sample is ``input_ids`` and ``attention_mask``, int64 [L]. The tokens are cut at L and padded at
the end. The mask says which of them belong to the text. Tokenizers come from `transformers`, in
the format of ``save_pretrained``. Nothing is downloaded, and no code of a tokenizer runs.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any

import numpy as np

from vfl_flower.config.arrays import Array
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.on_disk import KeptFile
from vfl_flower.data.samples import Arrays
from vfl_flower.data.source import Preparation


class Tokenizer:
    """Convert texts to at most ``length`` tokens; ``whose`` is the subject of errors."""

    def __init__(self, folder: str, length: int, whose: str) -> None:
        self.length, self._tokenizer = length, _opened(folder, whose)

    def encode(self, texts: Sequence[str]) -> Array:
        """Return tokens, and which of them belong to the text, int32 [n, 2, L]."""
        made = np.zeros((len(texts), 2, self.length), np.int32)
        made[:, 0] = self._tokenizer.pad_token_id or 0
        if len(texts):
            encoded = self._tokenizer(list(texts), truncation=True, max_length=self.length)
            for row, tokens in zip(made, encoded["input_ids"], strict=True):
                row[0, : len(tokens)] = tokens
                row[1, : len(tokens)] = 1
        return made

    @cached_property
    def digest(self) -> str:
        """Return a digest of the tokens' meaning."""
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def as_samples(rows: Array) -> Arrays:
    """Return model input from tokens [n, 2, L]."""
    ids, mask = np.ascontiguousarray(rows.swapaxes(0, 1), np.int64)
    return {"input_ids": ids, "attention_mask": mask}


@dataclass(frozen=True)
class TextColumn(KeptFile):
    """The one text column of a csv or parquet file."""

    tokenizer: str = ""
    length: int = 64

    def learn(self, train: Array) -> Preparation:
        """Return the number of tokens of a sample, and a digest of their meaning."""
        return Preparation({}, {}, [], [], [self.length], self._tokens.digest)

    def _texts(self, preparation: Preparation) -> list[str]:
        return self.feature_names

    def _encode(self, piece: Any, preparation: Preparation) -> Array:
        if preparation.tokenizer != self._tokens.digest:
            raise ConfigError(
                f"Party {self.party} has another tokenizer than its model was trained with. Name "
                "the earlier tokenizer."
            )
        (column,) = (piece[name] for name in piece)
        if self.missing == "refuse" and column.isna().any():
            raise self.wrong(
                "has missing texts. Fill them in, drop those rows, or set missing='median' to read "
                "them as empty texts.",
                f"column {column.name!r} has {int(column.isna().sum())} in some rows.",
            )
        texts = column.astype(object).where(column.notna(), "").map(str).tolist()
        return Tokenizer(self.tokenizer, preparation.shape[0], self.whose).encode(texts)

    def _decode(self, rows: Array, preparation: Preparation) -> Arrays:
        return as_samples(rows)

    @cached_property
    def _tokens(self) -> Tokenizer:
        return Tokenizer(self.tokenizer, self.length, f"Party {self.party}'s node configuration")


@lru_cache(maxsize=4)
def _opened(folder: str, whose: str) -> Any:
    if not folder:
        raise ConfigError(
            f"{whose} reads text as tokens and names no tokenizer. Set tokenizer='FOLDER', a "
            "folder from save_pretrained of transformers."
        )
    path = Path(expanduser(folder))
    if not isdir(path):
        raise ConfigError(
            f"{whose} names a tokenizer whose folder does not exist. Save a tokenizer by "
            "save_pretrained of transformers."
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"{whose} names a tokenizer, which needs transformers. Install vfl-flower[hf]."
        ) from None
    try:
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False, use_fast=True
        )
    except Exception as error:  # the library raises many kinds of errors
        raise ConfigError(
            f"{whose} names a tokenizer that cannot be read ({type(error).__name__}). Save one by "
            "save_pretrained of transformers."
        ) from None
