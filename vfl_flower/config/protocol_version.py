"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "2c4bdd43417d494772380c97d2be56c14d963284ec3f04f9d1767ac8602790ad"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
