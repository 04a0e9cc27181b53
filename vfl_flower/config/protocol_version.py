"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "0c16a0fa993a44f8284adb8cfa36f356f0a073a7f63bb49fee990b131ca03959"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
