"""A tokenizer of Llama's kind (BPE, Metaspace, <unk> <s> </s>) trained on a few words, and ways to make rows."""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerBase

from recipe.arguments import DataArguments, TrainArguments

WORDS = "the quick brown fox jumps over a lazy dog [INST] [/INST] <<SYS>> <</SYS>> What is two plus two ? Four . Hello"


def make_tokenizer(add_bos_token: bool = True, **kwargs: Any) -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [*string.printable.replace(" ", ""), "▁"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator([WORDS] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    return LlamaTokenizer(
        vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], add_bos_token=add_bos_token, **kwargs
    )


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


@pytest.fixture
def eos_adding_tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer(add_eos_token=True)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write rows, one JSON object a line, to a new file; returns its path."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def data_args(tmp_path: Path) -> Callable[..., DataArguments]:
    return lambda name, **kwargs: DataArguments(dataset_name=name, data_cache_dir=str(tmp_path / "cache"), **kwargs)


@pytest.fixture
def train_args() -> Callable[..., TrainArguments]:
    """Arguments for Llama-2 chat rows with the loss on the answers, if not told otherwise."""
    defaults: dict[str, Any] = {
        "output_dir": "unused",
        "max_length": 128,
        "chat_template_path": "llama2",
        "assistant_only_loss": True,
    }
    return lambda **kwargs: TrainArguments(**defaults | kwargs)


@pytest.fixture
def chat() -> Callable[..., dict[str, Any]]:
    """Make a row of user and assistant messages in turn, with a system message before them if one is given."""

    def chat(*turns: str, system: str | None = None) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages += [{"role": ("user", "assistant")[at % 2], "content": turn} for at, turn in enumerate(turns)]
        return {"messages": messages}

    return chat


@pytest.fixture
def chats(chat: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """30 chats of one to three turns."""
    return [chat(*["two ?", f"Four . {at}", "What ?", "the fox", "a", "b"][: 2 + 2 * (at % 3)]) for at in range(30)]
