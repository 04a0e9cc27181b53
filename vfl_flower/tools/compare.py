"""Compare systems and baselines on one data set, in one table."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import write_json
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.config.run_config import pairs
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.earlier_run import check_noise, without_noise
from vfl_flower.label_holder.results import results_folder
from vfl_flower.launch.engines import Finished, run_local
from vfl_flower.models.bottoms import has_gradient
from vfl_flower.protocol.privacy.together import of_several
from vfl_flower.protocol.system import baselines
from vfl_flower.protocol.systems import resolve
from vfl_flower.results.card_privacy import ONE_PLACE
from vfl_flower.results.figures import main_metric
from vfl_flower.results.report.read import folder_of, number, read
from vfl_flower.results.report.sections import comparison, differences, privacy
from vfl_flower.results.terminal import wrapped
from vfl_flower.tasks.inference.paired import paired
from vfl_flower.tools.options import of_user
from vfl_flower.tools.runner import check_anew, run_each
from vfl_flower.tools.seeds import mean, repeated

_OF_SYSTEMS = (
    *("epsilon", "noise-multiplier", "codec", "keep", "bits", "compression"),
    *("downlink-codec", "downlink-keep", "downlink-bits", "downlink-compression"),
    *("labels", "local-steps", "initial-surrogates", "perturbs"),
)


def compare(
    parties: int,
    common: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    target: float,
    node_configs: Sequence[Mapping[str, Any]] = (),
    seeds: int = 1,
) -> Path:
    """Run each configuration, and each baseline that fits, in this process; return the folder.

    ``common`` has options of all runs. Bytes are counted until the validation accuracy or R2
    reaches ``target``, or the test figure without validation rows. With one seed, the first run's
    model is tested against the others that are kept.
    """
    configurations = _configurations(common, runs)
    resolved = [resolve(each) for each in configurations.values()]
    for each in resolved:
        check_anew(each, "A comparison", "grow")
    if len({each.data.target for each in resolved}) > 1:
        raise ConfigError("Some runs predict classes and others numbers: compare them separately.")
    folders = set(map(folder_of, configurations))
    if "" in folders or len(folders) < len(configurations):
        raise ConfigError(
            "Each run gets a folder named by its title, in which only letters, digits and '.=-' "
            "count: choose titles that differ in those."
        )
    folder = results_folder(replace(resolved[0], strategy="compare"))
    run = partial(repeated, run_local, parties, node_configs=node_configs, seeds=seeds)
    finished = run_each(configurations, folder, run, partial(_write, folder, target))
    places = [each.folder for each in finished.values()]
    kept = [each for each in places if (each / checkpoint.FILE).is_file()]
    if kept and seeds == 1:
        with suppress(ConfigError):  # there may be no test rows, or no classes in them
            paired(kept)
    return folder


def _configurations(
    common: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the options of each run and of each baseline that fits, by name."""
    named = {run["strategy"] for run in runs}
    differ = any("privacy" in run for run in runs)  # else noise without privacy is a mistake
    configurations: dict[str, dict[str, Any]] = {}
    for run in runs:
        name, own = label(run, runs), {key: run[key] for key in run if key != "title"}
        if name in configurations:
            said = f"The run {name!r} is given twice: leave one out, or give each a title."
            raise ConfigError(said)
        shared = _of_baselines(common) if run["strategy"] in baselines() else common
        config = resolve({**shared, **own})
        if config.privacy.mechanism == "none" and differ:
            shared = without_noise(shared)
        configurations[name] = {**shared, **own}
        check_noise(config, configurations[name])
    for baseline in baselines():
        if baseline in named or (beside := _baseline(baseline, common)) is None:
            continue
        if baseline in configurations:
            said = f"The title {baseline!r} is the name of a baseline: choose another title."
            raise ConfigError(said)
        configurations[baseline] = beside
    return configurations


def compared(text: str) -> dict[str, Any]:
    """Read a RUN of `vfl compare`: perhaps a title, a system, and its own options."""
    title, _, rest = text.partition(": ")
    first = rest.split()[0] if rest.strip() else ""
    titled = bool(first) and ("=" not in title or first in SYSTEMS.names)
    name, *keys = (rest if titled else text).split(None, 1) or [""]
    if not name or (titled and not title):
        raise ConfigError("A run of `vfl compare` is empty: name a system, then its own options.")
    own = of_user(pairs(keys, "RUN"))
    if {"strategy", "out"} & own.keys():
        raise ConfigError(f"{text!r} names a strategy or out twice: write the system first.")
    return {"strategy": name, **own, **({"title": title} if titled else {})}


def _baseline(name: str, common: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a baseline's options beside these, or None if it does not fit."""
    keys = _of_baselines(common)
    sends = name not in ONE_PLACE
    fits = {"labels": "epsilon" in keys, "scalar": False, "perturbed-embedding": sends}
    if not fits.get(common.get("privacy", "none"), True):
        keys.pop("privacy")
    if keys.get("privacy", "none") == "none":
        keys = without_noise(keys)
    of_common = resolve({**keys, "strategy": "frozen"})
    if name == "intersection-only" and not of_common.data.partial:
        return None
    if name != "frozen" and not has_gradient(of_common.models.bottom):
        return None
    keys["strategy"] = name
    resolve(keys)
    return keys


def _of_baselines(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without noise, codecs and others that only systems have."""
    of_labels = {"epsilon"} if common.get("privacy") == "labels" else set()
    left_out = {*_OF_SYSTEMS} - of_labels
    return {key: value for key, value in common.items() if key not in left_out}


def _write(folder: Path, target: float, finished: Mapping[str, Finished]) -> None:
    figures = {name: figures_of(run, target) for name, run in finished.items()}
    for claim in of_several(figures.values()):
        for each in figures.values():
            if each.get("epsilon_protects") == claim.protects:
                each["epsilon_of_all_runs"], each["delta_of_all_runs"] = claim.epsilon, claim.delta
    write_json(folder / "compare.json", figures)


def label(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a run's title; by default its system, with options if two runs share it."""
    if "title" in run:
        return str(run["title"])
    name = str(run["strategy"])
    if sum(other["strategy"] == name for other in runs) == 1:
        return name
    return " ".join([name, *(f"{key}={value}" for key, value in run.items() if key != "strategy")])


def table(folder: Path) -> str:
    """Return a comparison as text: its figures, and what epsilon protects."""
    runs = read([folder])
    spent = privacy([run for run in runs if number(run.summary, "epsilon") is not None])
    notes = [each for each in spent.notes if isinstance(each, str)] if spent else []
    without = [run.title for run in runs if number(run.summary, "epsilon") is None]
    if notes and without:
        notes.append(f"No epsilon holds for {', '.join(without)}.")
    tests = [each.in_terminal() for each in [differences(runs)] if each]
    return "\n".join([comparison(runs).in_terminal(), *map(wrapped, notes), *tests])


def figures_of(run: Finished, target: float) -> dict[str, Any]:
    """Return a run's summary, the target, and the megabytes to it."""
    summary = run.summary
    seeds = [Finished(run.folder / f"seed-{seed}") for seed in summary.get("seeds", ())]
    found: dict[str, Any] = mean([_reached(each, target) for each in seeds or [run]])
    deviation = {**summary.get("deviation", {}), **found.pop("deviation", {})}
    return {**summary, "target": target, **found, **({"deviation": deviation} if deviation else {})}


def _reached(run: Finished, target: float) -> dict[str, float | None]:
    """Return the megabytes at the first evaluation that reaches the target."""
    for entry in run.history:
        of_test = main_metric(entry)
        value = entry.get(of_test.replace("test", "validation"))
        value = entry[of_test] if value is None else value
        if value is not None and value >= target:  # none of labels that noise hides
            return {"megabytes_to_target": (entry["bytes_up"] + entry["bytes_down"]) / 1e6}
    return {"megabytes_to_target": None}
