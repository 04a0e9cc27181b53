"""All checks of `vfl doctor`: what a folder holds decides which ones it gets."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.files import is_locked
from vfl_flower.data import withdrawn
from vfl_flower.label_holder import checkpoint
from vfl_flower.protocol.systems import resolve
from vfl_flower.tools import forget
from vfl_flower.tools.doctor import credentials, machine, network, runs
from vfl_flower.tools.doctor.finding import OK, PROBLEM, WARNING, Finding, many, some
from vfl_flower.transport.flower_internals import flower_home
from vfl_flower.transport.stream.listen import port_range

KEYS, MINE, RUN, STATES = "label holder", "party", "run", "states"

_SIGNS = {
    KEYS: ("superlink.key", "superlink.db", "loopback.key"),
    MINE: ("supernode.key", "supernode.pub"),
    RUN: (checkpoint.FILE, "history.jsonl", "summary.json"),
    STATES: ("*.state", "sums.key", "blinding.key", "labels.draws", "alignments"),
}
_INNER = "vfl-flower"  # where a side keeps its states by default, inside its FLWR_HOME


def examine(
    named: Sequence[Path], superlink: str, stream_ports: str, compared: Path | None
) -> list[Finding]:
    """Return the findings about this machine, and about all that is named."""
    given = [each.expanduser().absolute() for each in named]
    home = flower_home()
    named_here = given or [home] * home.is_dir()
    both = (folder for each in named_here for folder in (each, each / _INNER))
    roles = {each: role_of(each) for each in both if each in named_here or each.is_dir()}
    keys = [folder for folder, role in roles.items() if role in (KEYS, MINE)]
    where = network.address(superlink) if superlink else None
    if where and not keys:
        raise ConfigError(
            "--superlink needs the certificate superlink.crt. Also name the folder of "
            "deploy/superlink.sh or deploy/supernode.sh."
        )
    ports = _ports(stream_ports, [folder for folder, role in roles.items() if role == RUN])
    ahead = network.measured(where) if where else None
    found = list(machine.about(compared))
    found += machine.left_over(roles)
    for folder, role in roles.items():
        found += _of_folder(folder, role, bool(named), where, ahead[0] if ahead else 0.0)
    states = [folder for folder, role in roles.items() if role == STATES]
    for folder, role in roles.items():
        if role == RUN:
            found += runs.about(folder, states)
    found += _withdrawn([each for each in roles if each.is_dir()])
    for folder in keys:
        is_party = roles[folder] == MINE
        if where:
            found += network.about(where, folder, is_party, ahead)
        if not is_party:
            found += map(network.free_ports, ports)
        elif where:
            found += (network.stream_port(where.host, each) for each in ports)
    return found


def _ports(given: str, folders: Sequence[Path]) -> list[range]:
    """Return the given ports for streams, or the ports of the runs that are not under way."""
    found = []
    for folder in () if given else folders:
        with suppress(ConfigError):  # its own check says so
            if not any(map(is_locked, folder.glob("*.lock"))):
                found.append(checkpoint.load(folder).config.running)
    found = found or [resolve({"stream-ports": given} if given else {}).running]
    return list(dict.fromkeys(map(port_range, found)))


def role_of(folder: Path) -> str:
    """Return what a folder holds, by its files; empty if nothing of this software."""
    for role, signs in _SIGNS.items():
        if any(next(folder.glob(sign), None) for sign in signs):
            return role
    return ""


def _of_folder(
    folder: Path, role: str, named: bool, where: network.Address | None, ahead: float
) -> Iterator[Finding]:
    if not folder.is_dir():
        yield Finding("folder", PROBLEM, f"{folder} is not a folder. Name another.")
        return
    if not os.access(folder, os.R_OK | os.X_OK):
        sentence = f"You cannot read {folder}. Run this command as the user who owns it."
        yield Finding("folder", PROBLEM, sentence)
        return
    if named and not role and folder.name != _INNER and not any(map(role_of, folder.glob("*/"))):
        sentence = f"{folder} holds no keys, states or run. Name another folder."
        yield Finding("folder", PROBLEM, sentence)
    yield from credentials.about(folder, private=role != RUN)
    if role == KEYS:
        yield from credentials.of_label_holder(folder, where.host if where else "", ahead)
    if role == MINE:
        yield from credentials.of_party(folder, ahead)
    if role == STATES:
        yield credentials.sealed_files(folder)


def _withdrawn(folders: Sequence[Path]) -> Iterator[Finding]:
    """Yield whether files still hold people who have withdrawn."""
    for home in forget.homes_of(folders):
        listed = withdrawn.read(home / withdrawn.FILE)
        if not len(listed.hashes):
            continue
        left = [each.path.name for each in forget.leftovers(list({*folders, home}), listed)]
        said = f"People of {home / withdrawn.FILE} are in no file of these folders."
        if left:
            said = f"{some(left)} may hold people who have withdrawn. Run `vfl forget` again."
        yield Finding("withdrawn", WARNING if left else OK, said)


def in_words(found: Sequence[Finding]) -> str:
    """Return how many problems and warnings there are, in one line."""
    counts = {noun: sum(each.result == noun for each in found) for noun in (PROBLEM, WARNING)}
    said = [many(count, noun) for noun, count in counts.items() if count]
    return f"{' and '.join(said)}." if said else "All is well."
