"""The run configuration. Only this module reads it.

Flower's run configuration is a flat table of options in kebab case, which users know. Inside, it is
a `RunConfig` of `sections`, each for one part of the code. This module checks each option by
itself. Checks of several options stand beside the code that they concern.
`protocol.systems.resolve` runs those checks too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from vfl_flower.config import plugins
from vfl_flower.config.checks import Check, InvalidError, check_of
from vfl_flower.config.errors import ConfigError, meant, shown, unknown
from vfl_flower.config.options import (
    AssessmentConfig,
    CodecConfig,
    DataConfig,
    EstimatorConfig,
    ModelConfig,
    PrivacyConfig,
    RunningConfig,
    ScheduleConfig,
    ServingConfig,
    TrainingConfig,
    key,
)
from vfl_flower.config.options.option import sentences

_FLOWER = "flower"  # engine of examples that `flwr run` starts
_PAIR = re.compile(r"""[\w.-]+=('[^']*'|"[^"]*"|\S+)""")  # option=value, as Flower reads it

# A text without quotes. A match begins at no other letter of a name, so that it takes little time.
_BARE = re.compile(r"(?<![\w.-])([\w.-]+)=(?!true\b|false\b)([A-Za-z./~][^\s'\"]*)")

AUTO = "auto"
"""Value of an option that the chosen system, the data or the runtime decides."""


@dataclass(frozen=True)
class RunConfig:
    """One run. Field ``training.party_lr`` is option ``party-lr``; ``None`` is "auto"."""

    task: str = key(
        "train",
        "Chooses what the run does. `predict` applies the model of an earlier run, `model`, to new "
        "rows. `serve` answers requests for scores by that model, until it is stopped. `explain` "
        "measures what each feature is worth to it. `align` only finds the common rows and keeps "
        "the alignment for later runs. `information` computes the information value of each "
        "column.",
        example="task='predict' model='runs/a'",
        engine=_FLOWER,
        choices=("train", "predict", "serve", "explain", "align", "information"),
        related=("model", "without", "dataset"),
    )
    model: str = key(
        "",
        "Names the results folder of the run whose model predicts, serves or is explained.",
        example="task='predict' model='runs/a'",
        engine=_FLOWER,
        related=("task", "without"),
    )
    without: str = key(
        "",
        "Names parties to leave out of a prediction or an explanation, as in '0,3'. The model must "
        "be trained on subsets of the parties.",
        example="task='predict' model='runs/a' without='0,3'",
        engine=_FLOWER,
        related=("task", "subsets"),
    )
    information: str = key(
        "noisy",
        "Chooses the labels that give parties the information value of their columns. `noisy` "
        "sends each party labels that are randomised by `epsilon`. With `exact`, a party uploads "
        "the bins of its rows, and gets exact counts. Each party must allow `exact` in its node "
        "configuration.",
        example="task='information' information='exact'",
        engine=_FLOWER,
        choices=("noisy", "exact"),
        related=("task", "epsilon", "min-bin"),
    )
    min_bin: int = key(
        20,
        "Sets the least rows of each class in a bin of a column. Smaller bins are merged.",
        example="task='information' min-bin=50",
        engine=_FLOWER,
        least=1,
        related=("task", "information"),
    )
    repeats: int = key(
        1,
        "Sets how often an explanation permutes each feature. More permutations make the intervals "
        "shorter. Each one is an upload of every explained row. Real parties permit 1.",
        example="task='explain' model='runs/a' repeats=5",
        engine=_FLOWER,
        least=1,
        related=("task",),
    )
    strategy: str = key(
        "split-nn",
        "Chooses the system or baseline to run. `vfl list` describes each.",
        example="strategy='vafl'",
        basic=True,
        registry=plugins.SYSTEMS,
        related=("estimator", "quorum", "privacy"),
    )
    data: DataConfig = field(default_factory=DataConfig)
    models: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    uplink: CodecConfig = field(default_factory=CodecConfig)
    downlink: CodecConfig = field(default_factory=CodecConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    assessment: AssessmentConfig = field(default_factory=AssessmentConfig)
    running: RunningConfig = field(default_factory=RunningConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with these values, `None` for "auto"; default the rest.

        Raises
        ------
        ConfigError
            If an option cannot have its value.
        """
        return RunConfig().with_values(values)

    def __hash__(self) -> int:
        """Return the hash of all values, computed once: windows are cached by it."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, spec.name) for spec in fields(self)))

    @property
    def subsets(self) -> str:
        """Return which subsets of each row's parties also train the top model."""
        return self.training.subsets or ("sampled" if self.data.partial else "off")

    def values(self) -> dict[str, Any]:
        """Return option -> value. `of` makes the same configuration from it."""
        return {name: value_of(self) for name, value_of in _VALUES.items()}

    def with_values(self, values: Mapping[str, Any]) -> RunConfig:
        """Return this configuration with other values of some options.

        Raises
        ------
        ConfigError
            If an option cannot have its value.
        """
        changed: dict[str, dict[str, Any]] = {"": {}}
        for name, value in values.items():
            option = KEYS[name]
            changed.setdefault(option.section, {})[option.field] = option.check(value)
        own = changed.pop("")
        sections = {name: replace(getattr(self, name), **each) for name, each in changed.items()}
        return replace(self, **own, **sections)


GROUPS = {
    "": "task and system",
    "data": "data",
    "models": "models",
    "training": "training",
    "estimator": "how parties learn",
    "schedule": "schedule",
    "uplink": "compression of uploads",
    "downlink": "compression of answers",
    "privacy": "privacy",
    "assessment": "figures of the model",
    "running": "runtime and results",
    "serving": "online scores",
}
"""Section of a `RunConfig` -> title of its options."""

_SECTIONS: dict[str, Any] = {
    spec.name: spec.default_factory for spec in fields(RunConfig) if callable(spec.default_factory)
}


class Key(NamedTuple):
    """An option of the run configuration, and its position in a `RunConfig`.

    help : sentences; the first is the summary.
    example : pairs that `protocol.systems.resolve` accepts.
    auto : what decides the value if there is no default.
    basic : whether a new user needs the option.
    related : names of other options.
    symbol : the paper's symbol.
    engine : engine that the example needs, if not the default; "flower" for `flwr run`.
    before : what must be true before the example can run.
    values : permitted values in words, if no other field describes them.
    numbers : whether a number stands for its text.
    """

    name: str
    section: str  # empty for `RunConfig` itself
    field: str
    type: type
    default: Any
    help: str
    example: str
    auto: str = ""
    basic: bool = False
    related: tuple[str, ...] = ()
    symbol: str = ""
    engine: str = ""
    before: str = ""
    values: str = ""
    choices: tuple[str, ...] = ()
    registry: plugins.Registry | None = None
    least: float | None = None
    above: float | None = None
    below: float | None = None
    numbers: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the option's values, if the values have names."""
        return self.registry.names if self.registry else self.choices

    @property
    def summary(self) -> str:
        """Return the first sentence of the help text."""
        return sentences(self.help)[0]

    def of(self, config: RunConfig) -> Any:
        """Return the option's value in a configuration."""
        return _VALUES[self.name](config)

    def typed(self, value: Any, named: str = "") -> Any:
        """Return a value with the option's type, or raise `ConfigError`.

        named : name of the option in the error. The default is its own name.
        """
        if self.numbers and isinstance(value, int | float):
            value = str(value)
        try:
            return _check_of(self.name)(value)
        except InvalidError as error:
            quoted = isinstance(value, str) and self.type in (int, float, bool)
            hint = " Leave the quotes out." * quoted
            raise ConfigError(f"{named or self.name} = {shown(value)} {error}.{hint}") from None

    def check(self, value: Any) -> Any:
        """Return a value with the option's type; raise `ConfigError` unless it is permitted."""
        if value is None:
            return None
        if self.registry:
            self.registry.check(value, self.name)
        if self.choices and value not in self.choices:
            raise unknown(self.name, value, self.choices)
        return self.typed(value)


@cache
def _check_of(name: str) -> Check:
    option = KEYS[name]
    widest = {int: 2**31, float: 1e38}.get(option.type)  # of 32 bits
    if widest is None:
        return check_of(option.type)
    below = widest if option.below is None else option.below
    above = -widest if option.least is None and option.above is None else option.above
    return check_of(Annotated[option.type, Field(ge=option.least, gt=above, lt=below)])


def _keys_of(section: str, kind: Any, prefix: str = "") -> list[Key]:
    types = {"int": int, "float": float, "str": str, "bool": bool}
    keys = []
    for spec in fields(kind):
        if "help" not in spec.metadata:
            continue
        about = dict(spec.metadata)
        name = about.pop("name", spec.name.replace("_", "-"))
        if prefix:
            about["help"] = (
                f"Works like `{name}`, for messages to the parties. They carry gradient rows, or "
                "the shared top model."
            )
            about["example"] = re.sub(r"([a-z]+)=", rf"{prefix}\1=", about["example"])
            about["related"] = (name, *(prefix + other for other in about["related"]))
            about["basic"] = False
        type_of = types[str(spec.type).split(" |")[0]]
        keys.append(Key(prefix + name, section, spec.name, type_of, spec.default, **about))
    return keys


KEYS: dict[str, Key] = {
    each.name: each
    for each in (
        *_keys_of("", RunConfig),
        *(
            each
            for section, kind in _SECTIONS.items()
            for each in _keys_of(section, kind, "downlink-" if section == "downlink" else "")
        ),
    )
}
"""Every option, in the order of `vfl list`."""

_VALUES = {
    each.name: attrgetter(f"{each.section}.{each.field}".lstrip(".")) for each in KEYS.values()
}
"""Option -> what reads its value in a configuration."""


SHOWN = (
    *("strategy", "dataset", "label", "target", "id"),
    *("epochs", "batch-size", "party-lr", "seed", "out"),
)
"""Options that pyproject.toml shows to a user of Flower. No system has its own default for one
whose default is a value."""


def flower_defaults() -> dict[str, Any]:
    """Return the table ``[tool.flwr.app.config]`` of pyproject.toml: `SHOWN`, then all others.

    Flower refuses options that the table lacks, and passes on the table's value of each option
    that a user omits.
    """
    shown = {name: AUTO if KEYS[name].auto else KEYS[name].default for name in SHOWN}
    return shown | {name: AUTO for name in KEYS if name not in shown}


def given_to_flower(raw: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Return the options of a Flower run that a user gave, or changed in pyproject.toml.

    Parameters
    ----------
    raw : all options, as Flower passes them on.
    named : options of ``flwr run --run-config``.
    """
    table = flower_defaults()
    return {key: raw[key] for key in raw if key in named or raw[key] != table.get(key)}


def parse(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, typed, without the options that are "auto".

    Raises
    ------
    ConfigError
        If an option is unknown, or a value has the wrong type.
    """
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in KEYS:
            hint = meant(name, KEYS)
            raise ConfigError(f"There is no option {name!r}. {hint}See `vfl list --all`.")
        if not (isinstance(value, str) and value == AUTO):
            values[name] = KEYS[name].typed(value)
    return values


def pairs(texts: Sequence[str], said: str) -> dict[str, Any]:
    """Parse options from Flower's syntax ``OPTION='text' OTHER=5``, or a TOML file.

    Parameters
    ----------
    said : start of the error message, before the texts.

    Raises
    ------
    ConfigError
        If the texts cannot be read.
    """
    from click import ClickException
    from flwr.common.config import parse_config_args

    try:
        of_file = bool(texts) and texts[0].endswith(".toml")
        if of_file and "=" not in texts[0] and not Path(texts[0]).is_file():
            raise ConfigError(f"{said} {texts[0]!r} cannot be read: there is no such file.")
        left = [] if of_file else texts
        if any(_PAIR.sub("", text).strip() for text in left):
            raise ValueError  # Flower would silently skip what it does not recognise
        found = dict(parse_config_args(list(texts)))
    except (ClickException, OSError, ValueError) as error:
        given = " ".join(texts)
        advice = (
            "Write option=value pairs, with spaces between pairs alone, and texts in quotes, as in "
            "\"OPTION='text' OTHER=5\"."
        )
        quoted = _BARE.sub(r"\1='\2'", given)
        if quoted != given and not _PAIR.sub("", quoted).strip():
            advice = f'Texts need quotes, which the shell removes: write "{quoted}".'
        raise ConfigError(f"{said} {given!r} cannot be read. {advice}") from error
    return found
