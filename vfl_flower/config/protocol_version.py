"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 1
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "a677910dd7f51653bbb8c4fc9ddc82f3da7659601c643a57047bb1d8f81764f7"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
