"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "515a905e5463dbd31dc7e511d4953eaeb7f98f8e2b38daf0dc9d97610c34b6f9"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
