"""Programs on arrays larger than any machine: each operator becomes operations on blocks of dask arrays."""
