"""A party between two messages: what it keeps in Flower's ``Context``, and takes from it again.

Any process may serve any message, so everything that the next one needs is in ``Context.state``.
The feature block and the model's skeleton are built once a process.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache, partial
from pathlib import Path

import torch
from flwr.app import Context

from vfl_flower.config import RunConfig
from vfl_flower.data.blocks import FeatureBlock, load_block, seat
from vfl_flower.data.source import Preparation
from vfl_flower.errors import CodeError, ConfigError, OutOfStepError, VflError
from vfl_flower.messages import SMALL, DescribeOrder, RejoinOrder, TrainOrder
from vfl_flower.models.training import (
    load_model,
    load_optimizer,
    model_arrays,
    optimizer_arrays,
)
from vfl_flower.party import state, state_file
from vfl_flower.party.limits import Limits
from vfl_flower.party.party import Party
from vfl_flower.party.rules import Rules, check, own_model, refused, simulated
from vfl_flower.systems import refuse_places, resolve

log = logging.getLogger("flwr")

_skeletons: dict[tuple[int, int], tuple[int, Party]] = {}
"""What a process keeps of each party that it serves, and the run that it is of."""


def forget(run: int) -> None:
    """Let go of the parties of a run that has ended, if this process goes on."""
    for place, (of, _) in list(_skeletons.items()):  # a copy: other threads may run others
        if of == run:
            _skeletons.pop(place, None)


def begin(context: Context, order: DescribeOrder | RejoinOrder) -> Party:
    """The party of a node at the beginning of a run."""
    index, parties = seat(context)
    if not simulated(context):
        refuse_places(context.run_config)  # before anything that they name is loaded
    config = resolve(context.run_config)
    if config.running.resume:
        raise VflError("has lost the state from which it went on.")
    rules = check(context, config)
    party = party_of(context, config, order.outputs, load_block(context, config))
    party.origin = str(context.run_id)
    party.limits = limits_of(context, rules, party.origin)
    if isinstance(order, DescribeOrder):
        if state.load_about(context.state) or state_file.is_there(context):
            party.limits.go_on()  # described again: what was counted until now stays
        party.limits.begin()
    else:  # it has served messages of this run, and remembers none
        party.limits.go_on()
    _skeletons[index, parties] = context.run_id, party
    return party


def check_before_alignment(context: Context) -> None:
    """Refuse, by `ConfigError`, to align ids for a run that would be refused afterwards."""
    if not simulated(context):
        refuse_places(context.run_config)
    config = resolve(context.run_config)
    if config.task == "train":  # else the configuration that counts is in the state that is kept
        check(context, config)


def largest_order(context: Context) -> int:
    """Bytes of the arrays of the next order to a node's party, at most.

    Before it has described itself, which tells its rows, the label holder may send ids.
    """
    known = state.load_scalars(context.state).get("largest")
    return int(known) if known else SMALL + 32 * Rules.of(context.node_config).max_ids


def party_of(context: Context, config: RunConfig, outputs: int, block: FeatureBlock) -> Party:
    """The party of a node, with the bottom model that is its own if it has named one.

    Raises
    ------
    ConfigError
        If that model cannot be had, or makes no embeddings.
    """
    try:
        own = own_model(context, config)
        return Party(config, *seat(context), outputs, block, own)
    except CodeError as error:
        log.warning("%s", error.whole)
        if simulated(context):  # all are of one owner, who may read what the code says
            raise ConfigError(error.whole) from error
        raise


def check_data(about: str, party: Party) -> None:
    """Refuse, by `VflError`, data of a party that are not those that it wrote down."""
    then, now = ({**json.loads(each), "model": None} for each in (about, party.about))
    if then != now:
        raise VflError("has not the data that this run began with: its file has changed since.")


def check_model(about: str, party: Party) -> None:
    """Refuse, by `ConfigError`, a party's bottom model that is not the one it wrote down."""
    nothing = {"name": "none of this version", "args": ""}
    then, now = (json.loads(each).get("model", nothing) for each in (about, party.about))
    if then != now:
        shown = [f"{each['name']} {each['args']}".strip() for each in (then, now)]
        raise ConfigError(
            f"Party {party.index}'s model is {shown[1]!r}, and differs from {shown[0]!r}, with "
            "which the run began, in name, arguments or parameters: give it the one of then."
        )


def keep(party: Party, context: Context) -> None:
    """Leave everything that the next message needs in the node's ``Context.state``."""
    p = party.pending
    scalars = {
        "exchange": party.exchange,
        "steps": party.steps,
        "origin": party.origin,
        "pending-secret": party.pending_secret if p else b"",
        "largest": party.largest_order,
        "pending": [p.exchange, p.epoch, p.first, p.steps, int(p.coordinated)] if p else [],
    }
    surrogates = {
        name: link.surrogate.numpy()
        for name, link in party.links.items()
        if link.surrogate is not None
    }
    state.save_state(
        context.state,
        party.about,
        scalars,
        {**surrogates, **party.arrays},
        model=model_arrays(party.model),
        optimizer=optimizer_arrays(party.optimizer),
    )
    party.kept = context.state["model"]


def resume(context: Context) -> Party:
    """The party of a node, as the last message left it."""
    about = state.load_about(context.state)
    if not about:
        raise OutOfStepError("has no state of this run.")
    place = seat(context)
    config, outputs, _ = read_about(about)
    rules = check(context, config)
    run, party = _skeletons.get(place, (None, None))
    if party is None or run != context.run_id or party.about != about:
        check_number(about, place[1])
        party = party_of(context, config, outputs, load_block(context, config))
        check_data(about, party)
        check_model(about, party)
        _skeletons[place] = context.run_id, party
    scalars = state.load_scalars(context.state)
    party.origin = scalars["origin"]
    party.limits = limits_of(context, rules, party.origin)
    party.limits.go_on()
    party.arrays = state.load_large(context.state)
    for name, link in party.links.items():
        if link.surrogate is not None:
            link.surrogate = torch.from_numpy(party.arrays.pop(name))
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
    if party.kept is not context.state.get("model"):
        party.trace = None
        load_model(party.model, state.load_arrays(context.state, "model"))
        load_optimizer(party.optimizer, state.load_arrays(context.state, "optimizer"))
    party.kept = None
    return party


def limits_of(context: Context, rules: Rules, origin: str) -> Limits:
    """What the party's rules leave of a run that began in that Flower run."""
    path = Path()  # without that rule nothing is counted, and messages are many
    if rules.max_uploads is not None:
        path = state_file.place(context, run=origin).with_suffix(".uploads")
    return Limits(rules, partial(refused, context), path)


@lru_cache(maxsize=16)
def read_about(about: str) -> tuple[RunConfig, int, Preparation | None]:
    """Configuration, outputs and preparation that a `Party` wrote down."""
    values = json.loads(about)
    preparation = values["preparation"]
    return (
        RunConfig.of(values["config"]),
        values["outputs"],
        Preparation(**preparation) if preparation else None,
    )


def check_number(about: str, parties: int) -> None:
    """Refuse, by `ConfigError`, the state of a run of another number of parties."""
    then = json.loads(about)["parties"]
    if then != parties:
        raise ConfigError(
            f"The run was of {then} parties, and this one says num-partitions = {parties}."
        )
