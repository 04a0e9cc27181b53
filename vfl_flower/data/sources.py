"""Choose a party's source of data from its node configuration."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_flower.config.checks import InvalidError, check_of
from vfl_flower.config.errors import ConfigError, first_of
from vfl_flower.config.plugins import SOURCES
from vfl_flower.data.images import ImageColumn, ImageFolder
from vfl_flower.data.on_disk import SequenceColumn, as_kind, of_size
from vfl_flower.data.own_files import OPTIONS, OwnFile
from vfl_flower.data.source import Source
from vfl_flower.data.text import TextColumn
from vfl_flower.data.withdrawn import place

_Length = Annotated[int, Field(ge=1)]
_OPTIONS: dict[str, tuple[Any, Any]] = {  # option -> its default, and its type
    "file": ("", str),
    "id": ("id", str),
    "columns": ("", str),
    "missing": ("refuse", Literal["refuse", "median"]),
    "missing-words": ("", str),
    "text": ("refuse", Literal["refuse", "one-hot", "tokens"]),
    "dates": ("refuse", Literal["refuse", "days"]),
    "monotonic": ("", str),
    "segments": ("", str),
    "match-columns": ("", str),
    "rows": ("refuse", Literal["refuse", "last", "mean", "sequence"]),
    "images": ("", str),
    "image-size": (0, _Length),
    "tokenizer": ("", str),
    "text-length": (64, _Length),
    "sequence-length": (0, _Length),
}
_CHECKS = {name: check_of(kind) for name, (_, kind) in _OPTIONS.items()}


def source_of(node_config: Mapping[str, Any], party: int) -> Source:
    """Return a party's data, from its option ``source``, ``images`` or ``file``."""
    if node_config.get("monotonic") and not node_config.get("file"):
        raise ConfigError(f"Party {party} gives monotonic, which needs a file. Leave it out.")
    if "source" in node_config:
        source: Source = SOURCES.load(str(node_config["source"]))(node_config, party)
        if "held" not in node_config:  # frames of a Python process are its own to cut
            source.withdrawn = place(node_config)
        return source
    given = {name: _option(node_config, name, party) for name in _OPTIONS}
    if given["images"]:
        if given["file"]:
            raise ConfigError(
                f"Party {party} has named a file and a folder of images. Name only one of them: a "
                "party has one kind of data."
            )
        folder = ImageFolder(given["images"], given["image-size"], party)
        folder.withdrawn = place(node_config)
        return folder
    if not given["file"]:
        raise ConfigError(
            f"Party {party} has named no file. Start its SuperNode with --node-config "
            "\"partition-id=... num-partitions=... file='/path/features.parquet' id='id'\"."
        )
    words = {name: given[name.replace("_", "-")] for name in OPTIONS}
    words["withdrawn"] = place(node_config)
    return _of_kind(OwnFile(given["file"], **words, repeats=given["rows"], party=party), given)


def _option(node_config: Mapping[str, Any], name: str, party: int) -> Any:
    """Return a party's value of an option. The empty text stands for the default."""
    if (value := node_config.get(name, "")) == "":
        return _OPTIONS[name][0]
    try:
        return _CHECKS[name](value)
    except InvalidError as error:
        raise ConfigError(
            f"Party {party}'s node configuration gives {name} = {value!r}, which {error}."
        ) from None


def _of_kind(own: OwnFile, given: Mapping[str, Any]) -> OwnFile:
    """Return a file as the source for what its feature columns hold."""
    kinds: dict[str, tuple[type[OwnFile], dict[str, Any]]] = {
        "text": (TextColumn, {"tokenizer": given["tokenizer"], "length": given["text-length"]}),
        "images": (ImageColumn, {"size": given["image-size"]}),
        "sequences": (SequenceColumn, {"length": given["sequence-length"]}),
    }
    what = "text" if own.text == "tokens" else own.kind_of_features
    if what not in kinds:
        return of_size(own)
    if len(own.feature_names) != 1 and own.repeats != "sequence":
        raise own.wrong(
            f"holds {what} beside other columns, but a party has one kind of data. Name the one "
            "column by `columns`.",
            f"its feature columns are {first_of(own.feature_names)}.",
        )
    kind, options = kinds[what]
    return as_kind(kind, own, **options)
