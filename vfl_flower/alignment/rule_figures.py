"""Figures of the rules that match people, and their table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class RuleFigures:
    """Figures of a rule at one party, for ``summary.json`` and pages.

    ambiguous, their_ambiguous : people whose key stands more than once, here and at the party.
    false : matches that are false, as expected (`data.keys.expected_false`).
    chance : chance that two people of the label holder share the key, if it was asked about.
    lacks, why : columns that ``why`` lacks; or why the rule was not used.
    """

    party: int
    rule: str
    matched: int = 0
    ambiguous: int = 0
    their_ambiguous: int = 0
    false: float = 0.0
    chance: float = 0.0
    lacks: tuple[str, ...] = ()
    why: str = ""


def lines_of(figures: Sequence[RuleFigures]) -> list[str]:
    """Return the lines of a table of one party's rules; one line for rules that lack columns."""
    tried = [each for each in figures if not each.lacks]
    width = max([4, *(len(each.rule) for each in tried)])
    lines = [f"{'rule':{width}}  matched  ambiguous here, there  false"]
    for each in tried:
        ambiguous = f"{each.ambiguous}, {each.their_ambiguous}"
        numbers = f"{each.matched:7d}  {ambiguous:>21}  {each.false:.2g}"
        lines.append(f"{each.rule:{width}}  {each.why or numbers}")
    for whose in dict.fromkeys(each.why for each in figures if each.lacks):
        names = dict.fromkeys(n for each in figures if each.why == whose for n in each.lacks)
        number = sum(each.why == whose for each in figures)
        rules = "1 rule is" if number == 1 else f"{number} rules are"
        lines.append(f"{rules} not used, since {whose} lacks {', '.join(names)}.")
    return lines


def tables_of(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of all parties' tables, from ``summary.json``."""
    every = [RuleFigures(**each) for each in figures]
    lines = []
    for party in dict.fromkeys(each.party for each in every):
        mine = [each for each in every if each.party == party]
        matched = sum(each.matched for each in mine)
        lines += [f"Party {party}: {matched} people", *(f"  {line}" for line in lines_of(mine))]
    return lines
