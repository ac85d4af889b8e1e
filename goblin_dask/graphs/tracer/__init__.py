"""Arrays that record what is done with them: how NumPy functions become programs."""
