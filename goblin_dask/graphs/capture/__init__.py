"""From the researchers' graphs to programs: trees of arrays, Dask's task structures, checked templates."""
