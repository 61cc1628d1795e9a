"""Tiny models and data built in code, and the real entry started on real gloo ranks."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.warm import Warm

ROOT = Path(__file__).parent.parent
WORDS = "the quick brown fox jumps over a lazy dog while cats sleep".split()


def pytest_configure(config: pytest.Config) -> None:
    # One thread a process: the tests start several, and results must not depend on how a sum is split.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that dies of a signal says where


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of 300 tokens with Llama's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained(
        folder
    )


def write_model(folder: Path, **changes: Any) -> Path:
    """A random Llama of 300 words, width 32 and 2 layers, with its tokenizer; `changes` to its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    torch.manual_seed(0)
    values = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    LlamaForCausalLM(LlamaConfig(**{**values, **changes})).save_pretrained(folder)
    return folder


def write_chats(path: Path, num_rows: int = 39, seed: int = 0) -> Path:
    """Chat rows of uneven length."""
    draw = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(2, most)))

    rows = [
        {"messages": [{"role": "user", "content": words(8)}, {"role": "assistant", "content": words(12)}]}
        for _ in range(num_rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A gloo process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tied", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


@dataclass
class Finished:
    """A run of the entry that has ended."""

    run_dir: Path
    code: int
    log: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of training and evaluation."""
        return [line for line in self._lines() if "save_step" not in line]

    @property
    def saves(self) -> list[dict[str, Any]]:
        return [line for line in self._lines() if "save_step" in line]

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def column(self, key: str) -> list[Any]:
        return [line[key] for line in self.metrics if key in line]

    def ok(self) -> "Finished":
        assert self.code == 0, self.log[-6000:]
        return self


class Launcher:
    """Starts the entry with small defaults: through `accelerate launch` or `recipe.launch`, as a user does, or on ranks
    that are warm (tests/warm.py)."""

    def __init__(self, model: Path, data: Path, cache: Path):
        self.defaults = {
            "model_name_or_path": model,
            "dataset_name": data,
            "data_cache_dir": cache,
            "global_batch_size": 8,
            "max_length": 64,
            "max_steps": 4,
            "chat_template_path": "llama2",
            "assistant_only_loss": True,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "bf16": False,
            "save_steps": 100,
            "report_to": "none",
        }

    def command(self, run_dir: Path, keys: dict[str, Any]) -> list[str]:
        """The entry's arguments."""
        values = {**self.defaults, "output_dir": run_dir, **keys}
        asked = {
            key: value if isinstance(value, list) else [value] for key, value in values.items() if value is not None
        }
        return [part for key, parts in asked.items() for part in (f"--{key}", *map(str, parts))]

    def start(
        self,
        run_dir: Path,
        *,
        spread: str = "fsdp1_cpu_2rank",
        launch: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        disturb: str | None = None,
        **keys: Any,
    ) -> subprocess.Popen[str]:
        """Through a launcher. `disturb`: see tests/disturbed.py; it goes through `recipe.launch`."""
        command = [str(Path(sys.executable).with_name("accelerate")), "launch"]
        module = "recipe.train"
        if disturb is not None:
            command, module = [sys.executable, "-m", "recipe.launch"], "tests.disturbed"
            env = {**(env or {}), "DISTURB": disturb}
        command += ["--main_process_port", "0", "--config_file", str(_spread(spread)), *launch, "-m", module]
        return subprocess.Popen(
            command + self.command(run_dir, keys),
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def warm(
        self, run_dir: Path, *, spread: str = "fsdp1_cpu_2rank", world_size: int = 2, log: Path, **keys: Any
    ) -> "Warm":
        from tests.warm import Warm

        return Warm(_spread(spread), world_size, self.command(run_dir, keys), log)

    def __call__(
        self,
        run_dir: Path,
        *,
        world_size: int = 2,
        cold: bool = False,
        timeout: float = 240,
        **options: Any,
    ) -> Finished:
        """On warm ranks, where nothing is asked for that takes a launcher (or a GPU, whose driver outlives no fork)."""
        import torch

        if cold or options.keys() & {"launch", "env", "disturb"} or torch.cuda.is_available():
            options["launch"] = ("--num_processes", str(world_size), *options.get("launch", ()))
            with self.start(run_dir, **options) as process:
                try:
                    log, _ = process.communicate(timeout=timeout)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise
            return Finished(run_dir, process.returncode, log)
        with tempfile.TemporaryDirectory() as scratch:
            log_file = Path(scratch) / "log"
            code = self.warm(run_dir, world_size=world_size, log=log_file, **options).wait(timeout)
            return Finished(run_dir, code, log_file.read_text())


def _spread(name: str) -> Path:
    return ROOT / f"configs/accelerate/{name}.yaml"


@pytest.fixture(scope="session")
def launch(tiny_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tiny_model, chats, tmp_path_factory.mktemp("cache"))
