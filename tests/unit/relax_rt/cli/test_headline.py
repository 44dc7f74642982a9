from __future__ import annotations

import math

import pytest

from relax_rt.cli.headline import SPARK, Column, Headline
from relax_rt.observe.text import NOTHING, count, duration, number, sparkline

REWARD = Column("step", "reward_mean", "reward", ".3f", spark=True)


def left(headline: Headline, now: float) -> float:
    found = headline.estimate(now)
    assert found is not None and found.left_s is not None
    return found.left_s


def step(n: int, t: float, **fields: object) -> dict[str, object]:
    return {"kind": "step", "t": t, "m": t, "by": "trainer/0#1", "step": n, **fields}


def text(headline: Headline, now: float = 0.0) -> list[str]:
    return [value.text for value in headline.values(now)]


def test_nothing_is_known_before_the_first_record() -> None:
    headline = Headline([REWARD], 10)
    assert text(headline) == [NOTHING]
    found = headline.estimate(0.0)
    assert found is not None and found.left_s is None


def test_staleness_shows_mean_and_maximum_of_the_list() -> None:
    headline = Headline([Column("step", "staleness", "staleness", ".2f", aggregate="mean_max")])
    headline.update(step(1, 1.0, staleness=[0, 1, 1, 2]))
    assert text(headline) == ["1.00 / 2"]
    headline.update(step(2, 2.0, staleness=[]))
    assert text(headline) == [NOTHING]


RATE = Column("rollout", "tokens", "tokens/s", ".0f", aggregate="rate")


def counted(slot: str, t: float, tokens: int, epoch: int = 3) -> dict[str, object]:
    return {"kind": "rollout", "t": t, "by": f"{slot}#{epoch}", "tokens": tokens}


def test_a_rate_is_of_all_living_senders_and_of_the_last_seconds() -> None:
    headline = Headline([RATE])
    headline.update(counted("rollout/0", 100.0, 0))
    assert text(headline, now=100.0) == [NOTHING]
    for t in (102.0, 104.0):
        headline.update(counted("rollout/0", t, int(t - 100.0) * 50))
        headline.update(counted("rollout/1", t, int(t - 100.0) * 70))
    assert text(headline, now=104.0) == ["120"]
    headline.update(counted("rollout/0", 112.0, 600))
    assert text(headline, now=114.5) == ["50"], "rollout/1 has not been heard of for more than ten seconds"
    assert text(headline, now=200.0) == ["0"]


def test_a_rate_counts_turns_of_work_and_of_waiting() -> None:
    headline = Headline([RATE])
    for n in range(40):
        headline.update(counted("rollout/0", 2.0 * n, 200 * (n // 2)))
    assert text(headline, now=78.0) == ["50"]
    assert text(headline, now=80.0) == ["50"], "the last two seconds were waiting"


def test_a_seldom_sender_has_a_rate_over_its_last_two_records() -> None:
    headline = Headline([RATE])
    for t, tokens in ((0.0, 0), (60.0, 600), (120.0, 3_000)):
        headline.update(counted("rollout/0", t, tokens))
    assert text(headline, now=121.0) == ["40"]


def test_a_restarted_sender_counts_from_its_own_beginning() -> None:
    headline = Headline([RATE])
    headline.update(counted("rollout/0", 1.0, 5_000))
    headline.update(counted("rollout/0", 2.0, 5_050))
    headline.update(counted("rollout/0", 3.0, 0, epoch=9))
    headline.update(counted("rollout/0", 4.0, 40, epoch=9))
    assert text(headline, now=4.0) == ["40"]


def test_a_second_key_stands_after_a_slash() -> None:
    headline = Headline([Column("queue", "outstanding", "queue", of="bound")])
    headline.update({"kind": "queue", "t": 1.0, "outstanding": 96, "bound": math.inf})
    assert text(headline) == ["96 / inf"]


def test_steps_made_again_replace_the_ends_of_the_curve_and_of_the_pace() -> None:
    headline = Headline([REWARD], 10)
    for n in range(1, 6):
        headline.update(step(n, 10.0 * n, reward_mean=float(n)))
    assert left(headline, 50.0) == pytest.approx(50.0)
    headline.update(step(3, 100.0, reward_mean=33.0))
    assert list(headline.values(100.0)[0].spark) == [1.0, 2.0, 33.0]
    assert headline.step == 3
    # As fast as before, until enough steps are measured.
    assert left(headline, 100.0) == pytest.approx(70.0)
    for n in range(4, 7):
        headline.update(step(n, 102.0 + 2.0 * (n - 4), reward_mean=4.0))
    assert left(headline, 107.0) == pytest.approx(7.0)


def test_the_curve_is_bounded() -> None:
    headline = Headline([REWARD])
    for n in range(500):
        headline.update(step(n, float(n), reward_mean=1.0))
    assert len(headline.values(0.0)[0].spark) == SPARK


def test_nothing_is_left_at_the_target() -> None:
    headline = Headline([REWARD], 2)
    for n in (1, 2):
        headline.update(step(n, float(n), reward_mean=1.0))
    assert left(headline, 2.0) == 0.0


def test_versions_are_known_by_slot() -> None:
    headline = Headline([])
    headline.update({"kind": "rollout", "t": 1.0, "by": "rollout/3#8", "version": 17})
    assert headline.versions == {"rollout/3": 17}


def test_a_template_survives_what_the_record_lacks() -> None:
    column = Column("evaluation", "exact", "held-out", line="held-out {when}: {exact:.3f} [{exact_low:.3f}] {other}")
    headline = Headline([column])
    record = {"kind": "evaluation", "t": 1.0, "when": "before", "exact": 0.25, "exact_low": None}
    assert headline.lines(record) == [f"held-out before: 0.250 [{NOTHING}] {NOTHING}"]
    assert headline.lines({"kind": "step"}) == []


def test_a_column_without_a_title_is_reported_in_lines_alone() -> None:
    columns = [
        Column("cold", "loss", "", line="step {step} loss {loss:.1f}"),
        Column("cold", "validation", "", line="step {step} validation {validation:.1f}"),
    ]
    headline = Headline(columns)
    record = {"kind": "cold", "t": 1.0, "by": "trainer/0#1", "step": 0, "validation": 2.0}
    headline.update(record)
    assert headline.values(1.0) == [] and headline.lines(record) == ["step 0 validation 2.0"]
    assert headline.lines({**record, "step": 1, "loss": 1.5}) == ["step 1 loss 1.5", "step 1 validation 2.0"]
    assert "cold" not in headline.step_line(1.0)


@pytest.mark.parametrize("value", [None, math.nan, [1], {}])
def test_what_is_no_number_is_shown_as_nothing(value: object) -> None:
    headline = Headline([REWARD])
    headline.update(step(1, 1.0, reward_mean=value))
    assert text(headline) == [NOTHING]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 s"),
        (0.0042, "4.2 ms"),
        (0.42, "0.42 s"),
        (9.96, "10 s"),
        (59.6, "1m 00s"),
        (185, "3m 05s"),
        (3725, "1h 02m"),
        (200_000, "2d 07h"),
        (math.inf, NOTHING),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_counts_and_numbers() -> None:
    assert (count(11_520), count(1_230_000), count(math.nan)) == ("11,520", "1.23 M", NOTHING)
    assert (number(0.5, ".3f"), number(7.0), number(3.14159), number("12")) == ("0.500", "7", "3.142", "12")


def test_sparklines() -> None:
    assert sparkline([0, 7, math.nan, 3.5], 10) in ("▁█ ▄", "▁█ ▅")
    assert sparkline([5, 5], 10) == "▄▄"
    assert sparkline(range(100), 3) == "▁▅█"
    assert sparkline([math.nan], 10) == sparkline([1, 2], 0) == ""
