"""Write the protocol's version anew: python -m tests.protocol [next].

Without `next`, the version stays, and only the digest is renewed: an older label holder or party
can still take part. Say `next` if it cannot: after a new option, a new field or a new message.
"""

import re
import sys
from pathlib import Path

from vfl_flower.config import protocol_version
from vfl_flower.config.provenance import shared_code

FILE = Path(protocol_version.__file__)


def renewed(text: str, is_next: bool) -> str:
    """Return the file's text with the digest of this code, and perhaps with the next version."""
    version = protocol_version.VERSION + is_next
    text = re.sub(r"^VERSION = \d+", f"VERSION = {version}", text, flags=re.MULTILINE)
    return re.sub(r'^DIGEST = ".*"', f'DIGEST = "{shared_code()}"', text, flags=re.MULTILINE)


if __name__ == "__main__":
    FILE.write_text(renewed(FILE.read_text(), sys.argv[1:] == ["next"]))
