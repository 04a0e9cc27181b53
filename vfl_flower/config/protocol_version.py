"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "954fd8ed83df104ae95b82a05bb63fac3c56b5566a6611fcdeda1f4312fc7e3f"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
