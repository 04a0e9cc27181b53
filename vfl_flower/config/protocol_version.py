"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "f9eaf475eeb44eb41ca20a11da8c7a2c2a6e8fe6af8d5c0cfe0952df3e3e3c0c"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
