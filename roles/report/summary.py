"""What remains of a run: summary.json, the plots, and the lines that are printed at its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from relax_rt.observe.text import NOTHING, clip, count, duration, number
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.report.history import ColdStartLosses, Evaluation, History, SetScore, read_history
from relax_rt.roles.report.plots import draw_plots
from relax_rt.transport.queue.ledger.accounting import is_state
from relax_rt.transport.queue.ledger.messages import Loss, describe_loss

SUMMARY, PLOTS = "summary.json", "plots"
FIRST_AND_LAST = 10
LABEL = 19
LOSS_FIELDS = ("task", "groups", "prompts", "cause", "where", "example", "item", "hint")
LOSSES, CAUSE = 5, 78
"""Number of printed causes of losses, and of characters of each cause."""
FILTERED, RULE = "dropped(filter)", "filtered("
"""In the queue's account: samples that filters dropped, and the same ones by rule."""


def finish(run_dir: Path, config: RLConfig) -> dict[str, Any]:
    """Write summary.json and the plots of a run that has ended; return the summary."""
    return report(
        run_dir,
        name=config.run.name,
        target=config.algorithm.steps,
        bound=config.algorithm.max_staleness,
    )


def report(run_dir: Path, *, name: str = "", target: int | None = None, bound: float | None = None) -> dict[str, Any]:
    """Write summary.json and the plots of a run without its config.

    Args:
        name: the run's name, in the summary and over the plots.
        target: steps that the run was to make.
        bound: max_staleness; None or infinity: unbounded.

    Raises:
        OSError: summary.json cannot be written.
    """
    history = read_history(run_dir)
    summary = {"name": name, **summarise(history, run_dir=run_dir, target=target, bound=bound)}
    # Written before the plots too, so that a failure of the plots loses no numbers.
    _write_json(run_dir / SUMMARY, summary)
    try:
        plots = draw_plots(history, run_dir / PLOTS, bound=bound, title=name)
        skipped = "" if plots else "there is nothing to draw"
    except ImportError as error:
        plots, skipped = [], f"{error}; install matplotlib, or relax-rt[cpu] or relax-rt[gpu]"
    except OSError as error:
        plots, skipped = [], str(error)
    summary["plots"] = {"files": [str(path) for path in plots], "skipped": skipped}
    _write_json(run_dir / SUMMARY, summary)
    return summary


def _write_json(path: Path, summary: dict[str, Any]) -> None:
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    fresh.replace(path)


def summarise(history: History, *, run_dir: Path, target: int | None, bound: float | None) -> dict[str, Any]:
    """Numbers of a run; what is not known is None.

    Args:
        target: optimizer steps that the run was to make.
        bound: max_staleness; infinity and None are written as None (unbounded).
    """
    steps = history.steps
    rewards = [step.reward for step in steps if step.reward == step.reward]
    rate = history.generated_tokens / history.generated_s if history.generated_s > 0 else None
    # Samples by the trainer's own record, for a check against the queue's.
    trained = Counter(key for step in steps if not step.skipped for key in step.keys)
    ends = min(FIRST_AND_LAST, len(rewards) // 2) or len(rewards[:1])
    return {
        "steps": {
            "done": steps[-1].step if steps else 0,
            "target": target,
            "redone": len(history.redone),
            "redone_s": round(sum(step.t - step.began for step in history.redone), 1),
            "skipped": sum(bool(step.skipped) for step in steps),
            "empty": sum(step.empty for step in steps),
        },
        "cold_start": summarise_cold(history.cold),
        "samples": {
            "trained": sum(sum(step.staleness.values()) for step in steps if not step.skipped),
            "trained_twice": sum(times - 1 for times in trained.values()),
        },
        "tokens": {
            "generated": history.generated_tokens,
            "generated_at_least": history.incomplete,
            "generated_per_s": rate,
            "trained": int(sum(step.tokens for step in steps if not step.skipped)),
            "computed": int(sum(step.computed_tokens for step in [*steps, *history.redone])),
        },
        "time": _time(history),
        "reward": {
            "first": _known(fmean(rewards[:ends])) if rewards else None,
            "last": _known(fmean(rewards[-ends:])) if rewards else None,
            "over_steps": ends,
        },
        "staleness": _staleness(history, bound),
        "held_out": _held_out(history.evaluations),
        "sets": summarise_sets(history.sets),
        "restarts": {
            role: {"count": r.count, "causes": dict(r.causes), "away_s": round(r.away_s, 2)}
            for role, r in sorted(history.restarts.items())
        },
        "queue": history.account,
        "losses": [
            {"samples": loss.members, **{name: getattr(loss, name) for name in LOSS_FIELDS}} for loss in history.losses
        ],
        "files": {"run_dir": str(run_dir)},
    }


def _time(history: History) -> dict[str, Any]:
    # From the end of the step before by the same trainer, so that checkpoints are part of it.
    pairs = zip(history.steps, history.steps[1:], strict=False)
    between = [(b, b.t - a.t) for a, b in pairs if a.epoch == b.epoch and b.step == a.step + 1]
    times = between or [(step, step.t - step.began) for step in history.steps]
    return {
        "wall_s": round(history.wall_s, 1),
        "sessions": len(history.sessions),
        "step_s": _mean([seconds for _, seconds in times]),
        "wait_s": _mean([step.wait_s for step, _ in times]),
        "train_s": _mean([step.train_s for step, _ in times]),
        "publish_s": _mean([step.publish_s for step, _ in times]),
    }


def _staleness(history: History, bound: float | None) -> dict[str, Any]:
    samples: Counter[int] = Counter()
    for step in history.steps:
        samples.update(step.staleness)
    seen = [s for step in [*history.steps, *history.redone] for s in step.staleness]
    total = sum(samples.values())
    limit = bound if bound is not None and math.isfinite(bound) else None
    return {
        "mean": sum(s * n for s, n in samples.items()) / total if total else None,
        "max": max(seen, default=None),
        "bound": limit,
        "held": (max(seen) <= limit if limit is not None else True) if seen else None,
        "samples": {str(s): samples[s] for s in sorted(samples)},
    }


def _held_out(evaluations: list[Evaluation]) -> dict[str, Any]:
    before = next((e for e in evaluations if e.when == "before"), None)
    after = next((e for e in reversed(evaluations) if e.when == "after"), None)
    newest = next((e for e in reversed(evaluations) if e.when != "before"), None)
    gain = after.exact - before.exact if before and after else None
    known = after is not None and math.isfinite(after.gain_low) and math.isfinite(after.gain_high)
    return {
        "before": _plain(before),
        "after": _plain(after),
        "newest": _plain(newest),
        "gain": gain,
        "gain_low": after.gain_low if known and after else None,
        "gain_high": after.gain_high if known and after else None,
        "gain_clear": after.gain_low > 0 if known and after else None,
    }


def _plain(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    fields = ("step", "items", "exact", "exact_low", "exact_high", "lenient", "format", "constant_answer", "constant")
    values = {name: getattr(evaluation, name) for name in (*fields, "reward")}
    return {name: _known(value) if isinstance(value, float) else value for name, value in values.items()}


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else None


def render_summary(summary: dict[str, Any]) -> list[str]:
    """The lines that are printed at the end of a run."""
    blocks = [
        ("held-out accuracy", _held_out_lines(summary["held_out"])),
        ("held-out sets", set_lines(summary.get("sets", {}))),
        ("cold start", cold_lines(summary.get("cold_start"))),
        ("steps", _steps_lines(summary)),
        ("tokens", [_tokens_line(summary["tokens"])]),
        ("time", [_time_line(summary["time"])]),
        ("staleness", [_staleness_line(summary["staleness"])]),
        ("restarts", _restart_lines(summary)),
        ("queue", _queue_lines(summary)),
        ("lost", _loss_lines(summary.get("losses", []))),
        ("files", _file_lines(summary)),
    ]
    return [f"{label if i == 0 else '':{LABEL}}{line}" for label, lines in blocks for i, line in enumerate(lines)]


def _held_out_lines(held_out: dict[str, Any]) -> list[str]:
    before, after, newest = held_out["before"], held_out["after"], held_out["newest"]
    if before is None and newest is None:
        return ["not evaluated"]
    last = after or newest
    if last is None:
        return [f"{_accuracy(before)} before the first step; not evaluated since"]
    if before is None:
        lines = [f"{_accuracy(last)} at step {last['step']}"]
    else:
        at = "" if after else f" at step {last['step']} (the run ended before its last evaluation)"
        # Without a last evaluation of all items the newest may be of some of them.
        of = "" if before["items"] == last["items"] else f" on {count(before['items'])} items"
        lines = [f"{number(before['exact'], '.3f')}{of} -> {_accuracy(last)}{at}"]
    if held_out["gain"] is not None:
        lines.append(_gain_line(held_out))
    if last.get("reward") is not None:
        first = f"{number(before['reward'], '.3f')} -> " if before and before.get("reward") is not None else ""
        ended = number(last["format"], ".1%")
        return [*lines, f"reward of an episode {first}{number(last['reward'], '.3f')}, {ended} ended by themselves"]
    answer = f' ("{last["constant_answer"]}")' if last["constant_answer"] else ""
    lines.append(
        f"lenient {number(last['lenient'], '.3f')}, format {number(last['format'], '.1%')}, "
        f"best constant answer{answer} {number(last['constant'], '.3f')}"
    )
    return lines


def _accuracy(evaluation: dict[str, Any]) -> str:
    low, high = number(evaluation["exact_low"], ".3f"), number(evaluation["exact_high"], ".3f")
    return f"{number(evaluation['exact'], '.3f')} [{low}, {high}] on {count(evaluation['items'])} items"


def _gain_line(held_out: dict[str, Any]) -> str:
    gain = f"gain {number(held_out['gain'], '+.3f')}"
    if held_out["gain_clear"] is None:
        return gain
    interval = f"[{number(held_out['gain_low'], '+.3f')}, {number(held_out['gain_high'], '+.3f')}]"
    if held_out["gain_clear"]:
        verdict = "above zero"
    elif held_out["gain_high"] < 0:
        verdict = "below zero: it got worse"
    else:
        verdict = "not shown: the interval holds zero"
    return f"{gain} {interval}, {verdict} (95% intervals)"


def _steps_lines(summary: dict[str, Any]) -> list[str]:
    steps, samples, reward = summary["steps"], summary["samples"], summary["reward"]
    of = f" of {count(steps['target'])}" if steps["target"] else ""
    line = f"{count(steps['done'])}{of}, {count(samples['trained'])} samples"
    if steps["redone"]:
        line += f", {steps['redone']} more done again after restarts"
    if steps["skipped"]:
        line += f", {steps['skipped']} skipped (not finite)"
    if steps.get("empty"):
        line += f", {steps['empty']} trained nothing"
    lines = [line]
    if reward["first"] is not None:
        ends = "step" if reward["over_steps"] == 1 else f"{reward['over_steps']} steps"
        both = f"{reward['first']:.3f} -> {reward['last']:.3f} (mean of first, last {ends})"
        lines.append(f"reward {both}" if steps["done"] > 1 else f"reward {reward['last']:.3f}")
    return lines


def _tokens_line(tokens: dict[str, Any]) -> str:
    rate = tokens["generated_per_s"]
    least = "at least " if tokens["generated_at_least"] else ""
    made = f"{least}{count(tokens['generated'])} generated" + (f" ({count(round(rate))}/s)" if rate is not None else "")
    return f"{made}, {count(tokens['trained'])} trained on ({count(tokens['computed'])} computed)"


def _time_line(time: dict[str, Any]) -> str:
    line = duration(time["wall_s"])
    if time["sessions"] > 1:
        line += f" in {time['sessions']} sessions"
    if time["step_s"] is None:
        return line
    parts = [
        f"{name} {duration(time[f'{name}_s'])}"
        for name in ("wait", "train", "publish")
        if time[f"{name}_s"] is not None
    ]
    return f"{line}; a step {duration(time['step_s'])}" + (f" ({', '.join(parts)}; means)" if parts else "")


def _staleness_line(staleness: dict[str, Any]) -> str:
    if staleness["max"] is None:
        return NOTHING
    line = f"mean {number(staleness['mean'], '.2f')}, max {staleness['max']}"
    if staleness["bound"] is None:
        return f"{line}, no bound"
    return f"{line}, bound {number(staleness['bound'])}" + ("" if staleness["held"] else ": VIOLATED")


def _restart_lines(summary: dict[str, Any]) -> list[str]:
    lines = []
    for role, restarts in summary["restarts"].items():
        causes = ", ".join(
            kind if times == restarts["count"] else f"{kind} {times}" for kind, times in restarts["causes"].items()
        )
        cost = f"away {duration(restarts['away_s'])}"
        if role == "trainer" and summary["steps"]["redone"]:
            cost += f", {summary['steps']['redone']} steps done again ({duration(summary['steps']['redone_s'])})"
        lines.append(f"{role} {restarts['count']} ({causes}): {cost}")
    return lines or ["none"]


def _queue_lines(summary: dict[str, Any]) -> list[str]:
    account, seen = summary["queue"], summary["samples"]["trained_twice"]
    if account is None:
        return [f"no account; {seen} samples trained twice by the trainer's record"]
    twice = account.get("trained_twice", 0)
    ends = [f"{count(n)} {_with_rules(name, account)}" for name, n in account.items() if n and is_state(name)]
    issued = f"{count(account['samples_issued'])} samples: " if "samples_issued" in account else ""
    verdict = f"trained twice: {twice}" + ("" if twice == 0 else "  <- DEFECT, must be 0")
    if seen != twice:
        verdict += f" (by the trainer's own record {seen})"
    return [issued + (", ".join(ends) or "none"), verdict]


def _with_rules(name: str, account: dict[str, Any]) -> str:
    """Name a state; samples that filters dropped are counted as a whole and by rule."""
    if name == "lost":
        return "lost with their memory, their prompts sampled again"
    if name != FILTERED:
        return name
    rules = {key[len(RULE) : -1]: n for key, n in account.items() if key.startswith(RULE) and n}
    by_rule = ", ".join(f"{count(n)} {rule}" for rule, n in sorted(rules.items(), key=lambda item: -item[1]))
    return f"{FILTERED[:-1]}: {by_rule})" if rules else name


def _loss_lines(losses: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for loss in losses[:LOSSES]:
        fields = {name: loss[name] for name in ("task", "where", "groups", "prompts")}
        lines.append(describe_loss(Loss(**fields, members=loss["samples"], cause=clip(loss["cause"], CAUSE))))
    left = len(losses) - LOSSES
    return [*lines, f"and {left} more causes: `relax-rt why`"] if left > 0 else lines


def _file_lines(summary: dict[str, Any]) -> list[str]:
    run_dir, plots = summary["files"]["run_dir"], summary.get("plots", {})
    lines = [run_dir, "  summary.json, metrics.jsonl, events/, logs/, checkpoints/"]
    if plots.get("skipped"):
        lines.append(f"  plots skipped: {plots['skipped']}")
    elif plots.get("files"):
        names = [Path(name).name for name in plots["files"]]
        lines.append(f"  plots/: {', '.join(names)}")
    return lines


def summarise_cold(cold: ColdStartLosses) -> dict[str, Any] | None:
    """Return the numbers of the cold start; None: there was none."""
    if not cold.phase:
        return None
    return {
        "kind": cold.phase,
        "done": max([*cold.losses, *cold.validation], default=0),
        "of": cold.of,
        "loss": _ends(cold.losses),
        "validation_loss": _ends(cold.validation),
    }


def _ends(values: dict[int, float]) -> list[float] | None:
    steps = sorted(values)
    return [values[steps[0]], values[steps[-1]]] if steps else None


def cold_lines(cold: dict[str, Any] | None) -> list[str]:
    """Render the cold start's lines of the summary."""
    if cold is None:
        return []
    losses = [
        f"{name} {number(ends[0], '.4f')} -> {number(ends[1], '.4f')}"
        for name, ends in (("loss", cold["loss"]), ("validation loss", cold["validation_loss"]))
        if ends
    ]
    of = count(cold["of"])
    return [", ".join([f"{cold['kind']}, {count(cold['done'])} of {of} steps", *losses])]


def summarise_sets(sets: Mapping[str, Sequence[SetScore]]) -> dict[str, Any]:
    """Return for each set the evaluations `before`, `after` and `newest`; None for those that were not made."""
    return {
        name: {
            "before": _plain_score(next((s for s in scores if s.when == "before"), None)),
            "after": _plain_score(next((s for s in reversed(scores) if s.when == "after"), None)),
            "newest": _plain_score(next((s for s in reversed(scores) if s.when != "before"), None)),
        }
        for name, scores in sets.items()
    }


def set_lines(sets: Mapping[str, Any]) -> list[str]:
    """Render a line for each set."""
    return [f"{name}: {_set_line(one)}" for name, one in sets.items()]


def _set_line(one: Mapping[str, Any]) -> str:
    before, last = one["before"], one["after"] or one["newest"]
    shown = last or before
    parts = []
    for k, (value, low, high) in shown["pass_at"].items():
        first = f"{number(before['pass_at'][k][0], '.3f')} -> " if last and before and k in before["pass_at"] else ""
        parts.append(f"pass@{k} {first}{number(value, '.3f')} [{number(low, '.3f')}, {number(high, '.3f')}]")
    for key in ("greedy", "reward"):
        if shown[key] is not None:
            first = f"{number(before[key], '.3f')} -> " if last and before and before[key] is not None else ""
            parts.append(f"{key} {first}{number(shown[key], '.3f')}")
    each = f" x {shown['samples']}" if shown["samples"] > 1 else ""
    at = "" if one["after"] else f" at step {shown['step']}"
    return f"{', '.join(parts) or 'nothing measured'} on {count(shown['items'])} items{each}{at}"


def _plain_score(score: SetScore | None) -> dict[str, Any] | None:
    return None if score is None else msgspec.to_builtins(score)
