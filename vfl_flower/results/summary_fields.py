"""Descriptions of the fields of summary.json, which the reference of the results folder shows."""

from __future__ import annotations

from typing import NamedTuple


class Field(NamedTuple):
    """A field of a summary.

    type : its type and unit. With "or null", the field does not apply to every run.
    meaning : one sentence or two.
    """

    type: str
    meaning: str


_METRICS = {
    "loss": Field("number or null", "Mean loss."),
    "accuracy": Field(
        "number or null", "Share of rows with the right class. Two classes part at 0.5."
    ),
    "auc": Field("number or null", "Area under the ROC curve, for two classes."),
    "rmse": Field("number or null", "Root mean squared error, in units of the labels."),
    "r2": Field("number or null", "Share of the labels' variance that the model explains."),
}
_ROWS = {"validation": "On the validation rows.", "test": "On the test rows."}
_SPREAD = "numbers `mean` and `most`"

FIELDS: dict[str, dict[str, Field]] = {
    "What ran": {
        "strategy": Field("text", "The system or baseline."),
        "engine": Field("text", "Where the run took place: `local`, `ray` or `supernodes`."),
        "transport": Field("text", "How messages travel: `none`, `stream` or `messages`."),
        "dataset": Field("text", "The option `dataset`."),
        "parties": Field("whole number", "Number of parties."),
        "seed": Field("whole number", "The option `seed`."),
        "began": Field("text", "Date and time in UTC at which the run began."),
        "ended": Field("text", "Date and time in UTC at which the run ended."),
        "failure": Field("text or null", "Why the run failed. It is null after a whole run."),
    },
    "Data": {
        "data": Field(
            "object",
            "Numbers of `rows` for `training`, `validation` and `test`. `tested_on_training_rows` "
            "is true if no rows were held out. `ids` is a digest of the ids of all rows, in any "
            "order. `own_columns` is the number of the label holder's columns. `classes` and "
            "`class_shares` are of the training rows. For numbers there are `label_mean` and "
            "`label_deviation`. Shares, mean and deviation are null where noise on labels or "
            "scalars does not cover them.",
        ),
        "coverage": Field(
            "object",
            "People: `asked` (in the label holder's file), `aligned`, `scored` (in the test "
            "figures), `left_out` (reason -> number) and `by_party` (the number that a party has, "
            "as far as it is known). `left_out_parties` has sentences about parties. The figures "
            "of `vfl predict` have this field too: there, `scored` people have a score.",
        ),
    },
    "Schedule": {
        "schedule": Field("text", "`sync`, `async` or `t-sync`."),
        "quorum": Field("whole number", "Uploads that the label holder waits for."),
        "window": Field(
            "whole number",
            "Steps of a party in one exchange; in the last one if the window adapts.",
        ),
        "window_measured": Field(
            "object or null",
            "Seconds of an exchange (`exchange_seconds`) and of a step (`step_seconds`), where "
            "the window follows measured times.",
        ),
    },
    "Progress and cost": {
        "epochs": Field("number", "Epochs done, on average over the parties."),
        "steps": Field("whole number", "Steps of the top model."),
        "best_epoch": Field(
            "number or null", "Epoch of the restored model, if validation rows chose it."
        ),
        "exchanges": Field("whole number", "Messages that parties answered during training."),
        "bytes_up": Field("bytes", "Arrays from the parties to the label holder, in training."),
        "bytes_down": Field("bytes", "Arrays from the label holder to the parties, in training."),
        "evaluation_bytes": Field("bytes", "Arrays of evaluations, in both directions."),
        "seconds": Field("seconds", "Duration of the run, without interruptions."),
        "virtual_seconds": Field(
            "seconds", "Duration on the virtual clock. It is 0 without simulated delays."
        ),
        "peak_memory_mb": Field("MiB", "Largest memory of one process of the run."),
    },
    "Figures of the model": {
        "train_loss": Field(
            "number or null",
            "Mean loss of the mini-batches since the evaluation before. With noise on scalars it "
            "is null, since it would tell labels.",
        ),
        **{
            f"{rows}_{name}": Field(found.type, f"{found.meaning} {where}")
            for rows, where in _ROWS.items()
            for name, found in _METRICS.items()
        },
        "assessment": Field(
            "object or null",
            "Figures of the test rows with 95 % intervals, curves and segments. It is null if no "
            "rows are held out for testing.",
        ),
        "test_by_parties": Field(
            "object", "Number of parties that know a row -> figures on such test rows."
        ),
        "test_by_party": Field(
            "object", "Party -> figures on the test rows that it knows, predicted by it alone."
        ),
        "unknown_rows": Field("whole number", "Rows of the label holder that no party knows."),
    },
    "Privacy": {
        "epsilon": Field("number or null", "Epsilon that the run spent. Null claims nothing."),
        "delta": Field("number or null", "Delta of that epsilon."),
        "epsilon_protects": Field("text", "The data that the epsilon protects."),
        "epsilon_relation": Field("text", "How neighbouring data sets differ."),
        "epsilon_adversary": Field("text", "The adversary that the epsilon holds against."),
        "epsilon_of_paper": Field(
            "number or null", "Epsilon by the assumptions of the system's paper."
        ),
        "epsilon_secret_batches": Field(
            "number", "Epsilon if nobody knows which rows are in a mini-batch."
        ),
        "gaussian_mu": Field(
            "number", "Mu of Gaussian differential privacy, from which several runs compose."
        ),
        "noise_multiplier": Field("number", "Standard deviation of the noise, over the clip."),
    },
    "Parties": {
        "failed_parties": Field("list of whole numbers", "Parties that were absent at the end."),
        "by_party": Field("list of objects", "Cost of each party."),
        "by_party.party": Field("whole number", "Number of the party, from 0."),
        "by_party.name": Field("text", "Name of the party, if it has one."),
        "by_party.columns": Field("whole number", "Number of the party's feature columns."),
        "by_party.embedding_size": Field("whole number", "Numbers in one of its embeddings."),
        "by_party.exchanges": Field("whole number", "As above, of this party."),
        "by_party.bytes_up": Field("bytes", "As above, of this party."),
        "by_party.bytes_down": Field("bytes", "As above, of this party."),
        "by_party.evaluation_bytes": Field("bytes", "As above, of this party."),
        "by_party.reply_seconds": Field(_SPREAD, "Seconds from an order to its answer."),
        "by_party.reply_virtual_seconds": Field(_SPREAD, "The same on the virtual clock."),
        "by_party.staleness": Field(
            _SPREAD, "Steps of the label holder between an order and its answer."
        ),
        "best_party": Field(
            "whole number or text", "The best party, or `label holder`, in baseline `local-only`."
        ),
        "test_accuracy_of_party": Field("object", "Party -> test accuracy, in `local-only`."),
        "test_r2_of_party": Field("object", "Party -> test R2, in `local-only`."),
    },
    "Alignment and several seeds": {
        "alignment": Field("text", "Name of the alignment, in a summary of `vfl align`."),
        "rows": Field("whole number", "Aligned rows, in a summary of `vfl align`."),
        "seeds": Field("list of whole numbers", "Seeds of a run with `--seeds`."),
        "deviation": Field(
            "object", "Field -> standard deviation over the seeds. The fields then hold means."
        ),
    },
    "Provenance": {
        "config": Field("object", "Option -> value. Null stands for `auto`."),
        "versions": Field("object", "Versions of Python and of packages that affect results."),
        "code": Field("text", "SHA-256 digest of the code of vfl_flower and strategies."),
    },
}
"""Title of a group -> field -> its description. A dot leads into the objects of a list."""

HISTORY = (
    *("epoch", "steps", "exchanges", "bytes_up", "bytes_down", "evaluation_bytes", "seconds"),
    *("virtual_seconds", "train_loss"),
    *(f"{rows}_{name}" for rows in _ROWS for name in _METRICS),
)
"""Fields of an entry of history.jsonl that every run has."""


def described() -> dict[str, Field]:
    """Return every field by its name."""
    return {name: found for group in FIELDS.values() for name, found in group.items()}


def fields_of(summary: dict[str, object]) -> set[str]:
    """Return the names of the fields of a summary and of its parties."""
    parties = summary.get("by_party")
    of_parties = parties if isinstance(parties, list) else []
    return set(summary) | {f"by_party.{name}" for each in of_parties for name in each}
