"""The planner against runs of two real ranks (gloo): to the byte, what rests on a rank and what is written; within a
tenth, the memory of its process while it loads, saves and exports."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import LlamaConfig

from benchmarks import common
from recipe.arguments import TrainArguments
from recipe.checkpoint.manifest import Manifest
from recipe.checkpoint.saver import Content, Saver
from recipe.checkpoint.shards import MODEL, OPTIMIZER, Reader
from recipe.export import describe, drain, write_export
from recipe.loading import StreamingLoader, Weights
from recipe.loss import attach_summed_loss
from recipe.model import load_config, load_generation_config, load_tokenizer, meta_model
from recipe.plan import fitted, host, sharded
from recipe.plan.models import from_file
from recipe.plan.setup import OPTIMIZERS, STRATEGIES, Setup
from recipe.rendezvous import Rendezvous
from recipe.sharding import gather, state, wrap
from recipe.sharding.plugin import build_plugin
from tests.conftest import Launcher, write_model, write_tokenizer
from tests.distributed.ranks import run_ranks
from tests.plan.cases import a_setup

pytestmark = pytest.mark.slow
on_cpu_builds = pytest.mark.skipif(torch.version.cuda is not None, reason="with CUDA's libraries a process takes more")
RANKS = 2
OPTIMS = ("adamw_torch_fused", "adamw_8bit")
SPREADS = {
    "FSDP1 FULL_SHARD": ("1", "FULL_SHARD"),
    "FSDP1 SHARD_GRAD_OP": ("1", "SHARD_GRAD_OP"),
    "FSDP1 NO_SHARD": ("1", "NO_SHARD"),
    "FSDP2 FULL_SHARD": ("2", "FULL_SHARD"),
    "FSDP2 SHARD_GRAD_OP": ("2", "SHARD_GRAD_OP"),
}
EVEN = {"vocab_size": 320}
# Parameters of 268 M, 167 M, 81 M.
LARGE = {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 16, "num_attention_heads": 16}
MEDIUM = LARGE | {"num_hidden_layers": 8}
SMALL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 12}
# Rows of every kind that two ranks, or blocks of 16 bytes, do not divide.
ODD = {
    "vocab_size": 301,
    "hidden_size": 33,
    "intermediate_size": 65,
    "head_dim": 10,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}


def planned(folder: Path, spread: str = "FSDP1 FULL_SHARD", optim: str = "adamw_torch_fused", **changes: Any) -> Setup:
    """Of the model of `folder`, in fp32 on the ranks of a run here."""
    version, strategy = SPREADS[spread]
    values: dict[str, Any] = {
        "shape": from_file(folder / "config.json"),
        "num_nodes": 1,
        "gpus_per_node": RANKS,
        "fsdp": int(version),
        "strategy": STRATEGIES[strategy],
        "optimizer": OPTIMIZERS[optim],
        "compute_bytes": 4,
        "seq_len": 64,
        "checkpointing": "none",
    }
    return a_setup(**values | changes)


def on(spread: str, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    version, strategy = SPREADS[spread]
    return run_ranks(_spread, strategy, function, *args, world_size=RANKS, version=version, timeout=timeout)


def _spread(strategy: str, function: Callable[..., Any], *args: Any) -> Any:
    os.environ["FSDP_SHARDING_STRATEGY"] = strategy
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = str(strategy == "FULL_SHARD").lower()
    return function(*args)


def wrapped(folder: Path) -> tuple[Accelerator, nn.Module]:
    accelerator = Accelerator(fsdp_plugin=build_plugin(torch.float32, torch.float32))
    model = meta_model(load_config(folder), None, torch.float32)
    weights = Weights(folder) if dist.get_rank() == 0 else None
    loader = StreamingLoader(model, weights, torch.float32, wrap.loader_broadcasts(accelerator))
    return accelerator, wrap.shard(accelerator, model, loader)


def step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(64)[None] + 3
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()


# -- what rests on a rank ----------------------------------------------------------------------------------------------


def stored(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Elements of this rank's parts, and bytes of the memory that they lie in."""
    parts = [gather.local_part(tensor) for tensor in tensors]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts if part.numel()}
    return sum(part.numel() for part in parts), sum(storages.values())


def resting(folders: list[Path]) -> list[dict[str, tuple[int, int]]]:
    found = []
    for folder in folders:
        accelerator, model = wrapped(folder)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step(accelerator, model, optimizer)
        moments = [moment for of_one in optimizer.state.values() for key, moment in of_one.items() if key != "step"]
        found.append(
            {
                "weights": stored(model.parameters()),
                "gradients": stored(p.grad for p in model.parameters() if p.grad is not None),
                "moments": stored(moments),
            }
        )
        accelerator.free_memory()
    return found


def padded(folder: Path, setup: Setup) -> int:
    """Elements of the memory that a rank has for its weights: FSDP1 lays a unit out flat, begins each parameter at a
    multiple of 16 bytes and cuts it into equal parts (torch/distributed/fsdp/_flat_param.py); FSDP2 cuts the rows of
    each parameter (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""
    shapes = {name: p.shape for name, p in meta_model(load_config(folder), None, torch.float32).named_parameters()}
    if setup.fsdp == 2:
        return sum(-(-shape[0] // RANKS) * shape[1:].numel() for shape in shapes.values())
    units: dict[str, int] = {}
    for name, shape in shapes.items():
        unit = ".".join(name.split(".")[:3]) if ".layers." in name else "root"
        units[unit] = -(-units.get(unit, 0) // 4) * 4 + shape.numel()
    return sum(-(-size // RANKS) * RANKS // setup.shards for size in units.values())


@pytest.mark.parametrize("spread", SPREADS)
def test_what_rests_on_a_rank(spread: str, tmp_path: Path) -> None:
    """The planner leaves padding out. Under FSDP1 it is less than 16 bytes for each parameter, and an element of each
    unit for each rank; under FSDP2 less than a row of each parameter. No rank has more than rank 0."""
    even, odd = write_model(tmp_path / "even", **EVEN), write_model(tmp_path / "odd", **ODD)
    ranks = on(spread, resting, [even, odd])
    for folder, of_ranks in zip((even, odd), zip(*ranks, strict=True), strict=True):
        setup = planned(folder, spread)
        tensors = [p.shape for p in meta_model(load_config(folder), None, torch.float32).parameters()]
        rows = sum(shape[1:].numel() for shape in tensors)
        allowed = rows if setup.fsdp == 2 else 4 * len(tensors) + RANKS * (setup.shape.layers + 1)
        for what, foretold in sharded.resting(setup).items():
            elements, sizes = zip(*(held[what] for held in of_ranks), strict=True)
            times = 2 if what == "moments" else 1
            assert sum(elements) == times * setup.shape.parameters * RANKS / setup.shards
            assert max(elements) == elements[0]
            if folder == even:
                assert set(sizes) == {foretold}
            elif what == "moments":
                assert list(sizes) == [4 * number for number in elements], "they are of parameters, not of padding"
            else:
                assert set(sizes) == {4 * padded(folder, setup)}
            assert foretold <= max(sizes) <= foretold + times * 4 * allowed


# -- checkpoints and exports -------------------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, optim: str) -> torch.optim.Optimizer:
    """As the trainer makes it, but with embeddings in 8 bits too."""
    if optim != "adamw_8bit":
        return torch.optim.AdamW(model.parameters(), fused=True)
    from recipe import trainer  # and TRL with it, for which ranks that do not need it would wait

    chosen = trainer._optimizer(TrainArguments(optim=optim), model)
    assert chosen is not None
    return chosen[0](model.parameters(), **chosen[1])


def save(folder: Path, out: Path) -> dict[str, dict[str, int]]:
    """Bytes of a save's copies while it is written, and of those that stay; and of the moments that it takes, by which
    it was made. Without the counts of steps."""
    found = {}
    for optim in OPTIMS:
        accelerator, model = wrapped(folder)
        optimizer = optimizer_of(model, optim)
        step(accelerator, model, optimizer)
        saver = Saver(out / optim, Rendezvous(), torch.device("cpu"), in_background=True)
        fresh = meta_model(load_config(folder), None, torch.float32)
        shard_map = state.ShardMap(model, {name: p.shape for name, p in fresh.named_parameters()})
        moments = state.optimizer_pieces(shard_map, optimizer)
        pieces = {MODEL: state.model_pieces(shard_map), OPTIMIZER: moments}
        sizes = {"moments": stored(piece.data for piece in moments if piece.path[-1] != "step")[1]}
        saver.save(Content(pieces, {}, lambda folder: None, Manifest(1, 8, RANKS, {"seed": 0})))
        del pieces, moments
        saver.wait_staged()
        sizes["copies"] = copies(saver)
        outcome = saver.finish()
        assert outcome is not None
        outcome.raise_if_failed()
        found[optim] = sizes | {"stay": copies(saver)}
        accelerator.free_memory()
    return found


def copies(saver: Saver) -> int:
    assert saver._stager is not None
    storages = list(saver._stager._state_dict_stager._cached_storage_mapping.values())
    return sum(storage.nbytes() for storage in storages if storage.nbytes() > 4)


@pytest.mark.parametrize("spread", ["FSDP1 FULL_SHARD", "FSDP1 NO_SHARD", "FSDP2 FULL_SHARD"])
def test_what_a_save_copies(spread: str, tmp_path: Path) -> None:
    """To the byte, where the ranks hold different parts; else DCP decides which of them writes a unit."""
    folder = write_model(tmp_path / "model", **EVEN, hidden_size=256, intermediate_size=704)
    for optim in OPTIMS:
        (tmp_path / optim).mkdir()
    ranks = on(spread, save, folder, tmp_path)
    for optim in OPTIMS:
        setup = planned(folder, spread, optim)
        parameters, sizes = setup.shape.parameters, {"world_size": RANKS, "shards": setup.shards}
        stays, goes = host.save_bytes(parameters, **sizes, master_bytes=4, optimizer=setup.optimizer)
        quantised, least = optim == "adamw_8bit", 0.9 if spread == "FSDP1 NO_SHARD" else 1.0
        for found in (rank[optim] for rank in ranks):
            dense = found["moments"] if quantised else 0  # made for the save, beside their copies
            assert least * (stays + goes) <= dense + found["copies"] <= stays + goes
            # Norms are too small for 8 bits, and their moments are copied as they are.
            assert least * stays <= found["stay"] <= stays * (1.01 if quantised else 1)


@pytest.mark.parametrize(
    ("spread", "optim", "param_dtype", "export_dtype", "tied"),
    [
        ("fsdp1", "adamw_torch_fused", "float32", "bfloat16", False),
        ("fsdp2", "adamw_torch_fused", "bfloat16", "float32", True),
        ("fsdp1", "adamw_8bit", "bfloat16", "bfloat16", True),
        ("fsdp2", "adamw_8bit", "float32", "bfloat16", False),
    ],
)
def test_what_a_run_writes(
    spread: str, optim: str, param_dtype: str, export_dtype: str, tied: bool, launch: Launcher, tmp_path: Path
) -> None:
    """Tensors to the byte, without the count of steps of each parameter; files with what describes their tensors."""
    folder = write_model(
        tmp_path / "model", vocab_size=2000, hidden_size=256, intermediate_size=704, tie_word_embeddings=tied
    )
    keys = {"model_name_or_path": folder, "optim": optim, "param_dtype": param_dtype, "export_dtype": export_dtype}
    run = launch(tmp_path / "run", spread=f"{spread}_cpu_2rank", max_steps=2, **keys).ok()
    sizes = {"float32": 4, "bfloat16": 2}
    setup = planned(folder, optim=optim, master_bytes=sizes[param_dtype])
    foretold = host.estimate(setup, checkpoints=1, export_bytes=sizes[export_dtype])
    checkpoint, export = run.run_dir / "checkpoint-2", run.run_dir / "export"
    tensors = Reader(checkpoint / MODEL).shapes() | Reader(checkpoint / OPTIMIZER).shapes()
    held = sum(shape.numel() * dtype.itemsize for name, (shape, dtype) in tensors.items() if not name.endswith(".step"))
    assert held == foretold.checkpoint
    files = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert foretold.checkpoint < files < 1.04 * foretold.checkpoint
    weights = sum(
        path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        for path in export.glob("*.safetensors")
    )
    assert weights == foretold.exported
    assert foretold.disk == foretold.checkpoint + foretold.exported


# -- the memory of a process -------------------------------------------------------------------------------------------


def zeros(folder: Path, dtype: torch.dtype, **sizes: int) -> Path:
    """A Llama of 32,000 words without training, in files that take no disk but a few blocks."""
    config = LlamaConfig(**sizes, vocab_size=32_000, num_key_value_heads=sizes["num_attention_heads"])
    folder.mkdir()
    config.save_pretrained(folder)
    write_tokenizer(folder)
    shapes = {name: parameter.shape for name, parameter in meta_model(config, None, dtype).named_parameters()}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + shape.numel() * dtype.itemsize
        kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


@contextmanager
def peak(name: str, found: dict[str, int]) -> Iterator[None]:
    """Resident bytes of this rank at the peak of what is done, without the model's files, which it has mapped."""
    with common.AnonymousMemory() as watched:
        yield
        dist.barrier()
    found[name] = watched.peak + resident("RssFile")  # the libraries'


def resident(kind: str, process: int | str = "self") -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def load(folder: Path, found: dict[str, int]) -> tuple[Accelerator, nn.Module]:
    from recipe import train  # noqa: F401 - as a rank of a run has it

    Accelerator(fsdp_plugin=build_plugin(torch.float32, torch.float32))  # what it imports is not the load's
    found["process"] = resident("VmRSS")
    with peak("load", found):
        return wrapped(folder)


def only_load(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    load(folder, found)
    return found


def train_and_export(folder: Path, out: Path) -> dict[str, int]:
    """In the dtype that is the default of a run's export; as the trainer exports."""
    found: dict[str, int] = {}
    accelerator, model = load(folder, found)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    attach_summed_loss(model)
    with peak("train", found):
        for _ in range(2):
            step(accelerator, model, optimizer)
            model.zero_grad()
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    fresh, generation = meta_model(config, None, torch.float32), load_generation_config(folder, config, tokenizer)
    shapes = {name: p.shape for name, p in fresh.named_parameters()}
    about = partial(describe, fresh=fresh, config=config, tokenizer=tokenizer, generation=generation)
    with peak("export", found):
        accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        tensors = gather.full_parameters(model)
        if dist.get_rank() == 0:
            write_export(out, lambda _: tensors, shapes, torch.bfloat16, "5GB", about)
        drain(tensors)
    return found


@on_cpu_builds
def test_a_rank_that_holds_nothing_yet(tiny_model: Path) -> None:
    for found in on("FSDP1 FULL_SHARD", only_load, tiny_model):
        assert found["process"] == pytest.approx(fitted.PROCESS_BYTES, rel=0.05)


@on_cpu_builds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", ["FSDP1 FULL_SHARD", "FSDP2 FULL_SHARD"])
def test_loading(spread: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of 268 M parameters."""
    folder = zeros(tmp_path / "model", dtype, **LARGE)
    setup = planned(folder, spread)
    for number, found in enumerate(on(spread, only_load, folder)):
        foretold = host.rank(setup, first=number == 0, on_cpu=True, file_bytes=dtype.itemsize)
        assert found["load"] == pytest.approx(foretold.load, rel=0.1)


@on_cpu_builds
@pytest.mark.parametrize("spread", ["FSDP1 FULL_SHARD", "FSDP2 FULL_SHARD"])
def test_exporting(spread: str, tmp_path: Path) -> None:
    """After two steps, of 167 M parameters."""
    folder = zeros(tmp_path / "model", torch.float32, **MEDIUM)
    setup = planned(folder, spread)
    ranks = on(spread, train_and_export, folder, tmp_path / "export")
    for number, found in enumerate(ranks):
        foretold = host.rank(setup, first=number == 0, saves=False, export_bytes=2, on_cpu=True)
        assert found["export"] == pytest.approx(foretold.export, rel=0.1)
    together = host.estimate(setup, checkpoints=0, export_bytes=2, on_cpu=True)
    assert sum(found["export"] for found in ranks) == pytest.approx(together.export, rel=0.1)


@on_cpu_builds
@pytest.mark.parametrize("spread", ["fsdp1", "fsdp2"])
def test_a_whole_run(spread: str, launch: Launcher, tmp_path: Path) -> None:
    """Of 81 M parameters: the most that each rank ever takes, which is while it saves and trains on; and what the run
    itself foretells, before it has saved."""
    folder = zeros(tmp_path / "model", torch.float32, **SMALL)
    setup = planned(folder, f"{spread.upper()} FULL_SHARD")
    keys = {"model_name_or_path": folder, "global_batch_size": 2, "max_steps": 8, "save_steps": 5}
    log = tmp_path / "log"
    run = launch.warm(tmp_path / "run", spread=f"{spread}_cpu_2rank", log=log, **keys)
    peaks, end = [0] * RANKS, time.monotonic() + 240
    while any(rank.is_alive() for rank in run.ranks) and time.monotonic() < end:
        for number, rank in enumerate(run.ranks):
            with suppress(OSError, StopIteration):
                peaks[number] = resident("VmHWM", rank.pid)
        time.sleep(0.01)
    assert run.wait(1) == 0, log.read_text()[-6000:]
    for number, most in enumerate(peaks):
        foretold = host.rank(setup, first=number == 0, export_bytes=2, on_cpu=True)
        assert most == pytest.approx(max(foretold.save, foretold.export), rel=0.1)
    assert "memory predicted" in log.read_text() and "warning: memory" not in log.read_text()
