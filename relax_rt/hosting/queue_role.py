"""The queue role: serves the TransferQueue's broker."""

from __future__ import annotations

import asyncio
from typing import Any

from relax_rt.cluster.nodes.links import Links
from relax_rt.config.job import advice, load_job
from relax_rt.interfaces.role import Role
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.broker import Broker
from relax_rt.transport.queue.ledger.failures import REPORT_EVERY_S
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.weights.manifest import STAGE_DIR, StageApi
from relax_rt.transport.weights.stream import stage_server

METRICS_EVERY_S = 2.0
REPORTED = ("by_state", "outstanding", "bound", "payload_bytes", "refused_stale")


class Stage:
    """Answers other nodes where the weights are. Implements StageApi."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def where(self) -> str:
        return self._address


class QueueRole(Role):
    """Ready before any role that produces or consumes. Its death loses nothing acknowledged: see Broker."""

    kind = "queue"
    tier = 10

    async def setup(self) -> None:
        """Recover the ledger from the journal in the run directory and offer it."""
        ctx, table = self.ctx, self.ctx.config.queue
        self.payloads: PayloadServer | None = None
        self.weights: PayloadServer | None = None
        if (links := Links.from_environment()) is not None:
            self.payloads = PayloadServer(ctx.payload_dir, ctx.spill_dir, keys=links.keys)
            await self.payloads.listen(links.listen)
            # The newest weights are served here, as this role outlives a trainer: an engine on another node gets them
            # while no trainer is there.
            self.weights = stage_server(ctx.shm_dir / STAGE_DIR, links.keys)
            await self.weights.listen(links.listen)
        self.broker = Broker(
            ctx.run_dir / "queue",
            ctx.payload_dir,
            run_id=ctx.run_id,
            policy=load_job(ctx.config.run.job).ledger_policy(ctx.config),
            limits=QueueLimits(
                lease_s=table.lease_s,
                quarantine_after=table.quarantine_after,
                capacity_bytes=table.capacity_mib << 20,
                spill_bytes=table.spill_mib << 20,
                high_water=table.high_water,
                max_sample_bytes=table.max_sample_mib << 20,
                keep_steps=table.keep_steps,
                partials_bytes=table.marks_mib << 20,
                durable=table.durability == "disk",
            ),
            spill_dir=ctx.spill_dir,
            payloads=self.payloads.address if self.payloads is not None else "",
            notify=self._notify,
            fsync_every_s=table.fsync_every_s,
        )
        await self.broker.open()
        ctx.serve(QueueApi, self.broker)
        ctx.serve(StageApi, Stage(self.weights.address if self.weights is not None else ""))

    def _notify(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "members_lost":
            fields = {**fields, "hint": advice(self.ctx.config, fields)}
        if kind == "no_progress":
            # The run ends: show the number of failed groups that ended it in the queue's status.
            self.ctx.progress.advance(0, self.broker.summary())
        self.ctx.event(kind, **fields)

    async def run(self) -> None:
        """Serve until the run stops, or until the journal cannot be written."""
        await self.ctx.ready()
        report = asyncio.create_task(self._report())
        try:
            await self._serve()
        finally:
            report.cancel()
            await asyncio.gather(report, return_exceptions=True)
        # The event log of the ended run then has the same counts as the queue.
        self._report_losses(0.0)
        # The account of the whole run, across incarnations: it comes from the journaled ledger.
        self.ctx.event("queue_account", **await self.broker.account())

    async def _report(self) -> None:
        while True:
            self._report_losses(REPORT_EVERY_S)
            try:
                stats = await self.broker.stats()
                self.ctx.metrics({"kind": "queue", **{name: getattr(stats, name) for name in REPORTED}})
            except Exception:
                self.ctx.log.exception("the queue's metrics were not written")
            await asyncio.sleep(METRICS_EVERY_S)

    def _report_losses(self, older_s: float) -> None:
        """Report losses. A failure is logged: it costs neither the metrics nor the account."""
        try:
            self.broker.report_losses(older_s)
        except Exception:
            self.ctx.log.exception("losses were not reported")

    async def _serve(self) -> None:
        failed = asyncio.ensure_future(self.broker.run())
        stopping = asyncio.ensure_future(self.ctx.stopping.wait())
        try:
            while not failed.done() and not stopping.done():
                synced = self.broker.syncs
                await asyncio.wait([failed, stopping], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                # A round of the disk task shows that the loop turns and the journal can be forced to disk.
                if self.broker.syncs != synced:
                    self.ctx.progress.advance(self.broker.syncs - synced, self.broker.summary())
            if failed.done():
                await failed
        finally:
            stopping.cancel()
            failed.cancel()
            await asyncio.gather(stopping, failed, return_exceptions=True)

    async def teardown(self) -> None:
        """Force the journal to disk."""
        if hasattr(self, "broker"):
            await self.broker.close()
        for server in (getattr(self, "payloads", None), getattr(self, "weights", None)):
            if server is not None:
                await server.close()
