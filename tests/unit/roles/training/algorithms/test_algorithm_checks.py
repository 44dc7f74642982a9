"""What [algorithm] may not ask for is refused in words, at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_rt.roles.config.algorithm_checks import check_algorithm
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.training.algorithms.settings import AlgorithmTable


def problems(tmp_path: Path, *roles: str, **keys: object) -> list[tuple[str, str, str]]:
    """Place, message and hint of each problem of an algorithm table."""
    config = RLConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"path": "d"},
            "reward": {"function": "f.py:f"},
            "algorithm": keys,
            "config_dir": str(tmp_path),
        }
    )
    config = config.model_copy(update={"roles": dict.fromkeys(roles)})
    return [(".".join(map(str, p.path)), p.message, p.hint) for p in check_algorithm(config)]


def one(tmp_path: Path, *roles: str, **keys: object) -> tuple[str, str, str]:
    found = problems(tmp_path, *roles, **keys)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "cispo", "rloo", "decoupled_ppo", "m2po", "sft"])
def test_presets_that_need_no_further_role_pass(tmp_path: Path, name: str) -> None:
    assert problems(tmp_path, name=name) == []


def test_presets_with_their_roles_pass(tmp_path: Path) -> None:
    assert problems(tmp_path, "critic", name="ppo", group_size=1) == []
    assert problems(tmp_path, "reference", name="dpo") == []
    assert problems(tmp_path, "reference", name="distillation") == []


@pytest.mark.parametrize(
    ("keys", "place", "message", "hint"),
    [
        ({"loss": "ppo_clp"}, "algorithm.loss", "there is no loss called 'ppo_clp'", "did you mean 'ppo_clip'?"),
        ({"loss": "rloo"}, "algorithm.loss", "there is no loss called 'rloo'", "the name is of kind advantage"),
        (
            {"loss": {"name": "ppo_clip", "clip_hi": 0.1}},
            "algorithm.loss.clip_hi",
            "unknown key 'clip_hi'",
            "did you mean 'clip_high'?",
        ),
        (
            {"loss": {"name": "gspo", "clip_low": -1}},
            "algorithm.loss.clip_low",
            "must be greater than 0, not -1",
            "",
        ),
        ({"loss": {"clip_low": 0.1}}, "algorithm.loss", "it must say which loss", "known: "),
        ({"corrections": ["tis", "tsi"]}, "algorithm.corrections.1", "no correction called 'tsi'", "'tis'"),
        (
            {"corrections": [{"name": "icepop", "low": 3.0, "high": 2.0}]},
            "algorithm.corrections.0",
            "low = 3 is not below high = 2",
            "",
        ),
        ({"advantage": "nowhere.py:f"}, "algorithm.advantage", "there is no file", ""),
        ({"filters": ["zero_varianc"]}, "algorithm.filters.0", "no filter called", "'zero_variance'"),
        ({"sampler": {"name": "curriculum", "target": 2}}, "algorithm.sampler.target", "must be at most 1", ""),
        ({"advantage": "gae"}, "algorithm.advantage", "needs the values of a critic", "add [roles.critic]"),
        ({"kl": "k3"}, "algorithm.kl", "'k3' needs log-probabilities of a reference", "add [roles.reference]"),
        (
            {"loss": "ppo_clip", "corrections": ["tis"]},
            "algorithm.corrections.0",
            "would count it twice",
            'ratio_to = "proximal"',
        ),
        (
            {"loss": "decoupled_ppo", "corrections": ["icepop"]},
            "algorithm.corrections.0",
            "weights by pi / pi_behaviour itself",
            "leave it out",
        ),
        (
            {"loss": "policy_gradient", "corrections": ["tis", "rejection", "mis"]},
            "algorithm.corrections.2",
            "'tis' and 'mis' both weight by the same ratio",
            "keep one",
        ),
        ({"group_size": 1}, "algorithm.group_size", "compares the samples of a group", "at least 2"),
        ({"aggregation": "pair_mean"}, "algorithm.aggregation", "counts pairs", "token_mean"),
        ({"loss": "sft"}, "algorithm.advantage", "looks at no advantage", '"none"'),
        ({"advantage": "none"}, "algorithm.advantage", "judges no token", "grpo"),
        (
            {"streaming": True, "advantage": "reinforce_pp_baseline"},
            "algorithm.streaming",
            "advantage 'reinforce_pp_baseline' needs the whole step's samples at once",
            "leave it out",
        ),
        (
            {"filters": ["truncated", "zero_variance"], "group_size": 1, "advantage": "reinforce_pp"},
            "algorithm.filters.1",
            "filter 'zero_variance' compares the samples of a group",
            "leave the filter out",
        ),
        ({"refill": {"most": 4}}, "algorithm.refill", "no effect without filters", "leave it out"),
    ],
)
def test_refused(tmp_path: Path, keys: dict[str, object], place: str, message: str, hint: str) -> None:
    found = one(tmp_path, **keys)
    assert found[0] == place
    assert message in found[1]
    assert hint in found[2]


def test_refused_beside_roles_that_are_there(tmp_path: Path) -> None:
    place, message, hint = one(tmp_path, "reference", kl="k1")
    assert place == "algorithm.kl" and "gradient of zero" in message and 'place = "reward"' in hint
    _, message, _ = one(tmp_path, "reference", name="distillation", kl={"name": "k2", "place": "reward"})
    assert "does not look at the reward" in message
    (tmp_path / "mine.py").write_text("def distance(tokens, options):\n    return tokens.logprobs\n")
    own = {"name": "mine.py:distance", "coefficient": 1.0, "place": "reward"}
    assert "has no function 'cost'" in one(tmp_path, kl=own)[1]
    gae = {"name": "gae", "whiten": False}
    place, message, _ = one(tmp_path, "critic", advantage=gae, streaming=True)
    assert place == "algorithm.streaming" and "needs a critic's values" in message
    place, message, _ = one(tmp_path, "reference", name="dpo", aggregation="token_mean")
    assert place == "algorithm.aggregation" and "counts none" in message


def test_what_does_go_together_passes(tmp_path: Path) -> None:
    proximal = {"name": "ppo_clip", "ratio_to": "proximal"}
    assert problems(tmp_path, loss=proximal, corrections=["tis", "rejection"]) == []
    assert problems(tmp_path, corrections=[{"name": "rejection", "level": "geometric", "low": 0.99}]) == []
    assert problems(tmp_path, streaming=True, filters=["zero_variance"], refill={"most": 4}) == []
    assert problems(tmp_path, "reference", kl={"name": "k1", "place": "reward", "coefficient": 0.01}) == []


def test_the_defaults_are_those_of_asynchronous_training() -> None:
    table = AlgorithmTable(clip_low=0.1, clip_high=0.3, normalise_std=False)
    assert (table.advantage, table.loss, table.aggregation) == ("grpo", "decoupled_ppo", "token_mean")
    assert (table.clip_low, table.clip_high, table.normalise_std) == (0.1, 0.3, False)


USERS_CRITIC = """
from relax_rt.roles.training.algorithms.advantages import GaeOptions, gae, gae_returns
from relax_rt.roles.training.algorithms.registry import part

@part("advantage", options=GaeOptions, needs={"values"}{returns})
def mine(batch, options):
    return gae(batch, options)
"""


def test_a_critic_must_be_told_what_to_learn(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USERS_CRITIC.replace("{returns}", ""))
    place, message, hint = one(tmp_path, "critic", advantage="mine.py:mine")
    assert place == "algorithm.advantage" and "'mine' does not say which returns" in message
    assert "returns=gae_returns" in hint
    (tmp_path / "told.py").write_text(USERS_CRITIC.replace("{returns}", ", returns=gae_returns"))
    assert problems(tmp_path, "critic", advantage={"name": "told.py:mine", "gamma": 0.9}) == []


def test_a_cap_may_be_infinite(tmp_path: Path) -> None:
    assert problems(tmp_path, loss={"name": "decoupled_ppo", "weight_cap": float("inf")}) == []
