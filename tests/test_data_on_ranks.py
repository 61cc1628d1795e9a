"""Who prepares the data: rank 0 for all that see its folder, and the first rank of each node that does not."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from recipe.arguments import DataArguments, TrainArguments
from tests.warm import CONTEXT

pytestmark = pytest.mark.slow


def rank_of(environment: dict[str, str], model: Path, data: Path, cache: Path, answers: Any) -> None:
    """One rank, up to its data; puts what it found into `answers`."""
    import recipe.data.build
    from recipe.errors import UserError
    from recipe.model import load_tokenizer
    from recipe.rendezvous import Rendezvous
    from recipe.train import data_on_every_rank

    os.environ |= environment
    built = []
    build = recipe.data.build.Builder.build
    recipe.data.build.Builder.build = lambda *args: built.append(build(*args))
    keys = {"max_length": 64, "assistant_only_loss": True, "chat_template_path": "llama2", "global_batch_size": 8}
    data_args = DataArguments(dataset_name=str(data), data_cache_dir=str(cache))
    train_args = TrainArguments(output_dir="unused", **keys)
    found: dict[str, Any] = {"problems": []}
    try:
        prepared = data_on_every_rank(data_args, train_args, load_tokenizer(model), Rendezvous())
        found |= {"folder": prepared.folder, "rows": len(prepared.train)}
    except UserError as error:
        found["problems"] = error.problems
    answers.put((int(environment["RANK"]), found | {"built": len(built)}))


def start(model: Path, data: list[Path], caches: list[Path], local_ranks: list[int]) -> list[dict[str, Any]]:
    """What each of the ranks found; `data`, `caches` and `local_ranks` by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as the launcher has it
    answers, ranks = CONTEXT.Queue(), []
    for rank, local_rank in enumerate(local_ranks):
        places = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": len(local_ranks), "MASTER_PORT": store.port}
        environment = {key: str(value) for key, value in places.items()} | {
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ranks.append(CONTEXT.Process(target=rank_of, args=(environment, model, data[rank], caches[rank], answers)))
        ranks[-1].start()
    found = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
    return [found[rank] for rank in range(len(ranks))]


def test_a_folder_that_all_see_is_made_once_and_nobody_else_needs_the_files(tiny_model, chats, tmp_path):
    nowhere = tmp_path / "nowhere.jsonl"
    found = start(tiny_model, [chats, nowhere, nowhere], [tmp_path / "cache"] * 3, [0, 1, 0])
    assert [one["built"] for one in found] == [1, 0, 0]
    assert len({one["folder"] for one in found}) == 1 and [one["rows"] for one in found] == [39] * 3


def test_a_node_that_does_not_see_it_makes_its_own(tiny_model, chats, tmp_path):
    caches = [tmp_path / "here", tmp_path / "there", tmp_path / "there"]
    found = start(tiny_model, [chats] * 3, caches, [0, 0, 1])
    assert [one["built"] for one in found] == [1, 1, 0]
    assert len({one["folder"].name for one in found}) == 1
    assert [one["folder"].parent for one in found] == caches


def test_ranks_of_one_node_have_to_see_one_folder(tiny_model, chats, tmp_path):
    found = start(tiny_model, [chats] * 2, [tmp_path / "a", tmp_path / "b"], [0, 1])
    for one in found:
        (problem,) = one["problems"]
        assert "/b' is not the same folder for all ranks of a node" in problem


def test_what_is_wrong_with_the_data_is_found_once_and_said_by_all(tiny_model, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": []}\n')
    found = start(tiny_model, [bad, tmp_path / "nowhere.jsonl"], [tmp_path / "cache"] * 2, [0, 1])
    assert found[0]["problems"] == found[1]["problems"] and "1 of 1 rows are bad" in found[0]["problems"][0]
    assert [one["built"] for one in found] == [0, 0]
