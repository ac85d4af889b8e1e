"""The wire: sessions, the closed schema of Dask's messages, the comm backend (layer 2)."""
