"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "6d8f3b5d3dfa85c16922f5eeb4794e2c0f18049065a66b5b3b187d344f8b5e32"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
