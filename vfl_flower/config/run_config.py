"""The run configuration. Only this module reads it.

Flower's run configuration is a flat table of options in kebab case, which users know. Inside, it is
a `RunConfig` of `sections`, each for one part of the code. This module checks each option by
itself. Checks of several options stand beside the code that they concern.
`protocol.systems.resolve` runs those checks too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from vfl_flower.config import options, plugins
from vfl_flower.config.errors import ConfigError, meant, shown
from vfl_flower.config.options.option import Key, basic, key, setting

_PAIR = re.compile(r"""[\w.-]+=('[^']*'|"[^"]*"|\S+)""")  # option=value, as Flower reads it

# A text without quotes. A match begins at no other letter of a name, so that it takes little time.
_BARE = re.compile(r"(?<![\w.-])([\w.-]+)=(?!true\b|false\b)([A-Za-z./~][^\s'\"]*)")

_NO_SETTINGS = "is no settings. Write name=value for each, with a space between two."
_TRUTHS = {"true": True, "false": False}

AUTO = "auto"  # value of an option that the chosen system, the data or the runtime decides


@dataclass(frozen=True)
class RunConfig:
    """One run. Field ``training.party_lr`` is option ``party-lr``; ``None`` is "auto"."""

    task: str = key(
        "train",
        "Chooses what the run does. `predict` applies the model of an earlier run, `model`, to new "
        "rows. `distil` makes a model that predicts without parties. `serve` answers requests for "
        "scores by that model, until it is stopped. `explain` measures what each feature is worth "
        "to it. `align` only finds the common rows and keeps "
        "the alignment for later runs. `information` computes the information value of each "
        "column. With `model`, it gives figures for groups of the parties' columns.",
        example="task='predict' model='runs/a'",
        choices=("train", "predict", "distil", "serve", "explain", "align", "information"),
    )
    model: str = key(
        "",
        "Names the results folder of the run whose model is used.",
        example="task='predict' model='runs/a'",
    )
    without: str = setting(
        "",
        "Names parties to leave out of a prediction or an explanation, as in '0,3'. The model must "
        "be trained on subsets of the parties.",
        example="task='predict' model='runs/a' without='0,3'",
    )
    explain: bool = setting(
        False,
        "Writes what each participant contributes to each predicted score, and its reasons. Rules "
        "of the parties decide which columns they tell.",
        example="task='predict' model='runs/a' explain=true",
    )
    information: str = key(
        "noisy",
        "Chooses the labels that give parties the information value of their columns. `noisy` "
        "sends each party labels that are randomised by `epsilon`. With `exact`, a party uploads "
        "the bins of its rows, and gets exact counts. Each party must allow `exact` in its node "
        "configuration.",
        example="task='information' information='exact'",
        choices=("noisy", "exact"),
    )
    min_bin: int = setting(
        20,
        "Sets the least rows of each class in a bin of a column. Smaller bins are merged.",
        example="task='information' min-bin=50",
        least=1,
    )
    repeats: int = setting(
        1,
        "Sets how often an explanation permutes each feature. More permutations make the intervals "
        "shorter. Each one is an upload of every explained row. Real parties permit 1.",
        example="task='explain' model='runs/a' repeats=5",
        least=1,
    )
    strategy: str = basic(
        "split-nn",
        "Chooses the system or baseline to run. `vfl list` describes each.",
        example="strategy='vafl'",
        registry=plugins.SYSTEMS,
    )
    data: options.DataConfig = field(default_factory=options.DataConfig)
    models: options.ModelConfig = field(default_factory=options.ModelConfig)
    training: options.TrainingConfig = field(default_factory=options.TrainingConfig)
    estimator: options.EstimatorConfig = field(default_factory=options.EstimatorConfig)
    schedule: options.ScheduleConfig = field(default_factory=options.ScheduleConfig)
    uplink: options.CodecConfig = field(default_factory=options.CodecConfig)
    downlink: options.CodecConfig = field(default_factory=options.CodecConfig)
    privacy: options.PrivacyConfig = field(default_factory=options.PrivacyConfig)
    assessment: options.AssessmentConfig = field(default_factory=options.AssessmentConfig)
    running: options.RunningConfig = field(default_factory=options.RunningConfig)
    serving: options.ServingConfig = field(default_factory=options.ServingConfig)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with these values, `None` for "auto"; default the rest."""
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
        """Return this configuration with other values of some options."""
        changed: dict[str, dict[str, Any]] = {"": {}}
        for name, value in values.items():
            option, known = KEYS[name], _VALUES[name](self)
            if value == known and type(value) is type(known):
                continue  # it has been checked
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


def _keys_of(section: str, kind: Any) -> list[Key]:
    types = {"int": int, "float": float, "str": str, "bool": bool}
    keys, prefix = [], "downlink-" * (section == "downlink")
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
            about["basic"], about["expert"] = False, True
        if about["example"].startswith("task="):
            about["engine"] = "flower"  # `flwr run` starts it
        type_of = types[str(spec.type).split(" |")[0]]
        keys.append(Key(prefix + name, section, spec.name, type_of, spec.default, **about))
    return keys


KEYS: dict[str, Key] = {
    each.name: each
    for section, kind in {"": RunConfig, **_SECTIONS}.items()
    for each in _keys_of(section, kind)
}
"""Every option and expert setting: the content of a `RunConfig`."""

_VALUES = {
    name: attrgetter(f"{each.section}.{each.field}".lstrip(".")) for name, each in KEYS.items()
}
"""Option -> what reads its value in a configuration."""


_EXPERT = Key(
    name="expert",
    section="",
    field="",
    type=str,
    default="",
    help="Sets expert settings, as NAME=VALUE NAME=VALUE. A system or an experiment decides them: "
    "a `System` has them among its defaults. `vfl list NAME` explains each.",
    example="strategy='cascaded' expert='mu=0.0001 directions=sphere'",
    values=", ".join(name for name, each in KEYS.items() if each.expert),
)
OPTIONS: dict[str, Key] = {
    each.name: each
    for each in (
        *(each for each in KEYS.values() if not (each.section or each.expert)),
        _EXPERT,
        *(each for each in KEYS.values() if each.section and not each.expert),
    )
}
"""Options of every run, in the order of `vfl list`. `expert` has the settings of `KEYS` besides."""


def opened(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return options, with the settings that ``expert``, a text or a mapping, names beside them."""
    values = dict(raw)
    given = values.pop("expert", "")
    if isinstance(given, str):
        given = {} if given == AUTO else _settings(given)
    if not isinstance(given, Mapping):
        raise ConfigError(f"expert = {shown(given)} {_NO_SETTINGS}")
    for name, value in given.items():
        if name not in KEYS or not KEYS[name].expert:
            raise ConfigError(
                f"expert names {shown(name)}, which is no expert setting: "
                f"{meant(name, [each for each in KEYS if KEYS[each].expert])}See `vfl list expert`."
            )
        if name in values:
            raise ConfigError(f"{name} is given twice: in expert, and beside it. Leave one out.")
        values[name] = value
    return values


def _settings(text: str) -> dict[str, Any]:
    """Return the settings in a text, with values of their types where that is possible."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = [""]
    if any("=" not in word for word in words):
        raise ConfigError(f"expert = {shown(text)} {_NO_SETTINGS}")
    settings: dict[str, Any] = {}
    for name, _, value in (word.partition("=") for word in words):
        kind = KEYS[name].type if name in KEYS else str
        settings[name] = value if kind is str else _TRUTHS.get(value, value)
        for number in (float, int) if kind in (int, float) else ():
            with suppress(ValueError):
                settings[name] = number(value)
    return settings


def parse(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, typed, without the options that are "auto"."""
    values: dict[str, Any] = {}
    for name, value in opened(raw).items():
        if name not in KEYS:
            hint = meant(name, KEYS)
            raise ConfigError(f"There is no option {name!r}. {hint}See `vfl list --all`.")
        if not (isinstance(value, str) and value == AUTO):
            values[name] = KEYS[name].typed(value)
    return values


def pairs(texts: Sequence[str], said: str) -> dict[str, Any]:
    """Parse options from Flower's syntax ``OPTION='text' OTHER=5``, or a TOML file.

    An error begins with ``said`` and the texts.
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
        if set(given) & set("“”‘’"):
            advice = "Write straight quotes, ' and \", instead of curly ones."
        raise ConfigError(f"{said} {given!r} cannot be read. {advice}") from error
    return found


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
    return shown | {name: AUTO for name in OPTIONS if name not in shown}


def given_to_flower(raw: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """Return the options of a Flower run that a user named, or changed in pyproject.toml."""
    table = flower_defaults()
    return {key: raw[key] for key in raw if key in named or raw[key] != table.get(key)}


def packed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with all expert settings in the option ``expert``: the reverse of `opened`."""
    values = opened(values)
    expert = {name: value for name, value in values.items() if name in KEYS and KEYS[name].expert}
    rest = {name: value for name, value in values.items() if name not in expert}
    texts = {k: str(v).lower() if isinstance(v, bool) else v for k, v in expert.items()}
    words = (f"{name}={text}" for name, text in texts.items())
    return {**rest, "expert": shlex.join(words)} if expert else rest
