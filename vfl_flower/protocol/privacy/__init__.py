"""Privacy axis: two kinds of noise, who counts what was released, and what that is worth."""
