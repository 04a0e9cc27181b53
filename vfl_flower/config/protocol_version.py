"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "3dc41a81fedcb993e558e982a1157988e5b3155eecf61db669d26625ea365c36"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
