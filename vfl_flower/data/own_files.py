"""Your own file: a party's features, or the label holder's labels and features.

A party names its file in its ``--node-config``, the label holder in the run configuration. Both use
the same words: ``file`` (label holder: ``dataset = "files:PATH"``), ``id``, ``columns``,
``missing`` and ``text``. The rows of a run are the rows that all have (`vfl_flower.alignment`), in
the order of the label holder's ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vfl_flower.config.csv_text import restored
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options import DataConfig
from vfl_flower.config.provenance import free_memory
from vfl_flower.data.tables import Table


@dataclass(frozen=True)
class OwnFile(Table):
    """A csv or parquet file, and its owner's options for it."""

    kind = "file"

    @classmethod
    def of_party(cls, node_config: Mapping[str, Any], party: int) -> OwnFile:
        """Return the file that a party's node configuration names."""
        given = {name: node_config.get(name, "") for name in ("file", *_WORDS)}
        if not all(isinstance(value, str) for value in given.values()):
            raise ConfigError(
                f"Party {party}'s node configuration has an option that is not a text. Give file, "
                "id, columns, missing and text as texts in quotes."
            )
        path = given.pop("file")
        if not path:
            raise ConfigError(
                f"Party {party} has named no file. Start its SuperNode with --node-config "
                "\"partition-id=... num-partitions=... file='/path/features.parquet' id='id'\"."
            )
        own = cls(path, **{name: value for name, value in given.items() if value}, party=party)
        for name, known in (
            ("missing", ("refuse", "median")),
            ("text", ("refuse", "one-hot", "tokens")),
        ):
            if getattr(own, name) not in known:
                raise ConfigError(
                    f"Party {party}'s node configuration has an unknown value of {name}. "
                    f"Choose one of {', '.join(known)}."
                )
        return own

    @classmethod
    def of_label_holder(cls, data: DataConfig) -> OwnFile:
        """Return the file that ``dataset = "files:PATH"`` names."""
        path = data.dataset.partition(":")[2]
        words = {name: getattr(data, name) for name in _WORDS}
        return cls(path, **words, label=data.label, segments=data.segments)

    @cached_property
    def _names(self) -> list[str]:
        """Return the columns, without pandas' columns of row numbers."""
        import pandas as pd

        if not Path(self.path).expanduser().is_file():
            raise self.wrong(
                "is not there. Correct its path.",
                f"there is no such file as {Path(self.path).expanduser().absolute()}.",
            )
        if not Path(self.path).expanduser().stat().st_size:
            raise self.wrong(
                "is empty. Give it a line of column names, and rows.", "it has 0 bytes."
            )
        try:
            if self._is_csv:
                names = [str(each) for each in pd.read_csv(Path(self.path).expanduser(), nrows=0)]
                if self.id not in names and (wrong := of_separator(names)):
                    raise self.wrong(wrong, "its first line has no commas that separate columns.")
                return names
            names = [str(name) for name in self._schema.names]
            return [name for name in names if not re.fullmatch(r"__index_level_\d+__", name)]
        except (ValueError, OSError) as error:
            raise self._unreadable(error) from None

    @cached_property
    def _schema(self) -> Any:
        """Return a parquet file's schema, cached: its reading time grows with the columns."""
        import pyarrow.parquet as pq

        return pq.read_schema(Path(self.path).expanduser())

    def _read(self, names: list[str]) -> Any:
        import pandas as pd
        import pyarrow.parquet as pq

        try:
            if self._is_csv:
                frame = pd.read_csv(Path(self.path).expanduser(), usecols=names)
                if names == [self.id]:  # the file may be a file of predictions
                    frame[self.id] = restored(frame[self.id])
                return frame
            path = Path(self.path).expanduser()
            self._check_memory(path, names)
            return as_frame(pq.read_table(path, columns=names))
        except (ValueError, OSError, NotImplementedError) as error:
            raise self._unreadable(error) from None

    @cached_property
    def count(self) -> int:
        """Return the number of rows."""
        import pyarrow.parquet as pq

        if self._is_csv:
            return len(self._frame)
        rows: int = pq.read_metadata(Path(self.path).expanduser()).num_rows
        return rows

    def _some(self, names: list[str]) -> Any:
        if self._is_csv or len(names) == len(self.feature_names):
            return super()._some(names)
        return self._read(names)[names]  # all columns at once would take much memory

    def _check_memory(self, file: Any, names: list[str]) -> None:
        """Raise `ConfigError` if columns of a parquet file need more memory than is free.

        A file of some kilobytes may hold gigabytes: one value a billion times, or one long text.
        The footer does not say how long the texts of a dictionary are. If they might need more than
        the free memory, they are read as a dictionary, and measured.
        """
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        if not self._sizes:
            self._sizes.update(_sizes(file))
        free, sizes = free_memory(), self._sizes
        needed = sum(sizes[name][0] for name in names)
        for name in (name for name in names if needed <= free < sizes[name][1]):
            for part in pq.read_table(file, columns=[name], read_dictionary=[name])[name].chunks:
                lengths = pc.binary_length(part.dictionary).cast("int64").take(part.indices)
                needed += pc.sum(lengths).as_py() or 0
        if needed > free:
            raise self.wrong(
                "needs more memory than is free. Check the file, or give fewer rows or columns.",
                f"{len(names)} columns need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
                "free.",
            )

    @cached_property
    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return the result of `_sizes` for the file, once it was read."""
        return {}

    @property
    def kind_of_features(self) -> str:
        """Return the kind of the feature columns: images, sequences, or else a table."""
        import pyarrow as pa

        names = set(self.feature_names)
        if self._is_csv:
            return "table"
        types = {field.type for field in self._schema if field.name in names}
        if any(pa.types.is_struct(each) or pa.types.is_binary(each) for each in types):
            return "images"
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        return "sequences" if any(holds(each) for each in types for holds in lists) else "table"

    @property
    def _is_csv(self) -> bool:
        suffix = Path(self.path).suffix.lower()
        if suffix not in (".csv", ".parquet"):
            raise self.wrong(
                "is neither .csv nor .parquet. Write it as one of them.", f"it ends in {suffix!r}."
            )
        return suffix == ".csv"

    def _unreadable(self, error: Exception) -> ConfigError:
        return self.wrong(
            "cannot be read as a table with a header.", f"{type(error).__name__}: {error}"
        )


def of_separator(names: Sequence[str]) -> str:
    """Return what is wrong with a csv file's separator, by its column names, if so."""
    called = {";": "semicolons", "\t": "tabs", "|": "bars"}
    found = next((each for each in called if names and each in names[0]), "")
    if not found:
        return ""
    decimal = ", decimal=','" * (found == ";")
    return (
        f"has {called[found]} between its columns, instead of commas. Rewrite it, as "
        f"pandas.read_csv(FILE, sep={found!r}{decimal}).to_csv(FILE, index=False) does."
    )


def _sizes(file: Any) -> dict[str, tuple[int, int]]:
    """Return the bytes of each column in memory, and of its texts in the worst case."""
    import pyarrow.parquet as pq

    footer = pq.read_metadata(file)
    found = dict.fromkeys(footer.schema.to_arrow_schema().names, (0, 0))
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            path, stored = column.path_in_schema, column.total_uncompressed_size
            name = path if path in found else path.split(".")[0]
            size, worst = found[name]
            text = column.physical_type == "BYTE_ARRAY" and path in found
            found[name] = (
                size + max(8 * column.num_values, stored),
                worst + text * column.num_values * stored,
            )
    return found


def as_frame(table: Any) -> Any:
    """Convert an Arrow table, or some rows of it, to a pandas frame."""
    import pandas as pd
    import pyarrow as pa

    truths = {pa.bool_(): pd.BooleanDtype()}  # otherwise a missing value makes them objects
    return table.to_pandas(ignore_metadata=True, types_mapper=truths.get)


_WORDS = ("id", "columns", "missing", "text")
