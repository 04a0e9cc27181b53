"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "eb534a0e8a5a4df2960f4385c750abe8f31519011083f1488ab53e968ec53ee6"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
