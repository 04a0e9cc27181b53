"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "fe9e1fe5a3d339b2ad52206992b8332fd21ad46cb67030a44b6ceab87d5786dc"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
