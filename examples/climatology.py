"""A climatology with xarray, computed on volunteers: monthly means and anomalies of ten years of daily temperatures.

The data are made here (a seasonal cycle, a trend and weather), written to a Zarr array, and read back lazily; the
reduction is plain xarray, which runs on the grid because its dask arrays do.

    python examples/climatology.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
import zarr

import goblin_dask as goblin

LATITUDES, LONGITUDES = 36, 72


def write_temperatures(path: Path, years: int, seed: int = 0) -> None:
    """Years of daily temperatures in °C, float32, one Zarr chunk per year."""
    days = pd.date_range("2011-01-01", periods=365 * years, freq="D")
    rng = np.random.default_rng(seed)
    latitude = np.linspace(-87.5, 87.5, LATITUDES)[:, None]
    array = zarr.create_array(
        store=str(path), shape=(len(days), LATITUDES, LONGITUDES), chunks=(365, LATITUDES, LONGITUDES), dtype="float32"
    )
    for year in range(years):
        day = np.arange(365)[:, None, None]
        season = -np.cos(2 * np.pi * (day - 20) / 365) * latitude * 0.2
        weather = rng.standard_normal((365, LATITUDES, LONGITUDES)) * 3
        array[365 * year : 365 * (year + 1)] = 25 - 0.4 * abs(latitude) + season + 0.02 * year + weather


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--volunteers", type=int, default=2)
    parser.add_argument("--years", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, goblin.LocalGrid(volunteers=options.volunteers) as grid:
        path = Path(folder) / "temperature.zarr"
        write_temperatures(path, options.years)
        temperature = xr.DataArray(
            da.from_zarr(str(path)),
            dims=("time", "latitude", "longitude"),
            coords={"time": pd.date_range("2011-01-01", periods=365 * options.years, freq="D")},
        )
        monthly = temperature.groupby("time.month").mean("time")
        anomaly = temperature.groupby("time.month") - monthly
        warmest = anomaly.mean(("latitude", "longitude")).resample(time="YS").mean()
        with dask.config.set(scheduler=grid.lab.get):
            by_month, by_year = dask.compute(monthly.mean(("latitude", "longitude")), warmest)
        print("month  mean °C")
        for month, value in zip(by_month["month"].values, by_month.values, strict=True):
            print(f"{month:5d}  {value:7.2f}")
        print("anomaly by year:", ", ".join(f"{value:+.3f}" for value in by_year.values))


if __name__ == "__main__":
    main()
