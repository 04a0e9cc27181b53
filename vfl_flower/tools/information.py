"""Show the results of task "information" as a table."""

from __future__ import annotations

import json
from pathlib import Path

from vfl_flower.config.names import from_json, in_words
from vfl_flower.label_holder.results import INFORMATION


def table(folder: Path) -> str:
    """Return the information values of a results folder, the largest first."""
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
