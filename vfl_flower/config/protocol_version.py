"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "416387dda6d6888f2228441b7fa50f0c6bd0c7dc995ebe5a4101622558b6cbbb"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
