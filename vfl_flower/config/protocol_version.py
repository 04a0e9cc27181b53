"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "125e813be423bcfb7e81d16aa6255f89cedc8fcf5342c9a893f97ce4b887e415"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
