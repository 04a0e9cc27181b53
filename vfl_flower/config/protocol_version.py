"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "2c46c974cc318ca6c20ba2bfac89c3872ef8990361d37d0fb387bb95c1ba7ff5"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
