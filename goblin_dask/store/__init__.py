"""The laboratory's data: blobs by content address, named Zarr arrays, the ledger, and grants to move blobs."""
