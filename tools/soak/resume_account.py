"""The account of a run that was killed and resumed, made from what trainers and rollouts wrote down themselves.

On the path of steps that leads to the end each prompt index that was issued was trained exactly once, was dropped by a
rule that the event log names, or is pending, and nothing that a checkpoint covers was done again. The queue's own
account is not used for that; it is held against it. No I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from relax_rt.chaos.checks import TRAINER, checkpoint_ignored
from relax_rt.chaos.evidence import Checkpoint, Evidence

Record = dict[str, Any]
PASSES = 4
"""A prompt may be refused as too stale, and be made again, so often in a row before it counts as left out."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the run was to do: its steps, groups of a step, samples of a group, and the staleness bound."""

    steps: int
    prompts_per_step: int
    group_size: int
    max_staleness: int

    @property
    def under_way(self) -> int:
        """Groups that may be issued and not trained at once."""
        return (self.max_staleness + 1) * self.prompts_per_step

    @property
    def settled(self) -> int:
        """Up to this step of an undisturbed end, whatever was issued before a prompt that was trained has ended."""
        return self.steps - PASSES * (self.max_staleness + 1)


class Account(msgspec.Struct, kw_only=True):
    """Every prompt index, by what became of it.

    Attributes:
        issued: indices known to have been issued: all from 0 to one below this number.
        trained: the step of each. dropped: the rule of each. pending: the others.
        steps: on the path. redone: step records that a fall-back took off it. falls: fall-backs.
        wrong: everything that does not fit.
    """

    issued: int = 0
    trained: dict[int, int] = {}
    dropped: dict[int, str] = {}
    pending: list[int] = []
    steps: int = 0
    redone: int = 0
    falls: int = 0
    wrong: list[str] = []


def account(evidence: Evidence, job: Job) -> Account:
    """The account of an ended run."""
    path, wrong = final_path(evidence.steps)
    # The path alone would be whole as well if each life began anew.
    wrong += [breach.what for breach in checkpoint_ignored(evidence)]
    if sorted(path) != list(range(1, job.steps + 1)):
        lack = sorted(set(range(1, job.steps + 1)) - set(path))
        wrong.append(
            f"the path has {len(path)} steps of {job.steps}; it lacks {lack[:10]}, its last is {max(path, default=0)}"
        )
    prompt_of, odd = prompts_of_groups(evidence.produced)
    wrong += odd
    trained: dict[int, int] = {}
    for step, record in sorted(path.items()):
        wrong += list(_whole(step, record, job, prompt_of))
        for prompt in record["prompts"]:
            if prompt in trained:
                wrong.append(f"prompt {prompt} was trained in step {trained[prompt]} and again in step {step}")
            trained[prompt] = step
    dropped = dropped_by_rule(evidence.events)
    wrong += [
        f"prompt {p} was dropped ({dropped[p]}) and trained in step {trained[p]}"
        for p in sorted(dropped)
        if p in trained
    ]
    issued = 1 + max([*trained, *dropped, *prompt_of.values()], default=-1)
    pending = [index for index in range(issued) if index not in trained and index not in dropped]
    found = Account(
        issued=issued,
        trained=trained,
        dropped=dropped,
        pending=pending,
        steps=len(path),
        redone=len(evidence.steps) - len(path),
        falls=len({int(record["epoch"]) for record in evidence.steps}) - 1,
        wrong=wrong,
    )
    for check in (_left_out, _too_many):
        wrong += list(check(found, job))
    wrong += list(against_the_queue(found, evidence, job))
    wrong += list(checkpoints_fit(path, evidence.checkpoints, job))
    return found


def final_path(steps: Sequence[Record]) -> tuple[dict[int, Record], list[str]]:
    """The steps that lead to the end, and what is wrong with how the trainers' lives follow each other.

    A life (epoch) goes on behind a step of the path: what the lives before it did beyond that is undone.
    """
    lives: dict[int, list[Record]] = defaultdict(list)
    for record in steps:
        lives[int(record["epoch"])].append(record)
    path: dict[int, Record] = {}
    wrong: list[str] = []
    for epoch, records in sorted(lives.items()):
        first = int(records[0]["step"])
        if first > len(path) + 1:
            wrong.append(f"trainer {epoch} begins with step {first}, and the path before it has {len(path)} steps")
        path = {step: record for step, record in path.items() if step < first}
        for expected, record in enumerate(records, first):
            if record["step"] != expected:
                wrong.append(f"trainer {epoch} took step {record['step']} where step {expected} was due")
            path[int(record["step"])] = record
    return path, wrong


def prompts_of_groups(made: Sequence[Record]) -> tuple[dict[int, int], list[str]]:
    """The prompt that each group was made for, by the rollouts' records."""
    found: dict[int, int] = {}
    wrong: list[str] = []
    for record in made:
        for group, prompt in record["prompts"].items():
            if found.setdefault(int(group), prompt) != prompt:
                wrong.append(f"group {group} was made for prompt {found[int(group)]} and for prompt {prompt}")
    return found, wrong


def dropped_by_rule(events: Sequence[Record]) -> dict[int, str]:
    """Prompts that are not tried again, and the rule: failures or consumers' deaths beyond the limit, a filter."""
    ended = [e for e in events if e.get("kind") == "group_ended" and e.get("prompt_fate") == "retire"]
    return {int(event["prompt"]): str(event["state"]) for event in ended}


def _whole(step: int, record: Record, job: Job, prompt_of: dict[int, int]) -> Iterator[str]:
    """A step has whole groups, and of the prompts that rollouts made them for."""
    sizes = Counter(int(key.partition(".")[0]) for key in record["keys"])
    if len(sizes) != job.prompts_per_step or set(sizes.values()) != {job.group_size}:
        yield f"step {step} has {len(sizes)} groups of {sorted(set(sizes.values()))} samples"
    if len(record["prompts"]) != len(sizes):
        yield f"step {step} has {len(record['prompts'])} prompts for {len(sizes)} groups"
    unknown = sorted(group for group in sizes if group not in prompt_of)
    if unknown:
        yield f"step {step} was trained on groups {unknown[:5]}, which no rollout has made"
    told = sorted(prompt_of[group] for group in sizes if group in prompt_of)
    if not unknown and told != sorted(record["prompts"]):
        yield f"step {step} names prompts {record['prompts']}, its groups were made for {told}"


def _left_out(found: Account, job: Job) -> Iterator[str]:
    """Prompts are issued in order and those that return go first: what is pending is young."""
    high = max((prompt for prompt, step in found.trained.items() if step <= job.settled), default=-1)
    for prompt in found.pending:
        if prompt < high:
            yield (
                f"prompt {prompt} was left out: {high} was trained in step {found.trained[high]} of {job.steps}, "
                "and it never was"
            )


def _too_many(found: Account, job: Job) -> Iterator[str]:
    if len(found.pending) > job.under_way:
        yield f"{len(found.pending)} prompts are pending, and {job.under_way} may be under way at once"


def against_the_queue(found: Account, evidence: Evidence, job: Job) -> Iterator[str]:
    """Where the queue's account at the end differs from this one."""
    told = [event for event in evidence.events if event.get("kind") == "queue_account"]
    if not told:
        yield "the queue has left no account"
        return
    queue = told[-1]
    pairs = {
        "samples trained": (found.steps * job.prompts_per_step * job.group_size, queue["freed"] + queue["trained"]),
        "prompts dropped": (len(found.dropped), queue["prompts_retired"]),
        "samples trained twice": (0, queue["trained_twice"]),
        "prompts trained twice": (0, queue["prompts_trained_twice"]),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            yield f"{what}: {ours} by the records, {theirs} by the queue"
    # What was issued last may have left no record: its tokens were never finished.
    unseen = queue["prompts_first_issued"] - found.issued
    active = sum(queue[state] for state in ("reserved", "waiting", "ready", "leased"))
    if unseen < 0 or len(found.pending) + unseen > job.under_way:
        yield f"{queue['prompts_first_issued']} prompts were issued by the queue, {found.issued} by the records"
    kept = active / job.group_size + queue["prompts_waiting"]
    if kept != len(found.pending) + unseen:
        yield f"prompts pending: {len(found.pending)} by the records and {unseen} unseen, {kept:g} by the queue"


def checkpoints_fit(path: dict[int, Record], checkpoints: Sequence[Checkpoint], job: Job) -> Iterator[str]:
    """Each checkpoint that lies there has the weights of its step on the path, and the last step has one."""
    if max((one.step for one in checkpoints), default=0) != job.steps:
        yield f"there is no checkpoint of step {job.steps}"
    for one in checkpoints:
        record = path.get(one.step)
        if record is None or record["version"] != one.version:
            version = None if record is None else record["version"]
            yield f"checkpoint {one.folder} has version {one.version}, step {one.step} of the path has {version}"


# --- breaches made on purpose, in records of a run in which all was well


def _double(evidence: Evidence) -> None:
    """A group is trained on a second time, twenty steps later."""
    path, _ = final_path(evidence.steps)
    early, late = path[min(path)], path[max(path) // 2 + 1]
    group = late["keys"][0].partition(".")[0]
    again = early["keys"][0].partition(".")[0]
    late["keys"] = [
        key.replace(f"{group}.", f"{again}.") if key.startswith(f"{group}.") else key for key in late["keys"]
    ]
    made, _ = prompts_of_groups(evidence.produced)
    late["prompts"] = sorted(made[int(g)] for g in dict.fromkeys(key.partition(".")[0] for key in late["keys"]))


def _leave_out(evidence: Evidence) -> None:
    """A prompt was never made: in its place the step has one that was issued after all others."""
    path, _ = final_path(evidence.steps)
    record = path[max(path) // 2]
    made, _ = prompts_of_groups(evidence.produced)
    group = record["keys"][0].partition(".")[0]
    prompt, new = made[int(group)], 1 + max(made.values())
    record["prompts"] = sorted(new if one == prompt else one for one in record["prompts"])
    for one in evidence.produced:
        one["prompts"] = {g: new if p == prompt else p for g, p in one["prompts"].items()}


def _fall_back(evidence: Evidence) -> None:
    """The last life of the trainer began one step behind the newest checkpoint."""
    epoch = max(int(record["epoch"]) for record in evidence.steps)
    step = next(int(record["step"]) for record in evidence.steps if int(record["epoch"]) == epoch)
    told = {"kind": "checkpoint", "by": f"{TRAINER}#{epoch - 1}", "step": step, "folder": f"step-{step:06d}"}
    evidence.events.insert(0, told)


def _lose_step(evidence: Evidence) -> None:
    """A step of the path left no record."""
    path, _ = final_path(evidence.steps)
    evidence.steps.remove(path[max(path) // 2])


def _miscount(evidence: Evidence) -> None:
    """The queue counts a group too few."""
    told = [event for event in evidence.events if event.get("kind") == "queue_account"][-1]
    told["freed"] -= 8


def _swap(evidence: Evidence) -> None:
    """A step says that it was trained on another prompt than the one that its group was made for."""
    path, _ = final_path(evidence.steps)
    record = path[max(path)]
    record["prompts"] = [*record["prompts"][:-1], record["prompts"][-1] + 1000]


SABOTAGES: dict[str, Callable[[Evidence], None]] = {
    "double": _double,
    "fall-back": _fall_back,
    "leave-out": _leave_out,
    "lose-step": _lose_step,
    "miscount": _miscount,
    "swap": _swap,
}
