"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "d81bd6af16b11107b4be3ee043d6811919056db52e5ab834f7be4b71aaddfe3d"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
