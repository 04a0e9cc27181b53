"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "2fc9987ed3cd132a78bcd610c3ac1a30d41a69c561003321088628a90454f656"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
