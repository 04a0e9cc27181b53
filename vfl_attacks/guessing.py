"""Attack keys in the privacy audit: guess which people the other side has (`match`).

An attacker makes up people of values in its own table. It takes columns as independent, and tries
the likeliest people first. It leaves its own people out. Both sides then run the real steps of
`alignment.by_rules`. The label holder asks about the people, or a party has them in its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from vfl_attacks.labels import Finding
from vfl_flower import client_app
from vfl_flower.alignment.by_rules import RuleSteps
from vfl_flower.alignment.psi import Blinding
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import own_table
from vfl_flower.data.keys import ID, KeyTable, Part, Rule, parse
from vfl_flower.data.memory import NO_COLUMN, Frame, held
from vfl_flower.data.sources import source_of
from vfl_flower.data.tables import Table
from vfl_flower.launch.engines import in_process
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.early_messages import AlignOrder

MOST = 10_000  # guesses by a rule
_OF_DATES = {"date", "year", "month", "day"}
_COUNTED = {"max-ids", "max-ids-per-day"}
_LIMITS = {"match", "match-bits", "min-rows"}  # the other rules against guesses


@dataclass(frozen=True)
class Guesses(Finding):
    """How many people an attacker finds by guessing the keys of a rule.

    ``success`` is the share of the ``rows`` people that can be found: nobody shares their key, and
    the attacker's table does not have it.
    """

    guesses: int = 0
    people: int = 0  # found
    refused: str = ""  # the rule of the other side that refused all guesses


def of_guesses(
    run_config: Mapping[str, Any],
    config: RunConfig,
    node_configs: Sequence[Mapping[str, Any]],
    most: int = 0,
) -> list[Guesses]:
    """Guess people of party 0 and of the label holder, by each rule that both can use.

    The party has the rules of a real node, also by default. The label holder has ``match-error``.
    The control has none of these. An attacker spends no guess beyond ``max-ids``.
    """
    if not node_configs:
        raise ConfigError("An audit of match needs a party's file. Name it by --node-config.")
    of_party = {"match-bits": Rules.match_bits, "min-rows": Rules.min_rows, **node_configs[0]}
    most = most or MOST
    spent = min([most, *(int(of_party.pop(key)) for key in _COUNTED & of_party.keys())])
    own, theirs = own_table(config.data), source_of(of_party, 0)
    if not isinstance(theirs, Table) or not theirs.match_columns:
        raise ConfigError("Party 0 has no match-columns, so nobody can guess its people.")
    found: list[Guesses] = []
    for rule in parse(config.data.match):
        if ID in rule.columns or own.keys.missing(rule) or theirs.keys.missing(rule):
            continue
        for attacker, mine, others in (
            ("label holder", own.keys, theirs.keys),
            ("party 0", theirs.keys, own.keys),
        ):
            table = guesses(mine, rule, most)
            known = {key for key in mine.keys(rule) if key is not None}
            alone = others.keys(rule, others.once(rule)[0])
            there, last = sum(key not in known for key in alone), None
            for name, open_ in ("", False), (", control", True):
                number = spent if attacker == "label holder" and not open_ else most
                tried = table.iloc[:number]
                if not len(tried):  # all people that it can make up are its own
                    people, refused = 0, ""
                elif last and not last.refused and last.guesses == len(tried):
                    people, refused = last.people, ""  # no rule has made a difference
                else:
                    words = {**run_config, "match": str(rule), "align": "psi"}
                    words |= {"match-error": 1.0} if open_ or attacker == "label holder" else {}
                    node = {k: v for k, v in of_party.items() if not (open_ and k in _LIMITS)}
                    with _side(attacker, own, tried, node) as (keys, of_node):
                        people, refused = _matched(words, keys, of_node)
                rate = people / max(1, len(tried))
                told = f"{len(tried):,} guesses, {people:,} people, {rate:.2g} each"
                last = Guesses(
                    f"guesses{name}: {rule}",
                    f"{attacker}: {f'refused {refused}' if refused else told}",
                    *("found", people / max(1, there), 0.0, there, len(tried), people, refused),
                )
                found.append(last)
    if not found:
        raise ConfigError("Both sides can use no rule of match. Correct match-columns.")
    return found


@contextmanager
def _side(
    attacker: str, own: Table, people: pd.DataFrame, node: Mapping[str, Any]
) -> Iterator[tuple[KeyTable, Mapping[str, Any]]]:
    """Yield the label holder's keys and the party's node. The attacker's side has these people."""
    if attacker == "label holder":
        yield KeyTable({name: people[name] for name in people}, "The guesses"), node
        return
    options: Any = {"id": NO_COLUMN, "label": NO_COLUMN, "match_columns": " ".join(people.columns)}
    with held(own, [Frame("guesses", frame=people, party=0, **options)]) as name:
        yield own.keys, {"source": "memory", "held": name}


def guesses(keys: KeyTable, rule: Rule, most: int) -> pd.DataFrame:
    """Return the likeliest people that a side does not know, by the values in its own columns."""
    spare, texts = most + len(keys), dict[str, NDArray[Any]]()
    chance, picked = np.zeros(1), dict[str, NDArray[np.int64]]()  # log chances of people so far
    for name in rule.columns:
        parts = [part for part in rule.parts if part.column == name]
        numbers = keys.groups(parts)
        whole = np.flatnonzero(numbers >= 0)
        _, first, counts = np.unique(numbers[whole], return_index=True, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:spare]
        of_dates = any(part.function in _OF_DATES for part in parts)
        column = keys.part(Part(name, "date") if of_dates else Part(name))
        texts[name] = np.array(column.texts, object)[column.codes[whole[first[order]]]]
        # Of two sorted lists, the i-th and j-th are among the likeliest only if i * j is small.
        with_each = np.minimum(len(order), spare // np.arange(1, len(chance) + 1))
        left = np.repeat(np.arange(len(chance)), with_each)
        right = np.arange(len(left)) - np.repeat(np.cumsum(with_each) - with_each, with_each)
        both = chance[left] + np.log(counts[order] / counts.sum())[right]
        likeliest = np.argsort(-both, kind="stable")[:spare]
        chance, left, right = both[likeliest], left[likeliest], right[likeliest]
        picked = {each: places[left] for each, places in picked.items()} | {name: right}
    table = pd.DataFrame({name: texts[name][places] for name, places in picked.items()})
    known, made = set(keys.keys(rule)), KeyTable({n: table[n] for n in table}, "The guesses")
    new = [place for place, key in enumerate(made.keys(rule)) if key not in known]
    return table.iloc[new[:most]].reset_index(drop=True)


def _matched(
    run_config: Mapping[str, Any], keys: KeyTable, node: Mapping[str, Any]
) -> tuple[int, str]:
    """Match by one rule, with the real steps of both sides; return the people, or why none."""
    config = resolve(run_config)
    order = AlignOrder(method="psi", config=json.dumps(config.values()))
    with (
        TemporaryDirectory() as states,
        in_process(1, run_config, config, [node], Path(states), client_app.app) as grid,
    ):
        (at,) = grid.get_node_ids()
        steps = RuleSteps(grid, config, keys, {at: 0}, Blinding(), order, lenient=False)
        steps.match()
        (figures,) = steps.matches[at].figures
    why = figures.why.removeprefix("not used: ")
    return figures.matched, "by match-error" if "match-error" in why else why
