"""Options of rows, columns and labels."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from vfl_flower.config import plugins
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options.option import basic, key, setting


@dataclass(frozen=True)
class DataConfig:
    """Rows, columns and labels."""

    dataset: str = basic(
        "digits",
        "Names the data set. The built-in sets, npz:PATH, csv:PATH, parquet:PATH, svmlight:PATH "
        "and hf:NAME_OR_DIR are divided among the parties. With files:PATH, PATH is the label "
        "holder's own csv or parquet file. Each party then names its own file in its "
        "--node-config.",
        example="dataset='breast-cancer'",
        values="digits, breast-cancer, npz:PATH, csv:PATH, parquet:PATH, svmlight:PATH, "
        "hf:NAME_OR_DIR, files:PATH, FILE.py:NAME or FILE.py:NAME:PATH",
    )
    label: str = basic(
        "label",
        "Names the label column. It applies to csv:, parquet:, hf: and files: data sets.",
        example="dataset='files:labels.csv' label='default'",
    )
    target: str = basic(
        "classification",
        "Says what the labels are: classes or numbers. Numbers are fitted by squared error.",
        example="dataset='csv:houses.csv' label='price' target='regression'",
        choices=("classification", "regression"),
    )
    class_weights: str = key(
        "",
        "Weights the classes in the loss. Give one number for each class, in the order of the "
        "classes. `balanced` uses the inverse class frequency. The empty text weights all classes "
        "equally.",
        example="dataset='breast-cancer' class-weights='balanced'",
    )
    label_range: str = setting(
        "",
        "Clips regression labels to a lowest and a highest value. Noise on labels or on scalars "
        "needs this range.",
        example="dataset='csv:people.csv' label='age' target='regression' label-range='0,120'",
    )
    id: str = basic(
        "id",
        "Names the id column of the label holder's file. It applies to files: data sets.",
        example="dataset='files:labels.csv' id='customer'",
    )
    columns: str = key(
        "",
        "Names the feature columns of the label holder's file, separated by commas. The empty "
        "text uses all other columns. `none` uses no column. A minus before each name leaves "
        "these columns out.",
        example="dataset='files:labels.csv' columns='age,income'",
    )
    segments: str = key(
        "",
        "Names columns of the label holder's file, separated by commas. Each value of such a "
        "column is a segment, for which the model is assessed. The column is no feature, unless "
        "`columns` names it.",
        example="dataset='files:labels.csv' segments='region,age band'",
    )
    time: str = key(
        "",
        "Names a column of dates or whole numbers in the label holder's file. Each month of dates, "
        "or each number, is a period, for which the model is assessed. The column is no feature, "
        "unless `columns` names it.",
        example="dataset='files:labels.csv' time='month'",
    )
    split: str = key(
        "random",
        "Chooses the rows held out for testing. `time` holds out the newest whole periods of the "
        "column that the option `time` names. Their share is as near to test-fraction as it can.",
        example="dataset='files:labels.csv' time='month' split='time'",
        choices=("random", "time"),
    )
    missing: str = key(
        "refuse",
        "Says how to handle missing numbers in the label holder's columns. `median` fills in the "
        "column's median.",
        example="dataset='files:labels.csv' missing='median'",
        choices=("refuse", "median"),
    )
    missing_words: str = key(
        "",
        "Names texts that are missing values in the label holder's columns, separated by commas. "
        "The empty cell is missing in any case.",
        example="dataset='files:labels.csv' missing='median' missing-words='NA,?'",
    )
    text: str = key(
        "refuse",
        "Says how to handle text in the label holder's columns. `one-hot` makes a 0/1 column for "
        "each value.",
        example="dataset='files:labels.csv' text='one-hot'",
        choices=("refuse", "one-hot"),
    )
    dates: str = key(
        "refuse",
        "Says how to handle dates in the label holder's columns. `days` counts days since the "
        "newest date of the training rows. The model keeps this date for later files.",
        example="dataset='files:labels.csv' dates='days'",
        choices=("refuse", "days"),
    )
    monotonic: str = setting(
        "",
        "Names columns of the label holder's file that the score rises with (+) or falls with (-), "
        "for all values. A party names its own in its node configuration.",
        example="dataset='files:labels.csv' monotonic='income:+,debt:-'",
    )
    align: str = basic(
        "psi",
        "Chooses how the rows of files: data sets are matched by id. `psi` finds the rows of all "
        "participants by private set intersection. `any` also keeps rows that at least "
        "`min-parties` parties have. `ids` requires equal ids at all parties. Each party must "
        "allow `ids` in its node configuration.",
        example="dataset='files:labels.csv' align='any'",
        choices=("psi", "any", "ids"),
    )
    min_parties: int = key(
        1,
        "Sets how many parties must have a row for the row to be used. It applies to align='any'. "
        "0 requires no party, if the label holder has feature columns.",
        example="dataset='files:labels.csv' align='any' min-parties=2",
        least=0,
    )
    match: str = key(
        "",
        "Matches people without a common id, by rules of columns between semicolons, one after the "
        "other. `person` is a list of rules for people. The empty text matches by `id`.",
        example="dataset='files:labels.csv' match='surname+date(birthdate); person'",
    )
    match_columns: str = setting(
        "",
        "Says which column of the label holder's file has which name in rules. Without it, the "
        "names are equal. A party says so in its node configuration.",
        example="dataset='files:labels.csv' match='person' match-columns='surname=last_name'",
    )
    match_error: float = setting(
        0.001,
        "Sets the largest share of a rule's matches that may be false. A rule above it is not "
        "used.",
        example="dataset='files:labels.csv' match='person' match-error=0.01",
        above=0,
    )
    presence: float = setting(
        1.0,
        "Sets the share of rows that each party has, to try out partial rows. It applies to "
        "divided data sets. The seed draws these rows. Every row stays with at least one party.",
        example="dataset='breast-cancer' presence=0.7",
        above=0,
    )
    test_fraction: float = key(
        0.2,
        "Sets the share of rows held out for testing. It applies to data without a test part. "
        "With 0, all figures describe the training rows.",
        example="test-fraction=0.3",
        least=0,
        below=1,
    )
    validation_fraction: float | None = basic(
        None,
        "Sets the share of training rows held out for validation. The run restores the model with "
        "the lowest validation loss. With 0, the run keeps the model of the last epoch.",
        example="validation-fraction=0.1",
        auto="0.15, at most 20000 rows. 0 with fewer than 200 training rows. 0 with "
        "privacy='scalar', which would not protect the labels of these rows.",
        least=0,
        below=1,
    )
    image_split: str = setting(
        "quadrants",
        "Chooses how images are divided among parties. `quadrants` makes a near-square grid of "
        "blocks. `rows` and `columns` make bands of pixels. `flat` cuts the flattened image into "
        "equal parts.",
        example="image-split='rows'",
        choices=("quadrants", "rows", "columns", "flat"),
    )
    tokenizer: str = setting(
        "",
        "Names the folder of the tokenizer for a divided data set of texts. The folder has the "
        "format of the transformers library. Each party gets its part of each text's words.",
        example="dataset='hf:reviews' tokenizer='tokenizer'",
    )
    text_length: int = setting(
        64,
        "Limits the tokens in one party's part of a text.",
        example="dataset='hf:reviews' tokenizer='tokenizer' text-length=32",
        least=1,
    )
    augment: str = setting(
        "none",
        "Chooses how parties augment samples during training. A party's node configuration can "
        "override it. `crop-flip` crops and mirrors images.",
        example="augment='crop-flip' bottom-model='cnn'",
        registry=plugins.AUGMENTATIONS,
    )

    @property
    def called(self) -> str:
        """Return the name of the data in sentences."""
        return "the data" if self.dataset.startswith("memory:") else self.dataset

    @property
    def apart(self) -> bool:
        """Return whether each participant has a file, instead of a part of one data set."""
        return self.dataset.startswith("files:")

    @property
    def partial(self) -> bool:
        """Return whether parties may lack rows."""
        return self.align == "any" or self.presence < 1

    @property
    def own_data(self) -> bool:
        """Return whether each participant brings data, so that rows must be aligned."""
        return self.dataset.startswith(("files:", "memory:"))


class Rule(NamedTuple):
    """How the threshold is chosen."""

    kind: str  # "number", "f1", "cost" or "rate"
    number: float = math.nan  # threshold, false alarms that a missed positive costs, or share


_DEFAULT = Rule("number", 0.5)

CONFIDENCE = 0.95
"""Confidence that honest rows are flagged no more often than `flag_rate` says."""


def rows_to_flag(rate: float) -> int:
    """Return the fewest rows whose largest measure bounds that share of rows at `CONFIDENCE`."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-rate))


@dataclass(frozen=True)
class AssessmentConfig:
    """The threshold of two classes, and the segments of rows."""

    threshold: str = key(
        "0.5",
        "Sets the probability above which the second of two classes is predicted. `f1`, `cost:R` "
        "and `rate:R` choose it on validation rows. `f1` takes the best F1 score. With `cost:R`, a "
        "missed positive costs as much as R false alarms. `rate:R` flags that share of the rows.",
        example="dataset='breast-cancer' threshold='cost:5'",
        values="a number between 0 and 1, 'f1', 'cost:R' or 'rate:R'",
        numbers=True,
    )
    min_segment: int = setting(
        50,
        "Sets the fewest rows of a segment that has figures.",
        example="dataset='files:labels.csv' segments='region' min-segment=100",
        least=1,
    )
    flag_rate: float = key(
        0.0,
        "Flags scores in which a party's embedding does not fit the others'. This share of honest "
        "rows may be flagged too. A model of any subset answers such a row without that party. 0 "
        "flags nothing.",
        example="dataset='digits' validation-fraction=0.25 flag-rate=0.01",
        least=0,
        below=1,
    )

    @property
    def rule(self) -> Rule:
        """Return how the threshold is chosen, or raise `ConfigError` if the option is invalid."""
        kind, _, text = self.threshold.partition(":")
        if self.threshold == "f1":
            return Rule("f1")
        if kind not in ("cost", "rate"):
            kind, text = "number", self.threshold
        with suppress(ValueError):
            if 0 < (number := float(text)) < (math.inf if kind == "cost" else 1):
                return Rule(kind, number)
        raise ConfigError(
            f"threshold = {self.threshold!r} is not a threshold. Give a number between 0 and 1, "
            "'f1', 'cost:5' for the cost of a missed positive, or 'rate:0.1' for the share to flag."
        )

    def check(self, data: DataConfig) -> None:
        """Raise `ConfigError` if these options contradict the options of the data."""
        rule = self.rule
        if data.target == "regression" and rule != _DEFAULT:
            raise ConfigError(
                f"threshold = {self.threshold!r} is for two classes, and target = 'regression' has "
                "none. Leave threshold out."
            )
        if rule.kind != "number" and data.validation_fraction == 0:
            raise _no_rows(self.threshold)
        for option, named in (("segments", data.segments), ("time", data.time)):
            if named and not data.own_data:
                raise ConfigError(
                    f"{option} = {named!r} names columns of the label holder's file, and dataset "
                    f"= {data.dataset!r} is divided among the parties. Leave {option} out, or set "
                    "dataset='files:PATH'."
                )
        if data.split == "time" and not (data.time and data.test_fraction and data.align != "ids"):
            raise ConfigError(
                "split = 'time' needs a column of dates, test rows, and align = 'psi' or 'any'. "
                "Set time, a test-fraction above 0 and such an align, or leave split out."
            )

    def check_rows(self, classes: int, validation: int) -> None:
        """Raise `ConfigError` if so many classes and validation rows do not fit the threshold."""
        if classes > 2 and self.rule != _DEFAULT:
            raise ConfigError(
                f"threshold = {self.threshold!r} is for two classes, and the labels have "
                f"{classes}. Leave threshold out."
            )
        if self.rule.kind != "number" and not validation:
            raise _no_rows(self.threshold)

    def check_flags(self, held_out: int) -> None:
        """Raise `ConfigError` if so few held-out rows cannot show that few scores are flagged."""
        if self.flag_rate and held_out < (needed := rows_to_flag(self.flag_rate)):
            raise ConfigError(
                f"flag-rate = {self.flag_rate:g} needs {needed} validation rows, and there are "
                f"{held_out}. Raise validation-fraction or flag-rate, or leave flag-rate out."
            )


def _no_rows(threshold: str) -> ConfigError:
    return ConfigError(
        f"threshold = {threshold!r} is chosen on validation rows, and there are none. Set "
        "validation-fraction, or give threshold as a number."
    )
