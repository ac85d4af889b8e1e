"""How results are verified, and the life of a task (layer 2)."""
