"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "52e416f954b849a4d68cdc202b548f05fb292cfb00d99f2776ee78f9a1a06efd"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
