"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "871f605bc8c244da5bcab4f6612e956cc780199bd9c8a713fc1308052893277e"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
