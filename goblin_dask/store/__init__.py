"""Blobs, named arrays and the ledger, on any Zarr v3 store (layer 1)."""
