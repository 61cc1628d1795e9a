"""A walk takes its process; several of them take one after the other (`walk_all`), and a run on real tensors its own
(`measure`)."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.profiler import profile, record_function
from transformers import AutoConfig, LlamaConfig

from recipe.errors import UserError
from recipe.launch import environment
from recipe.model import meta_model
from recipe.plan import dry_run
from recipe.plan.ledger import FLASH, Ledger
from tests.conftest import ROOT

LLAMA2_70B: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
TINY = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DEEP = TINY | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
TINY_PARAMETERS, TINY_TENSORS = 34_976, 21
DEEP_LAYER = 590_336  # parameters
ASKED: dict[str, Any] = {
    "world_size": 16,
    "ranks_per_node": 8,
    "micro_batch": 1,
    "seq_len": 64,
    "accumulation": 1,
    "checkpointing": True,
    "param_dtype": "float32",
    "compute_dtype": "bfloat16",
    "reduce_dtype": "float32",
}


def request(folder: Path, fsdp: int = 2, model: dict[str, Any] = TINY, fsdp_config: Any = None, **changes: Any) -> Any:
    """What the walk is asked for, of a model that is written into `folder`."""
    LlamaConfig(**model).save_pretrained(folder)
    spread = environment(str(ROOT / f"configs/accelerate/fsdp{fsdp}_2node_16gpu.yaml"))
    return ASKED | {"model": str(folder), "spread": spread | (fsdp_config or {})} | changes


def child(function: str, asked: Any) -> Any:
    """What `function` of this module makes of `asked`, in a process of its own."""
    code = f"from tests.plan import test_dry_run as t; t.{function}()"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def walk_all() -> None:
    found = {}
    for name, asked in json.load(sys.stdin).items():
        config = AutoConfig.from_pretrained(asked.pop("model"))
        try:
            found[name] = vars(dry_run.walk(config, **asked))
        except UserError as error:
            found[name] = error.problems
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("walked")
    bf16 = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    asked: dict[str, dict[str, Any]] = {
        "fsdp1": {"fsdp": 1},
        "fsdp2": {},
        "fsdp1 bf16": {"fsdp": 1, **bf16},
        "fsdp2 bf16": bf16,
        "fsdp1 hybrid": {"fsdp": 1, "fsdp_config": {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}},
        "longer": {"seq_len": 96},
        "fsdp1 longer": {"fsdp": 1, "seq_len": 96},
        "eager": {"attention": "eager"},
        "keeps activations": {"checkpointing": False},
        "deep": {"model": DEEP, "seq_len": 8},
        "fsdp1 deep": {"fsdp": 1, "model": DEEP, "seq_len": 8},
        "fsdp1 deep, whole": {
            "fsdp": 1, "model": DEEP, "seq_len": 8, "fsdp_config": {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}
        },
        "deep, whole": {"model": DEEP, "seq_len": 8, "fsdp_config": {"FSDP_RESHARD_AFTER_FORWARD": "false"}},
        "two": {"model": DEEP, "seq_len": 8, "accumulation": 2},
        "three": {"model": DEEP, "seq_len": 8, "accumulation": 3},
        "wrong": {"world_size": 15, "fsdp_config": {"FSDP_OFFLOAD_PARAMS": "true"}},
        "no flash": {"model": TINY | {"attention_dropout": 0.1}},
    }  # fmt: skip
    return child("walk_all", {name: request(folder / name, **changes) for name, changes in asked.items()})


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "fsdp1 bf16", "fsdp2 bf16", "fsdp1 hybrid"])
def test_what_rests_on_a_rank_is_exact(walked, name):
    model = meta_model(LlamaConfig(**TINY), None, torch.float32)
    assert model.num_parameters() == TINY_PARAMETERS and len(list(model.parameters())) == TINY_TENSORS
    sharded, share = walked[name]["sharded"], TINY_PARAMETERS // (8 if "hybrid" in name else 16)
    size = 2 if "bf16" in name else 4
    assert walked[name]["units"] == 3
    assert sharded["parameters"] == sharded["gradients"] == share * size
    assert sharded["buffers"] == 2 * 4 * 4, "RoPE's frequencies and their original, in fp32"
    steps = sharded["optimizer"] - 2 * share * size
    assert steps == 4 * TINY_TENSORS if "fsdp2" in name else 0 < steps <= 4 * TINY_TENSORS, "a counter a parameter"


@pytest.mark.parametrize(("short", "long"), [("fsdp2", "longer"), ("fsdp1", "fsdp1 longer")])
def test_longer_rows_take_more(walked, short, long):
    short, long = walked[short]["peaks"], walked[long]["peaks"]
    assert list(short) == [
        "load", "forward 1", "backward 1", "optimizer 1", "forward 2", "backward 2", "optimizer 2", "evaluation"
    ]  # fmt: skip
    for phase in short:
        same = phase.startswith(("load", "optimizer"))
        assert long[phase] == short[phase] if same else long[phase] > short[phase], phase


def test_flash_attention_makes_no_scores(walked):
    """64 x 64 scores of 4 heads in fp32, and more than one copy of them, are what eager attention has on top."""
    assert walked["eager"]["peaks"]["backward 2"] > walked["fsdp2"]["peaks"]["backward 2"] + 64 * 64 * 4 * 4


def test_checkpointing_keeps_the_input_of_each_layer_alone(walked):
    kept = [walked[name]["at_peak"]["forward 1"]["activations"] for name in ("fsdp2", "keeps activations")]
    assert kept[1] > 2 * kept[0]


def test_fsdp2_has_a_unit_four_times_at_the_end_of_its_backward_pass(walked):
    """Its weights, the weights of the next as the all-gather left them, its gradients, and in fp32 the gradients of the
    one before in the reduce-scatter."""
    at = walked["deep"]["at_peak"]["backward 2"]
    assert at["gathered"] == at["gathering"] == at["unreduced"] == 2 * DEEP_LAYER
    assert at["reducing"] == 4 * DEEP_LAYER


def test_fsdp2_has_a_unit_three_times_in_the_forward_pass(walked):
    """Its weights, the all-gather's output that they were copied from, and that of the unit before."""
    at = walked["deep"]["at_peak"]["evaluation"]
    assert at["gathered"] == 2 * DEEP_LAYER and at["gathering"] == 4 * DEEP_LAYER


def test_fsdp1_has_the_root_whole_throughout(walked):
    """And, at the end of a layer's backward pass, the next layer, fetched ahead; its own gradients are cast whole."""
    at, root = walked["fsdp1 deep"]["at_peak"]["backward 2"], 2 * 256 * 256 + 256
    assert at["gathered"] == 2 * (DEEP_LAYER + root)
    assert at["unreduced"] == 2 * DEEP_LAYER and at["reducing"] == 4 * DEEP_LAYER


@pytest.mark.parametrize("name", ["deep, whole", "fsdp1 deep, whole"])
def test_units_that_stay_whole_stay_until_their_backward_pass(walked, name):
    assert walked[name]["at_peak"]["forward 1"]["gathered"] >= 3 * 2 * DEEP_LAYER


def test_later_micro_batches_find_gradients(walked):
    one, two, three = (walked[name] for name in ("deep", "two", "three"))
    assert "gradients" not in one["at_peak"]["forward 2"] and "optimizer" in one["at_peak"]["forward 2"]
    assert two["at_peak"]["forward 1"]["gradients"] == two["sharded"]["gradients"]
    assert two["peaks"] == three["peaks"]


def test_what_cannot_be_walked_is_refused_by_its_keys(walked):
    ranks, offload = walked["wrong"]
    assert "15 ranks with 8 on a node" in ranks and "set num_processes and num_machines" in ranks
    assert "fsdp_offload_params is true" in offload and "set it to false" in offload
    (attention,) = walked["no flash"]
    assert (
        "attn_implementation is flash_attention_2, and" in attention and "set attn_implementation: eager" in attention
    )


def test_the_command_gives_json_or_a_users_mistake(tmp_path):
    def run(asked: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "recipe.plan.dry_run"]
        return subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT)

    asked = request(tmp_path)
    found = json.loads(run(asked).stdout)
    assert found["units"] == 3 and found["peaks"]["load"] == sum(found["at_peak"]["load"].values())
    (tmp_path / "config.json").write_text("{}")
    failed = run(asked)
    assert failed.returncode == 2 and str(tmp_path / "config.json") in failed.stderr and not failed.stdout


def test_a_storage_counts_once_until_it_ends():
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        ledger.phase("first")
        whole = torch.empty(100)
        part = whole[:10]
        ledger.phase("second")
        del whole
        other = torch.empty(10)
        ledger.hold([other], "parameters")
        del part
        ledger.phase("third")
        torch.empty(1)
        ledger.phase("first")
        torch.empty(20)
    assert ledger.peaks() == {
        "first": {"temporary": 400},
        "second": {"temporary": 400, "parameters": 40},
        "third": {"temporary": 4, "parameters": 40},
    }


def measure() -> None:
    """The walk on real tensors, whose peaks by phase are what PyTorch's allocator gave."""

    class RealMode(nullcontext[None]):
        def from_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    class Deaf(Ledger):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented
            self.flash_calls += func is FLASH
            return func(*args, **(kwargs or {}))

        def hold(self, *_: object) -> int:
            return 0

        def phase(self, name: str) -> None:
            with record_function(f"phase {name}"):
                super().phase(name)

    asked = json.load(sys.stdin)
    trace = Path(asked["model"]) / "trace.json"
    dry_run.FakeTensorMode, dry_run.Ledger = RealMode, Deaf
    said = os.dup(1)
    os.dup2(2, 1)  # the profiler greets on stdout
    with profile(profile_memory=True) as profiler:
        dry_run.walk(AutoConfig.from_pretrained(asked.pop("model")), **asked)
    profiler.export_chrome_trace(str(trace))
    os.dup2(said, 1)
    events = json.loads(trace.read_text())["traceEvents"]
    alive, phase, peaks = 0, "", {}
    for event in sorted((e for e in events if "ts" in e), key=lambda e: e["ts"]):
        if event["name"].startswith("phase "):
            phase = event["name"].removeprefix("phase ")
        alive += event["args"]["Bytes"] if event["name"] == "[memory]" else 0
        peaks[phase] = max(peaks.get(phase, 0), alive)
    print(json.dumps(peaks))


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_run_on_real_tensors_takes_what_was_walked(tmp_path, fsdp, checkpointing):
    """Of a model whose units matter as 70B's do. The walk does not see generators' states, of 5 KB a layer here."""
    model = TINY | {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "vocab_size": 2000}
    asked = request(tmp_path, fsdp, model, seq_len=256, accumulation=2, checkpointing=checkpointing)
    peaks, measured = child("walk_all", {"it": asked})["it"]["peaks"], child("measure", asked)
    assert {phase: measured[phase] for phase in peaks} == pytest.approx(peaks, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [1, 2])
def test_llama2_70b(tmp_path, fsdp):
    asked = request(tmp_path, fsdp, LLAMA2_70B, seq_len=2048, accumulation=2)
    found = child("walk_all", {"it": asked})["it"]
    assert found["seconds"] < 120 and found["host_bytes"] < 4e9
    assert found["units"] == 81
    assert found["sharded"]["parameters"] / 2**30 == pytest.approx(16.06, abs=0.005)
    assert max(found["peaks"], key=found["peaks"].get) == "backward 2"
    assert found["peaks"]["backward 2"] / 2**30 == pytest.approx(75, abs=0.5)
