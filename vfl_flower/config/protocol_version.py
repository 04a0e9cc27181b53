"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "736a1e026cae910b60bc28b3a8c94a7a1fe3bf45f184a097fd2c6d7e33d8d0e7"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
