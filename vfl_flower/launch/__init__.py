"""How whole runs start: in this process, on Ray, or on SuperNodes."""
