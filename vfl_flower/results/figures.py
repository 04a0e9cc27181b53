"""Figures of runs as text: main metrics, headlines, and the people that a run covers."""

from collections.abc import Mapping, Sequence
from typing import Any

from vfl_flower.config.errors import ConfigError

VALIDATED = {
    "validation_auc": "validation AUC",
    "validation_accuracy": "validation accuracy",
    "validation_r2": "validation R2",
}
"""Validation metric that selects configurations -> its name. The first that a run has counts."""

NO_VALIDATION = (
    "There are no validation rows to choose by, and test rows must not choose. Set "
    'validation-fraction, as in -c "validation-fraction=0.2".'
)

GUARANTEE = {
    "protects": "epsilon_protects",
    "relation": "epsilon_relation",
    "adversary": "epsilon_adversary",
}
"""Statement about an epsilon -> its name in a summary. Show all of them with every epsilon."""

TRANSPORTS = {"none": "", "stream": " over streams", "messages": " over Flower's messages"}
"""Transport -> text to append to a time."""


ASSESSED = {
    "auc": ("AUC", "chance that a random positive row has a higher score than a negative one"),
    "gini": ("Gini", "2 AUC - 1"),
    "ks": ("KS", "largest distance between the score distributions of both classes"),
    "average_precision": ("average precision", "area under the precision-recall curve"),
    "macro_auc": ("macro AUC", "mean AUC of each class against the rest"),
    "log_loss": ("log loss", "mean negative logarithm of the probability of the true class"),
    "brier": ("Brier score", "mean squared error of the probabilities"),
    "ece": ("calibration error", "expected distance of probabilities from true shares, by bins"),
    "accuracy": ("accuracy", "share of rows with the right class"),
    "precision": ("precision", "share of true positives among the flagged rows"),
    "recall": ("recall", "share of the positive rows that are flagged"),
    "false_positives": ("false positive rate", "share of the negative rows that are flagged"),
    "f1": ("F1", "harmonic mean of precision and recall"),
    "macro_f1": ("macro F1", "mean F1 of the classes"),
    "flagged": ("flagged", "share of rows that are predicted positive"),
    "rmse": ("RMSE", "root mean squared error, in units of the labels"),
    "mae": ("MAE", "mean absolute error, in units of the labels"),
    "r2": ("R²", "share of the labels' variance that the model explains"),
    "spearman": ("Spearman", "rank correlation of predictions and labels"),
    "bias": ("bias", "mean of prediction minus label, in units of the labels"),
}
"""Figure of an assessment -> its name, and its meaning."""

IN_UNITS = "rmse", "mae", "bias"  # figures of an assessment in units of the labels

_RULES = {
    "f1": "the largest F1 on validation rows",
    "cost": "the least cost on validation rows, where a missed positive costs as much as {} false "
    "alarms",
    "rate": "the highest scores on validation rows, a share of {}",
}


def data_called(dataset: str, parties: Sequence[str], rows: float | None) -> str:
    """Return what the data of a run, with these parties, are called in a title."""
    if not dataset.startswith("memory:"):
        return dataset.rsplit("/", 1)[-1]
    names = [each.removeprefix("party ") for each in parties]
    several = not names or len(names) > 4 or any(name.isdecimal() for name in names)
    who = f"{len(names)} parties" if several else ", ".join(names)
    return f"data of {who}" + (f", {rows:,.0f} rows" if rows else "")


def main_metric(figures: Mapping[str, Any]) -> str:
    """Return the name of the main metric: test accuracy, or test R2 for regression."""
    return "test_accuracy" if figures.get("test_r2") is None else "test_r2"


def chosen_by(figures: Mapping[str, Any]) -> str:
    """Return the metric that selects configurations, or raise `ConfigError` without any."""
    for key in VALIDATED:
        if figures.get(key) is not None:
            return key
    raise ConfigError(NO_VALIDATION)


def spread(figures: Mapping[str, Any], key: str, form: str, unit: float = 1) -> str:
    """Return a figure times ``unit`` as text, over several seeds with its standard deviation."""
    deviation = figures.get("deviation", {}).get(key)
    text = format(figures[key] * unit if unit != 1 else figures[key], form)
    return text if deviation is None else f"{text} ± {deviation * unit:{form}}"


def reached(figures: Mapping[str, Any]) -> str:
    """Return the test figures of a history entry or a summary as text."""
    if figures[main_metric(figures)] is None:
        return "no test figures"
    if main_metric(figures) == "test_r2":
        rmse, r2 = spread(figures, "test_rmse", ".4g"), spread(figures, "test_r2", ".4f")
        return f"test RMSE {rmse}, R2 {r2}"
    return f"test accuracy {spread(figures, 'test_accuracy', '.4f')}"


def validated(entry: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    """Return the last and the least validation loss as text; empty without validation."""
    if entry.get("validation_loss") is None:
        return ""
    least = " (best)" if best else ""
    if best and best["epoch"] < entry["epoch"]:
        least = f" (best {best['validation_loss']:.4f} at epoch {best['epoch']:g})"
    return f"validation loss {entry['validation_loss']:.4f}{least}"


def in_brief(entry: Mapping[str, Any], best: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the last loss, the least validation loss and the test figure in brief."""
    loss = entry.get("validation_loss")
    test = entry[main_metric(entry)]
    of_test = "" if test is None else f"test {test:.3f}"
    if loss is None:
        loss = entry.get("train_loss")
        return "" if loss is None else f"train loss {loss:.3f}", "", of_test
    least = "best" if best else ""
    if best and best["epoch"] < entry["epoch"]:
        least = f"best {best['validation_loss']:.3f} @{best['epoch']:g}"
    return f"val loss {loss:.3f}", least, of_test


def headline(summary: Mapping[str, Any]) -> str:
    """Return a run's figures and costs in one line, then what its epsilon protects."""
    parts = []
    if summary[main_metric(summary)] is not None:
        parts.append(reached(summary))
    if summary["test_auc"] is not None:
        parts.append(f"AUC {spread(summary, 'test_auc', '.4f')}")
    if summary.get("best_epoch") is not None:
        best, last = (spread(summary, key, ".5g") for key in ("best_epoch", "epochs"))
        parts.append(f"the model of epoch {best} of {last}")
    if summary["epsilon"] is not None:
        epsilon, delta = spread(summary, "epsilon", ".3g"), spread(summary, "delta", "g")
        of = f" of all {len(summary['seeds'])} runs" if summary.get("seeds") else ""
        parts.append(f"epsilon {epsilon} at delta {delta}{of}")
    up, down = (spread(summary, key, ".2f", 1e-6) for key in ("bytes_up", "bytes_down"))
    parts += [
        f"{spread(summary, 'exchanges', '.0f')} exchanges",
        f"{up} MB up, {down} MB down",
        f"{spread(summary, 'seconds', '.1f')} s{TRANSPORTS[summary['transport']]}",
    ]
    if summary.get("seeds"):
        parts.append(f"{len(summary['seeds'])} seeds, mean ± standard deviation")
    rerun = of_rerun(summary["rerun"]) if summary.get("rerun") else ""
    distilled = of_distilled(summary["distilled"]) if summary.get("distilled") else ""
    lines = [f"{summary['strategy']}: {', '.join(parts)}", guarantee(summary), rerun, distilled]
    return "\n".join(filter(None, lines))


def of_distilled(found: Mapping[str, Any]) -> str:
    """Return what a distilled model keeps of the gain of the run that it learned from."""
    names = {"federation": "the run", "distilled": "distilled", "local_only": "local-only"}
    figure, kept = ASSESSED[found["metric"]][0], found["kept"]
    each = [f"{found[key]:.4f} {names[key]}" for key in names if found[key] is not None]
    said = f"{figure} on the test rows: {', '.join(each)}."
    if kept is None:
        why = "noise hides labels" if found["local_only"] is None else "it is not clear of chance"
        return f"{said} The share of the gain that is kept is not known, since {why}."
    low, high = percent(kept["low"]), percent(kept["high"])
    return f"{said} Distilled keeps {percent(kept['value'])} of the gain (95 %: {low} to {high})."


def of_rerun(rerun: Mapping[str, Any]) -> str:
    """Return how a rerun compares with the run that it repeats, in one line."""
    if rerun["differs"]:
        return (
            f"The rerun differs from the run, with equal messages: {', '.join(rerun['differs'])}."
        )
    return (
        f"The rerun equals the run: {rerun['messages']} messages, all parameters and all figures "
        "are the same to the last bit."
    )


def guarantee(summary: Mapping[str, Any]) -> str:
    """Return what a summary's epsilon protects, in one line; empty without an epsilon."""
    if summary.get("epsilon") is None:
        return ""
    said = [f"{name}: {summary[key]}" for name, key in GUARANTEE.items() if key in summary]
    return f"epsilon {'. '.join(said)}." if said else ""  # summaries of older runs lack these


def form_of(figure: str) -> str:
    """Return the format of a figure: digits after the point, or significant digits."""
    return ".4g" if figure in IN_UNITS else ".4f"


def percent(share: float, unit: str = "%") -> str:
    """Return a share as text."""
    return f"{100 * share:.1f} {unit}"


def chosen(rule: str) -> str:
    """Return how a threshold was chosen, in words to append to its value."""
    kind, _, argument = rule.partition(":")
    return (
        f", chosen for {_RULES[kind].format(argument)}" if kind in _RULES else ", which was given"
    )


MEAN = "mean"  # stands in place of the classes where labels are numbers


def coverage(
    asked: int,
    aligned: int,
    scored: int,
    left_out: Mapping[str, int],
    by_party: Mapping[int, int],
    left_out_parties: Sequence[str] = (),
    rules: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the field ``coverage`` of a summary, or of the figures of predictions.

    ``more`` says which ``file`` people come from, and how their ``labels`` differ.
    """
    return {
        "asked": asked,
        "aligned": aligned,
        "scored": scored,
        "left_out": {why: number for why, number in left_out.items() if number},
        "by_party": {str(party): by_party[party] for party in sorted(by_party)},
        "not_at": {str(party): asked - by_party[party] for party in sorted(by_party)},
        "left_out_parties": list(left_out_parties),
        **({"rules": list(rules)} if rules else {}),
        **more,
    }


def lines(found: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return a coverage as lines of a table: what, and the number of people."""
    by_party, left_out = found.get("by_party") or {}, found.get("left_out") or {}
    lacking = found.get("not_at") or {}
    return [
        ("in the label holder's file", found.get("asked")),
        *((f"at {names.get(each, each)}", number) for each, number in by_party.items()),
        *(
            (
                f"at {names.get(str(each['party']), each['party'])} by {each['rule']}",
                each["matched"],
            )
            for each in found.get("rules") or ()
            if each["matched"]
        ),
        ("aligned", found.get("aligned")),
        *((each, found[each]) for each in ("aligned without a label",) if found.get(each)),
        ("scored", found.get("scored")),
        *((f"left out: {why}", number) for why, number in left_out.items()),
        *((f"not at {names.get(each, each)}", number) for each, number in lacking.items()),
    ]
