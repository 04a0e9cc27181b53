"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "5052cf81e6780032923451fb7ea13a409ad0aa564091252886643c4ce3058eb4"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
