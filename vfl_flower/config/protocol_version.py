"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "e54b6bd991305b95dbd1d94a3ef5cf166f1708312106148c31735f7bd58cfab2"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
