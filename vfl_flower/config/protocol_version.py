"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "f64099038e779d78495a49bc23f129e77ab819e99fe33d7c08812599c1cf7b51"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
