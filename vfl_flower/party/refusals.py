"""Refusals of a party. The first message of a session, and each about another run, passes here.

A party's rules stand in its own node configuration, which nobody else can set. `check_order` finds
each configuration that a message refers to, and `check` compares it with the rules. Before these
checks, the party reads no data and computes nothing.

Some options could give a protection away: a path, arguments of a model, a public seed of noise.
The party accepts them only if its node configuration repeats them.
"""

import json
from collections.abc import Iterator
from typing import Any

from flwr.app import Context

from vfl_flower.config.errors import VflError
from vfl_flower.config.node_rules import Rules, refused_tasks
from vfl_flower.config.run_config import RunConfig, parse
from vfl_flower.party import about, state, state_file
from vfl_flower.party.own_model import own_config
from vfl_flower.protocol import estimators
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.system import load_system
from vfl_flower.protocol.systems import refuse_places, resolve, sized
from vfl_flower.transport import messages
from vfl_flower.transport.early_messages import EarlyOrder
from vfl_flower.transport.messages import DescribeOrder, GrowOrder, Order, RejoinOrder
from vfl_flower.transport.node import index_and_parties, refused, simulated
from vfl_flower.transport.shared_actor import SharedActorOrder
from vfl_flower.transport.stream.messages import SessionOrder

# --- every message ------------------------------------------------------------------------------

_MOST_PARTIES = 1024  # that a label holder may tell of: a party reserves memory for each

_accepted: set[tuple[str, str, bool]] = set()
"""Triples that keep the rules: (text about itself, node configuration, whether simulated)."""


def check_order(context: Context, order: Order) -> None:
    """Raise an error if the party's rules forbid an order, or the order's run."""
    if 0 < order.of_parties <= _MOST_PARTIES and order.of_parties > index_and_parties(context)[1]:
        context.node_config = {**context.node_config, "num-partitions": order.of_parties}
    written = state.load_about(context.state)
    node = repr(context.node_config)
    one_owner = simulated(context)
    is_accepted = (written, node, one_owner) in _accepted
    if is_accepted and not isinstance(order, OF_OTHER_RUNS):
        return  # skip repeated checks: there are many messages
    rules = Rules.of(context.node_config)
    if rules.aggregation == "secure" and not rules.sum_peers and not one_owner:
        raise refused(
            context,
            "every order: its rule is aggregation = 'secure', and sum-peers is missing. Give it "
            "the other parties' keys by sum-peers='1:KEY 2:KEY', or trust the first keys that the "
            "label holder passes on by sum-peers='first-seen'",
        )
    if isinstance(order, SessionOrder | SharedActorOrder):
        return  # each order that they carry is checked by itself
    if isinstance(order, RejoinOrder):
        state_file.load_latest(context, state_file.run_name(context, order.nonce))
        written = state.load_about(context.state)
    if written:
        _check_written(context, written)
        if len(_accepted) >= 4096:
            _accepted.clear()
        _accepted.add((written, node, one_owner))
    if isinstance(order, messages.ResumeOrder | messages.PredictOrder):
        saved = state_file.load(context, order.run, order.number)
        _check_written(context, state.load_about(saved.state))
    for config in _told(context, order):
        check(context, config)
        own_config(context, config)


OF_OTHER_RUNS = (
    *(EarlyOrder, DescribeOrder, RejoinOrder, messages.ResumeOrder, messages.PredictOrder),
    *(SessionOrder, SharedActorOrder),
)
"""Orders whose configurations differ from the configuration of the party's state."""


def _check_written(context: Context, text: str) -> None:
    """Raise `ConfigError` if the party's current rules forbid to continue the run."""
    written = about.read(text)
    check(context, written.config, written.rows)


def _told(context: Context, order: Order) -> Iterator[RunConfig]:
    """Yield the configurations of an order's run, as the label holder tells them.

    Where an earlier run gives most options, the order contains the configuration.
    """
    if isinstance(order, EarlyOrder | GrowOrder) and order.config:
        yield told(context, order.config)
    begins = isinstance(order, DescribeOrder | RejoinOrder) and not isinstance(order, GrowOrder)
    if not begins and not isinstance(order, EarlyOrder):
        return
    if not simulated(context):
        refuse_places(context.run_config)  # before any import path is loaded
    given, is_told = parse(context.run_config), isinstance(order, EarlyOrder) and order.config
    of_earlier = bool(given.get("resume") or given.get("grow"))
    in_state = bool(state.load_about(context.state))
    if (in_state or of_earlier) and isinstance(order, RejoinOrder):
        return  # the party continues from its state, or fails
    if (of_earlier or given.get("task") in ("predict", "explain")) and (is_told or in_state):
        return
    yield resolve(context.run_config)


def told(context: Context, text: str) -> RunConfig:
    """Return an order's configuration, after the checks of a run configuration."""
    try:
        values = json.loads(text)
        given = {str(name): value for name, value in values.items() if value is not None}
    except (ValueError, AttributeError):
        raise VflError("was sent a configuration that cannot be read.") from None
    if not simulated(context):
        refuse_places(given)
    return resolve(given)


# --- rules --------------------------------------------------------------------------------------


def check(context: Context, config: RunConfig, rows: int | None = None) -> Rules:
    """Return a party's rules, if this configuration satisfies them and names only accepted code."""
    rules, one_owner = Rules.of(context.node_config), simulated(context)
    if not one_owner:
        refuse_places(config.values())
        _check_arguments(context, config.models.bottom_args)
    if not one_owner or rules.dataset:
        _check_dataset(context, config.data.dataset, rules.dataset)
    tokenizer = config.data.tokenizer
    if tokenizer and not one_owner and context.node_config.get("tokenizer") != tokenizer:
        raise refused(context, f"tokenizer = {tokenizer!r}, a folder that others name")
    if rules.systems:
        _check_system(context, config, rules.systems)
    aggregation = config.models.aggregation
    if rules.aggregation and aggregation != rules.aggregation:
        rule = f"its rule is aggregation = {rules.aggregation!r}"
        raise refused(context, f"aggregation = {aggregation!r}: {rule}")
    aggregation_of(config).check_rules(context, rules)
    epochs = (config if rows is None else sized(config, rows)).training.epochs
    if epochs is not None and rules.max_epochs is not None and epochs > rules.max_epochs:
        raise refused(context, f"epochs = {epochs}: its rule is max-epochs = {rules.max_epochs}")
    if rules.min_embedding_noise:
        _check_noise(context, config, rules.min_embedding_noise)
    of_its_own = config.data.own_data or rules.min_embedding_noise
    if of_its_own and not (one_owner and rules.noise_seed is None):
        _check_seed(context, config.privacy.noise_seed, rules.noise_seed)
    return rules


def check_task(context: Context, task: str) -> None:
    """Raise `ConfigError` if the party's rule ``refuse`` names this task."""
    refuse = Rules.of(context.node_config).refuse
    if task in refused_tasks(refuse):
        raise refused(context, f"task {task!r}: its rule is refuse = {refuse!r}")


def _check_arguments(context: Context, arguments: str) -> None:
    """Refuse model arguments from others: installed code would run with them."""
    own = context.node_config
    if arguments and "model" not in own and own.get("model-args") != arguments:
        raise refused(
            context,
            f"model-args = {arguments!r} from others: its own node configuration gives "
            f"{_or_none('model-args', own.get('model-args'))}",
        )


def _check_dataset(context: Context, dataset: str, permitted: str) -> None:
    """Refuse a path of others, except for the label holder's own file."""
    named = dataset == permitted and not dataset.startswith("memory:")
    if ":" in dataset and not dataset.startswith("files:") and not named:
        raise refused(
            context,
            f"dataset = {dataset!r} from others: its own node configuration gives "
            f"{_or_none('dataset', permitted or None)}",
        )


def _check_seed(context: Context, seed: int, permitted: int | None) -> None:
    if seed >= 0 and seed != permitted:
        raise refused(
            context,
            f"noise-seed = {seed}, which reveals its noise and its first model: its own node "
            f"configuration gives {_or_none('noise-seed', permitted)}",
        )


def _check_system(context: Context, config: RunConfig, systems: str) -> None:
    system, rule = config.strategy, f"its rule is systems = {systems!r}"
    permitted = [name.strip() for name in systems.split(",")]
    if system not in permitted:
        raise refused(context, f"strategy = {system!r}: {rule}")
    own = RunConfig.of(load_system(system).defaults)
    if estimators.choose(config) is not estimators.choose(own):  # the name alone says too little
        raise refused(
            context, f"strategy = {system!r} with another estimator or labels than its own: {rule}"
        )


def _check_noise(context: Context, config: RunConfig, least: float) -> None:
    rule = f"its rule is min-embedding-noise = {least:g}"
    privacy, mechanism = config.privacy, mechanism_of(config)
    if not mechanism.perturbs_uploads:
        raise refused(context, f"privacy = {privacy.mechanism!r}: {rule}")
    if not mechanism.relative_noise >= least:  # epsilon depends on the relative noise
        noise, bound = privacy.embedding_noise, privacy.embedding_bound
        what = f"embedding-noise = {noise:g} at embedding-bound = {bound:g}"
        raise refused(context, f"{what}: {rule} times that bound")


def _or_none(key: str, value: Any) -> str:
    return f"no {key}" if value is None else f"{key} = {value!r}"
