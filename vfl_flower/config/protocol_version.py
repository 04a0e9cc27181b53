"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "fef563e4a7e279319b6f2d6263e5e0c5807a38201061acf4c1a8d4bdf885c014"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
