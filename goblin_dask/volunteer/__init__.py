"""The goblin plugin of a stock Dask worker: volunteers and validators (layer 3)."""
