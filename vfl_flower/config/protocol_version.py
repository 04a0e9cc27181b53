"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "9730abb0ca8ccee7c54042db3da6c74021cbefb226fb5aaf8e6b8db4a9e21a82"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
