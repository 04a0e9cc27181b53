"""Records: what is counted once, and must survive a crash."""
