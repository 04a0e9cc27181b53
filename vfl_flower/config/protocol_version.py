"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "9ed597f9bc21d3b4c90f83c5067a31b4c1d61e36a961fc72a74854b0149aba27"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
