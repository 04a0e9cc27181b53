"""The five axes of the design space, each in a place of its own: both halves of its protocol."""
