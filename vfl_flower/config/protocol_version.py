"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "308ff9096a2431d0b2b4982f4d21b7fac809151145c39d9f139e4aab665b4d1d"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
