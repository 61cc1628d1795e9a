import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from recipe.checkpoint.shards import Piece, Reader
from recipe.checkpoint.unpickle import read_metadata
from tests.distributed.ranks import run_ranks

METADATA = "torch.distributed.checkpoint.metadata"


class Calls:
    """Its pickle calls `function(*args)` when it is opened."""

    def __init__(self, function: Callable[..., object], *args: Any):
        self.reduced = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def content(value: Any) -> bytes:
    """Of a pickle, without its beginning and its end."""
    return pickle.dumps(value, protocol=2)[2:-1]


def named(module: str, name: str) -> bytes:
    """As protocol 4 names things: `name` may have dots, and is looked up attribute by attribute."""
    return content(module) + content(name) + pickle.STACK_GLOBAL


def pickled(*parts: bytes) -> bytes:
    return pickle.PROTO + b"\x04" + b"".join(parts) + pickle.STOP


def call(callee: bytes, *args: Any) -> bytes:
    return callee + content(args) + pickle.REDUCE


WHOLE = content(Metadata({}))
PLAIN_GLOBAL = pickle.GLOBAL + b"os\nsystem\n"


def evil(mark: Path) -> dict[str, bytes]:
    """Pickles that would make the file `mark`, each by another way."""
    command, code = f"touch {mark}", f"open({str(mark)!r}, 'w')"
    nested = Metadata({"model.w": Calls(os.system, command)})  # type: ignore[dict-item]
    deep = Metadata({}, storage_data={MetadataIndex("w"): [{"a": (Calls(eval, code),)}]})
    dotted = "Metadata.__init__.__globals__"
    return {
        "os.system": pickle.dumps(Calls(os.system, command)),
        "eval": pickle.dumps(Calls(eval, code)),
        "exec, protocol 0": pickle.dumps(Calls(exec, code), protocol=0),
        "plain global": pickled(call(PLAIN_GLOBAL, command)),
        "builtins by a dotted name": pickled(named(METADATA, dotted), WHOLE),
        "a method of what is allowed": pickled(call(named("pathlib", "Path.touch"), mark)),
        "another name of an allowed module": pickled(call(named(METADATA, "os.system"), command)),
        "torch.load": pickled(call(named("torch", "load"), str(mark))),
        "an attribute of a dtype's module": pickled(call(named("torch", "os.system"), command)),
        "nested": pickle.dumps(nested),
        "nested deeper": pickle.dumps(deep),
        "before the metadata": pickled(call(named("posix", "system"), command), pickle.POP, WHOLE),
        "an instance": pickled(pickle.MARK + content(command) + pickle.INST + b"os\nsystem\n"),
        "an extension": pickled(pickle.EXT1 + b"\x01"),
        "a persistent id": pickled(content("a") + pickle.BINPERSID),
        "a class that is changed": pickled(
            named("pathlib", "PosixPath"), content((None, {"_str": str(mark)})), pickle.BUILD, pickle.POP, WHOLE
        ),
        "a function that is changed": pickled(
            named("torch.serialization", "_get_layout"), content({"a": 1}), pickle.BUILD, pickle.POP, WHOLE
        ),
    }


@pytest.mark.parametrize("kind", evil(Path("unused")))
def test_what_would_run_code_is_refused_and_nothing_ran(kind, tmp_path):
    """S12: also where the rest of it is whole, and wherever in it the call is."""
    mark, path = tmp_path / "ran", tmp_path / ".metadata"
    path.write_bytes(evil(mark)[kind])
    with pytest.raises(ValueError, match=r"\.metadata cannot be read: ") as caught:
        read_metadata(path)
    assert not os.path.exists(mark) and str(mark.parent) == str(tmp_path)
    assert type(caught.value) is ValueError


@pytest.mark.parametrize("kind", ["os.system", "eval", "nested", "nested deeper"])
def test_stock_unpickling_would_have_run_it(kind, tmp_path):
    """So the test above could fail."""
    pickle.loads(evil(tmp_path / "ran")[kind])
    assert (tmp_path / "ran").exists()


def test_the_name_that_was_refused_is_said(tmp_path):
    (tmp_path / ".metadata").write_bytes(evil(tmp_path / "ran")["os.system"])
    with pytest.raises(ValueError, match=r"it names posix\.system, which no checkpoint needs, and was not opened"):
        read_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize("value", [None, {}, [], "a", torch.Size((1,)), MetadataIndex("w"), torch.float32, Metadata])
def test_what_is_no_metadata_is_refused(value, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(ValueError, match=f"holds a {type(value).__name__} and no metadata of a checkpoint"):
        read_metadata(tmp_path / ".metadata")


def test_a_file_that_is_missing_empty_or_cut_off(tmp_path):
    path = tmp_path / ".metadata"
    with pytest.raises(ValueError, match="is missing"):
        read_metadata(path)
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path, no_dist=True)
    whole = path.read_bytes()
    assert read_metadata(path).state_dict_metadata.keys() == {"model.w"}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cannot be read"):
            read_metadata(path)


# -- what stock torch writes -------------------------------------------------------------------------------------------


def save_stock(folder: Path) -> dict[str, Any]:
    """Model and optimizer of FSDP1 and of FSDP2 by stock torch; returns whole parameters."""
    whole = {}
    for version in (1, 2):
        torch.manual_seed(version)
        model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3, dtype=torch.bfloat16))
        whole[version] = {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}
        if version == 1:
            for i in (0, 1):
                model[i] = FullyShardedDataParallel(model[i], device_id=torch.device("cpu"), use_orig_params=True)
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        else:
            fully_shard(model[0])
            fully_shard(model[1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / f"fsdp{version}")
    return whole


@pytest.mark.slow
def test_metadata_of_fsdp1_and_fsdp2_by_stock_torch_are_read(tmp_path):
    whole, _ = run_ranks(save_stock, tmp_path)
    for version, parameters in whole.items():
        reader = Reader(tmp_path / f"fsdp{version}")
        known = reader.shapes()
        for name, expected in parameters.items():
            shape, dtype = known[f"model.{name}"]
            assert dtype == (torch.bfloat16 if name.startswith("1.") else torch.float32)
            assert known[f"optimizer.state.{name}.exp_avg"] == (shape, dtype)
            target = torch.full(shape, -1.0)
            reader.read([Piece(("model", name), shape, (0,) * len(shape), target)])
            assert torch.equal(target, torch.from_numpy(expected))
