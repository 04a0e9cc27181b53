"""Privacy: noise (`mechanism`), its cost (`accountant`), and what was released (`release_log`)."""
