"""A party between two messages: what it keeps in Flower's ``Context``, and takes from it again.

Any process may serve any message, so everything that the next one needs is in ``Context.state``.
The feature block and the model are built once a process. While that process goes on, the state
has the model's own memory, and no copy of it: what leaves the process are the bytes of then.
"""

from __future__ import annotations

import logging
import math
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context

from vfl_flower.config.errors import ConfigError, OutOfStepError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig, parse
from vfl_flower.data.at_party import FeatureBlock
from vfl_flower.models.training import load_model, load_optimizer, model_tensors, optimizer_tensors
from vfl_flower.party import state, state_file
from vfl_flower.party.about import read
from vfl_flower.party.inputs import load_block
from vfl_flower.party.limits import Limits
from vfl_flower.party.own_model import own_config
from vfl_flower.party.party import Party
from vfl_flower.party.refusals import check, told
from vfl_flower.protocol.aggregation import aggregation_of, keys
from vfl_flower.protocol.batches import steps_per_epoch
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.flower_internals import config_record
from vfl_flower.transport.messages import (
    SMALL,
    Arrays,
    DescribeOrder,
    EvaluateOrder,
    GrowOrder,
    RejoinOrder,
    TrainOrder,
)
from vfl_flower.transport.node import refused, seat

log = logging.getLogger("flwr")

_skeletons: dict[tuple[int, int], tuple[int, Party]] = {}
"""The parties that a process serves, each with the run that it is of."""


def forget(run: int) -> None:
    """Let go of the parties of a run that has ended, if this process goes on."""
    for place, (of, _) in list(_skeletons.items()):  # a copy: other threads may run others
        if of == run:
            _skeletons.pop(place, None)


def begin(context: Context, order: DescribeOrder | RejoinOrder) -> Party:
    """The party of a node at the beginning of a run."""
    index, parties = seat(context)
    given = parse(context.run_config)
    if given.get("resume") or given.get("grow"):
        raise VflError("has lost the state from which it went on.")
    config = resolve(context.run_config)
    party = party_of(context, config, order.outputs, load_block(context, config))
    rules = check(context, config, party.rows)
    party.origin = str(context.run_id)
    party.run = state_file.run_name(context, order.nonce)
    if party.seal:
        party.seal.begin(party.run)
    party.limits = limits_of(context, rules, party.origin)
    if isinstance(order, DescribeOrder):
        if state.load_about(context.state) or state_file.is_there(context, party.run):
            party.limits.go_on()  # described again: what was counted until now stays
        party.limits.begin()
    else:  # it has served messages of this run, and remembers none
        party.limits.go_on()
    keys.forget(context)  # not before: a party that is refused stays as it was
    forget_copies(context)
    _skeletons[index, parties] = context.run_id, party
    return party


def grow(context: Context, order: GrowOrder) -> Party:
    """The party of a node at the beginning of a run that begins by models of an earlier one.

    If the party was of that run, it has its model of then, prepares its columns as then, and counts
    on what it gave away; else all is new. Its own folder of states alone is looked into.

    Raises
    ------
    ConfigError, VflError
        If it has no such model, or other columns or another model than then, or if its rules do not
        let it go on.
    """
    index, parties = seat(context)
    config = told(context, order.config)
    if not aggregation_of(config).may_grow:  # whatever became of the option `grow`
        name = config.models.aggregation
        raise VflError(f"was asked to begin aggregation = {name!r} by an earlier model.")
    saved, number = None, 0
    if index < order.parties:
        saved, number = state_file.load(context, order.run, order.number)
    about = state.load_about(saved) if saved else ""
    block = load_block(context, config, read(about).preparation if about else None)
    party = party_of(context, config, order.outputs, block, bool(about))
    rules = check(context, config, party.rows)
    party.origin = str(context.run_id)
    party.run = state_file.run_name(context, order.nonce)
    if saved:
        party.brought_from = number
        check_model(about, party)
        check_weights(party, about)
        load_model(party.model, state.load_arrays(saved, "model"))
        then, per_epoch = state.load_scalars(saved), steps_per_epoch(party.config, party.rows)
        party.origin, party.brought = then["origin"], then["exchange"]
        # Not below what it was trained for: runs of few rows between would take the count away.
        party.steps = math.ceil(round(then["epochs"] * per_epoch, 6))
        epochs = party.config.training.epochs
        ends = party.steps + (0 if party.frozen else epochs * per_epoch)
        party.limits = limits_of(context, rules, party.origin)
        party.limits.check_steps(ends, per_epoch)
        party.limits.go_on()
    else:
        party.limits = limits_of(context, rules, party.origin)
        party.limits.begin()
    _skeletons[index, parties] = context.run_id, party
    return party


def largest_order(context: Context) -> int:
    """Bytes of the arrays of the next order to a node's party, at most.

    Before it has described itself, which tells its rows, the label holder may send ids.
    """
    known = state.load_scalars(context.state).get("largest")
    return int(known) if known else SMALL + 32 * Rules.of(context.node_config).max_ids


def party_of(
    context: Context, config: RunConfig, outputs: int, block: FeatureBlock, grown: bool = False
) -> Party:
    """The party of a node, with the bottom model that is its own if it has named one.

    Parameters
    ----------
    grown : whether that began in an earlier run.

    Raises
    ------
    ConfigError
        If that model cannot be had, or makes no embeddings.
    """
    return Party(config, *seat(context), outputs, block, own_config(context, config), grown)


def check_data(about: str, party: Party) -> None:
    """Refuse, by `VflError`, other data than the party's model began with."""
    then, now = read(about), read(party.about)
    if (now.ids, now.preparation) != (then.ids, then.preparation):
        raise VflError("has not the data that this run began with: its file has changed since.")


def check_model(about: str, party: Party) -> None:
    """Refuse, by `ConfigError`, another bottom model than the party wrote about."""
    then, now = read(about).model, read(party.about).model
    if then != now:
        raise ConfigError(
            f"Party {party.index}'s model is {now['name']!r}, and differs from {then['name']!r}, "
            "with which the run began, in name, arguments or parameters: give it the one of then."
        )


def check_training(about: str, party: Party) -> None:
    """Refuse, by `ConfigError`, another training of the party's model than when the run began."""
    then, now = read(about), read(party.about)
    if (then.training, then.augment) != (now.training, now.augment):
        raise ConfigError(
            f"Party {party.index}'s node configuration says otherwise how its model is trained "
            "than when the run began: put back what it said then."
        )


def rename(context: Context, run: str) -> None:
    """Have the state of a party be of the run of this name, which goes on with another."""
    scalars = dict(state.load_scalars(context.state))
    context.state["scalars"] = config_record({**scalars, "run": run})


def keep(party: Party, context: Context) -> None:
    """Leave everything that the next message needs in the node's ``Context.state``."""
    p = party.pending
    scalars = {
        "exchange": party.exchange,
        "steps": party.steps,
        "epochs": party.epochs,
        "origin": party.origin,
        "run": party.run,
        "pending-secret": party.pending_secret if p else b"",
        "largest": party.largest_order,
        "pending": [p.exchange, p.epoch, p.first, p.steps, int(p.coordinated)] if p else [],
    }
    if party.seal:
        scalars |= party.seal.scalars
    surrogates = {name: surrogate.numpy() for name, surrogate in party.surrogates()}
    _save(party, context, scalars, {**surrogates, **party.arrays})
    if party.seal:
        party.seal.keep(context)
    party.left = context.state["scalars"]


def is_new(context: Context) -> bool:
    """Whether a party has served no turn yet."""
    return state.load_scalars(context.state).get("exchange") == 0


_AT = "model-at-"  # what a model at the evaluation of a number is kept as


def forget_copies(context: Context) -> None:
    """Have no copies of models any more: they are of what was before this run began, or went on."""
    for name in [each for each in context.state if each.startswith(_AT)]:
        del context.state[name]


def remember(context: Context, order: EvaluateOrder) -> None:
    """Keep a copy of the model at this evaluation, if it may be gone back to.

    Those of the best and of the last are kept too, since the label holder may not know yet whether
    the last was better.
    """
    if not order.number:
        return
    kept = {f"{_AT}{number}" for number in (order.best, order.last)}
    for name in [each for each in context.state if each.startswith(_AT)]:
        if name not in kept:
            del context.state[name]
    model = state.load_arrays(context.state, "model")
    copies = {name: array.copy() for name, array in model.items()}
    state.save_group(context.state, f"{_AT}{order.number}", copies)


def model_at(context: Context, number: int) -> Arrays:
    """The party's model as it was at the evaluation of this number.

    Raises
    ------
    VflError
        If no copy was kept.
    """
    if f"{_AT}{number}" not in context.state:
        raise VflError(f"has kept no model of evaluation {number}.")
    return state.load_arrays(context.state, f"{_AT}{number}")


def break_off(party: Party, context: Context) -> None:
    """Leave what a message that failed has left: the state as it was, but for what was learned.

    Models learn in place, by whole steps (`Estimator.update`). So what was learned stays learned,
    and the feedback that it was learned from is not awaited any more.
    """
    party.trace = party.left = None
    scalars = state.load_scalars(context.state)
    awaited = scalars.get("pending")
    changed = {}
    if awaited and (party.pending is None or party.pending.exchange != awaited[0]):
        changed = {"pending": [], "pending-secret": b""}
    if party.seal and scalars:
        changed |= party.seal.fail(context)
    if changed:
        _save(party, context, {**scalars, **changed}, {})


def _save(party: Party, context: Context, scalars: dict[str, Any], large: state.Memory) -> None:
    groups, kept = {}, party.kept() if party.kept else None
    if party.model.by_step or kept is None or kept is not context.state.get("model"):
        groups["model"] = model_tensors(party.model)  # else it is there, and goes on changing
    if party.optimizer.state or "model" in groups:
        groups["optimizer"] = optimizer_tensors(party.optimizer)
    state.save_state(context.state, party.about, scalars, large, **groups)
    party.kept = weakref.ref(context.state["model"])


def resume(context: Context) -> Party:
    """The party of a node, as the last message left it."""
    about = state.load_about(context.state)
    if not about:
        raise OutOfStepError("has no state of this run.")
    place = seat(context)
    run, party = _skeletons.get(place, (None, None))
    if party is not None and run == context.run_id and _is_as_left(party, context):
        party.limits.go_on()
        party.left = None  # until it leaves something again
        if party.seal:
            party.seal.load(context, state.load_scalars(context.state))
        return party
    written = read(about)
    rules = Rules.of(context.node_config)
    if party is None or run != context.run_id or party.about != about:
        check_number(about, place[1])
        preparation = written.preparation if written.grown else None
        block = load_block(context, written.config, preparation)
        party = party_of(context, written.config, written.outputs, block, written.grown)
        check_data(about, party)
        check_model(about, party)
        check_weights(party, about)
        check_training(about, party)
        _skeletons[place] = context.run_id, party
    scalars = state.load_scalars(context.state)
    party.origin, party.run = scalars["origin"], state_file.run_of(context)
    party.limits = limits_of(context, rules, party.origin)
    party.limits.go_on()
    party.arrays = state.load_large(context.state)
    for links in (party.uplinks, party.downlinks):
        for link in links.values():
            if link.surrogate is not None:
                link.surrogate = torch.from_numpy(party.arrays.pop(link.saved))
    if party.seal:
        party.seal.load(context, scalars)
    party.exchange = scalars["exchange"]
    party.steps = scalars["steps"]
    party.pending_secret = scalars["pending-secret"]
    party.pending = None
    if scalars["pending"]:
        exchange, epoch, first, steps, coordinated = scalars["pending"]
        party.pending = TrainOrder(
            exchange=exchange,
            epoch=epoch,
            first=first,
            steps=steps,
            coordinated=bool(coordinated),
        )
    kept = party.kept() if party.kept else None
    if kept is None or kept is not context.state.get("model"):
        if kept is not None:  # in another Context, for which this model is left as it is
            state.settle(kept)
        party.trace = None
        load_model(party.model, state.load_arrays(context.state, "model"))
        load_optimizer(party.optimizer, state.load_arrays(context.state, "optimizer"))
    party.node_config = dict(context.node_config)  # by whose rules it was looked at
    party.learning()  # whatever a message that failed has left
    return party


def _is_as_left(party: Party, context: Context) -> bool:
    """Whether a state is what this very party left in it, of a node so configured."""
    scalars, model = (context.state.get(name) for name in ("scalars", "model"))
    return (
        party.left is not None
        and party.left is scalars
        and party.exchange == scalars["exchange"]
        and party.kept is not None
        and party.kept() is model
        and party.node_config == context.node_config
    )


def limits_of(context: Context, rules: Rules, origin: str) -> Limits:
    """What the party's rules leave of a run that began in that Flower run."""
    path = Path()  # without that rule nothing is counted, and messages are many
    if rules.max_uploads is not None:
        path = state_file.place(context, run=origin).with_suffix(".uploads")
    return Limits(rules, partial(refused, context), path)


def check_weights(party: Party, about: str) -> None:
    """Refuse, by `VflError`, other frozen weights than the run began with: states lack them."""
    if read(party.about).weights != read(about).weights:
        raise VflError(
            "has other weights in the folder of its model than this run began with: put those of "
            "then back."
        )


def check_number(about: str, parties: int) -> None:
    """Refuse, by `ConfigError`, the state of a run of another number of parties."""
    then = read(about).parties
    if then != parties:
        raise ConfigError(
            f"The run was of {then} parties, and this one says num-partitions = {parties}."
        )
