"""Describe a node: its party, its folder, and how it refuses or fails."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from vfl_flower.config import errors, logs, names
from vfl_flower.config.files import check_own
from vfl_flower.config.logs import log
from vfl_flower.transport.flower_internals import STATES, flower_home, in_ray, lasting_home
from vfl_flower.transport.wire import to_failure


def index_and_parties(context: Context) -> tuple[int, int]:
    """Return the index of a node's party, and the number of parties."""
    node = context.node_config
    index, parties = node.get("partition-id"), node.get("num-partitions")
    if not (isinstance(index, int) and isinstance(parties, int) and 0 <= index < parties):
        raise errors.ConfigError(
            "A SuperNode does not know which party it is: start it with "
            "--node-config 'partition-id=0 num-partitions=4', partition-id counting from 0."
        )
    return index, parties


def simulated(context: Context) -> bool:
    """Return whether all parties have one owner: in one process, or under Ray."""
    return bool(context.node_config.get("simulated")) or in_ray()


def describe_records(context: Context) -> AbstractContextManager[None]:
    """Describe log records by run and party, in the format that the party or the run chose."""
    node = context.node_config
    about = logs.described(
        node.get("log-format", context.run_config.get("log-format")),
        lasting=not (node.get("simulated") or in_ray()),
        run=str(context.run_id),
        role="party",
        party=node.get("partition-id"),
    )
    return _named(about, node) if node.get("name") else about


@contextmanager
def _named(about: AbstractContextManager[None], node: Mapping[str, object]) -> Iterator[None]:
    """Use the name of a node's party within a context."""
    with about, names.named(names.from_json({node.get("partition-id"): node.get("name")})):
        yield


def states_folder(context: Context) -> Path:
    """Return the folder in which a node keeps its states and keys, if no other user can change it.

    It is FLWR_HOME/vfl-flower, or the one that ``states`` in the node configuration names. Actors
    of a Ray cluster have no node configuration, and a run of `vfl` tells them the folder.
    """
    named = context.node_config.get("states") or os.environ.get(STATES)
    folder = Path(str(named)).expanduser() if named else flower_home() / "vfl-flower"
    return check_folder(context, folder, "states")


def lasting_folder(node_config: Mapping[str, Any]) -> Path:
    """Return the folder of what a side keeps for later runs. A real node names its own folder."""
    named = not (node_config.get("simulated") or in_ray()) and node_config.get("states")
    return Path(str(named)).expanduser() if named else lasting_home()


def check_folder(context: Context, folder: Path, what: str) -> Path:
    """Return a folder of a node; raise `ConfigError` if another user can change it.

    The sentence leaves the node, so it does not name the folder. The node's own log does.
    """
    try:
        check_own(folder)
    except errors.SharedError as error:
        log.warning("%s", error)
        raise errors.ConfigError(
            f"Party {context.node_config.get('partition-id')} keeps its {what} in a folder that "
            "other users can change: its own log says how to mend that."
        ) from None
    except OSError as error:
        log.warning("%s cannot be read: %s", folder, error)
        raise errors.ConfigError(
            f"Party {context.node_config.get('partition-id')} cannot read the folder of its "
            f"{what}: its own log says why."
        ) from None
    return folder


def refused(context: Context, what: str) -> errors.ConfigError:
    """Log that a party refuses something, and return the error."""
    sentence = f"Party {context.node_config.get('partition-id')} refuses {what}."
    with describe_records(context):
        log.warning("%s", sentence)
    return errors.ConfigError(sentence)


def failure(error: Exception, message: Message, context: Context) -> Message:
    """Return the answer that names what went wrong, and holds no data."""
    if isinstance(error, errors.CodeError):
        log.warning("%s", error)
        said = str(error) if simulated(context) else error.outside  # one owner may read it all
        return to_failure(names.in_words(said), message)
    if isinstance(error, errors.VflError):
        return to_failure(
            names.in_words(str(error)), message, isinstance(error, errors.OutOfStepError)
        )
    if isinstance(error, MemoryError):
        return to_failure("has not enough memory for what it was asked.", message)
    # The owner of a party's code may read what it quotes. Others' errors may quote the data too.
    here = context.node_config.get("simulated")  # in this process, whose terminal its owner reads
    own = errors.in_own_code(error) and not here
    log.error("%s", f"{errors.places(error)}\n{error}" if own else errors.places(error))
    if here:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return to_failure(errors.raised(error), message)
