"""A plan as plain text, the same on every terminal, so that it can be kept and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from relax_rt.roles.planning.flow import Figure
from relax_rt.roles.planning.links import spans
from relax_rt.roles.planning.memory import GIB, MIB, Component

if TYPE_CHECKING:
    from relax_rt.roles.planning.fit import GpuAccount
    from relax_rt.roles.planning.placement import Placed
    from relax_rt.roles.planning.plan import Gang, HardwarePlan

T = TypeVar("T")
K = TypeVar("K")

GAP = "  "
LISTED = 6
"""Members of a communicator that are named one by one; of more, the slots only."""


def render(plan: HardwarePlan) -> str:
    """The plan for people."""
    blocks = [
        [f"{plan.run}: {plan.heading}"],
        _model(plan),
        _nodes(plan),
        _placement(plan),
        *(_gang(gang, plan) for gang in plan.gangs),
        _communicators(plan),
        _weights(plan),
        _ports(plan),
        _gpu_memory(plan),
        _host_memory(plan),
        *_figures(plan.figures),
        ["assumed", *(f"  {line}" for line in plan.assumptions)],
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block)


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows with aligned columns; those numbered in `right` to the right."""
    if not rows:
        return []
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(widths[at]) if at in right else c.ljust(widths[at]) for at, c in enumerate(row)]
        lines.append("  " + GAP.join(cells).rstrip())
    return lines


def _model(plan: HardwarePlan) -> list[str]:
    shape, model = plan.model.shape, plan.model
    active = f", {model.active_parameters:,} for one token" if shape.experts else ""
    rows = [
        ("parameters", f"{model.parameters:,}{active}"),
        ("layers", f"{shape.layers}, hidden {shape.hidden}, vocabulary {shape.vocabulary}, context {shape.context}"),
        ("heads", f"{shape.heads} of {shape.head_dim}, {shape.kv_heads} of keys and values"),
    ]
    if shape.experts:
        experts = f"{shape.experts} of width {shape.expert_ffn}, {shape.experts_per_token} a token"
        rows.append(("experts", f"{experts}, in {sum(shape.sparse)} of {shape.layers} layers"))
    return [f"model  {model.path} ({shape.family})", *_table(rows)]


def _nodes(plan: HardwarePlan) -> list[str]:
    rows = []
    for node in plan.inventory:
        gpus = f"{node['gpus']} x {node['gpu']}" if node["gpus"] else "no GPU"
        rows.append(
            (str(node["name"]), str(node["address"]), gpus, f"{node['cores']} cores", f"{node['memory_gib']:g} GiB")
        )
    return ["nodes, the head first", *_table(rows)]


def _placement(plan: HardwarePlan) -> list[str]:
    rows = []
    for node in plan.inventory:
        here = [slot for slot in plan.slots if slot.node == node["name"]]
        by_gpu: dict[int, list[Placed]] = {}
        for slot in here:
            for gpu in slot.gpus:
                by_gpu.setdefault(gpu, []).append(slot)
        for gpu, slots in sorted(by_gpu.items()):
            names = [_shared(slot) + _rank(plan, slot) for slot in slots]
            rows.append((str(node["name"]), f"GPU {gpu}", ", ".join(names)))
        without = [slot for slot in here if not slot.gpus]
        if without:
            rows.append((str(node["name"]), "cores", ", ".join(_shared(slot) for slot in without)))
        unused = [gpu for gpu in range(int(str(node["gpus"]))) if gpu not in by_gpu]
        if unused:
            rows.append((str(node["name"]), "unused", f"GPU {spans(unused)}"))
    return ["placement", *_table(rows)]


def _shared(slot: Placed) -> str:
    return f"{slot.slot} ({slot.share:g} of it)" if 0 < slot.share < 1 else slot.slot


def _rank(plan: HardwarePlan, slot: Placed) -> str:
    """The rank's place along each kind of parallelism that has more than one."""
    gang = next((gang for gang in plan.gangs if gang.kind == slot.kind), None)
    if gang is None:
        return ""
    rank = gang.ranks[slot.index]
    parts = [f"{kind} {at}" for kind, at in rank.dense.items() if gang.sizes.dense[kind] > 1]
    if rank.experts is not None and gang.sizes.expert > 1:
        parts.append(f"expert {rank.experts['expert']}")
    return f": {', '.join(parts)}" if parts else ""


def _gang(gang: Gang, plan: HardwarePlan) -> list[str]:
    sizes = gang.sizes
    shown = f"tensor {sizes.tensor}, context {sizes.context}, pipeline {sizes.pipeline}, data {gang.data}"
    if plan.model.shape.experts and gang.backend == "megatron":
        shown += f"; experts: expert {sizes.expert}, tensor {sizes.expert_tensor}, data {gang.expert_data}"
    order = "-".join(gang.order)
    rows = [
        (kind, "; ".join(spans(group.ranks) for group in members))
        for kind, members in _runs(gang.groups, lambda group: group.kind)
    ]
    head = f"groups of {gang.kind} ({gang.backend}, {sizes.world} rank{'s' if sizes.world > 1 else ''}: {shown})"
    return [head, *_table([("order", order), *rows])] if rows else []


def _communicators(plan: HardwarePlan) -> list[str]:
    rows = []
    inner = [found for found in plan.communicators if found.kind not in ("weights", "ipc")]
    for (kind, link, rate), members in _runs(inner, lambda c: (c.kind, c.link.name, c.link.gb_s)):
        speed = f"{link} {rate:g} GB/s" if rate is not None else link
        rows.append((kind, str(len(members)), speed, "; ".join(found.name for found in members)))
    return ["NCCL communicators: kind, how many, slowest link, members", *_table(rows, right=(1,))] if rows else []


def _weights(plan: HardwarePlan) -> list[str]:
    rows = []
    for found in (found for found in plan.communicators if found.kind == "weights"):
        receivers = found.members[1:]
        if len(receivers) > LISTED:
            receivers = tuple(_whole_slots(receivers))
        rows.append((found.name, f"{found.members[0]} -> {', '.join(receivers)}"))
    for found in (found for found in plan.communicators if found.kind == "ipc"):
        rows.append((found.name, f"{found.members[0]} -> {', '.join(found.members[1:])} by CUDA IPC"))
    return ["weight broadcast: sender -> receivers", *_table(rows)] if rows else []


def _whole_slots(members: Iterable[str]) -> Iterator[str]:
    """``rollout/0@node-1:0-3`` for all GPUs of a slot together."""
    for prefix, found in _runs(list(members), lambda member: member.rpartition(":")[0]):
        yield f"{prefix}:{spans(int(member.rpartition(':')[2]) for member in found)}"


def _ports(plan: HardwarePlan) -> list[str]:
    return ["ports", *_table([(port.node, str(port.port), port.what) for port in plan.ports])]


def _gpu_memory(plan: HardwarePlan) -> list[str]:
    """Every GPU; those with the same contents once."""
    lines = ["memory of each GPU, estimated, GiB"]
    alike: dict[object, list[GpuAccount]] = {}
    for account in plan.gpus:
        key = tuple((share.slot.partition("/")[0], tuple(share.components)) for share in account.shares)
        alike.setdefault((account.capacity, key), []).append(account)
    for accounts in alike.values():
        first = accounts[0]
        slots = ", ".join(dict.fromkeys(share.slot for account in accounts for share in account.shares))
        where = "; ".join(f"{node} GPU {spans(a.gpu for a in on)}" for node, on in _runs(accounts, lambda a: a.node))
        used = first.total / first.capacity
        lines.append(f"  {slots} on {where}: {_gib(first.total)} of {_gib(first.capacity)}, {used:.0%}")
        lines += [f"  {line}" for share in first.shares for line in _components(share.components)]
    return lines if plan.gpus else []


def _components(components: Sequence[Component]) -> list[str]:
    return _table([(part.name, _gib(part.bytes), part.how) for part in components], right=(1,))


def _host_memory(plan: HardwarePlan) -> list[str]:
    lines = ["memory of each node, estimated, GiB"]
    for host in plan.hosts:
        shared = f"/dev/shm {_gib(host.shared)} of {_gib(host.shared_capacity)}"
        lines.append(f"  {host.node}: {_gib(host.total)} of {_gib(host.capacity)}; of these {shared}")
        lines += [f"  {line}" for line in _components(host.components)]
    return lines


def _figures(found: Sequence[Figure]) -> Iterator[list[str]]:
    for section, members in _runs(found, lambda figure: figure.section):
        yield [section, *_table([(figure.name, amount(figure), figure.how) for figure in members], right=(1,))]


def amount(figure: Figure) -> str:
    """A figure's value with its unit."""
    value = figure.value
    if value is None:
        return "no bound" if figure.unit == "samples" else "unknown"
    if figure.unit == "bytes":
        return f"{value / GIB:.1f} GiB" if value >= GIB else f"{value / MIB:.0f} MiB"
    if figure.unit == "s":
        return f"{value:.3f} s"
    if figure.unit == "ratio":
        return f"{value:.1%}"
    return f"{value:,.0f}" + (f" {figure.unit}" if figure.unit else "")


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}"


def _runs(items: Sequence[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    return [(found, list(members)) for found, members in groupby(items, key)]
