"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "08fa43a9eab1f077266d17ccde4999bcce760642930ee34089c1acf825b9b9a0"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
