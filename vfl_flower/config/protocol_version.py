"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "a8f7fd48f00b303a050145030ff6c5505ac1e0b394b7acd84b9d289b8a56d982"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
