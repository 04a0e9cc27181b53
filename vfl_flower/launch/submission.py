"""Submit a run to Flower's processes, watch it, and find out why it failed."""

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vfl_flower.config.errors import Terminated, VflError
from vfl_flower.config.files import make_folder
from vfl_flower.config.logs import notice
from vfl_flower.config.plugins import BOTTOMS
from vfl_flower.config.run_config import KEYS, opened
from vfl_flower.label_holder.progress import from_elsewhere
from vfl_flower.label_holder.results import SUMMARY, result_of
from vfl_flower.launch.processes import SuperLink

_STARTS = 2  # of a run that never began: Ray or Flower may start too slowly
_TELLING = re.compile(
    r"error|exception|timed out|refused|denied|no space|killed|unavailable", re.IGNORECASE
)
_BOILERPLATE = re.compile(
    r"\s|(ERROR *: *)?("  # indented lines are code in a traceback
    r"Exit Code|An unhandled exception occurred|For more information|Traceback|The above exception|"
    r"During handling|An exception occurred !!|(Simulation|ServerApp) raised an exception|"
    r"RuntimeError: (Simulation Runtime crashed|An error was encountered)|.*FutureWarning|Error$)"
)
_STARTED = re.compile(r"Successfully started run (\d+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_RECORD = re.compile(r"^(DEBUG|INFO|WARNING|ERROR) *: +", re.MULTILINE)
_ENDED = re.compile(r"Exit Code: (201|700)\b")  # an exception of the ServerApp or the simulation
_PATHS = (
    *("resume", "grow", "rerun", "tokenizer"),
    *("serve-certificate", "serve-key", "serve-token"),
)
_NO_RAY = "RuntimeError: Simulation Runtime crashed."  # no party has received anything


def from_anywhere(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run configuration with absolute paths, for processes in other folders."""
    values = opened(run_config)
    for name, value in tuple(values.items()):
        key = KEYS.get(name)
        if key is None or not isinstance(value, str):
            continue
        kind, _, path = value.partition(":")
        if name in _PATHS and value:
            values[name] = _absolute(value)
        elif (name == "dataset" or key.registry) and kind.endswith(".py"):
            values[name] = f"{_absolute(kind)}:{path}"
        elif path and (
            (name == "bottom-model" and kind in BOTTOMS.of)
            or (name == "dataset" and kind in ("files", "npz", "csv", "parquet"))
            or (name == "dataset" and kind == "hf" and Path(path).exists())  # else a hub's
        ):
            values[name] = f"{kind}:{_absolute(path)}"
    return values


def of_node_from_anywhere(node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node configuration with absolute paths, as `from_anywhere`."""
    values = dict(node_config)
    for name in ("file", "images", "states", "tokenizer"):
        if isinstance(values.get(name), str) and values[name]:
            values[name] = _absolute(values[name])
    for key in ("augment", "source", "model"):
        module, _, name = str(values.get(key, "")).partition(":")
        if module.endswith(".py"):
            values[key] = f"{_absolute(module)}:{name}"
    kind, _, folder = str(values.get("model", "")).partition(":")
    if folder and kind in BOTTOMS.of:
        values["model"] = f"{kind}:{_absolute(folder)}"
    return values


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def run_on(superlink: SuperLink, parties: int, run_config: Mapping[str, Any]) -> Path:
    """Submit a run, again if its ServerApp never ran, wait for its end, and return its folder."""
    folder = Path(run_config["out"])
    make_folder(folder)
    # Parties keep their states beside the results, since their FLWR_HOME ends with the run.
    (superlink.home / "vfl-flower").symlink_to(folder)
    log, summary = folder / "flower.log", folder / result_of(str(run_config.get("task")))
    history = folder / "history.jsonl"
    before = touched(history), touched(summary)  # a resumed run has both
    with from_elsewhere(folder) as look:
        for _ in range(_STARTS):
            read = log.stat().st_size if log.exists() else 0
            process = superlink.submit(run_config, parties, log)
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    look()
            except (KeyboardInterrupt, Terminated):
                if number := _STARTED.search(said_in(log, read)):  # it keeps a checkpoint
                    superlink.end_run(number[1], process, log)
                raise
            said = said_in(log, read)
            if sentence := sentence_of(said):
                raise VflError(sentence)
            if touched(summary) != before[1]:
                if summary.name == SUMMARY and (why := json.loads(summary.read_text())["failure"]):
                    raise VflError(why)
                return folder
            # The ServerApp touches the history before it sends anything, perhaps before Ray is up.
            if touched(history) != before[0]:
                if _NO_RAY not in said:
                    raise VflError(
                        f"Flower ended the run after it had begun: {_cause(said)} "
                        f"Its log {log} says more."
                    )
                if before[0] is None:
                    history.unlink()  # otherwise the next start finds a run here
                before = touched(history), before[1]
            notice.warning("Flower ended the run before it began: %s", _cause(said))
    raise VflError(
        f"Flower ended the run before it began, {_STARTS} times: {_cause(said)} "
        f"Its log {log} says more."
    )


def said_in(log: Path, read: int) -> str:
    """Return what Flower's log says after its first ``read`` bytes, as text without colours."""
    return _as_text(_COLOURS.sub("", log.read_bytes()[read:].decode(errors="replace")))


def touched(path: Path) -> int | None:
    """Return when a file was last written; None if it does not exist."""
    return path.stat().st_mtime_ns if path.exists() else None


def _as_text(said: str) -> str:
    """Return Flower's log with each JSON line (`config.logs`) as a record in text."""
    lines = said.split("\n")
    for at, line in enumerate(lines):
        if line.startswith('{"time": '):
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                more = [record["exception"]] if "exception" in record else []
                lines[at] = "\n".join([f"{record['level']} : {record['message']}", *more])
    return "\n".join(lines)


def sentence_of(said: str) -> str | None:
    """Return our error that ended the ServerApp: without traceback, and before an exit code."""
    _, *records = _RECORD.split(said)
    levels, texts = records[::2], records[1::2]
    for level, text, following in zip(levels, texts, texts[1:], strict=False):
        if level == "ERROR" and _ENDED.match(following) and "Traceback (most" not in text:
            return " ".join(text.split())
    return None


def _cause(said: str) -> str:
    """Return the last line of Flower's log that says what went wrong, as a sentence."""
    lines = (
        line.rstrip().strip("─│╭╮╰╯ ") if line[:1] in "│╭╰" else line for line in said.splitlines()
    )
    telling = [line for line in lines if _TELLING.search(line) and not _BOILERPLATE.match(line)]
    found = " ".join(_RECORD.sub("", telling[-1]).split()) if telling else "it does not say why"
    return f"{found[:300].rstrip('.')}."
