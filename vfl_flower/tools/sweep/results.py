"""Write what a sweep found: sweep.json and a page; and the line to paste."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vfl_flower.config.files import write_whole
from vfl_flower.config.flower_table import packed
from vfl_flower.results.report import write_report
from vfl_flower.results.report.sweep import FILE, Swept
from vfl_flower.results.terminal import wrapped
from vfl_flower.tools.sweep.search import of_trial
from vfl_flower.tools.sweep.study import Study


def write(folder: Path, study: Study, about: Mapping[str, Any]) -> None:
    """Write ``sweep.json`` and ``report.html``."""
    found = {
        **about,
        "metric": study.metric,
        "importance": study.importance(),
        "together": [each.as_json() for each in study.together()],
        "trials": [asdict(each) for each in study.tried],
    }
    found["best"] = best(found)["number"]
    found["line"] = line(found)
    write_whole(folder / FILE, (json.dumps(found, indent=2) + "\n").encode())
    write_report([folder])


def best(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the trial with the best figure; of equal ones, the first."""
    trials = [each for each in found["trials"] if each["state"] == "finished"]
    return max(trials, key=lambda each: (each["figure"], -each["number"]))


def table(folder: Path) -> str:
    """Return the best trials, what came of the others, and the line to paste."""
    swept = Swept.read(folder)
    found = [swept.best_trials().in_terminal(), wrapped(swept.sentence)]
    if swept.shares:
        shares = ", ".join(f"{key} {share or 0:.2f}" for key, share in swept.shares.items())
        found.append(wrapped(f"Importance: {shares}."))
    return "\n".join([*found, "The best configuration:", swept.found["line"]])


def line(found: Mapping[str, Any]) -> str:
    """Return the command that runs the best configuration."""
    keys = of_trial(found["keys"], best(found)["keys"])
    words = ["vfl", "run", "-c", pasted(packed(keys))]
    if found["node_configs"]:
        words += [
            word for each in found["node_configs"] for word in ("--node-config", pasted(each))
        ]
    else:
        words += ["--parties", str(found["parties"])]
    if found["seeds"] > 1:
        words += ["--seeds", str(found["seeds"])]
    return " ".join(_quoted(word) for word in words)


def pasted(keys: Mapping[str, Any]) -> str:
    """Return options as ``-c`` takes them."""
    return " ".join(f"{key}={_value(value)}" for key, value in keys.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"' if "'" in value else f"'{value}'"
    return str(value)


def _quoted(word: str) -> str:
    """Return a word for a shell; in double quotes if they are as good."""
    if shlex.quote(word) == word:
        return word
    return shlex.quote(word) if set(word) & set('"$`\\!') else f'"{word}"'
