"""Rules of a party: options in its node configuration, which nobody else can set.

`vfl_flower.party.refusals` compares a run's options with these rules. Others apply elsewhere:

- `max-epochs`, `max-uploads`, `max-predictions`: `party.limits`
- `max-ids`, `max-ids-per-day`: `alignment.asked_ids`
- `align`, `alignment-days`, `min-rows`, `match`, `match-bits`: `alignment.store` and `.by_rules`
- `embedding-activation`, `sum-peers`: `protocol.aggregation.secure` and `.keys`
- `stream-address`: `transport.stream.session`
- `retention-days`: `party.state_file`
- `information`, `reasons`, `refuse`: the tasks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints

from vfl_flower.config.checks import Amount, Count, InvalidError, check_of
from vfl_flower.config.errors import ConfigError, meant
from vfl_flower.config.logs import FORMATS
from vfl_flower.config.names import Name

_OTHERS = (  # options of a node configuration that are not rules
    *("partition-id", "num-partitions", "simulated", "states"),
    *("file", "source", "held", "id", "columns", "missing", "missing-words", "text", "dates"),
    *("match-columns", "rows", "monotonic", "segments"),
    *("model", "model-args", "embedding-size", "log-format"),
    *("images", "image-size", "tokenizer", "text-length", "sequence-length", "augment"),
)

OWN_TRAINING = (  # options of training that a party may set for its own model
    *("party-lr", "optimizer", "weight-decay", "lr-schedule", "lr-step", "lr-decay", "warm-up"),
    "clip-gradient",
)


def rule(default: Any, help: str, example: str, basic: bool = False) -> Any:
    """Return the dataclass field of one rule. `options.option.Key` explains the arguments."""
    return field(default=default, metadata={"help": help, "example": example, "basic": basic})


@dataclass(frozen=True)
class Rules:
    """Rules in a node configuration, where names have hyphens. None sets no rule."""

    align: str = rule(
        "psi",
        "Sets the method by which ids may be compared. `ids` permits that method, and no other.",
        "align='ids'",
    )
    min_rows: Count = rule(
        50,
        "Refuses a run whose participants have fewer common rows than this. In a simulation, the "
        "rule applies only if it is set.",
        "min-rows=100",
        basic=True,
    )
    max_ids: Count = rule(
        10_000_000,
        "Limits the ids that label holders may ask about. The limit counts all label holders and "
        "all runs. It counts each id once. Services may ask about half of them.",
        "max-ids=100000",
    )
    max_ids_per_day: Count | None = rule(
        None,
        "Limits the new ids that label holders may ask about in one day of UTC. Services may ask "
        "about half of them.",
        "max-ids-per-day=10000",
    )
    match: str = rule(
        "",
        "Names the rules that may match people without a common id, as the option `match` does. "
        "The empty text permits all rules of columns in `match-columns`.",
        "match='surname+date(birthdate)+postcode'",
    )
    match_bits: Amount = rule(
        20.0,
        "Refuses a rule whose keys are easier to guess than this, in bits. The party's own people "
        "tell the bits. In a simulation, the rule applies only if it is set.",
        "match-bits=25",
    )
    alignment_days: Count = rule(
        30,
        "Sets the days for which the party keeps an alignment and uses it again. 0 keeps none.",
        "alignment-days=7",
    )
    retention_days: Count | None = rule(
        None,
        "Sets the days after which the party removes states, alignments and reasons. It looks at "
        "each checkpoint of a run. A model whose state is removed predicts no more.",
        "retention-days=365",
    )
    systems: str = rule(
        "",
        "Names the systems that the party takes part in, separated by commas. The empty text "
        "permits all.",
        "systems='ef-vfl,vafl'",
        basic=True,
    )
    refuse: str = rule(
        "",
        "Names tasks that the party takes no part in, separated by commas: `explain`, "
        "`information` or `drift`. `none` refuses nothing. Without this rule, a party with the "
        "rule aggregation='secure' refuses `explain`.",
        "refuse='explain,drift'",
    )
    reasons: str = rule(
        "none",
        "Sets what the party tells of its reasons for a score. `ranks` tells numbers of the "
        "columns with the largest parts, and `names` also their names. Its own file has all.",
        "reasons='names'",
    )
    information: str = rule(
        "noisy",
        "Permits exact counts of labels in the party's bins, by `exact`. The party then uploads "
        "the bin of each of its rows. In a simulation, the rule applies only if it is set.",
        "information='exact'",
    )
    min_embedding_noise: Amount = rule(
        0.0,
        "Requires noise on all embeddings that the party uploads. The value is the least "
        "`embedding-noise`, divided by `embedding-bound`.",
        "min-embedding-noise=1.5",
    )
    max_epochs: Count | None = rule(
        None,
        "Limits the passes over the party's rows that train one model. The limit counts all runs "
        "of that model.",
        "max-epochs=100",
        basic=True,
    )
    max_uploads: Count | None = rule(
        None,
        "Limits how often the party uploads an embedding of the same row. The limit counts a run "
        "and all runs that resume it, grow from it or predict with it.",
        "max-uploads=200",
    )
    max_predictions: Count | None = rule(
        None,
        "Limits the rows that the party embeds for predictions. The limit counts all models that "
        "the party keeps.",
        "max-predictions=1000",
    )
    max_predictions_per_day: Count | None = rule(
        None,
        "Limits the rows that the party embeds for predictions in one day of UTC.",
        "max-predictions-per-day=10000",
    )
    aggregation: str = rule(
        "",
        "Sets the aggregation that the party insists on. With `secure`, it refuses a run in which "
        "the label holder gets its embeddings unmasked.",
        "aggregation='secure' sum-peers='first-seen'",
    )
    sum_peers: str = rule(
        "",
        "Gives the public keys of the other parties for masked sums, as in '1:HEX 2:HEX'. "
        "`first-seen` trusts the first keys that the party sees. The empty text does so too, "
        "unless the party has the rule aggregation='secure'.",
        "sum-peers='first-seen'",
    )
    embedding_activation: str = rule(
        "",
        "Permits one `embedding-activation` besides `none` in runs with masked sums.",
        "embedding-activation='tanh'",
    )
    noise_seed: Count | None = rule(
        None,
        "Permits one `noise-seed` for runs on the party's data. Others then know its noise.",
        "noise-seed=0",
    )
    dataset: str = rule(
        "",
        "Permits one `dataset` that contains a path, which the party then reads for others.",
        "dataset='csv:shared.csv'",
    )
    stream_address: str = rule(
        "",
        "Names the hosts that the party may connect to, separated by commas. Each host may have "
        ":PORT. The empty text permits this machine only.",
        "stream-address='vfl.example.org:9500'",
    )
    name: Name = rule(
        "",
        "Gives the party a name, which the label holder's errors, tables and pages call it by. The "
        "name decides nothing else.",
        "name='bank'",
    )

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Rules:
        """Return the rules in a node configuration, or raise `ConfigError`."""
        return _rules_of(tuple((key, type(value), value) for key, value in node_config.items()))


@lru_cache(maxsize=4096)  # every message reads the rules
def _rules_of(node_config: tuple[tuple[str, type, Any], ...]) -> Rules:
    values = {key: value for key, _, value in node_config}
    whose = f"Party {values.get('partition-id')}'s node configuration"
    given: dict[str, Any] = {}
    for key, value in values.items():
        if key in _CHECKS:
            try:
                given[key.replace("-", "_")] = _CHECKS[key](value)
            except InvalidError as error:
                raise ConfigError(f"{whose} gives {key} = {value!r}, which {error}.") from None
        elif key not in (*_OTHERS, *OWN_TRAINING):
            _check_own_key(key, whose, "source" in values)
        elif key == "log-format" and value not in FORMATS:
            raise ConfigError(f"{whose} gives {key} = {value!r}. Use one of {', '.join(FORMATS)}.")
    for key, permitted in _CHOICES.items():
        if given.get(key, permitted[0]) not in permitted:
            choices = " or ".join(map(repr, permitted))
            raise ConfigError(f"{whose} gives {key} = {given[key]!r}. Use {choices}.")
    for name in refused_tasks(given.get("refuse", "")):
        if name not in REFUSABLE:
            raise ConfigError(
                f"{whose} gives refuse = {given['refuse']!r}, which names a task {name!r}. Use "
                f"{', '.join(REFUSABLE)} or none."
            )
    rules = Rules(**given)
    days = rules.alignment_days if rules.retention_days is None else rules.retention_days
    return replace(rules, alignment_days=min(days, rules.alignment_days))


_CHOICES = {"information": ("noisy", "exact"), "reasons": ("none", "ranks", "names")}

REFUSABLE = ("explain", "information", "drift")
"""Tasks that a party can refuse by its rule ``refuse``."""


def refused_tasks(refuse: str) -> list[str]:
    """Return the names in a rule ``refuse``."""
    return [name.strip() for name in refuse.split(",") if name.strip() not in ("", "none")]


_CHECKS = {  # None is the default of some rules, and no value
    name.replace("_", "-"): check_of(Count if kind == Count | None else kind)
    for name, kind in get_type_hints(Rules, include_extras=True).items()
}


class Rule(NamedTuple):
    """A rule, as `vfl list` describes it."""

    name: str
    type: str
    default: Any
    help: str
    example: str
    basic: bool


RULES: dict[str, Rule] = {
    name: Rule(name, str(spec.type).removesuffix(" | None"), spec.default, **spec.metadata)
    for spec in fields(Rules)
    for name in (spec.name.replace("_", "-"),)
}
"""Every rule, by its name."""


def _check_own_key(key: str, whose: str, has_source: bool) -> None:
    """Refuse an unknown option. A source may read others, but none whose name is like a rule's."""
    known = [*_CHECKS, *_OTHERS, *OWN_TRAINING]
    close = get_close_matches(key, known, 1, 0.85 if has_source else 0.6)
    close = ["model"] if key == "bottom-model" else close
    if close or not has_source:
        hint = f"Did you mean {close[0]}?" if close else meant(key, known).rstrip()
        hint = hint or f"Rules are {', '.join(_CHECKS)}."
        raise ConfigError(f"{whose} has an unknown option {key!r}. {hint}")
