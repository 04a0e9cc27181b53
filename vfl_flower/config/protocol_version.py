"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "e1c7b6643d8733fc4ed92c574e877b211d72052b65da9d264eeda4804f60ecf3"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
