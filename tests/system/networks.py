"""The command line, for tests: to the gateway every peer is of a network of its own, though all are on this machine."""

import functools
import itertools

from goblin_dask import cli
from goblin_dask.gateway import settings

_numbers = itertools.count()
# The command takes the class from the module when it runs.
settings.GatewayConfig = functools.partial(settings.GatewayConfig, network=lambda address: f"network {next(_numbers)}")

if __name__ == "__main__":
    cli.main()
