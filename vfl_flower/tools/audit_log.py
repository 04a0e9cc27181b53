"""`vfl audit-log`: verify a service's audit log, and find who asked for an id."""

from pathlib import Path
from typing import Annotated

import typer

from vfl_flower.tools import options
from vfl_flower.tools.command import Command

_APART = {"line", "time", "event", "ids", "before"}  # fields that `find` prints apart, or not

app = typer.Typer(
    help="Verify the audit log of a service, or find the requests for an id.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command("verify", cls=Command, epilog=options.VERIFY_EXAMPLES)
def _verify(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...")],
    noted: options.Noted = "",
    after: options.After = "",
) -> None:
    """Check that no line was cut, changed, added or moved; else name the line.

    Each line holds the digest of the line before, and FILE.seal the last one.
    Whoever can write to the folder as its owner can write the whole log anew.
    So note the last digest elsewhere, and give it to --noted later.

    Name all files of the log, the oldest first. The last one has the seal.
    If older files are no longer kept, give the last digest of the newest of
    them to --after, as you noted it.
    """
    from vfl_flower.config.audit_chain import verify

    found = verify(*files, noted=noted, after=after)
    print(f"{found.lines} lines, from {found.first} to {found.last}. No line is missing.")
    for place in found.torn:
        print(f"{place} is torn: its process was killed while it wrote that line.")
    if found.unsealed:
        print(f"{found.unsealed} lines follow the last seal: nobody can tell yet whether more did.")
    if found.earlier.digest:
        print(f"{found.earlier.lines} earlier lines, up to --after, were not verified.")
    print(f"last digest: {found.digest}")


@app.command("find", cls=Command, epilog=options.FIND_EXAMPLES)
def _find(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    ids: Annotated[list[str], typer.Argument(metavar="ID...")],
) -> None:
    """Print the requests that asked for an id.

    The log holds a keyed hash of each id. The key, audit-log.key, must lie
    beside FILE. Verify the log first: this command does not.
    """
    from vfl_flower.config.audit_chain import find
    from vfl_flower.data.ids import encoded

    names = {encoded(each): each for each in ids}
    left = dict.fromkeys(ids)
    for one, fields in find(file, names):
        left.pop(names[one], None)
        rest = [f"{name} {_said(value)}" for name, value in fields.items() if name not in _APART]
        where = f"line {fields['line']}", fields["time"], fields["event"]
        print(f"{names[one]}: {', '.join((*where, *rest))}")
    for each in left:
        print(f"{each}: no line has it.")


def _said(value: object) -> str:
    """Return a field in one line."""
    if isinstance(value, list):
        return "+".join(map(_said, value))
    return ascii(value)[1:-1] if isinstance(value, str) else str(value)
