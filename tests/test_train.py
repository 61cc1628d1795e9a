"""End to end through the real entry on two gloo ranks: train, checkpoint, resume, export, reload; FSDP1 and FSDP2."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner, _load_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from recipe.checkpoint.manifest import Manifest
from tests.conftest import Launcher, write_chats, write_model

pytestmark = pytest.mark.slow
SPREADS = ("fsdp1_cpu_2rank", "fsdp2_cpu_2rank")
EXACT = ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "epoch", "batch_fingerprints")


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """A sharded checkpoint in one process, by torch's own reader."""
    state: dict = {}
    reader = dcp.FileSystemReader(folder)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return next(iter(state.values()))


@pytest.fixture(scope="module", params=SPREADS)
def runs(request: pytest.FixtureRequest, launch: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """12 steps in one go, through `accelerate launch`, and 12 steps stopped at 5 and resumed. 39 rows: a global batch
    spans the end of an epoch."""
    keys = {"spread": request.param, "max_steps": 12, "export_dtype": "float32", "report_to": "tensorboard"}
    folder = tmp_path_factory.mktemp(request.param)
    whole = launch(folder / "whole", cold=True, **keys).ok()
    stopped = launch(folder / "parts", stop_at_step=5, **keys).ok()
    first = [*stopped.metrics]
    assert not (folder / "parts" / "export").exists(), "a run that was stopped exports nothing"
    return {"whole": whole, "first": first, "resumed": launch(folder / "parts", **keys).ok(), "spread": request.param}


def test_fsdp_is_really_on(runs: dict) -> None:
    version = runs["spread"][4]
    assert f"recipe: FSDP{version}, FULL_SHARD, 3 units (layers + 1)" in runs["whole"].log
    assert "this rank's shard: 18,896 in float32" in runs["whole"].log, "half of 37,792 parameters on each rank"
    assert "after step 1: weights in float32, moments in float32" in runs["whole"].log
    assert "global batch 8 = 1 samples x 4 accumulated x 2 ranks; 12 steps" in runs["whole"].log


def test_resume_is_exact(runs: dict) -> None:
    """R1: losses, gradient norms, learning rates, tokens, samples and weights as if the run had never stopped."""
    whole, resumed = runs["whole"].metrics, runs["resumed"].metrics
    assert [line["step"] for line in runs["first"]] == [1, 2, 3, 4, 5]
    assert [{k: line[k] for k in EXACT} for line in whole] == [{k: line[k] for k in EXACT} for line in resumed]
    exports = [load_file(runs[run].run_dir / "export" / "model.safetensors") for run in ("whole", "resumed")]
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(exports[0][key], exports[1][key]) for key in exports[0])
    assert "resuming from" in runs["resumed"].log and "step 5, written by 2 ranks" in runs["resumed"].log


def test_loss_falls(runs: dict) -> None:
    losses = runs["whole"].column("loss")
    assert losses[0] == pytest.approx(5.7, abs=0.1), "ln(300) for a random model"
    assert losses[-1] < losses[0] - 0.2


def test_checkpoint_has_everything(runs: dict) -> None:
    """S1, S4: sharded model and optimizer, one file a rank, and all that a reload needs; no full state dict."""
    folder = runs["whole"].run_dir / "checkpoint-12"
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert {f"{part}/.metadata", f"{part}/__0_0.distcp", f"{part}/__1_0.distcp"} <= names
    assert {"scheduler.json", "trainer_state.json", "manifest.json"} <= names
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not any(name.endswith((".bin", ".safetensors", ".pt", ".pth", ".pkl")) for name in names)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["details"]["sharding"]["wrap"] == "LlamaDecoderLayer"
    assert manifest["step"] == 12 and manifest["world_size"] == 2 and manifest["run"]["global_batch_size"] == 8
    assert set(manifest["files"]) == names - {"manifest.json"}


def test_checkpoint_is_fp32_with_plain_names_and_moments(runs: dict) -> None:
    """S5, S12, R1: DCP keys are the model's own, weights and moments fp32, moments not zero."""
    folder = runs["whole"].run_dir / "checkpoint-12"
    model = read_shards(folder / "pytorch_model_fsdp_0")
    fresh = LlamaForCausalLM.from_pretrained(runs["whole"].run_dir / "export").state_dict()
    assert model.keys() == fresh.keys()
    assert {tensor.dtype for tensor in model.values()} == {torch.float32}
    optimizer = read_shards(folder / "optimizer_0")["state"]
    assert optimizer.keys() == fresh.keys()
    for name, state in optimizer.items():
        assert state["exp_avg"].shape == fresh[name].shape and state["exp_avg"].dtype == torch.float32
        assert float(state["step"]) == 12
    assert all(state["exp_avg_sq"].abs().sum() > 0 for state in optimizer.values())


def test_stock_accelerate_reads_the_checkpoint(runs: dict, tmp_path: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    folder = runs["whole"].run_dir
    merge_fsdp_weights(str(folder / "checkpoint-12/pytorch_model_fsdp_0"), str(tmp_path))
    merged, export = load_file(tmp_path / "model.safetensors"), load_file(folder / "export/model.safetensors")
    assert merged.keys() == export.keys() and all(torch.equal(merged[key], export[key]) for key in merged)


def test_export_reloads_strictly_with_the_trained_logits(runs: dict) -> None:
    """S3, S4, S5: 0 missing, 0 unexpected; logits equal to those of the trained shards."""
    folder = runs["whole"].run_dir
    model, info = AutoModelForCausalLM.from_pretrained(folder / "export", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(model) is LlamaForCausalLM and model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.use_cache is True
    trained = LlamaForCausalLM(model.config)
    trained.load_state_dict(read_shards(folder / "checkpoint-12/pytorch_model_fsdp_0"))
    ids = torch.arange(3, 40).unsqueeze(0)
    assert torch.equal(model.eval()(ids).logits, trained.eval()(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    assert "[INST]" in tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)


def test_run_folder(runs: dict) -> None:
    folder = runs["whole"].run_dir
    assert "global_batch_size: 8" in (folder / "config.yaml").read_text()
    line = runs["whole"].metrics[-1]
    wanted = {"step", "loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second", "step_seconds"}
    assert wanted | {"tokens_per_second_per_gpu", "data_wait_seconds", "peak_memory_bytes"} <= line.keys()
    assert len(line["peak_memory_bytes"]) == 2 and min(line["peak_memory_bytes"]) > 1e8
    assert "mfu" not in line, "a CPU's peak is not known"
    assert list((folder / "runs").rglob("events.out.tfevents.*")) or list(folder.rglob("events.out.tfevents.*"))


def test_log_is_quiet(runs: dict) -> None:
    """No deprecation that a user can do nothing about, and no traceback."""
    noise = [line for line in runs["whole"].log.splitlines() if "Warning" in line or "Traceback" in line]
    assert not noise, noise


OPTIMIZERS = ("adamw_torch_fused", "paged_adamw_32bit", "adamw_8bit")


@pytest.fixture(scope="module")
def wider_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that bitsandbytes quantises most shards (those of 4,096 elements and more)."""
    return write_model(tmp_path_factory.mktemp("model") / "wider", hidden_size=128, intermediate_size=256)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_optimizers_resume_exactly(
    spread: str, optim: str, launch: Launcher, wider_model: Path, tmp_path: Path
) -> None:
    """R9."""
    keys = {"spread": spread, "optim": optim, "model_name_or_path": wider_model, "max_steps": 6}
    whole = launch(tmp_path / "whole", **keys).ok()
    launch(tmp_path / "parts", stop_at_step=3, **keys).ok()
    resumed = launch(tmp_path / "parts", **keys).ok()
    for key in ("loss", "grad_norm", "learning_rate"):
        assert resumed.column(key) == whole.column(key)
    assert ("uint8" in whole.log.split("moments in ")[1].splitlines()[0]) == (optim == "adamw_8bit")


@pytest.mark.parametrize("spread", SPREADS)
def test_bf16_compute_keeps_fp32_weights_and_exports_bf16(spread: str, launch: Launcher, tmp_path: Path) -> None:
    """S12, T2, T3."""
    run = launch(tmp_path / "run", spread=spread, bf16=True).ok()
    assert "compute in bfloat16" in run.log
    assert "after step 1: weights in float32, moments in float32" in run.log
    export = load_file(run.run_dir / "export/model.safetensors")
    assert {tensor.dtype for tensor in export.values()} == {torch.bfloat16}
    assert json.loads((run.run_dir / "export/config.json").read_text())["dtype"] == "bfloat16"
    saved = read_shards(run.run_dir / "checkpoint-4/pytorch_model_fsdp_0")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[key].bfloat16(), export[key]) for key in export)


def test_bf16_weights_are_a_choice_with_a_warning(launch: Launcher, tmp_path: Path) -> None:
    run = launch(tmp_path / "run", param_dtype="bfloat16", bf16=True, max_steps=2).ok()
    assert "param_dtype is bfloat16" in run.log, "what it costs is said"
    assert "after step 1: weights in bfloat16, moments in bfloat16" in run.log


@pytest.mark.parametrize("spread", SPREADS)
def test_tied_embeddings_stay_tied(spread: str, launch: Launcher, tied_model: Path, tmp_path: Path) -> None:
    """L7."""
    run = launch(tmp_path / "run", spread=spread, model_name_or_path=tied_model, export_dtype="float32").ok()
    export = load_file(run.run_dir / "export/model.safetensors")
    assert "lm_head.weight" not in export
    model, info = AutoModelForCausalLM.from_pretrained(run.run_dir / "export", output_loading_info=True)
    assert not info["missing_keys"] and model.lm_head.weight is model.model.embed_tokens.weight
    assert run.column("loss")[-1] < run.column("loss")[0]


def test_a_checkpoint_says_where_its_data_are_from_and_the_log_that_rows_are_apart(
    launch: Launcher, chats: Path, tmp_path: Path
) -> None:
    other = write_chats(tmp_path / "other.jsonl", num_rows=10, seed=9)
    keys = {"packing": True, "save_steps": 2, "max_steps": 2, "export": False}
    run = launch(tmp_path / "run", data=[str(chats), str(other)], **keys).ok()
    assert "rows of a batch come out of a small LlamaForCausalLM (sdpa) as they do alone" in run.log
    assert f"{chats}: messages, 39 rows read, 39 kept" in run.log
    first, second = Manifest.read(run.run_dir / "checkpoint-2").details["data"]
    assert (first["source"], first["format"], first["rows"]) == (str(chats), "messages", 39)
    assert (second["source"], second["rows"]) == (str(other), 10) and first["content"] != second["content"]


@pytest.mark.parametrize("packing", [False, True])
def test_evaluation_does_not_depend_on_the_ranks(packing: bool, launch: Launcher, tmp_path: Path) -> None:
    """T12: 7 rows (or 3 blocks) on two ranks finish, and count once each."""
    losses = []
    for processes in (1, 2):
        run = launch(
            tmp_path / str(processes),
            world_size=processes,
            eval_samples=7,
            eval_strategy="steps",
            eval_steps=2,
            per_device_eval_batch_size=2,
            export=False,
            packing=packing,
        ).ok()
        losses.append(run.column("eval_loss"))
        assert run.column("eval_perplexity") == pytest.approx([math.exp(loss) for loss in losses[-1]])
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], abs=2e-6)


@pytest.mark.parametrize("spread", SPREADS)
def test_a_save_and_an_export_right_after_an_evaluation_have_the_masters(
    spread: str, launch: Launcher, tmp_path: Path
) -> None:
    """A forward pass without a backward leaves FSDP2's last unit whole, in the compute dtype."""
    held_out = {"eval_samples": 7, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}
    keys = {**held_out, "spread": spread, "bf16": True, "export_dtype": "float32", "save_steps": 2, "max_steps": 2}
    run = launch(tmp_path / "run", **keys).ok()
    saved = read_shards(run.run_dir / "checkpoint-2/pytorch_model_fsdp_0")
    export = load_file(run.run_dir / "export/model.safetensors")
    assert saved.keys() == export.keys() and all(torch.equal(saved[key], export[key]) for key in saved)
    rounded = [key for key in saved if torch.equal(saved[key], saved[key].bfloat16().float())]
    assert not rounded, "these came from the compute dtype"
