"""The page about predictions whose outcomes were known later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vfl_flower.results.page import Page, Section, Table
from vfl_flower.results.report.assessment import assessment
from vfl_flower.results.report.features import MEANING, SCALE, drifts
from vfl_flower.results.report.read import Shown, mapping, number, shown
from vfl_flower.results.report.segments import segments
from vfl_flower.results.report.subsets import rates


def evaluation(run: Shown, found: Mapping[str, Any]) -> Page:
    """Return the page about the figures of `vfl evaluate`, beside the run's test figures."""
    people, drift = mapping(found.get("people")), mapping(found.get("drift"))
    counts = [[what, shown(number(people, what), ",.0f")] for what in people]
    now = replace(run, title="outcomes", summary={**run.summary, **found})
    indices = drifts(drift, "From the test rows to all predictions")
    parts = [
        Section("People", [Table(["people", "number"], [counts]), rates(found)]),
        assessment([now, replace(run, title="test rows of training")], of="rows"),
        segments([now]),
        Section("Drift of the scores", [indices], [SCALE, ("", MEANING)]) if drift else None,
    ]
    return Page(f"Outcomes of predictions of {run.title}", parts)
