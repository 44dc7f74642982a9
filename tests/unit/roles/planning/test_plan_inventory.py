"""nodes.toml: what is accepted, what is refused, and where the caret stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_rt.config.inventory import load_inventory
from relax_rt.config.problems import BadInput, ConfigErrors, Problem

SOUND = """\
[gpu.h100]
memory_gib = 79.6
nvlink_gb_s = 450
[[nodes]]
name = "a"
address = "10.0.0.1"
cores = 8
memory_gib = 64
gpu = "h100"
gpus = 4
nvlink = [[0, 1], [2, 3]]
interfaces = [{ name = "ib0", gbit_s = 400, count = 2 }]
[[nodes]]
name = "b"
address = "10.0.0.2"
cores = 8
memory_gib = 64
"""


def refused(tmp_path: Path, text: str) -> list[Problem]:
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        load_inventory(path)
    return caught.value.problems


def underlined(problem: Problem) -> str:
    assert problem.place is not None
    start = problem.place.column - 1
    return problem.place.text[start : start + problem.place.width]


def test_a_sound_inventory(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text(SOUND)
    found = load_inventory(path)
    first, second = found.nodes
    assert found.gpus == 4
    assert found.kind_of(first).pcie_gb_s == 25
    assert first.nvlink_group(2) == {2, 3}
    assert (first.shared_memory_gib, second.gpus) == (32, 0)
    assert (found.ports.first, found.ports.last) == (29_400, 29_999)


@pytest.mark.parametrize(
    ("old", "new", "shown", "words"),
    [
        ('gpu = "h100"', 'gpu = "h10"', '"h10"', "there is no table [gpu.h10]"),
        ('gpu = "h100"\n', "", "4", "of what kind is not said"),
        ("[2, 3]", "[2, 4]", "4", "a has GPUs 0 to 3, not 4"),
        ("[2, 3]", "[2, 1]", "1", "GPU 1 stands in the NVLink groups twice"),
        ('name = "b"', 'name = "a"', '"a"', 'nodes[0] has the same name, "a"'),
        ("10.0.0.2", "10.0.0.1", '"10.0.0.1"', 'nodes[0] has the same address, "10.0.0.1"'),
        ("nvlink_gb_s = 450\n", "", "[[0, 1], [2, 3]]", "no nvlink_gb_s"),
        ("cores = 8\nmemory_gib = 64\ngpu", "cors = 8\nmemory_gib = 64\ngpu", "cors", "unknown key 'cors'"),
        ("memory_gib = 64\ngpu", "memory_gib = 64\nshm_gib = 65\ngpu", "65", "more than memory_gib = 64"),
        ("gbit_s = 400", "gbit_s = -1", "-1", "must be greater than 0"),
        ("gpus = 4", 'gpus = "4"', '"4"', "must be an integer"),
        ("[gpu.h100]", "[ports]\nfirst = 5000\nlast = 4000\n[gpu.h100]", "5000", "not below ports.last"),
        ("count = 2 }", 'count = 2 }, { name = "ib0", gbit_s = 1 }', '"ib0"', "another interface"),
    ],
)
def test_what_is_wrong_is_underlined(tmp_path: Path, old: str, new: str, shown: str, words: str) -> None:
    assert old in SOUND
    problems = refused(tmp_path, SOUND.replace(old, new, 1))
    assert [(underlined(p), words in p.message) for p in problems if words in p.message] == [(shown, True)], problems


def test_everything_is_reported_at_once(tmp_path: Path) -> None:
    text = SOUND.replace("[2, 3]", "[2, 9]").replace('name = "b"', 'name = "a"').replace('gpu = "h100"', 'gpu = "x"')
    assert len(refused(tmp_path, text)) == 3


def test_mistakes_of_several_nodes_are_reported_together(tmp_path: Path) -> None:
    first, second = SOUND.split('[[nodes]]\nname = "b"')
    text = first.replace("cores = 8", "cores = true") + '[[nodes]]\nname = "b"' + second.replace("cores = 8\n", "")
    assert [problem.path for problem in refused(tmp_path, text)] == [("nodes", 0, "cores"), ("nodes", 1, "cores")]


def test_no_nodes_and_no_file(tmp_path: Path) -> None:
    assert refused(tmp_path, "")[0].message.startswith("missing key 'nodes'")
    assert "at least 1" in refused(tmp_path, "nodes = []")[0].message
    with pytest.raises(BadInput, match="there is no config"):
        load_inventory(tmp_path / "other.toml")
