"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "8b5349b7187a139fcf288d54b5a6ea88cbedada85005fd579341afb013f52475"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
