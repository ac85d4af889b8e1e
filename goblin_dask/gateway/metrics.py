"""Prometheus' ``/metrics``, one registry a gateway, made from the same `Status` as the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from goblin_dask.gateway.status import Status

CONTENT_TYPE = CONTENT_TYPE_LATEST
ENDS = ("accepted", "failed")


@dataclass(frozen=True, slots=True)
class Health:
    """What the server knows of itself."""

    sessions: int
    relays_active: int
    relays_waiting: int
    relays_failed: int
    database_pending: int
    database_dropped: int
    refused: int
    lag: float
    """Seconds by which the event loop was late, at its latest."""


class Metrics:
    """Renders the metrics.

    Parameters
    ----------
    look : callable
        Returns the status and the health of this moment.
    """

    def __init__(self, look: Callable[[], tuple[Status, Health]]):
        self._look = look
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def render(self) -> bytes:
        """Text for Prometheus."""
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """Nothing before the first scrape: names are not looked up for clashes, there is one collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        status, health = self._look()
        totals = status.totals

        workers = GaugeMetricFamily("goblin_workers", "Connected workers", labels=["role", "state"])
        for role in ("volunteer", "validator"):
            for state in ("working", "idle", "quarantined"):
                n = sum(worker.role == role and worker.state == state for worker in status.workers)
                workers.add_metric([role, state], n)
        yield workers
        yield GaugeMetricFamily("goblin_labs", "Connected laboratories", value=status.labs)

        tasks = GaugeMetricFamily("goblin_tasks", "Open tasks by state", labels=["state"])
        ended = CounterMetricFamily("goblin_tasks_ended", "Tasks that ended", labels=["how"])
        for state, n in status.tasks.items():
            (ended if state in ENDS else tasks).add_metric([state], max(0, n))
        yield tasks
        yield ended

        accepted = CounterMetricFamily("goblin_results_accepted", "Results accepted, by method", labels=["method"])
        rejected = CounterMetricFamily("goblin_results_rejected", "Results rejected, by method", labels=["method"])
        seconds = CounterMetricFamily("goblin_check_cpu_seconds", "CPU seconds of checks", labels=["method"])
        worst = GaugeMetricFamily(
            "goblin_accepted_residual_ratio", "Worst residual over tolerance of an accepted result", labels=["method"]
        )
        for method in status.methods:
            accepted.add_metric([method.method], method.accepted)
            rejected.add_metric([method.method], method.rejected)
            seconds.add_metric([method.method], method.check_seconds)
            worst.add_metric([method.method], method.ratio)
        yield from (accepted, rejected, seconds, worst)

        moved = CounterMetricFamily("goblin_blob_bytes", "Bytes of blobs moved", labels=["direction"])
        moved.add_metric(["to_volunteers"], totals.bytes_to_volunteers)
        moved.add_metric(["from_volunteers"], totals.bytes_from_volunteers)
        moved.add_metric(["relayed"], totals.bytes_relayed)
        yield moved
        yield CounterMetricFamily("goblin_flop", "Accepted floating point operations", value=totals.flops)
        yield CounterMetricFamily("goblin_compute_cpu_seconds", "CPU seconds of results", value=totals.compute_seconds)
        yield CounterMetricFamily("goblin_quarantines", "Hosts put into quarantine", value=totals.quarantined)
        yield GaugeMetricFamily("goblin_latency_seconds", "Median, submitted to accepted", value=status.latency)

        yield GaugeMetricFamily("goblin_sessions", "Sessions, those without a connection too", value=health.sessions)
        yield CounterMetricFamily("goblin_refused", "Peers that were not admitted", value=health.refused)
        relays = GaugeMetricFamily("goblin_relays", "Relayed transfers", labels=["state"])
        relays.add_metric(["active"], health.relays_active)
        relays.add_metric(["waiting"], health.relays_waiting)
        yield relays
        yield CounterMetricFamily("goblin_relays_failed", "Relayed transfers that failed", value=health.relays_failed)
        yield GaugeMetricFamily(
            "goblin_database_pending", "Facts that wait to be written", value=health.database_pending
        )
        yield CounterMetricFamily("goblin_database_dropped", "Facts given up", value=health.database_dropped)
        yield GaugeMetricFamily(
            "goblin_loop_lag_seconds", "Worst delay of the event loop since the last sample", value=health.lag
        )
