"""TensorBoard event files of a run's evaluations (``observer='tensorboard'``).

The files hold the numbers of history.jsonl, and nothing else of the run.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import make_folder, opened_to_append, told
from vfl_flower.label_holder.callbacks import Callback

_ROWS = ("train", "validation", "test")


class TensorBoard(Callback):
    """Write event files into ``RUN/tensorboard``, one for each start or resume.

    The step axis counts steps of the top model. If a resumed run repeats steps, TensorBoard shows
    the repeated steps and discards the earlier ones.
    """

    def __init__(self) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise ConfigError(
                "observer = 'tensorboard' needs TensorBoard, which is not installed. Run: "
                "pip install 'vfl-flower[tensorboard]'."
            ) from None
        self._events, self._summaries, self._records = event_pb2, summary_pb2, RecordWriter
        self._file: BinaryIO | None = None

    def began(self, folder: Path) -> None:
        """Open a new event file that only its owner can read."""
        make_folder(folder / "tensorboard")
        name = f"events.out.tfevents.{time.time_ns()}"
        self._path = folder / "tensorboard" / name
        self._file = opened_to_append(self._path)
        self._write(file_version="brain.Event:2")
        self._first = True

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Write the numbers of a history entry."""
        step = int(entry["steps"])
        if self._first:  # START makes TensorBoard discard later steps of earlier files
            log = self._events.SessionLog
            self._write(step=step, session_log=log(status=log.START))
            self._first = False
        value = self._summaries.Summary.Value
        values = [value(tag=tag, simple_value=figure) for tag, figure in _scalars(entry)]
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def ended(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
            self._file = None

    def _write(self, **what: Any) -> None:
        """Append one event and flush it to the file."""
        assert self._file
        event = self._events.Event(wall_time=time.time(), **what)
        with told(self._path):
            self._records(self._file).write(event.SerializeToString())
            self._file.flush()


def _scalars(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield each number with its name, grouped as TensorBoard expects. Skip mappings."""
    for key, figure in entry.items():
        if isinstance(figure, int | float) and key != "steps":
            rows, _, name = key.partition("_")
            yield (f"{rows}/{name}" if rows in _ROWS else f"spent/{key}"), float(figure)
