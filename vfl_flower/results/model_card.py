"""The model card of a run, made from ``summary.json`` and `GIVEN`: no name of a party's column."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import write_whole
from vfl_flower.config.names import called
from vfl_flower.protocol.system import load_system
from vfl_flower.results import card_privacy
from vfl_flower.results.figures import lines, of_distilled, percent
from vfl_flower.results.page import Page, Section, Table, html, markdown
from vfl_flower.results.report.assessment import assessment
from vfl_flower.results.report.read import MEASURES, Shown, json_of, mapping, measured, number
from vfl_flower.results.report.sections import settings
from vfl_flower.results.report.segments import rates, segments

FILES = "model_card.md", "model_card.html"
GIVEN = "card.toml"  # file beside a card with fields that people give
_FIELDS = "owner", "purpose", "approval", "review date"

_ABOUT = (
    "This card describes a model that a label holder and several parties trained together. The "
    "program wrote it when the run ended. Dates are in UTC."
)
_BARE = {"accuracy": "accuracy", "auc": "AUC", "loss": "loss", "r2": "R²", "rmse": "RMSE"}
_NAMED = "csv:", "parquet:", "hf:", "files:", "memory:"  # data sets with a column of labels


def write_card(folder: Path, summary: Mapping[str, Any] | None = None) -> None:
    """Write the model card of a run into its results folder.

    Without a summary, write it again: with `GIVEN`, and with figures of seeds from above.
    """
    given, fields, seeds = folder / GIVEN, dict.fromkeys(_FIELDS, "not given"), {}
    if summary is None:
        summary, seeds = (json_of(each / "summary.json") for each in (folder, folder.parent))
        try:
            fields |= tomllib.loads(given.read_text()) if given.is_file() else {}
        except ValueError as error:
            said = f"{given} is not TOML: {error}. Write lines such as owner = 'NAME'."
            raise ConfigError(said) from None
    write_page(card(summary, fields, seeds), *(folder / name for name in FILES))


def write_page(page: Page, *paths: Path) -> None:
    """Write a page as Markdown and as HTML."""
    for path, content in zip(paths, (markdown(page), html(page)), strict=True):
        encoded = content.encode(errors="replace")
        write_whole(path, encoded, synced=False)  # it can be made again


def card(summary: Mapping[str, Any], given: Mapping[str, str], seeds: Mapping[str, Any]) -> Page:
    """Return the card of a run: ``seeds`` is the summary of all seeds, if there is one."""
    config = {key: value for key, value in summary["config"].items() if key != "resume"}  # a folder
    run = Shown("", Path(), {**summary, "config": config})
    by_segment, options = segments([run]), settings([run])
    sections = [
        Section("Responsibility", [items([[name, str(each)] for name, each in given.items()])]),
        _training(summary),
        _distilled(summary),
        _data(summary, run.dataset),
        _parties(summary),
        _figures(summary, run),
        by_segment and by_segment.plain,
        Section("Privacy", notes=[card_privacy.paragraph(summary)]),
        Section("Limits", notes=card_privacy.limits(summary)),
        options and replace(options, title="Options"),
        _code(summary, seeds),
    ]
    return Page(f"Model card: {summary['strategy']} on {run.dataset}", sections)


def items(rows: Sequence[Sequence[str]], head: Sequence[str] = ("item", "value")) -> Table:
    """Return a table whose columns are all texts."""
    return Table(head, [rows], len(head))


# --- how the model came to be --------------------------------------------------------------------


def _training(summary: Mapping[str, Any]) -> Section:
    which, best = "of the last epoch", summary.get("best_epoch")
    if best is not None:
        which = f"of epoch {best:g}, which has the least validation loss"
    rows = [
        ["system", f"{summary['strategy']}: {load_system(summary['strategy']).about}"],
        ["began", summary["began"]],
        ["ended", summary["ended"]],
        ["epochs", f"{summary['epochs']:g} of {summary['config']['epochs']}"],
        ["model kept", which],
    ]
    return Section("Training", [items(rows)], [_ABOUT])


def _distilled(summary: Mapping[str, Any]) -> Section | None:
    found = summary.get("distilled")
    if not found:
        return None
    said = (
        f"This model learned from {found['mix']:.0%} scores of the run in {found['run']}, and else "
        f"from labels. {found['people_without_label']:,} people have scores alone. "
        "It needs no party."
    )
    return Section("Distilled", notes=[said, of_distilled(found)])


def _data(summary: Mapping[str, Any], dataset: str) -> Section:
    of, config = summary["data"], summary["config"]
    rows = [["data set", dataset]]
    if str(summary["dataset"]).startswith(_NAMED):
        rows.append(["label", f"column {config['label']}"])
    rows += [[f"rows, {kind}", f"{count:,}"] for kind, count in of["rows"].items()]
    if config.get("split") == "time":
        rows.append(["test rows", f"the newest, by column {config['time']}"])
    differ = rates(summary.get("coverage") or {})
    if covered := summary.get("coverage"):
        names = {str(each["party"]): called(each) for each in summary["by_party"]}
        rows += [[f"people {what}", f"{count:,}"] for what, count in lines(covered, names)]
        file = (covered.get("file") or {}).items()
        rows += [[f"file, {what}", f"{n:,}" if type(n) is int else n] for what, n in file]
    rows.append(["digest of all ids, SHA-256", of["ids"]])
    if gone := summary.get("withdrawn"):
        rows.append(["people withdrawn since", f"{gone['people']:,} of {gone['of']:,} in training"])
    if of["classes"]:
        return Section("Data", [items(rows), _classes(summary), differ])
    if of["label_mean"] is not None:
        said = (
            f"The labels are numbers, of mean {of['label_mean']:.4g} and standard deviation "
            f"{of['label_deviation']:.4g} in the training rows."
        )
    else:
        said = f"The labels are numbers in the range {config['label-range']}."
    return Section("Data", [items(rows), differ], [said])


def _classes(summary: Mapping[str, Any]) -> Table:
    of = summary["data"]
    names, shares = [str(each) for each in of["classes"]], of["class_shares"]
    if shares is None:
        return items([[each] for each in names], ["class"])
    noisy = summary["config"]["privacy"] == "labels"
    head = ["class", "share of training rows" + (", estimated from noisy labels" * noisy)]
    return Table(head, [[[name, percent(s)] for name, s in zip(names, shares, strict=True)]])


def _parties(summary: Mapping[str, Any]) -> Section:
    own = str(summary["data"]["own_columns"])
    rows = [["label holder", "some" * bool(summary["config"]["monotonic"]), own, ""]]
    for each in summary["by_party"]:
        sizes = str(each["columns"]), str(each["embedding_size"])
        rows.append([called(each), "some" * each.get("monotone", False), *sizes])
    said = "The label holder does not know the names of the parties' columns."
    head = ["participant", "monotonic", "columns", "embedding size"]
    return Section("Parties", [Table(head, [rows], 2)], [said])


# --- how good it is ------------------------------------------------------------------------------


def _figures(summary: Mapping[str, Any], run: Shown) -> Section:
    repeated = summary["data"]["tested_on_training_rows"]
    title = "Figures on training rows" if repeated else "Figures on test rows"
    if card_privacy.covers_figures(summary):
        said = (
            "There are none: no rows were held out for testing, and figures of training rows would "
            "follow from labels that the noise protects."
        )
        return Section(title, notes=[said])
    if found := assessment([run], charts=False):
        return replace(found.plain, title=title)
    known = [(name, summary.get(f"test_{key}")) for key, name in _BARE.items()]
    bare = [[name, f"{value:.4g}"] for name, value in known if value is not None]
    return Section(title, [Table(["figure", "value"], [bare])])


# --- how to repeat it ----------------------------------------------------------------------------


def _code(summary: Mapping[str, Any], seeds: Mapping[str, Any]) -> Section:
    again, dataset = "vfl rerun RUN, where RUN is the folder of this card", summary["dataset"]
    if str(dataset).startswith("files:"):
        again += ", and the --node-config of each party"
    if str(dataset).startswith("memory:") or summary["strategy"] in card_privacy.ONE_PLACE:
        again = "no command repeats frames, or a run without messages"
    rows = [["repeat to the last bit", again]]
    spread = [
        [f"{key.replace('_', ' ')} over {len(seeds['seeds'])} seeds", measured(seeds, key)]
        for key in (*MEASURES, "test_auc", "test_rmse")
        if number(mapping(seeds.get("deviation")), key) is not None
    ]
    rows += spread or [["spread over seeds", "not measured: add --seeds 5 to vfl run"]]
    rows += [["digest of the code, SHA-256", summary["code"]]]
    rows += [[name, str(version)] for name, version in summary["versions"].items()]
    return Section("Code", [items(rows)])
