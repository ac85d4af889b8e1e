"""`LabNode`: owns the laboratory's data, jobs and ledger; runs graphs on its Dask cluster and on the grid."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import os
import secrets
import sys
import threading
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from goblin_dask import config
from goblin_dask import messages as m
from goblin_dask.digest import Digest
from goblin_dask.errors import InputError, JobCancelled
from goblin_dask.graphs.capture.dask_internals import Request
from goblin_dask.graphs.program import Program
from goblin_dask.labnode.actors import Happening, OnGrid
from goblin_dask.labnode.cluster import LabCluster
from goblin_dask.labnode.data import DataServer
from goblin_dask.labnode.execute import Run
from goblin_dask.labnode.fusion import fuse
from goblin_dask.labnode.jobs import FINAL, Job, Result, Submission, check_target, translate
from goblin_dask.labnode.lowering import check_declared, lower
from goblin_dask.labnode.placement import place
from goblin_dask.labnode.plan import Plan
from goblin_dask.labnode.price import Prices
from goblin_dask.labnode.progress import waits
from goblin_dask.labnode.residents import Residents
from goblin_dask.labnode.service import Service
from goblin_dask.labnode.targets import Writing
from goblin_dask.labnode.uplink import Accepted, GridLink, Prepared
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.ledger import Ledger
from goblin_dask.verify.policy import parse, written

logger = logging.getLogger(__name__)

NOTICE = """\
goblin-dask: data are NOT encrypted while they are computed on. Whoever lends a computer can read the numbers that it
works on. Confidential data do not belong on an open grid."""

PREPARED = 4096
"""Programs that are kept encoded for later jobs."""

KEPT_JOBS = 200
"""Finished jobs that are kept, with their results, until their researcher lets go of them."""


class LabNode:
    """The laboratory's node.

    Parameters
    ----------
    gateway : str, optional
        ``goblin://host:port``; by default ``goblin.gateway.url``.
    gateway_token : str, optional
        What the gateway's operator gave to the laboratory.
    directory : path, optional
        For blobs and the ledger.
    host, port : str, int, optional
        Where researchers are served; port 0 takes any free one.
    token : str, optional
        What researchers have to show; made and kept in the directory by default.
    slots, threads, offload, verify, routes, grace, cap : optional
        As in `goblin.yaml` under ``lab``.
    """

    def __init__(
        self,
        gateway: str | None = None,
        gateway_token: str | None = None,
        *,
        directory: Path | str | None = None,
        host: str | None = None,
        port: int | None = None,
        token: str | None = None,
        slots: int | None = None,
        threads: int | None = None,
        offload: str | None = None,
        verify: str | None = None,
        routes: str | None = None,
        grace: str | float | None = None,
        cap: str | int | None = None,
    ):
        self.gateway = config.need("gateway.url", gateway, "say where the gateway is, as goblin://HOST:PORT")
        self._gateway_token = config.get("token", gateway_token) or ""
        chosen = config.get("lab.directory", directory)
        self.directory = Path(chosen) if chosen else Path.home() / ".local/share/goblin-dask/lab"
        self._host, self._port = str(config.get("lab.host", host)), int(config.get("lab.port", port))
        self._slots = int(config.get("lab.slots", slots))
        self._threads = int(config.get("lab.threads", threads) or os.cpu_count() or 1)
        self._offload = config.get("lab.offload", offload)
        self._verify = config.get("lab.verify", verify)
        self._routes = config.get("lab.routes", routes)
        if self._routes not in ("auto", "direct", "relay"):
            raise InputError(f'goblin.lab.routes must be "auto", "direct" or "relay", got {self._routes!r}')
        self._grace, self._cap = config.get_seconds("lab.grace", grace), config.get_bytes("lab.cap", cap)
        self.token = config.get("lab.token", token) or ""
        self.jobs: dict[str, Job] = {}
        self.origins: Counter[str] = Counter()
        """Tasks of researchers' graphs that read an array, since the start: ``grid``, accepted from volunteers;
        ``lab``, run here."""
        self.offer_changed: set[asyncio.Queue[m.GridOffer]] = set()
        self._prepared: OrderedDict[Program, Prepared] = OrderedDict()
        """The programs that were used last."""
        self._prepared_lock = threading.Lock()
        self._kept: dict[str, tuple[Digest, ...]] = {}
        self._kept_lock = threading.Lock()
        self._over: deque[str] = deque(maxlen=KEPT_JOBS)
        """Jobs that were cancelled: threads may still be busy with tasks of theirs."""
        self._closers: list[Any] = []

    @property
    def url(self) -> str:
        """Where researchers connect to."""
        return self._service.url

    @property
    def offer(self) -> m.GridOffer:
        """What the volunteers offer now."""
        return self._link.offer

    # --- life ---------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Open the store and the ledger, start the cluster, join the gateway, serve researchers.

        Raises
        ------
        ConnectionLost, Refused
            When the gateway cannot be reached or refuses.
        StoreError, InputError
            When the directory or the address cannot be used.
        """
        identity, key = self._identity()
        self._loop = asyncio.get_running_loop()
        try:
            self.blobs = BlobStore(self.directory, cap=self._cap, grace=self._grace)
            self._closers.append(functools.partial(asyncio.to_thread, self.blobs.close))
            self.ledger = Ledger(self.directory / "ledger.sqlite")
            self._closers.append(functools.partial(asyncio.to_thread, self.ledger.close))
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="goblin-lab")
            self._lowering = ThreadPoolExecutor(1, thread_name_prefix="goblin-lowering")
            self._closers += [self._shutdown(self._pool), self._shutdown(self._lowering)]
            self._data = DataServer(self.blobs, key)
            self._closers.append(self._data.close)
            await self._data.start(local=self._routes == "auto", host=None if self._routes == "relay" else self._host)
            self._link = GridLink(
                self.gateway,
                self._gateway_token,
                lab=identity,
                key=key,
                data=self._data,
                ledger=self.ledger,
                blobs=self.blobs,
                on_offer=self._on_offer,
            )
            self._closers.append(self._link.close)
            await self._link.start()
            self._cluster = LabCluster(
                slots=self._slots,
                threads=self._threads,
                directory=self.directory / "dask",
                on_release=self._on_release,
                on_cancel=self._on_cancel,
            )
            await self._cluster.start()
            self._closers.append(self._cluster.close)
            self.residents = Residents(self._cluster)
            self._closers.append(self.residents.close)
            self._collector = asyncio.create_task(self._collect(), name="goblin-collector")
            self._closers.append(self._stop_collector)
            self._service = Service(self)
            await self._service.start(self._host, self._port)
            self._closers.append(self._service.close)
        except BaseException:
            await self.close()
            raise
        logger.info("lab node at %s", self.url)

    async def close(self) -> None:
        """Cancel what runs and stop."""
        for job in list(self.jobs.values()):
            await self.cancel(job)
        while self._closers:
            await self._closers.pop()()

    async def __aenter__(self) -> LabNode:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @staticmethod
    def _shutdown(pool: ThreadPoolExecutor) -> Any:
        return functools.partial(asyncio.to_thread, pool.shutdown, cancel_futures=True)

    def _identity(self) -> tuple[str, bytes]:
        """The laboratory's random identity and the key of its grants, made at the first start."""
        try:
            return self._kept_identity()
        except OSError as error:
            raise InputError(
                f"the lab node's directory {self.directory} cannot be used ({error.strerror}): name another with "
                "goblin.lab.directory"
            ) from error

    def _kept_identity(self) -> tuple[str, bytes]:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "identity.json"
        if not path.exists():
            print(NOTICE, file=sys.stderr, flush=True)
            note = {"lab": secrets.token_hex(16), "key": secrets.token_hex(32), "token": secrets.token_urlsafe(24)}
            fresh = path.with_suffix(".new")
            fresh.touch(mode=0o600)
            fresh.write_text(json.dumps(note))
            fresh.replace(path)
        note = json.loads(path.read_text())
        self.token = self.token or note["token"]
        return note["lab"], bytes.fromhex(note["key"])

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(max(1.0, self._grace / 4))
            await asyncio.to_thread(self.blobs.collect)
            await self.residents.sweep()

    async def _stop_collector(self) -> None:
        self._collector.cancel()
        await asyncio.gather(self._collector, return_exceptions=True)

    def _on_offer(self, offer: m.GridOffer) -> None:
        for queue in self.offer_changed:
            queue.put_nowait(offer)
        for job in self.jobs.values():
            job.announce()  # it may wait for somebody who has come, or gone

    # --- blobs of keys --------------------------------------------------------------------------------------------
    def keeps(self, job: Job, key: str, digests: tuple[Digest, ...]) -> None:
        """The value of a key of the lab's graph refers to these blobs. From any thread."""
        for name in digests:
            self.blobs.retain(name)
        with self._kept_lock:
            over = job.id in self._over
            earlier = digests if over else self._kept.pop(key, ())
            if digests and not over:
                self._kept[key] = digests
        for name in earlier:
            self.blobs.release(name, at_once=over)

    def _drop_blobs(self, job: Job) -> None:
        """All that was kept for a job goes, and what its last tasks still store."""
        with self._kept_lock:
            self._over.append(job.id)
            keys = [key for key in self._kept if f"-{job.id}-" in key]
            digests = [name for key in keys for name in self._kept.pop(key)]
        for name in digests:
            self.blobs.release(name, at_once=True)

    def count(self, where: str, tasks: int) -> None:
        """Add to `origins`. From any thread."""
        with self._kept_lock:
            self.origins[where] += tasks

    def _on_release(self, key: str) -> None:
        with self._kept_lock:
            digests = self._kept.pop(key, ())
        for name in digests:
            self.blobs.release(name)

    def _on_cancel(self, key: str) -> None:
        for job in list(self.jobs.values()):
            if job.run is not None and job.id in key:
                job.run.released(key)

    # --- jobs -------------------------------------------------------------------------------------------------------
    def submit(self, submission: Submission) -> Job:
        """Start a job.

        Raises
        ------
        InputError
            For a policy or placement that does not exist.
        """
        policy = parse(submission.verify if submission.verify is not None else self._verify)
        offload = submission.offload or self._offload
        if offload not in ("auto", "always", "never"):
            raise InputError(f'offload must be "auto", "always" or "never", got {offload!r}')
        job = Job(submission, self._loop, lambda states: waits(states, self.offer, self._link.connected))
        self._forget_old()
        self.jobs[job.id] = job
        job.task = asyncio.create_task(self._run(job, policy, offload), name=f"goblin-job-{job.id}")
        return job

    def _forget_old(self) -> None:
        finished = [job for job in self.jobs.values() if job.state in FINAL]
        for job in finished[: max(0, len(finished) - KEPT_JOBS)]:
            self._loop.create_task(self.forget(job))

    async def _run(self, job: Job, policy: m.Policy, offload: str) -> None:
        writing = None
        try:
            request, plan = await self._loop.run_in_executor(self._lowering, self._lower, job.submission, offload)
            if job.submission.target is not None:
                writing = await asyncio.to_thread(Writing, job.submission.target, plan)
            run, values = await self._compute(job, plan, policy)
            await job.last_report()
            if writing is not None:
                job.become("storing")
                await asyncio.to_thread(writing.finish, job.certificate)
            found = {key: run.value(key, values) for key in plan.keys}
            for array in job.submission.declared:
                check_declared(array, {key: value.specs() for key, value in found.items()})
            job.result = Result(job.submission.keys, plan.keys, found, request.assemble, job.certificate)
            job.become("done")
        except BaseException as error:
            job.error = translate(error, job)
            logger.info("job %s ended: %s", job.id, job.error)
            try:
                await self._end_early(job, writing)
            finally:
                job.become("cancelled" if isinstance(job.error, JobCancelled) else "failed")
        finally:
            if job.run is not None:
                job.run.close()

    async def _compute(self, job: Job, plan: Plan, policy: m.Policy) -> tuple[Run, dict[str, Any]]:
        """Run a plan. Again, when sampling has found something wrong that was used: the rest is in the ledger."""
        for number in itertools.count():
            run = job.run = Run(
                f"{job.id}-{number}",
                plan,
                link=self._link,
                blobs=self.blobs,
                pool=self._pool,
                observer=_Observer(self, job),
                policy=policy,
                prepared=self._prepare,
                residents=self.residents,
            )
            run.priority_of = self._cluster.priority_of
            graph, wanted = run.graph()
            if not number:
                total = sum(map(len, graph.layers.values()))
                job.report_to_actor(self._cluster, total, written(policy), self._known)
                job.become("running")
            if policy.method != "sample":
                return run, await self._cluster.compute(graph, wanted, job.futures.extend)
            sampling = await self._cluster.sample(run.name, policy.probability, run.recheck)
            try:
                values = await self._cluster.compute(graph, wanted, job.futures.extend)
                mismatched = await self._cluster.settled(run.name, sampling)
            finally:
                await self._cluster.stop_sampling(run.name, sampling)
                self._link.settle(job.id)
            if not mismatched and not run.reopened:
                return run, values
            logger.warning("job %s: %d sampled results were wrong, its graph is run again", job.id, len(mismatched))
            run.close()
            futures, job.futures = job.futures, []
            await self._cluster.release(futures)
        raise AssertionError

    def _lower(self, submission: Submission, offload: str) -> tuple[Request, Plan]:
        if submission.target is not None:
            check_target(submission.target)
        request = Request.of(submission.graph, submission.keys)
        plan = lower(request, request.keys)
        for array in submission.declared:
            check_declared(array, plan.specs)
        prices = Prices()
        if offload != "never" and submission.fuse:
            plan = fuse(plan, self.offer, prices)
        return request, place(plan, self.offer, offload, prices)  # type: ignore[arg-type]

    def _prepare(self, program: Program) -> Prepared:
        with self._prepared_lock:
            known = self._prepared.pop(program, None) or Prepared(program)
            self._prepared[program] = known  # at the end: popped are those that were used longest ago
            if len(self._prepared) > PREPARED:
                self._prepared.popitem(last=False)
            return known

    def _known(self, accepted: dict[str, tuple[Digest, int]]) -> list[Happening]:
        """What the ledger says of the tasks that a job has had accepted."""
        entries = self.ledger.lookup(task for task, _ in accepted.values())
        return [
            OnGrid(key, entries[task].verdict, origins) for key, (task, origins) in accepted.items() if task in entries
        ]

    async def cancel(self, job: Job) -> None:
        """Cancel a job; returns when it is gone."""
        if job.state in FINAL or job.task is None:
            return
        job.task.cancel()
        await job.finished.wait()

    async def _end_early(self, job: Job, writing: Writing | None) -> None:
        """Nothing goes on for this job, and nothing stays of it."""
        if job.run is not None:
            job.run.close()
        if isinstance(job.error, JobCancelled):  # one that has failed may be tried again, and find what it had
            await asyncio.to_thread(self._drop_blobs, job)
        futures, job.futures = job.futures, []
        if futures:
            await self._cluster.cancel(futures)
        await job.stop_reporting()
        if writing is not None:
            await asyncio.to_thread(writing.abandon)

    async def forget(self, job: Job) -> None:
        """Let go of a job and of its results."""
        await self.cancel(job)
        if self.jobs.pop(job.id, None) is not None and job.futures:
            futures, job.futures = job.futures, []
            await self._cluster.release(futures)


class _Observer:
    """Passes what a run tells to its job, and what it keeps to the node."""

    def __init__(self, node: LabNode, job: Job):
        self._node, self._job = node, job
        self.keeps = functools.partial(node.keeps, job)

    def grid_state(self, key: str, state: str) -> None:
        self._job.grid_state(_task_of(key), state)

    def grid_done(self, key: str, accepted: Accepted, origins: int) -> None:
        if self._job.grid_done(_task_of(key), accepted, origins):
            self._node.count("grid", origins)

    def lab_done(self, key: str, kind: str, reason: str, origins: int) -> None:
        self._job.lab_done(_task_of(key), kind, reason, origins)
        if kind == "lab":
            self._node.count("lab", origins)


def _task_of(key: str) -> str:
    """What a key stands for, however often its job's graph is run."""
    kind, *_, number = key.split("-")
    return f"{kind}-{number}"
