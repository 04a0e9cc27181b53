"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "6de15dce98f0761689e85c82b4345702d938aca4c402fb1dd3f2cb41ca5f59bb"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
