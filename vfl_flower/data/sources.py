"""Choose a party's source of data from its node configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from vfl_flower.config.checks import InvalidError, check_of
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import SOURCES
from vfl_flower.data.images import ImageColumn, ImageFolder
from vfl_flower.data.on_disk import as_kind, of_size
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.sequences import SequenceColumn
from vfl_flower.data.source import Source
from vfl_flower.data.text import TextColumn


def source_of(node_config: Mapping[str, Any], party: int) -> Source:
    """Return a party's data, from its option ``source``, ``images`` or ``file``.

    They name code, a folder and a file.

    Raises
    ------
    ConfigError
        If an option has an invalid value, or the file cannot be read.
    """
    if "source" in node_config:
        source: Source = SOURCES.load(str(node_config["source"]))(node_config, party)
        return source
    size, tokens, values = (
        _number(node_config, key, default, party)
        for key, default in (("image-size", 0), ("text-length", 64), ("sequence-length", 0))
    )
    if node_config.get("images"):
        if node_config.get("file"):
            raise ConfigError(
                f"Party {party} has named a file and a folder of images. Name only one of them: a "
                "party has one kind of data."
            )
        return ImageFolder(str(node_config["images"]), size, party)
    own = OwnFile.of_party(node_config, party)
    if own.text == "tokens":
        tokenizer = str(node_config.get("tokenizer", ""))
        return _one_column(own, TextColumn, "text", tokenizer=tokenizer, length=tokens)
    kind = own.kind_of_features
    if kind == "images":
        return _one_column(own, ImageColumn, kind, size=size)
    if kind == "sequences":
        return _one_column(own, SequenceColumn, kind, length=values)
    return of_size(own)


def _one_column(own: OwnFile, kind: type[OwnFile], what: str, **more: Any) -> OwnFile:
    """Return the file as a source of this kind, which has a single feature column."""
    if len(own.feature_names) != 1:
        raise own.wrong(
            f"holds {what} beside other columns, but a party has one kind of data. Name the one "
            "column by `columns`.",
            f"its feature columns are {', '.join(own.feature_names[:8])}.",
        )
    return as_kind(kind, own, **more)


def _number(node_config: Mapping[str, Any], key: str, default: int, party: int) -> int:
    if key not in node_config:
        return default
    try:
        number: int = check_of(Annotated[int, Field(ge=1)])(node_config[key])
        return number
    except InvalidError as error:
        raise ConfigError(
            f"Party {party}'s node configuration gives {key} = {node_config[key]!r}, which {error}."
        ) from None
