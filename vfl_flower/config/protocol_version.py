"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "d148536da1d482d30fea96e3d6f59844a679e16cb40d65ce6f52994d42675b3b"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
