"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "3fc2bca6ad1b8b50ec48c194f7b22ce12f191649d1676dd324873dc83f163eb9"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
