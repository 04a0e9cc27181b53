"""Privacy audit: run published attacks against a system's messages.

A ClientApp wraps the parties' own: it reads the messages of party 0 (`Wiretap`), or answers in its
place (`Curious`). No attack reads the memory of a side: true labels and features measure success.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from strategies.vertical import strategy_of
from vfl_attacks import features
from vfl_attacks.canary import Canary, canary
from vfl_attacks.clients import Curious, Ids, Wiretap, summed
from vfl_attacks.explanation import of_explanation
from vfl_attacks.guessing import of_guesses
from vfl_attacks.information import of_information
from vfl_attacks.labels import Finding, direct, finding, with_known_rows
from vfl_attacks.reasons import of_reasons
from vfl_flower.api.model import quiet
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import write_json
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.config.provenance import code_digest, versions
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.label_holder.results import in_use, results_folder
from vfl_flower.launch.engines import run_local
from vfl_flower.models.bottoms import build_bottom, learn_bins
from vfl_flower.protocol import estimators
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.aggregation.secure import Secure
from vfl_flower.protocol.system import baselines
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.local import LocalGrid

_SUMMING = {"top-model": "sum", "epochs": 1, "batch-size": 64}  # Cascaded, section VI-B
_OF_OTHER_SERVERS = {  # options without meaning, or with another one, if the server sums
    *("combine", "embedding-size", "embedding-activation", "top-hidden"),
    *("on-party-failure", "parties", "out"),
}
_SMALL = 0.001  # party-lr there: the paper's least, since the user's suits another server
_INVERTED = 100  # rows: each takes a search
_SHOWN = 500  # rows whose features the label holder knows for its decoder


def audit(
    parties: int,
    run_config: Mapping[str, Any],
    known: int = 4,
    node_configs: Sequence[Mapping[str, Any]] = (),
) -> tuple[list[Finding], Canary | None, Path]:
    """Attack a system, and write ``audit.json`` into the results folder of the run.

    Some attackers know ``known`` labelled rows of each class. Node configurations are for ``match``
    alone, where keys are guessed and nothing is trained.
    """
    config = checked(run_config)
    if config.data.match:
        return _of_match(run_config, config, node_configs)
    if aggregation_of(config).any_subset:
        said = "An audit needs rows that all parties have: leave presence and subsets out."
        raise ConfigError(said)
    # Masks change the default activation: runs without masks must train the same model.
    if isinstance(aggregation_of(config), Secure):
        run_config = {**run_config, "embedding-activation": config.models.embedding_activation}
    labels = load_labels(config).train
    check_known(config, known, labels)
    folder = results_folder(config)
    trials = min(10, math.ceil(15_000 / len(labels)))  # a few rows leave much to chance
    with tqdm(total=2 + 2 * trials, unit="run", desc="audit", disable=None, leave=False) as bar:
        taps = [Wiretap(config)]
        for party in range(1, parties):
            taps.append(Wiretap(config, taps[-1], party=party))  # each wraps the one before
        run = run_local(parties, {**run_config, "out": str(folder)}, taps[-1])
        tap = taps[0]
        bar.update()
        untrained = Wiretap(config.with_values({"aggregation": "plain"}))
        # A party knows its embeddings without masks: a plain run computes them.
        plain = {**run_config, "aggregation": "plain"}
        _run({**plain, "party-lr": 0.0, "epochs": 1}, parties, untrained, run.summary)
        own = tap
        if tap.is_masked:
            own = Wiretap(resolve(plain))
            _run(plain, parties, own, run.summary)
        bar.update()
        findings = _direct_inference(parties, run_config, labels, trials, bar)
    findings += with_known_rows(config, labels, known, taps, own, untrained)
    first = tap if tap.is_masked else untrained  # if masked, the last ones reveal as much
    findings += _of_features(config, parties, taps, first, folder)
    findings += of_information(config, parties)
    findings += of_explanation(config, parties, folder, known, _SHOWN)
    findings += of_reasons(config, parties, folder, known, _SHOWN)
    claim = canary(config.with_values({"aggregation": "plain"}))  # parties are the adversary
    attacks = [asdict(each) for each in findings]
    figures = {"test_accuracy": run.summary["test_accuracy"], "attacks": attacks}
    write_report(folder, config, parties, {**figures, "epsilon": asdict(claim) if claim else None})
    return findings, claim, folder


def checked(run_config: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a run that an audit can attack, or raise `ConfigError`."""
    config = resolve(run_config)
    if config.strategy in baselines():
        systems = [name for name in SYSTEMS.names if name not in baselines()]
        raise ConfigError(
            f"strategy = {config.strategy!r} is a baseline, and an audit needs a system: choose "
            f"one of {', '.join(systems)}."
        )
    if estimators.choose(config).broadcasts:
        raise ConfigError(
            "labels = 'shared' leaves an attacker nothing to infer, since every party knows them: "
            "audit labels = 'private'."
        )
    if config.data.match:
        return config
    if config.data.own_data:
        raise ConfigError(
            "An audit reads both sides of a run, so it needs one data set divided among the "
            "parties. Name one by dataset, such as 'csv:PATH' with similar columns."
        )
    if config.data.target == "regression":
        raise ConfigError(
            "target = 'regression' has no classes for the audit's attacks to infer: leave it out."
        )
    if config.task != "train" or config.model or config.running.resume or config.running.grow:
        raise ConfigError(
            "An audit trains anew what it attacks: leave task, model, resume and grow out."
        )
    return config


def check_known(config: RunConfig, known: int, labels: Ids) -> None:
    """Raise `ConfigError` if some class has too few training rows."""
    counts = np.bincount(labels)
    if known < 1 or counts.min() <= known:
        raise ConfigError(
            f"{known} known rows per class are impossible: the smallest class of "
            f"{config.data.dataset} has {counts.min()} training rows. Choose at least 1, and fewer."
        )


def _of_match(
    run_config: Mapping[str, Any], config: RunConfig, node_configs: Sequence[Mapping[str, Any]]
) -> tuple[list[Finding], None, Path]:
    """Guess the keys of a run that matches people by rules."""
    found = of_guesses(run_config, config, node_configs)
    folder = results_folder(config)
    with in_use(folder):
        attacks = {"attacks": [asdict(each) for each in found]}
        write_report(folder, config, len(node_configs), {"failure": None}, "summary.json")
        write_report(folder, config, len(node_configs), attacks)
    return [*found], None, folder


def write_report(
    folder: Path, config: RunConfig, parties: int, figures: Any, name: str = "audit.json"
) -> None:
    """Write figures and the configuration that they are of."""
    report = {
        "strategy": config.strategy,
        "dataset": config.data.dataset,
        "parties": parties,
        **figures,
        "config": config.values(),
        "versions": versions(),
        "code": code_digest(),
    }
    write_json(folder / name, report)


def _run(
    run_config: Mapping[str, Any], parties: int, tap: Wiretap, like: Mapping[str, Any]
) -> dict[str, Any]:
    """Run for the wiretap, without a results folder; return the figures.

    Reuse the scalar noise of the run whose summary is ``like``, since calibration takes long. Show
    no warnings, since they are not about the audited run.
    """
    calibrated = like.get("noise_multiplier")
    if calibrated is not None:
        run_config = {key: run_config[key] for key in run_config.keys() - {"epsilon"}}
        run_config["noise-multiplier"] = calibrated
    config = resolve(run_config)
    strategy = strategy_of(config)(config, load_labels(config))
    with quiet(logging.ERROR):
        strategy.start(LocalGrid(tap, parties, run_config, config))
    return strategy.figures()


def _direct_inference(
    parties: int, run_config: Mapping[str, Any], labels: Ids, trials: int, bar: Any
) -> list[Finding]:
    """Attack two parties whose outputs a server sums, as in Table I of Cascaded.

    Trials differ in their seed. Besides direct inference, measure the forward embedding leak (Sun
    et al., 2022): embeddings whose sum is the output may show the class without any feedback.
    """
    config = resolve(run_config)
    given = {key: run_config[key] for key in run_config.keys() - _OF_OTHER_SERVERS} | _SUMMING
    given["aggregation"] = "plain"  # equal answers; attacks on masked uploads are left out below
    if config.models.top != "sum":
        given["party-lr"] = _SMALL
    if config.schedule.quorum:
        given["quorum"] = 2 if config.schedule.quorum >= parties else 1
    heard: list[tuple[Wiretap, ...]] = []
    first: dict[str, Any] = {}
    for trial in range(trials):
        of_trial = {**given, "seed": config.training.seed + trial}
        resolved = resolve(of_trial)
        guessing = Wiretap(resolved, guess=np.random.default_rng([resolved.training.seed, 4]))
        heard.append((Wiretap(resolved, Curious(resolved)), Wiretap(resolved, guessing), guessing))
        for tap in heard[-1][:2]:
            summary = _run(of_trial, 2, tap, first)
            first = first or summary
            bar.update()
    attackers = {
        "direct, designed queries*": "party 0: answers to its own queries",
        "direct, uploads read*": "eavesdropper: uploads and answers of party 0",
        "direct, uploads guessed*": "eavesdropper: answers of party 0",
    }
    if not estimators.choose(config).answers_by_scalars:  # uploads are not used
        del attackers["direct, uploads guessed*"]
    findings = []
    for named, taps in zip(attackers.items(), zip(*heard, strict=True), strict=False):
        pairs = [(direct(tap.gradients[tap.answered]), labels[tap.answered]) for tap in taps]
        findings.append(finding(*named, pairs))
    benign = [taps[1] for taps in heard]
    outputs = [(direct(-tap.embeddings[tap.uploaded]), labels[tap.uploaded]) for tap in benign]
    findings.append(finding("embeddings as outputs*", "eavesdropper: uploads of party 0", outputs))
    if isinstance(aggregation_of(config), Secure):  # an eavesdropper reads no upload
        read = ("uploads of", "uploads and") if len(attackers) == 3 else ("uploads of",)
        findings = [each for each in findings if not any(word in each.attacker for word in read)]
    return findings


def _of_features(
    config: RunConfig, parties: int, taps: Sequence[Wiretap], untrained: Wiretap, folder: Path
) -> list[Finding]:
    """Attack features as the label holder; draw them if they are images."""
    block = np.asarray(load_features(config, 0, parties).train)
    generator = np.random.default_rng([config.training.seed, 6])
    tap = taps[0]
    picture: Path | None = folder / "reconstruction.png"
    everywhere = np.all([each.uploaded for each in taps], axis=0)
    views = {"": ("embeddings of party 0", tap.embeddings)}
    if estimators.choose(config).uploads_per_row > 1:
        views[", pairs"] = "pairs of party 0", tap.pairs
    if len({each.embeddings.shape[1] for each in taps}) == 1:
        views[", sum"] = f"the sum over {parties} parties", summed(taps)
    findings = []
    for name, (view, rows_of) in views.items():
        success, known, rows = features.decode(
            config, block[everywhere], rows_of[everywhere], _SHOWN, generator, picture
        )
        attacker = f"label holder: {view}, features of {known} rows"
        attack = f"feature reconstruction{name}"
        findings.append(Finding(attack, attacker, "R2", success, 0.0, rows))
        picture = None
    sent, block = untrained.embeddings[untrained.uploaded], block[untrained.uploaded]
    few = generator.permutation(len(block))[:_INVERTED]
    # If a secret has drawn the party's model, the attacker's model is independent of it.
    for whose, secret in (("the seed's", b""), ("a secret's", generator.bytes(16))):
        model = build_bottom(config, 0, samples.first(block), sent.shape[1], secret=secret)
        learn_bins(model, block)  # an attacker may know how the columns are distributed
        found = features.invert(model, sent[few], block.shape[1:], generator)
        success = features.explained(block[few], found, block[few].mean(0))
        attacker = f"label holder: first embeddings of party 0, by {whose} model"
        name = f"inversion, {whose} model"
        findings.append(Finding(name, attacker, "R2", success, 0.0, len(few)))
    if block.ndim == 2:
        findings += features.drift_counts(block, sent, _SHOWN, generator)
    return findings
