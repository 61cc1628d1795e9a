"""T1, T5: loss and gradient norm of a step do not depend on how its global batch is split, nor on FSDP."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaForCausalLM

from recipe.arguments import parse_arguments
from recipe.data import prepare
from recipe.sampling import SampleStream
from tests.conftest import Launcher

pytestmark = pytest.mark.slow
STEPS = 6  # 39 rows in batches of 8: the fifth step spans the end of the first epoch
MAX_GRAD_NORM = 1.2  # below the norms seen, so that every step is clipped

SPLITS = {
    "1 rank x 8": ("fsdp1_cpu_2rank", 1, 8),
    "2 ranks x 4": ("fsdp1_cpu_2rank", 2, 4),
    "2 ranks x 2 x 2": ("fsdp1_cpu_2rank", 2, 2),
    "FSDP2, 2 ranks x 4": ("fsdp2_cpu_2rank", 2, 4),
    "FSDP2, 2 ranks x 1 x 4": ("fsdp2_cpu_2rank", 2, 1),
}


@pytest.fixture(scope="module")
def reference(launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Plain PyTorch, one process, no FSDP, no trainer: row by row, a mean over all labelled tokens of the global
    batch."""
    values = {**launch.defaults, "max_steps": STEPS, "output_dir": tmp_path_factory.mktemp("reference")}
    data, model, train = parse_arguments([part for k, v in values.items() for part in (f"--{k}", str(v))])
    folder = Path(model.model_name_or_path)
    rows = prepare(data, train, AutoTokenizer.from_pretrained(folder)).train
    net = LlamaForCausalLM.from_pretrained(folder)
    decay = [p for n, p in net.named_parameters() if "norm" not in n]
    rest = [p for n, p in net.named_parameters() if "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    stream = list(SampleStream(len(rows), seed=42, global_batch_size=8, max_steps=STEPS))
    seen: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step in range(STEPS):
        warmup, rate = 2, 1e-3
        factor = step / warmup if step < warmup else (STEPS - step) / (STEPS - warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        batch = [rows[i] for i in stream[step * 8 : step * 8 + 8]]
        count = sum(label != -100 for row in batch for label in row["labels"][1:])
        total = 0.0
        for row in batch:
            logits = net(torch.tensor([row["input_ids"]])).logits[0, :-1]
            loss = cross_entropy(logits, torch.tensor(row["labels"][1:]), ignore_index=-100, reduction="sum") / count
            loss.backward()
            total += loss.item()
        seen["loss"].append(total)
        seen["grad_norm"].append(torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_GRAD_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(seen["grad_norm"]) > MAX_GRAD_NORM
    return seen


@pytest.mark.parametrize("split", SPLITS)
def test_split(split: str, reference: dict[str, list[float]], launch: Launcher, tmp_path: Path) -> None:
    spread, processes, micro = SPLITS[split]
    run = launch(
        tmp_path / "run",
        spread=spread,
        world_size=processes,
        per_device_train_batch_size=micro,
        max_steps=STEPS,
        max_grad_norm=MAX_GRAD_NORM,
        export=False,
    ).ok()
    assert run.column("loss") == pytest.approx(reference["loss"], abs=5e-6)
    assert run.column("grad_norm") == pytest.approx(reference["grad_norm"], rel=2e-5)


STRATEGIES = ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str, reference: dict[str, list[float]], launch: Launcher, tmp_path: Path) -> None:
    run = launch(
        tmp_path / "run",
        launch=("--fsdp_sharding_strategy", strategy),
        max_steps=STEPS,
        max_grad_norm=MAX_GRAD_NORM,
        export=False,
    ).ok()
    assert f"recipe: FSDP1, {strategy}" in run.log
    assert run.column("loss") == pytest.approx(reference["loss"], abs=5e-6)
    assert run.column("grad_norm") == pytest.approx(reference["grad_norm"], rel=2e-5)


def test_size_based_wrap(reference: dict[str, list[float]], launch: Launcher, tmp_path: Path) -> None:
    """T11: units by size, where the accelerate file asks for it; the same numbers."""
    wrap = ("--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "--fsdp_min_num_params", "5000")
    run = launch(tmp_path / "run", launch=wrap, max_steps=STEPS, max_grad_norm=MAX_GRAD_NORM, export=False).ok()
    assert run.column("loss") == pytest.approx(reference["loss"], abs=5e-6)


@pytest.mark.parametrize("spread", ("fsdp1_cpu_2rank", "fsdp2_cpu_2rank"))
def test_fsdps_own_checkpointing(
    spread: str, reference: dict[str, list[float]], launch: Launcher, tmp_path: Path
) -> None:
    """T8, T9: exactly one of the two kinds of activation checkpointing, and either gives the same numbers."""
    asked = ("--fsdp_activation_checkpointing", "true")
    both = launch(tmp_path / "both", spread=spread, launch=asked)
    assert both.code != 0 and "activation checkpointing is on twice" in both.log
    keys = {"max_steps": STEPS, "max_grad_norm": MAX_GRAD_NORM, "export": False}
    run = launch(tmp_path / "one", spread=spread, launch=asked, activation_checkpointing=False, **keys).ok()
    assert run.column("loss") == pytest.approx(reference["loss"], abs=5e-6)
    assert run.column("grad_norm") == pytest.approx(reference["grad_norm"], rel=2e-5)


def test_packed_blocks(launch: Launcher, tmp_path: Path) -> None:
    """Packed blocks on one rank and on two: one loss curve."""
    keys = {"packing": True, "max_steps": STEPS, "global_batch_size": 4, "export": False}
    curves = [launch(tmp_path / str(n), world_size=n, **keys).ok().column("loss") for n in (1, 2)]
    assert curves[0] == pytest.approx(curves[1], abs=5e-6)
