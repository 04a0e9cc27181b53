"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "5abb46e048ed78f3d8be1fb7c717af342809250c484a1956acb7c01f15047c2c"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
