"""Measure attacks of a hostile party in `vfl audit`: success and accuracy, beside a control."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from vfl_attacks.audit import check_known, checked, write_report
from vfl_attacks.hostile import ATTACKS, Hostile
from vfl_attacks.labels import Finding
from vfl_flower.api.model import quiet
from vfl_flower.config.errors import ConfigError, unknown
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.results import in_use, results_folder
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.protocol.systems import resolve

SEEDS = 3


@dataclass(frozen=True)
class Outcome:
    """Figures of one seed: shares of the attacked rows, and the accuracy of rows left alone."""

    rows: int
    success: float
    accuracy: float
    unflagged: float | None = None
    flagged: float | None = None
    control: Outcome | None = None


def robustness(
    parties: int, run_config: Mapping[str, Any], names: Sequence[str], known: int = 4
) -> tuple[list[Finding], Path]:
    """Attack a system as a hostile party 0, and write ``audit.json`` into the results folder.

    Findings are means over `SEEDS` seeds. ``success`` is the share of test rows of other classes
    that get the target class, the rarest one. ``accuracy`` counts the rows that the party leaves
    alone. If scores are flagged, ``unflagged`` is the success without a flag, and ``flagged`` the
    share of the attacked rows with one. Beside each stands the figure of an honest party 0.
    """
    config = checked(run_config)
    chosen = _chosen(config, parties, names)
    folder, total = results_folder(config), SEEDS * len(chosen)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen}
    with (
        in_use(folder),
        quiet(logging.ERROR),
        TemporaryDirectory() as runs,
        tqdm(total=total, unit="attack", desc="audit", disable=None, leave=False) as bar,
    ):
        if any((folder / name).exists() for name in ("history.jsonl", "summary.json")):
            raise ConfigError(f"{folder} already holds a run: name another folder.")
        for each in range(SEEDS):
            keys = {**run_config, "seed": config.training.seed + each}
            for name, _, outcome in of_seed(parties, keys, chosen, Path(runs, str(each)), known):
                outcomes[name].append(outcome)
                bar.update()
        findings = [each for name in chosen for each in _findings(name, known, outcomes[name])]
        write_report(folder, config, parties, {"failure": None}, "summary.json")
        figures = {"attacks": [asdict(each) for each in findings]}
        of_seeds = {name: [asdict(each) for each in found] for name, found in outcomes.items()}
        write_report(folder, config, parties, {**figures, "seeds": of_seeds})
    return findings, folder


def _chosen(config: RunConfig, parties: int, names: Sequence[str]) -> list[str]:
    """Return the attacks of these names, or raise `ConfigError`."""
    if config.data.match or config.data.presence < 1:
        raise ConfigError("A hostile party needs rows that all have: leave match and presence out.")
    if isinstance(samples.first(load_features(config, 0, parties).train), dict):
        raise ConfigError("Attacks change samples of one tensor: name another bottom-model.")
    every = [*ATTACKS, "hostile"]
    for name in names:
        if name not in every:
            raise unknown("attack", name, every)
    return list(ATTACKS) if "hostile" in names else list(dict.fromkeys(names))


def of_seed(
    parties: int, run_config: Mapping[str, Any], names: Sequence[str], runs: Path, known: int = 4
) -> Iterator[tuple[str, Hostile, Outcome]]:
    """Yield attacks, party 0 and outcomes. Attacks of scoring alone share ``runs``/Hostile."""
    config = resolve(run_config)
    labels = load_labels(config).train
    check_known(config, known, labels)
    generator = np.random.default_rng([config.training.seed, 11])
    of_class = (np.flatnonzero(labels == each) for each in range(labels.max() + 1))
    ids = np.concatenate([generator.choice(each, known, False) for each in of_class])
    given = config, parties, (ids, labels[ids]), int(np.bincount(labels).argmin())

    def trained(kind: type[Hostile]) -> Hostile:
        client, out = kind(*given), str(runs / kind.__name__)
        run_local(parties, {**run_config, "out": out}, client)
        client.run = out
        return client

    honest = trained(Hostile)
    control = measured(honest, False)
    for name in names:
        kind, alone = ATTACKS[name], control
        if kind.trains:
            client = trained(kind)
            alone = measured(client, False)
        else:  # it has read the messages of the honest run
            client = kind(*given)
            vars(client).update(vars(honest))
        outcome = replace(measured(client, True), accuracy=alone.accuracy, control=control)
        yield name, client, outcome


def measured(client: Hostile, active: bool, **keys: Any) -> Outcome:
    """Return the figures of party 0 on the test rows, as its run's model predicts them."""
    client.active, labels = active, load_labels(client.config).tested
    with TemporaryDirectory() as place:
        file = predict_local({**keys, "model": client.run, "out": f"{place}/0.csv"}, client=client)
        return _outcome(pd.read_csv(file, dtype=str), labels, client.target)


def _outcome(found: Any, labels: Labels, target: int) -> Outcome:
    """Return the figures of predictions of the test rows."""
    classes = {str(each): number for number, each in enumerate(labels.classes)}
    predicted = found["prediction"].map(classes).to_numpy()
    others, won = labels.test != target, predicted == target
    accuracy = float((predicted == labels.test).mean())
    outcome = Outcome(int(others.sum()), float(won[others].mean()), accuracy)
    if "inconsistent" not in found:
        return outcome
    flagged = found["inconsistent"].notna().to_numpy()
    unflagged = float((won & ~flagged)[others].mean())
    return replace(outcome, unflagged=unflagged, flagged=float(flagged[others].mean()))


def _findings(name: str, known: int, outcomes: Sequence[Outcome]) -> list[Finding]:
    """Return means over the seeds, beside the figures of an honest party."""
    attacker = f"party 0: {ATTACKS[name].means}; {known} labels a class"
    rows, findings = sum(each.rows for each in outcomes), []
    for measure in ("success", "accuracy", "unflagged", "flagged"):
        values = [(getattr(each, measure), getattr(each.control, measure)) for each in outcomes]
        if values[0][0] is not None:
            found, control = np.mean(values, 0).tolist()
            findings.append(Finding(name, attacker, measure, found, control, rows))
    return findings
