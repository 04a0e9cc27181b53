"""Enrol parties: each describes itself, and one that does not fit is refused."""

import json
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder.checkpoint import Checkpoint, Keeper
from vfl_flower.label_holder.earlier_run import check_number, check_states
from vfl_flower.models.bottoms import embedding_size
from vfl_flower.protocol import estimators
from vfl_flower.protocol.codecs.channel import check_memory
from vfl_flower.transport.base import Transport
from vfl_flower.transport.gather import gather_all
from vfl_flower.transport.messages import DescribeOrder, Description, GrowOrder, Order, ResumeOrder


class Member(NamedTuple):
    """Node, embedding size, feature columns and name of a party, and whether it is monotone."""

    node: int
    size: int
    columns: int
    name: str = ""
    monotone: bool = False


def enrol(
    transport: Transport,
    config: RunConfig,
    labels: Labels,
    keeper: Keeper | None = None,
    nonce: str = "",
) -> dict[int, Member]:
    """Ask every node to describe itself, or to resume; return party -> node and size.

    Parties keep their states under ``nonce``. Raise `ConfigError` if parties or labels do not fit
    each other, or surrogates do not fit into memory.
    """
    found, earlier = (keeper.found, keeper.earlier) if keeper else (None, None)
    if transport.simulated:  # all share one memory: check before any party uses it
        _check_surrogates(transport, config, labels, len(list(transport.get_node_ids())))
    again = keeper.again if keeper else None
    to_repeat: dict[str, Any] = {"run": again.run, "number": again.number} if again else {}
    order: Order = DescribeOrder(outputs=labels.outputs, nonce=nonce, **to_repeat)
    if found:
        order = ResumeOrder(run=found.run, number=found.number, nonce=nonce)
    if earlier:
        order = GrowOrder(
            outputs=labels.outputs,
            nonce=nonce,
            run=earlier.run,
            number=earlier.number,
            parties=len(earlier.strategy["seats"]),
            config=json.dumps(config.values()),
        )
    transport.parties = found.parties if found else transport.parties
    descriptions = gather_all(transport, order, Description, config.running)
    if found:
        check_states(found, descriptions.values())
    if earlier:
        _check_brought(config, earlier, list(descriptions.values()))
    if not transport.simulated:
        _check_surrogates(transport, config, labels, len(descriptions))
    before = found or earlier
    holder = before.strategy["holder"] if before else {}
    then = dict(enumerate(holder.get("sizes", ())))
    known = holder.get("monotone", [()])[0]
    for description in descriptions.values():
        check(description, config, labels, len(descriptions), then, known)
    return {
        each.party: Member(node, each.embedding_size, each.columns, each.name, each.monotone)
        for node, each in descriptions.items()
    }


def _check_brought(
    config: RunConfig, earlier: Checkpoint, descriptions: Sequence[Description]
) -> None:
    """Refuse too few parties, or parties without their models of the earlier run."""
    check_number(config.running.grow, earlier, config, len(descriptions))
    then = len(earlier.strategy["seats"])
    check_states(earlier, descriptions[:then])
    for description in descriptions[then:]:
        if description.exchange:
            raise ConfigError(
                f"Party {description.party} brings a model, and was not in the run in "
                f"{config.running.grow}: start it anew."
            )
    notice.info(
        "The run begins with the models of %s. Parties with a model: %d. New parties: %d.",
        *(config.running.grow, then, len(descriptions) - then),
    )


def _size(of: float) -> str:
    return f"{of / 1e6:.1f} MB" if of >= 1e6 else f"{of / 1e3:.1f} kB"


def _check_surrogates(
    transport: Transport, config: RunConfig, labels: Labels, parties: int
) -> None:
    """Log the memory of surrogates, and refuse surrogates that do not fit."""
    estimator = estimators.choose(config)(config)
    shape = len(labels.train), embedding_size(config, labels.outputs)
    table = 4 * shape[0] * shape[1]
    of_party = estimator.party_tables(parties) * table
    if not of_party:
        return
    here = (1 + estimator.holder_tables()) * parties * table
    notice.info(
        "Error feedback keeps surrogates of %d x %d numbers: %s a party, %s at the label holder",
        *shape,
        _size(of_party),
        _size(here),
    )
    whose = "all parties' and the label holder's" if transport.simulated else "the label holder's"
    check_memory(whose, here + parties * of_party * transport.simulated)


def check(
    description: Description,
    config: RunConfig,
    labels: Labels,
    parties: int,
    sizes: Mapping[int, int] = MappingProxyType({}),
    monotone: Collection[int] = (),
) -> None:
    """Refuse a party whose columns, rows or ids do not fit the run. The sentence names it.

    ``sizes`` has the embedding size of parties whose model has begun to learn, and ``monotone``
    says which of these have monotonic columns.
    """
    rows = len(labels.train), len(labels.test)
    who = f"Party {description.party}"
    if description.parties != parties:
        raise ConfigError(
            f"{who} ({description.columns} columns) was started as one of {description.parties} "
            f"parties, but there are {parties} nodes: give all the same num-partitions, and start "
            "as many."
        )
    if (description.train_rows, description.test_rows) != rows:
        raise ConfigError(
            f"{who} has {description.train_rows} training and {description.test_rows} test rows, "
            f"the label holder {rows[0]} and {rows[1]}: align them first."
        )
    if description.alignment != labels.alignment:
        raise ConfigError(
            f"{who} has other sample ids than the label holder, or in another order: align them "
            "first."
        )
    known = description.party in sizes
    as_then = description.monotone == (known and description.party in monotone)
    if sizes and not as_then and (known or not monotone):
        raise ConfigError(f"{who} must have the `monotonic` that the model began with: restore it.")
    given, size = description.embedding_size, embedding_size(config, labels.outputs)
    then = sizes.get(description.party, given)
    if given != then:
        raise ConfigError(
            f"{who} has embeddings of size {given}, where the run began with {then}: set its "
            f"embedding-size to {then}."
        )
    alike = config.models.top == "sum" or config.models.combine != "concat"
    if given != size and (alike or estimators.choose(config).broadcasts):
        raise ConfigError(
            f"{who} has embeddings of size {given}, and the run configuration gives {size}. A sum "
            "or a mean of embeddings, or labels = 'shared', needs equal sizes: leave the party's "
            "embedding-size out, or set combine = 'concat'."
        )
