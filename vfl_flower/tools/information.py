"""The command `vfl information`: run its task, and show the results as a table."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from vfl_flower.config.errors import terminating
from vfl_flower.config.names import from_json, in_words
from vfl_flower.tools import options


def information(
    run_config: options.RunConfig = None,
    node_config: options.NodeConfig = None,
    parties: options.Parties = None,
    out: options.Out = "",
    engine: options.EngineName = "local",
) -> None:
    """Compute the information value of each column, before any model exists.

    The label holder sends labels with noise, or answers exact counts by bin.
    Each party bins its own columns, and keeps a table and a picture of them.
    The label holder gets the values by number: RUN/information.json.
    """
    from vfl_flower.config.plugins import ENGINES

    start = ENGINES.load(engine)
    logging.getLogger("flwr.notice").setLevel(logging.INFO)
    number, keys, node_configs = options.given(run_config, node_config, parties, out)
    keys["task"] = "information"
    with terminating():
        folder = start(number, keys, node_configs=node_configs).folder
    print(table(folder))
    print(f"results: {folder}")


def table(folder: Path) -> str:
    """Return the information values of a results folder, the largest first."""
    from vfl_flower.label_holder.results import INFORMATION

    found = json.loads((folder / INFORMATION).read_text())
    names = from_json(found.get("names"))
    rows = [
        (who if who == "label holder" else in_words(f"party {who}", names), each)
        for who, party in found["parties"].items()
        for each in party.get("features", ())
    ]
    rows.sort(key=lambda row: -(row[1]["value"] or 0.0))
    lines = [f"{'column':<40}{'IV':>8}   {'95 % interval':<18}{'bins':>4}"]
    for who, each in rows:
        name = each["feature"] if who == "label holder" else f"feature {each['feature']}"
        column, note = f"{who}, {name}"[:39], each.get("note", "")
        value, interval = "", ""
        if each["value"] is not None:
            value, interval = f"{each['value']:.4f}", f"{each['low']:.4f} to {each['high']:.4f}"
        line = f"{column:<40}{value:>8}   {interval:<18}{each['bins']:>4}"
        lines.append(f"{line}  {note}" if note else line)
    lines += [
        in_words(f"party {who} takes no part: {party['refused']}", names)
        for who, party in found["parties"].items()
        if "refused" in party
    ]
    how = "exact counts"
    if found["mode"] == "noisy":
        spent = found["spent"]
        how = f"noisy labels, epsilon = {found['epsilon']:g}"
        how += f" (all draws of these labels: {spent:g})" if spent is not None else " (repeatable)"
        if "label holder" in found["parties"]:
            how += "\nThe label holder's own columns have values by its true labels."
    return "\n".join([*lines, f"{found['rows']} training rows, by {how}"])
