"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "6c872e636546fcd1ef03f2caf5eddfece51a7c31943324fcf06eb77e841d9fab"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
