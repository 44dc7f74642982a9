"""The tables [reward], [reward.judge] and [roles.reward] of roles.toml."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from relax_rt.config.schema import RoleSettings, Seconds, Table

NUMBER = r"(-?\d+(?:\.\d+)?)"


class JudgeTable(Table):
    """The prompt of the generative judge ([roles.genrm]), and how its answers are parsed."""

    prompt: str
    """User message; {question}, {completion}, {answer} and keys of the item's metadata are filled in."""
    system: str | None = None
    """System message put before it."""
    pattern: str = NUMBER
    """Regular expression of the verdict; its last match counts, and of that the first group."""
    words: dict[str, float] = Field(default_factory=dict)
    """Verdicts in words: { yes = 1.0, no = 0.0 }, whatever their case. Empty: verdicts are numbers."""
    lowest: float = 0.0
    """A number of this or less is the verdict 0."""
    highest: float = 1.0
    """A number of this or more is the verdict 1; between the two it is in proportion."""
    otherwise: float | None = None
    """The verdict where nothing in the judge's words matches; unset: the sample fails and is made again."""
    samples: Annotated[int, Field(ge=1, le=64)] = 1
    """Verdicts of each completion; their mean counts."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """0 is greedy: the same words always get the same verdict."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] = 64
    """Maximum tokens of the judge's reply."""
    timeout_s: Seconds = 120.0
    """For one verdict, the wait for a judge included. A sample whose verdict does not come fails, and is made again."""


OnFailure = Literal["fail", "zero"]


class ComponentTable(Table):
    """A part of the reward: one with a name (guides/rewards.md lists them) or a function of yours. Further keys are the
    options of the reward that is named: { name = "regex", pattern = 'answer: \\d+', weight = 0.2 }."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str | None = None
    """Name of a built-in reward: math, choice, exact, regex, tags, json, length, code, unit_tests, http, verifier,
    genrm, …"""
    function: str | None = None
    """Instead of name: `file.py:function` or `package.module:function`, as reward.function."""
    weight: float = 1.0
    """The reward is the sum of all components, each times its weight."""
    label: str | None = None
    """Name in records and metrics; unset: its name, or its function's."""
    group: bool = False
    """The function scores all completions of a prompt in one call; see reward.group."""
    on_failure: OnFailure | None = None
    """Unset: reward.on_failure."""

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


class RewardTable(Table):
    """The reward: one function, or weighted components. Functions of yours run in processes of their own."""

    function: str | None = None
    """`file.py:function` (relative to the config file) or `package.module:function`; sync or async. It is called as
    f(completion: str, answer: str, **info) and returns a float or a dict of components (summed, or `total`). Or the
    name of a reward, as "math" or "genrm" (the judge's verdict)."""
    components: list[ComponentTable] = Field(default_factory=list)
    """Instead of function: [{ name = "math" }, { function = "mine.py:f", weight = 0.5 }], or an [[reward.components]]
    each."""
    group: bool = False
    """The function scores all completions of a prompt in one call: f(completions: list[str], answer: str, **info)
    returns a list with one reward for each."""
    timeout_s: Seconds = 10.0
    """A call that takes longer marks its sample failed; its process is killed, with all that it started, and
    replaced."""
    on_failure: OnFailure = "fail"
    """Effect of a call that raises or does not return: fail its sample, which is regenerated, or count it as 0."""
    workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Processes in which each reward role calls your functions. 0: its own, where a debugger reaches them, and where a
    call that hangs ends the role."""
    memory_mib: Annotated[int, Field(ge=64)] | None = 4096
    """A worker that takes more, with all that it started, is killed."""
    processes: Annotated[int, Field(ge=1, le=10_000)] = 64
    """A worker that starts more is killed."""
    judge: JudgeTable | None = None
    """The generative judge; its verdict, 0 to 1, is what a reward function gets that takes `verdict`."""


class RewardSettings(RoleSettings):
    """A reward worker."""

    batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Samples leased at a time."""
