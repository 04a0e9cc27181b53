"""What a sweep leaves: sweep.json, a page and pictures; the table of it, and a line to paste."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vfl_flower.config.files import write_whole
from vfl_flower.label_holder.charts import draw_lines, draw_shares
from vfl_flower.label_holder.figures import SECOND, VALIDATED, aligned
from vfl_flower.protocol.privacy.together import Claim, in_words
from vfl_flower.tools.report import report
from vfl_flower.tools.report.sweep import front_lines
from vfl_flower.tools.sweep.study import Study

_SHOWN = 10  # trials in the table


def write(folder: Path, study: Study, about: Mapping[str, Any]) -> None:
    """``sweep.json``, ``importance.png``, ``pareto.png`` if there is one, and ``report.html``."""
    found = {
        **about,
        "metric": study.metric,
        "importance": study.importance(),
        "frontier": study.frontier(),
        "together": [each.as_json() for each in study.together()],
        "trials": [asdict(each) for each in study.tried],
    }
    found["best"] = best(found)["number"]
    found["line"] = line(found)
    write_whole(folder / "sweep.json", (json.dumps(found, indent=2) + "\n").encode())
    label = f"share of the variance of {VALIDATED[study.metric]}"
    if found["importance"]:
        draw_shares(found["importance"], label, folder / "importance.png")
    if about["second"]:
        words = SECOND[about["second"]][1]
        draw_lines(front_lines(found), words, VALIDATED[study.metric], folder / "pareto.png")
    page = report([folder])
    write_whole(folder / "report.html", page.encode("utf-8", errors="xmlcharrefreplace"))


def best(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The trial with the best figure; among equals the first."""
    trials = [each for each in found["trials"] if each["state"] == "finished"]
    return max(trials, key=lambda each: (each["figure"], -each["number"]))


def table(folder: Path) -> str:
    """The best trials, or those of the frontier; what came of the others; the line to paste."""
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    trials = [each for each in found["trials"] if each["state"] == "finished"]
    trials.sort(key=lambda each: -each["figure"])
    if found["second"]:
        trials = [each for each in trials if each["number"] in found["frontier"]]
    keys = list(found["trials"][0]["keys"])
    second = [SECOND[found["second"]][1]] if found["second"] else []
    rows: list[Sequence[str]] = [("trial", *keys, VALIDATED[found["metric"]], *second, "seconds")]
    for each in trials[: None if second else _SHOWN]:
        rows.append(
            (
                str(each["number"]),
                *(f"{each['keys'][key]}" for key in keys),
                with_deviation(each),
                *([shown_second(found, each)] if second else []),
                f"{each['seconds']:.1f}",
            )
        )
    of = {state: _count(found, state) for state in ("finished", "stopped", "failed")}
    said = (
        f"{len(found['trials'])} trials: {of['finished']} finished, {of['stopped']} stopped early"
    )
    said += f", {of['failed']} failed." if of["failed"] else "."
    shares = ", ".join(f"{key} {share:.2f}" for key, share in found["importance"].items())
    notes = [said, *([f"Importance: {shares}."] if shares else [])]
    if second:
        notes.append("These are the Pareto front: no trial is better in one and as good in both.")
    notes += [in_words(Claim(**each)) for each in found["together"]]
    return "\n".join([aligned(rows, texts=0), *notes, "The best configuration:", found["line"]])


def _count(found: Mapping[str, Any], state: str) -> int:
    return sum(each["state"] == state for each in found["trials"])


def with_deviation(trial: Mapping[str, Any]) -> str:
    """A trial's figure, by several seeds with the standard deviation."""
    text, deviation = f"{trial['figure']:.4f}", trial["deviation"]
    return text if deviation is None else f"{text} ± {deviation:.4f}"


def shown_second(found: Mapping[str, Any], trial: Mapping[str, Any]) -> str:
    """A trial's second figure."""
    return f"{trial['second'] * SECOND[found['second']][2]:.4g}"


def line(found: Mapping[str, Any]) -> str:
    """The command that runs the best configuration."""
    keys = {**found["keys"], **best(found)["keys"]}
    words = ["vfl", "run", "-c", pasted(keys)]
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
    """Keys as ``-c`` takes them."""
    return " ".join(f"{key}={_value(value)}" for key, value in keys.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"' if "'" in value else f"'{value}'"
    return str(value)


def _quoted(word: str) -> str:
    """A word for a shell; in double quotes where that is as good, as in examples."""
    if shlex.quote(word) == word:
        return word
    return shlex.quote(word) if set(word) & set('"$`\\!') else f'"{word}"'
