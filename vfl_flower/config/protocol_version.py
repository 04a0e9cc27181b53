"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "5f9df69fa171af6025f251264460a0ae7a20cd6e2b87e489df4ed6f88f0aae52"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
