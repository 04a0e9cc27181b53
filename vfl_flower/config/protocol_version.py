"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "b294a2ffd321df9462f29caa366932da81272328241c7387cf490fcd32e74775"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
