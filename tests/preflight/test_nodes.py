"""What ranks of a job must have in common, held against each other through a real store."""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from recipe.arguments import Arguments, parse_arguments
from recipe.errors import UserError
from recipe.preflight import Found, Report, nodes
from recipe.rendezvous import Rendezvous


def facts(node: str, **changes: Any) -> dict[str, Any]:
    same = {
        "code": "abc",
        "versions": {"torch": "2.13.0"},
        "config": {"seed": "0", "output_dir": "/runs/a"},
        "gpus": {"number": "8", "models": "A100"},
    }
    return {"node": node, **same, **changes}


def test_what_is_the_same_everywhere_is_no_problem():
    assert nodes.differences([facts("node1"), facts("node1"), facts("node2")]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"code": "def"}, ["code is not the same on all nodes: abc on node1; def on node2", "same commit"]),
        ({"versions": {"torch": "2.12.0"}}, ["versions: torch", "2.12.0 on node2", "constraints.txt"]),
        ({"config": {"seed": "1", "output_dir": "/runs/a"}}, ["config: seed", "1 on node2", "the same config"]),
        ({"config": {"seed": "0", "output_dir": "/runs/b"}}, ["config: output_dir", "/runs/b on node2"]),
        ({"gpus": {"number": "7", "models": "A100"}}, ["gpus: number", "7 on node2", "the same number of ranks"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_differs_is_named_with_its_values_and_nodes(changes, said):
    """S9: an output folder that each rank makes of its own clock, among them."""
    (problem,) = nodes.differences([facts("node1"), facts("node1"), facts("node2", **changes)])
    assert all(text in problem for text in said), problem


def test_ranks_by_node():
    assert nodes.places(["a", "a", "a", "b", "b", "c"]) == "ranks 0-2 on a, 3-4 on b, 5 on c"


class FourRanks:
    num_nodes = 2


def test_clocks_that_are_apart_and_nodes_of_one_name():
    same = [facts("vm")] * 4
    assert nodes.oddities([facts("a"), facts("a"), facts("b"), facts("b")], [0.0, 1.0, 2.0, 3.0], FourRanks()) == []
    (odd,) = nodes.oddities([facts("a"), facts("a"), facts("b"), facts("b")], [0.0, 1.0, 2.0, 60.0], FourRanks())
    assert odd.startswith("the clocks of a and b are 60 s apart")
    (odd,) = nodes.oddities(same, [0.0] * 4, FourRanks())
    assert odd.startswith("2 nodes were started and they have 1 host names (vm)")


def test_the_code_is_what_is_in_the_files(tmp_path, monkeypatch):
    before = nodes.code_digest()
    assert before == nodes.code_digest() and len(before) == 12
    package = tmp_path / "recipe/preflight"
    package.mkdir(parents=True)
    (package.parent / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(nodes, "__file__", str(package / "nodes.py"))
    first = nodes.code_digest()
    (package.parent / "a.py").write_text("x = 2\n")
    assert nodes.code_digest() != first != before


# -- ranks, as threads that share a store ------------------------------------------------------------------------------


def rendezvous(store: dist.Store, rank: int, world_size: int) -> Rendezvous:
    made = object.__new__(Rendezvous)
    made._store, made.rank, made.world_size = store, rank, world_size
    made.num_nodes = world_size
    return made


def on_ranks(work: Callable[[Rendezvous], Any], world_size: int = 2) -> list[Any]:
    """What `work` returned or raised on each rank. Each has a client of its own, as processes have."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: list[Any] = [None] * world_size

    def rank(number: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
        try:
            results[number] = work(rendezvous(store, number, world_size))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[number] = error

    threads = [threading.Thread(target=rank, args=[number]) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_gather_is_by_rank():
    assert on_ranks(lambda meet: meet.gather("x", {"rank": meet.rank}), 3) == [[{"rank": i} for i in range(3)]] * 3


def test_a_rank_that_never_comes_is_named():
    def work(meet: Rendezvous) -> Any:
        return None if meet.rank == 1 else meet.gather("start", 0, patience=0.1)

    first, _, third = on_ranks(work, 3)
    for error in (first, third):
        assert isinstance(error, TimeoutError) and str(error).startswith("ranks 1 have not reached 'start'")


def test_a_problem_of_some_ranks_is_every_ranks():
    def work(meet: Rendezvous) -> None:
        with meet.all_or_none("data"):
            if meet.rank != 0:
                raise UserError("no such file", "and another")

    for error in on_ranks(work, 3):
        assert isinstance(error, UserError)
        assert [problem.split(" (on ")[0] for problem in error.problems] == ["no such file", "and another"]
        assert all(" (on " in problem for problem in error.problems), "not every rank has it"


def test_a_problem_of_all_ranks_is_said_once():
    def work(meet: Rendezvous) -> None:
        with meet.all_or_none("data"):
            raise UserError("no such file")

    assert [error.problems for error in on_ranks(work)] == [["no such file"]] * 2


@pytest.fixture
def arguments(tiny_model: Path, chats: Path, tmp_path: Path) -> Arguments:
    keys = {"model_name_or_path": tiny_model, "dataset_name": chats, "output_dir": tmp_path / "runs/new"}
    return parse_arguments([f"--{key}={value}" for key, value in {**keys, "max_length": 64}.items()])


def report(*problems: str) -> Report:
    found = object.__new__(Found)
    return Report(problems=list(problems), warnings=["costly"], found=found)


def test_nodes_that_agree(arguments, tmp_path):
    for found, lines in on_ranks(lambda meet: nodes.agree(meet, report(), arguments)):
        assert isinstance(found, Found)
        assert lines[0].startswith("ranks 0-1 on ") and "warning: costly" in lines
        assert any("2 nodes were started and they have 1 host names" in line for line in lines), "these are threads"
    assert list(tmp_path.iterdir()) == [], "the token is gone"


def test_the_problems_of_all_nodes_come_in_one_error(arguments):
    def work(meet: Rendezvous) -> Any:
        return nodes.agree(meet, report("everywhere", *(["only there"] if meet.rank else [])), arguments)

    for error in on_ranks(work):
        assert isinstance(error, UserError) and error.problems[0] == "everywhere"
        assert error.problems[1].startswith("only there (on ")


def test_a_folder_that_is_not_shared(arguments, monkeypatch):
    """S8."""
    monkeypatch.setattr(nodes, "SHARED_SECONDS", 0.2)
    hidden = staticmethod(lambda path: os.path.exists(path) and not path.name.startswith(".recipe-"))
    monkeypatch.setattr(Path, "exists", lambda self: hidden(self))
    for error in on_ranks(lambda meet: nodes.agree(meet, report(), arguments)):
        assert isinstance(error, UserError)
        assert "is not the same folder on all nodes" in error.problems[0]
        assert error.problems[0].endswith("set output_dir to a shared file system")


def test_a_folder_that_cannot_be_written_to(arguments, monkeypatch):
    monkeypatch.setattr(Path, "touch", lambda self: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    for error in on_ranks(lambda meet: nodes.agree(meet, report(), arguments)):
        assert isinstance(error, UserError) and "Read-only file system" in error.problems[0]
