"""A gang of ranks behind the interface of one trainer backend: rank 0 leads, the others follow its commands.

What rank 0 is asked to do goes to every rank as a command, one after the other, whatever thread asked: so all of them
make the same calls in the same order, and collectives never cross each other. One thing runs beside the commands: the
weights of a publication are copied aside and gathered by a thread of each rank over a process group of their own. Only
a command that changes the weights waits for the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError

from relax_rt.config.problems import BadInput
from relax_rt.roles.base.sample import Sample, SampleMeta, bare_meta
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.channel import COMMAND_S, GATHER_S, GangRanks
from relax_rt.roles.training.backend.interface import AdapterBackend, GradientPart, StepResult
from relax_rt.roles.training.backend.shares import (
    LeaseReader,
    SharedSample,
    ShareReport,
    assign_replicas,
    decode_runs,
    encode_runs,
    from_summary,
    shared,
    stand_in,
    summarise,
)
from relax_rt.roles.training.batch.rows import Numbered, replica_share
from relax_rt.roles.training.checkpoints.optimizer_state import failure_file
from relax_rt.roles.training.checkpoints.store import is_transient
from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.queue.ledger.messages import LeaseGrant
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError, Unreachable
from relax_rt.transport.weights.manifest import Layout
from relax_rt.transport.weights.payloads import Lora

COPY_WAIT_S = COMMAND_S + GATHER_S
"""Limit of a rank's copy of its weights: others may have to begin theirs first."""
UNREADABLE = (SafetensorError, OSError, Refused)
"""Raised by a checkpoint that cannot be used."""


class RankBackend(Protocol):
    """One rank of a backend; `TrainerBackend` documents the calls. All ranks make the same calls in the same order;
    each gets its share of a batch, which may be empty."""

    objective: Objective

    @property
    def takes_branches(self) -> bool:
        """Whether it computes the branches of a sample as what they are, sequences of their own."""

    @property
    def ranks(self) -> GangRanks: ...
    def keeps_groups_together(self, samples: Sequence[Sample]) -> bool:
        """Whether the samples of a group must go to one replica."""

    def use(self, objective: Objective, table: AlgorithmTable, *, temperature: float | None = None) -> None: ...
    def log_probabilities(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]: ...
    def accumulate(self, samples: Sequence[Sample]) -> GradientPart: ...
    def apply(self, count: float, number: int, before_update: Callable[[], None] = ...) -> StepResult: ...
    def layout(self, dtype: str) -> Layout: ...
    def export(self, into: memoryview | None, dtype: str, copied: Callable[[], None] = ...) -> None:
        """Write the weights of all ranks into rank 0's buffer; the others pass None. It runs beside the other calls, so
        it uses none of their process groups."""

    def snapshot(self) -> None: ...
    def write(self, folder: Path) -> None: ...
    def restore(self, folder: Path) -> None: ...


class GangMember:
    """One rank's part of each command. The same code runs on rank 0 and on its followers.

    Args:
        waiting: called with what this rank waits for, and with "" when it continues.
        lease_reader: of a gang that shares the samples of a lease (`backend.shares`); None: rank 0 sends them.
    """

    def __init__(
        self,
        backend: RankBackend,
        waiting: Callable[[str], None] = lambda _: None,
        lease_reader: LeaseReader | None = None,
    ) -> None:
        self.backend, self.ranks, self._waiting = backend, backend.ranks, waiting
        self.lease_reader = lease_reader
        self._held: dict[tuple[int, int], SharedSample] = {}
        self._copied = threading.Event()
        self._copied.set()

    def _export(self, into: memoryview | None, dtype: str, copied: Callable[[], None] = lambda: None) -> None:
        """Export this rank's part of a publication; `_copied` was cleared when the command came."""

        def aside() -> None:
            self._copied.set()
            copied()

        try:
            self.backend.export(into, dtype, aside)
        finally:
            self._copied.set()

    def _weights_may_change(self) -> None:
        if self._copied.is_set():
            return
        self._waiting("this rank's copy of its weights for a publication")
        try:
            if not self._copied.wait(COPY_WAIT_S):
                raise DeadlineExceeded(
                    f"rank {self.ranks.rank} did not copy its weights aside within {COPY_WAIT_S:g} s"
                )
        finally:
            self._waiting("")

    @property
    def _adapted(self) -> AdapterBackend:
        assert isinstance(self.backend, AdapterBackend), "only asked of a backend that has adapters"
        return self.backend

    def _read_share(self, parts: Sequence[LeaseGrant], *, begin: bool) -> list[ShareReport]:
        """Read this replica's part of a lease, and return how that went on every rank."""
        assert self.lease_reader is not None, "rank 0 asks only gangs whose ranks all have one"
        if begin:
            self._held = {}
        own, report = [], ShareReport(self.lease_reader.node)
        try:
            read, received = self.lease_reader.read(parts[self.ranks.replica])
            own = [shared(sample, self.ranks.replica) for sample in read]
            self._held |= {(sample.meta.group, sample.meta.member): sample for sample in own}
            # Ranks that share a replica read the same samples: one of them reports these.
            samples = [summarise(sample) for sample in own] if self.ranks.reports_loss else []
            report = ShareReport(report.node, received, samples)
        except RelaxError as error:
            again = isinstance(error, Unreachable | DeadlineExceeded)
            report = ShareReport(report.node, failed=str(error), again=again)
        encoded = self.ranks.gather(msgspec.msgpack.encode(report))
        return [msgspec.msgpack.decode(one, type=ShareReport) for one in encoded]

    def _share(self, samples: Sequence[Sample]) -> list[Numbered]:
        if samples and isinstance(samples[0], SharedSample):
            held = [(index, one) for index, one in enumerate(samples) if isinstance(one, SharedSample)]
            return [(index, one) for index, one in held if one.replica == self.ranks.replica]
        whole = self.backend.keeps_groups_together(samples)
        return replica_share(samples, self.ranks.replica, self.ranks.replicas, whole_groups=whole)

    def _log_probabilities(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Return the log-probabilities of the whole batch, on every rank; each replica computes its share."""
        mine = self._share(samples)
        values = self.backend.log_probabilities([sample for _, sample in mine])
        own: dict[str, list[bytes]] = {}
        if self.ranks.reports_loss:
            for (index, sample), one in zip(mine, values, strict=True):
                columns = [one, sample.behaviour_logprobs, sample.reference_logprobs]
                own[str(index)] = [
                    column.astype(np.float32, copy=False).tobytes()
                    for column in (columns if isinstance(sample, SharedSample) else columns[:1])
                    if column is not None
                ]
        found = {
            int(i): [np.frombuffer(v, np.float32) for v in columns]
            for part in self.ranks.gather(own)
            for i, columns in part.items()
        }
        for index, sample in enumerate(samples):
            if isinstance(sample, SharedSample) and sample.replica != self.ranks.replica:
                # Whoever asks for log-probabilities compares them with these.
                sample.behaviour_logprobs = found[index][1]
                sample.reference_logprobs = found[index][2] if len(found[index]) > 2 else None
        return [found[index][0] for index in range(len(samples))]

    def _accumulate(self, samples: Sequence[Sample]) -> None:
        """Compute this replica's share."""
        self.backend.accumulate([sample for _, sample in self._share(samples)])

    def _restore(self, folder: Path) -> None:
        """Restore a checkpoint on all ranks or on none.

        Raises:
            OSError: the file system refused it to one of them.
            Refused: one of them cannot read it, or it is of another model.
        """
        why, again = "", False
        self._weights_may_change()
        try:
            self.backend.restore(folder)
        except UNREADABLE as error:
            why, again = str(error) or type(error).__name__, is_transient(error)
        failures = [
            (f"rank {rank}: {why}", again) for rank, (why, again) in enumerate(self.ranks.gather((why, again))) if why
        ]
        if any(again for _, again in failures):
            raise OSError(next(why for why, again in failures if again))
        if failures:
            raise Refused(f"checkpoint {folder}", why=failures[0][0])


class Leader(GangMember):
    """Rank 0: a `TrainerBackend` over all ranks. It gets whole batches; each replica takes its share of them."""

    def __init__(self, backend: RankBackend, lease_reader: LeaseReader | None = None) -> None:
        super().__init__(backend, lease_reader=lease_reader)
        self._turn = threading.Lock()
        self._exporting = threading.Lock()

    @contextmanager
    def _command(
        self,
        name: str,
        samples: Sequence[Sample] = (),
        options: Mapping[str, str | int | float] | None = None,
        table: Mapping[str, Any] | None = None,
        parts: Sequence[LeaseGrant] = (),
    ) -> Iterator[None]:
        """Send a command; this rank carries it out within the context."""
        with self._turn:
            command = GangCommand(name, encode_samples(samples), dict(options or {}), dict(table or {}), list(parts))
            send_command(command, self.ranks.control)
            yield

    def read(self, lease: LeasedBatch, begin: bool) -> tuple[list[Sample], dict[str, int]]:
        """Have each replica read its share of a lease whose payload was not fetched.

        Args:
            begin: the lease is the first of a step: samples of the step before are forgotten.

        Returns:
            The samples, in the order of the lease, and the bytes that each node received from others, by its name.

        Raises:
            Unreachable: a rank could not get its share in time; another lease may do. RelaxError: it cannot be read.
        """
        objective, count = self.backend.objective, self.ranks.replicas
        whole = "pairs" in objective.needs
        replicas = assign_replicas(lease.samples, count, whole_groups=whole, updates=objective.updates_per_step)
        by_key = dict(zip(lease.keys, replicas, strict=True))
        parts = [lease.part([key for key, replica in by_key.items() if replica == place]) for place in range(count)]
        with self._command("read", options={"begin": int(begin)}, parts=parts):
            reports = self._read_share(parts, begin=begin)
        for rank, report in enumerate(reports):
            if report.failed:
                kind = Unreachable if all(one.again for one in reports if one.failed) else RelaxError
                raise kind(f"payload of lease {lease.lease} at rank {rank} on node {report.node}", why=report.failed)
        received: dict[str, int] = {}
        for report in reports:
            received[report.node] = received.get(report.node, 0) + report.received
        summaries = {(one.meta.group, one.meta.member): one for report in reports for one in report.samples}
        samples: list[Sample] = []
        for leased in lease.samples:
            place, replica = (leased.key.group, leased.key.member), by_key[leased.key]
            mine = replica == self.ranks.replica
            samples.append(self._held[place] if mine else from_summary(summaries[place], leased, replica))
        return samples, received

    def _check(self, samples: Sequence[Sample]) -> None:
        """Refuse bad samples before the command is sent: a rank that ends within a command leaves the others in it."""
        most = max((len(sample.meta.branches) for sample in samples), default=0)
        if most > 1 and not self.backend.takes_branches:
            raise BadInput(
                f"an episode of {most} branches",
                why="gangs of Megatron-Core compute a sample as one sequence: a branch would see those before it",
                hint='set roles.trainer.backend = "torch", with which the queue has taken it; `relax-rt up` resumes',
            )

    def use(self, objective: Objective, table: AlgorithmTable, *, temperature: float | None = None) -> None:
        """Have every rank use another objective, which is of the table, from now on."""
        given = {"base": str(objective.base), "longest": objective.longest, "temperature": temperature}
        options = {name: value for name, value in given.items() if value is not None}
        with self._command("use", options=options, table=table.model_dump()):
            self.backend.use(objective, table, temperature=temperature)

    def log_probabilities(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Return log-probabilities of each trained token, float32 [T] for each sample.

        Raises:
            BadInput: a sample has branches, and the backend takes none.
        """
        self._check(samples)
        with self._command("log_probabilities", samples):
            return self._log_probabilities(samples)

    def accumulate(self, samples: Sequence[Sample]) -> GradientPart:
        """Add the gradients of a part of the step's batch; raises as `log_probabilities`. The objective's state goes
        along: a checkpoint gave it to rank 0 alone."""
        self._check(samples)
        objective = self.backend.objective
        with self._command("accumulate", samples, objective.state()):
            self._accumulate(samples)
        return GradientPart(objective.count(samples), sum(int(sample.loss_mask.sum()) for sample in samples))

    def apply(self, count: float, number: int, before_update: Callable[[], None] = lambda: None) -> StepResult:
        """Take the optimizer's step. `before_update` comes first: what it waits for may need commands of its own."""
        before_update()
        with self._command("apply", options={"count": count, "number": number}):
            return self.backend.apply(count, number, self._weights_may_change)

    def layout(self, dtype: str) -> Layout:
        """Return where `export` puts each tensor."""
        return self.backend.layout(dtype)

    def export(self, into: memoryview, dtype: str, copied: Callable[[], None] = lambda: None) -> None:
        """Write the weights of all ranks, as they are when the command comes; other commands run meanwhile.

        Raises:
            Unreachable: a rank is gone, or did not send its part in time. RelaxError: one could not copy it.
        """
        with self._exporting:
            with self._command("export", options={"dtype": dtype}):
                self._copied.clear()
            self._export(into, dtype, copied)

    def export_base(self, into: memoryview | None, dtype: str) -> None:
        """Write the model's own weights, without the adapters."""
        with self._command("export_base", options={"dtype": dtype}):
            self._adapted.export_base(into, dtype)

    @property
    def changes_kept(self) -> float | None:
        """Return `AdapterBackend.changes_kept` of rank 0's rows."""
        found: float | None = getattr(self.backend, "changes_kept", None)
        return found

    def adapters(self) -> Lora:
        """Return a copy of the adapters, whole."""
        with self._command("adapters"):
            return self._adapted.adapters()

    def snapshot(self) -> None:
        """Have every rank copy its state aside."""
        with self._command("snapshot"):
            self.backend.snapshot()

    def write(self, folder: Path) -> None:
        """Have every rank write its part of the last snapshot, beside the commands that follow."""
        with self._command("write", options={"folder": str(folder)}):
            pass
        self.backend.write(folder)

    def restore(self, folder: Path) -> None:
        """Have every rank restore its part of a checkpoint.

        Raises:
            Refused: one of them could not; none must continue without another `restore`.
        """
        with self._command("restore", options={"folder": str(folder)}):
            self._restore(folder)

    def close(self) -> None:
        """End the other ranks' wait for commands."""
        with self._exporting, self._command("end"):
            pass


class Follower(GangMember):
    """Any other rank: carries out rank 0's commands until the command to end.

    Args:
        doing: called with the name of each command when it comes, and with "" when it is done.
    """

    def __init__(
        self,
        backend: RankBackend,
        doing: Callable[[str], None] = lambda _: None,
        waiting: Callable[[str], None] = lambda _: None,
        lease_reader: LeaseReader | None = None,
    ) -> None:
        super().__init__(backend, waiting, lease_reader)
        self._doing = doing
        self._threads: dict[str, threading.Thread] = {}
        self._failed: BaseException | None = None

    def run(self) -> None:
        """Follow rank 0. Raises what a command, or work beside the commands, raised."""
        self._doing("")
        while (command := receive_command(self.ranks.control)).name != "end":
            if self._failed is not None:
                raise self._failed
            self._doing(command.name)
            self._carry_out(command)
            self._doing("")
        for thread in self._threads.values():
            # Its own deadlines bound it.
            thread.join()
        if self._failed is not None:
            raise self._failed

    def _beside(self, name: str, work: Callable[[], None]) -> None:
        """Run the work in a thread, beside the commands that follow."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised when the next command comes
                self._failed = error

        self._threads[name] = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads[name].start()

    def _carry_out(self, command: GangCommand) -> None:
        samples, options = decode_samples(command.samples, self._held), command.options
        match command.name:
            case "use":
                table, longest = AlgorithmTable(**command.table), options.get("longest")
                temperature = options.get("temperature")
                length = int(longest) if longest is not None else None
                objective = Objective.of(table, base=Path(str(options["base"])), longest=length)
                self.backend.use(objective, table, temperature=float(temperature) if temperature is not None else None)
            case "read":
                self._read_share(command.parts, begin=bool(options["begin"]))
            case "log_probabilities":
                self._log_probabilities(samples)
            case "accumulate":
                self.backend.objective.restore({name: float(value) for name, value in options.items()})
                self._accumulate(samples)
            case "apply":
                self.backend.apply(float(options["count"]), int(options["number"]), self._weights_may_change)
            case "export":
                dtype = str(options["dtype"])
                if "export" in self._threads:
                    self._threads["export"].join()
                self._copied.clear()
                self._beside("export", lambda: self._export(None, dtype))
            case "export_base":
                self._adapted.export_base(None, str(options["dtype"]))
            case "adapters":
                self._adapted.adapters()
            case "snapshot":
                self.backend.snapshot()
            case "write":
                folder = Path(str(options["folder"]))
                self._beside("write", lambda: self._write(folder))
            case "restore":
                try:
                    self._restore(Path(str(options["folder"])))
                except Refused:
                    pass  # rank 0 reports it, and sends another restore
            case _:
                raise Refused(f"command {command.name!r}", why="this rank does not know it: are all of one version?")

    def _write(self, folder: Path) -> None:
        try:
            self.backend.write(folder)
        except BaseException as error:
            failure_file(folder, self.ranks.rank).write_text(str(error))
            raise


COLUMNS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "behaviour_logprobs": np.float32,
    "advantages": np.float32,
    "proximal_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "values": np.float32,
}
"""Columns of a sample that forward and backward passes read."""


RANK_0_COLUMNS = ("loss_mask", "advantages", "proximal_logprobs")
"""Columns of a shared sample that rank 0 computes or changes; the others are with its replica."""


class EncodedSample(msgspec.Struct, array_like=True, frozen=True):
    """A sample on its way to other ranks: its columns as bytes, by name, and its reward.

    Attributes:
        replica: who has the rest of a shared sample, whose columns are run-length encoded; -1: this is all of it.
    """

    meta: SampleMeta
    columns: dict[str, bytes]
    reward: float | None = None
    replica: int = -1


class GangCommand(msgspec.Struct, array_like=True, frozen=True):
    """A call that every rank makes; decoding one builds plain values alone.

    Attributes:
        name: the method. samples: its batch. options: its other arguments.
        table: the keys of [algorithm], for `use`. parts: of a lease, by replica, for `read`.
    """

    name: str
    samples: list[EncodedSample] = []
    options: dict[str, str | int | float] = {}
    table: dict[str, Any] = {}
    parts: list[LeaseGrant] = []


def encode_samples(samples: Sequence[Sample]) -> list[EncodedSample]:
    """Encode samples for other ranks."""
    found = []
    for sample in samples:
        if isinstance(sample, SharedSample):
            runs = {
                name: encode_runs(values.astype(COLUMNS[name], copy=False))
                for name in RANK_0_COLUMNS
                if (values := getattr(sample, name)) is not None
            }
            name_only = bare_meta(sample.meta.group, sample.meta.member)
            found.append(EncodedSample(name_only, runs, sample.reward, sample.replica))
            continue
        columns = {}
        for name, dtype in COLUMNS.items():
            values = getattr(sample, name)
            if values is not None:
                columns[name] = np.ascontiguousarray(values, dtype).tobytes()
        found.append(EncodedSample(sample.meta, columns, sample.reward))
    return found


def decode_samples(
    samples: Sequence[EncodedSample], held: Mapping[tuple[int, int], SharedSample] | None = None
) -> list[Sample]:
    """Decode samples; columns that passes do not read are not with them.

    Args:
        held: the shared samples that this rank has, by group and member.
    """
    found: list[Sample] = []
    for sample in samples:
        if sample.replica >= 0:
            place = sample.meta.group, sample.meta.member
            mine = (held or {}).get(place)
            # A lease that failed on another rank leaves its samples here; leased again, they may be another replica's.
            if mine is None or mine.replica != sample.replica:
                found.append(stand_in(*place, sample.replica))
                continue
            given: dict[str, Any] = dict.fromkeys(RANK_0_COLUMNS)
            given |= {name: decode_runs(data, np.dtype(COLUMNS[name])) for name, data in sample.columns.items()}
            found.append(msgspec.structs.replace(mine, reward=sample.reward, **given))
            continue
        columns: dict[str, Any] = {k: np.frombuffer(v, COLUMNS[k]) for k, v in sample.columns.items()}
        found.append(Sample(meta=sample.meta, versions=[], reward=sample.reward, **columns))
    return found


def send_command(command: GangCommand, group: dist.ProcessGroup) -> None:
    """Send a command from rank 0 to all others of the group."""
    data = bytearray(msgspec.msgpack.encode(command))
    dist.broadcast(torch.tensor([len(data)]), 0, group=group)
    dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=group)


def receive_command(group: dist.ProcessGroup) -> GangCommand:
    """Wait for the next command from rank 0."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    return msgspec.msgpack.decode(data.numpy().data, type=GangCommand)
