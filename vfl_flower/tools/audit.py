"""Privacy audit: published attacks on a system, by what its messages carry.

An attack runs the application itself, with a ClientApp in front of the parties' own that reads the
messages of party 0 (`Wiretap`), or that also answers in its place (`Curious`). An attacker has
those messages, the run configuration, and what its row of the table says it has; true labels and
features otherwise serve to count its successes. The memory of a party or of the label holder is
never looked at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from strategies.vertical import strategy_of
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import write_whole
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.config.provenance import code_digest, versions
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.label_holder.results import results_folder
from vfl_flower.launch.engines import run_local
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.protocol import estimators
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.aggregation.secure import Secure
from vfl_flower.protocol.systems import baselines, resolve
from vfl_flower.tools import audit_features as features
from vfl_flower.tools.audit_canary import Canary, canary
from vfl_flower.tools.audit_clients import Curious, Ids, Rows, Wiretap, summed
from vfl_flower.transport.local import LocalGrid

_DRAWS = 10  # of the labelled rows that an attacker knows; its success is the mean
_SUMMING = {"top-model": "sum", "epochs": 1, "batch-size": 64}  # Cascaded, section VI-B
_OF_OTHER_SERVERS = (  # keys that mean nothing, or something else, where the server sums
    "combine",
    "embedding-size",
    "embedding-activation",
    "top-hidden",
    "on-party-failure",
    "parties",
    "out",
)
_SMALL = 0.001  # party-lr there: the least that the paper tried, since the user's is for another
_INVERTED = 100  # rows, since each is searched for


@dataclass(frozen=True)
class Finding:
    """A row of the table: how often an attacker is right, beside one that only guesses.

    ``measure``: "accuracy", the share of rows whose class is named, where guessing names the most
    frequent class; with two classes "AUC"; or for features "R2", the share of variance explained.
    ``rows`` is how many rows it was measured on, over all trials.
    """

    attack: str
    attacker: str
    measure: str
    success: float
    guessing: float
    rows: int


# --- attacks: scores [R, C] of the classes, the highest of which is named -------------------------


def direct(gradients: Rows) -> Rows:
    """Label inference by the sign of the gradient of the outputs [R, C] (Fu et al., 2022).

    d loss / d y_c is p_c, less one if c is the label: only the label's component is negative.
    """
    return np.hstack([gradients, -gradients]) if gradients.shape[1] == 1 else -gradients


def by_norm(gradients: Rows, known: Ids, labels: Ids) -> Rows:
    """Label inference by the norms of gradient rows [R, E] (Li et al., 2022), on a log scale.

    A row is of the class whose known rows have the nearest mean.
    """
    logs = np.log(np.linalg.norm(gradients, axis=1) + 1e-30)
    means = _class_means(logs[known, None], labels)[:, 0]
    scores: Rows = -np.square(logs[:, None] - means)
    return scores


def by_direction(gradients: Rows, known: Ids, labels: Ids) -> Rows:
    """Label inference by the directions of gradient rows [R, E] (Li et al., 2022).

    A row is of the class whose known rows' mean direction makes the largest cosine with its own.
    """
    directions = _unit(gradients)
    scores: Rows = directions @ _unit(_class_means(directions[known], labels)).T
    return scores


def complete(embeddings: Rows, known: Ids, labels: Ids) -> Rows:
    """Model completion (Fu et al., 2022): a head for embeddings [R, E], fitted to known rows."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaled = StandardScaler().fit_transform(embeddings)
    scores: Rows = (
        LogisticRegression(max_iter=500).fit(scaled[known], labels).predict_log_proba(scaled)
    )
    return scores


def _class_means(rows: Rows, labels: Ids) -> Rows:
    return np.stack([rows[labels == each].mean(0) for each in range(labels.max() + 1)])


def _unit(rows: Rows) -> Rows:
    unit: Rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return unit


# --- the audit ----------------------------------------------------------------------------------


def audit(
    parties: int, run_config: Mapping[str, Any], known: int = 4, shown: int = 500
) -> tuple[list[Finding], Canary | None, Path]:
    """Attack a system, and write ``audit.json`` into the results folder of the run attacked.

    Parameters
    ----------
    known : labelled rows of each class that some attackers have.
    shown : rows, up to a tenth of all, whose features the label holder has for its decoder.

    Raises
    ------
    ConfigError, PartyError
        As `run_local`; or if the strategy is a baseline, or a class has too few rows.
    """
    config = resolve(run_config)
    if config.strategy in baselines():
        systems = [name for name in SYSTEMS.names if name not in baselines()]
        raise ConfigError(
            f"strategy = {config.strategy!r} is a baseline, and the audit is for systems: choose "
            f"one of {', '.join(systems)}."
        )
    if estimators.choose(config).broadcasts:
        raise ConfigError(
            "labels = 'shared' leaves an attacker nothing to infer, since every party knows them: "
            "audit labels = 'private'."
        )
    if config.data.own_data:
        raise ConfigError(
            "An audit looks at both sides of a run, so it needs a data set that is divided among "
            "the parties: name one by dataset, such as 'csv:PATH' of like columns."
        )
    if aggregation_of(config).any_subset:
        raise ConfigError(
            "An audit is of rows that all parties have: leave presence and subsets out."
        )
    if config.data.target == "regression":
        raise ConfigError(
            "target = 'regression' has no classes for the audit's attacks to infer: leave it out."
        )
    if config.task != "train" or config.model or config.running.resume or config.running.grow:
        raise ConfigError(
            "An audit trains anew what it attacks: leave task, model, resume and grow out."
        )
    # Masks change the default activation: runs without masks must train the same model.
    if isinstance(aggregation_of(config), Secure):
        run_config = {**run_config, "embedding-activation": config.models.embedding_activation}
    labels = load_labels(config).train
    counts = np.bincount(labels)
    if known < 1 or counts.min() <= known:
        raise ConfigError(
            f"{known} known rows a class cannot be: the smallest class of {config.data.dataset} "
            f"has {counts.min()} training rows, and some must be left to attack."
        )
    folder = results_folder(config)
    trials = min(10, math.ceil(15_000 / len(labels)))  # few rows alone leave much to chance
    with tqdm(total=2 + 2 * trials, unit="run", desc="audit", disable=None, leave=False) as bar:
        taps = [Wiretap(config)]
        for party in range(1, parties):
            taps.append(Wiretap(config, taps[-1], party=party))  # each reads what the last lets by
        run = run_local(parties, {**run_config, "out": str(folder)}, taps[-1])
        tap = taps[0]
        bar.update()
        untrained = Wiretap(config.with_values({"aggregation": "plain"}))
        # A party has its own embeddings, whatever it masks them by: those of a plain run.
        plain = {**run_config, "aggregation": "plain"}
        _run({**plain, "party-lr": 0.0, "epochs": 1}, parties, untrained, run.summary)
        own = tap
        if tap.is_masked:
            own = Wiretap(resolve(plain))
            _run(plain, parties, own, run.summary)
        bar.update()
        findings = _direct_inference(parties, run_config, labels, trials, bar)
    findings += _with_known_rows(config, labels, known, taps, own, untrained)
    first = tap if tap.is_masked else untrained  # of masked embeddings the last say no less
    findings += _of_features(config, parties, shown, taps, first, folder)
    claim = canary(config.with_values({"aggregation": "plain"}))  # parties are its adversary
    report = {
        "strategy": config.strategy,
        "dataset": config.data.dataset,
        "parties": parties,
        "test_accuracy": run.summary["test_accuracy"],
        "attacks": [asdict(finding) for finding in findings],
        "epsilon": asdict(claim) if claim else None,
        "config": config.values(),
        "versions": versions(),
        "code": code_digest(),
    }
    write_whole(folder / "audit.json", (json.dumps(report, indent=2) + "\n").encode())
    return findings, claim, folder


def _run(
    run_config: Mapping[str, Any], parties: int, tap: Wiretap, like: Mapping[str, Any]
) -> dict[str, Any]:
    """A run of which only what the wiretap read is kept; its figures.

    Scalar noise is that of the run that ``like`` sums up, since calibrating it anew takes long.
    """
    calibrated = like.get("noise_multiplier")
    if calibrated is not None:
        run_config = {key: run_config[key] for key in run_config.keys() - {"epsilon"}}
        run_config["noise-multiplier"] = calibrated
    config = resolve(run_config)
    strategy = strategy_of(config)(config, load_labels(config))
    strategy.start(LocalGrid(tap, parties, run_config, config))
    return strategy.figures()


def _direct_inference(
    parties: int, run_config: Mapping[str, Any], labels: Ids, trials: int, bar: Any
) -> list[Finding]:
    """Table I of Cascaded: two parties, a server that sums their outputs, one epoch, batch 64.

    Trials differ in their seed. Beside its direct inference, the forward embedding leak of Sun et
    al. (2022): embeddings that are summed to the outputs may show the class without any feedback.
    """
    config = resolve(run_config)
    given = {key: run_config[key] for key in run_config.keys() - set(_OF_OTHER_SERVERS)} | _SUMMING
    given["aggregation"] = "plain"  # answers are the same, and what is masked is left out below
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
        "direct, designed queries*": "party 0: answers to queries of its own",
        "direct, uploads read*": "eavesdropper: uploads and answers of party 0",
        "direct, uploads guessed*": "eavesdropper: answers of party 0",
    }
    if not estimators.choose(config).answers_by_scalars:  # uploads are not used
        del attackers["direct, uploads guessed*"]
    findings = [
        _finding(
            name,
            attacker,
            [(direct(tap.gradients[tap.answered]), labels[tap.answered]) for tap in taps],
        )
        for (name, attacker), taps in zip(attackers.items(), zip(*heard, strict=True), strict=False)
    ]
    benign = [taps[1] for taps in heard]
    outputs = [(direct(-tap.embeddings[tap.uploaded]), labels[tap.uploaded]) for tap in benign]
    findings.append(_finding("embeddings as outputs*", "eavesdropper: uploads of party 0", outputs))
    if isinstance(aggregation_of(config), Secure):  # of which an eavesdropper reads none
        read = ("uploads of", "uploads and") if len(attackers) == 3 else ("uploads of",)
        findings = [each for each in findings if not any(word in each.attacker for word in read)]
    return findings


def _with_known_rows(
    config: RunConfig,
    labels: Ids,
    known: int,
    taps: Sequence[Wiretap],
    own: Wiretap,
    untrained: Wiretap,
) -> list[Finding]:
    """Attacks that start from a few labelled rows of each class: all draws of those together."""
    tap, everywhere = taps[0], np.all([each.uploaded for each in taps], axis=0)
    of_messages = tap.gradients, tap.answered
    attacks = [
        ("gradient norms", "eavesdropper: messages of party 0", by_norm, *of_messages),
        ("gradient directions", "eavesdropper: messages of party 0", by_direction, *of_messages),
        ("model completion", "party 0: its embeddings", complete, own.embeddings, own.uploaded),
        (
            "model completion, control",
            "party 0, untrained: its embeddings",
            complete,
            untrained.embeddings,
            untrained.uploaded,
        ),
    ]
    if tap.is_masked:
        views = ("one party", "party 0", tap.embeddings), ("sum", "all parties", summed(taps))
        attacks += [
            (
                f"model completion, {name}",
                f"label holder: uploads of {whose}",
                complete,
                rows,
                everywhere,
            )
            for name, whose, rows in views
        ]
    findings = []
    for name, attacker, attack, rows, reached in attacks:
        rows, truth = rows[reached], labels[reached]
        of_class = [np.flatnonzero(truth == each) for each in range(labels.max() + 1)]
        if min(map(len, of_class)) <= known:
            raise ConfigError(
                f"Of some class no more than {known} rows were in a mini-batch, and some must be "
                "left to attack: give the run more epochs, or attackers fewer known rows."
            )
        generator = np.random.default_rng([config.training.seed, 5])
        draws = []
        for _ in range(_DRAWS):
            ids = np.concatenate([generator.choice(each, known, False) for each in of_class])
            scores = attack(rows, ids, truth[ids])
            draws.append((np.delete(scores, ids, 0), np.delete(truth, ids)))
        findings.append(_finding(name, f"{attacker}, {known} labels a class", draws))
    return findings


def _finding(attack: str, attacker: str, trials: Sequence[tuple[Rows, Ids]]) -> Finding:
    """How often the highest score is that of the true class; with two classes, the AUC.

    Parameters
    ----------
    trials : of each, scores [R, C] and labels [R]; the mean over trials is reported.
    """
    from sklearn.metrics import roc_auc_score

    rows = sum(len(truth) for _, truth in trials)
    if trials[0][0].shape[1] == 2:
        areas = [roc_auc_score(truth, scores[:, 1] - scores[:, 0]) for scores, truth in trials]
        return Finding(attack, attacker, "AUC", float(np.mean(areas)), 0.5, rows)
    success = np.mean([(scores.argmax(1) == truth).mean() for scores, truth in trials])
    guessing = np.mean([np.bincount(truth).max() / len(truth) for _, truth in trials])
    return Finding(attack, attacker, "accuracy", float(success), float(guessing), rows)


def _of_features(
    config: RunConfig,
    parties: int,
    shown: int,
    taps: Sequence[Wiretap],
    untrained: Wiretap,
    folder: Path,
) -> list[Finding]:
    """Attacks of the label holder on features; draws images, if they are such."""
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
            config, block[everywhere], rows_of[everywhere], shown, generator, picture
        )
        attacker = f"label holder: {view}, features of {known} rows"
        attack = f"feature reconstruction{name}"
        findings.append(Finding(attack, attacker, "R2", success, 0.0, rows))
        picture = None
    sent, block = untrained.embeddings[untrained.uploaded], block[untrained.uploaded]
    few = generator.permutation(len(block))[:_INVERTED]
    # Where a secret has drawn the party's model, an attacker has one that is independent of it.
    for whose, secret in (("the seed's", b""), ("a secret's", generator.bytes(16))):
        model = build_bottom(config, 0, samples.first(block), sent.shape[1], secret)
        found = features.invert(model, sent[few], block.shape[1:], generator)
        success = features.explained(block[few], found, block[few].mean(0))
        attacker = f"label holder: first embeddings of party 0, by {whose} model"
        name = f"inversion, {whose} model"
        findings.append(Finding(name, attacker, "R2", success, 0.0, len(few)))
    return findings
