"""Tokenizers of the kinds that models have, trained on a few words, and ways to make rows."""

import json
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from recipe.arguments import DataArguments, TrainArguments
from recipe.data.tokenization import IGNORE

WORDS = "the quick brown fox jumps over a lazy dog [INST] [/INST] <<SYS>> <</SYS>> What is two plus two ? Four . Hello"
SPECIAL = ["<unk>", "<s>", "</s>"]
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
LLAMAS = ("first", "always", "shipped")
# Qwen's, without its rule for contractions.
QWEN_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def make_tokenizer(add_bos_token: bool = True, **kwargs: Any) -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [*string.printable.replace(" ", ""), "▁"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator([WORDS] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    return LlamaTokenizer(
        vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], add_bos_token=add_bos_token, **kwargs
    )


@cache
def sentencepiece() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges as Llama's: a token for every byte, and "▁" (a space) only where a token begins."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    alphabet = [*string.printable.strip(), "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL + of_bytes, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([WORDS] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def llama_tokenizer(kind: str, chatml: bool = False) -> PreTrainedTokenizerBase:
    """As Llama-2's, with another rule for the space that SentencePiece sets before a text.

    Args:
        kind: 'first', transformers' own: at the start of a text alone. 'always', with `legacy=True`: after each special
            token too. 'shipped', in Llama-2's tokenizer.json: the same, by a normalizer. 'never': none.
        chatml: with ChatML's tokens, of which <|im_end|> is eos.
    """
    vocab, merges = sentencepiece()
    if kind == "shipped":
        bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(bpe)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    else:
        legacy, prefix = kind == "always", kind != "never"
        made = LlamaTokenizer(vocab, merges, legacy=legacy, add_prefix_space=prefix, add_bos_token=True)
    if chatml:
        made.add_special_tokens({"additional_special_tokens": [IM_START, IM_END]})
        made.eos_token = IM_END
    return made


@cache
def byte_level_json() -> str:
    """A byte-level BPE that splits texts as Qwen's, with tokens of several line breaks and of several spaces."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([WORDS, "a\n\n\n\nb\n\nc    d  e"] * 5, trainer)
    return backend.to_str()


def byte_level_tokenizer(add_prefix_space: bool = False, **kwargs: Any) -> PreTrainedTokenizerBase:
    """With ChatML's tokens, and <|im_end|> as eos."""
    backend = Tokenizer.from_str(byte_level_json())
    if add_prefix_space:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    special = [*SPECIAL, IM_START, IM_END]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=IM_END, **kwargs)


def pieces(row: Any, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """The texts of a row's unbroken runs of trained and untrained tokens, with the spaces they begin with.

    A decoder of Llama's kind takes off the first space of what it decodes, so a special token goes before it.
    """
    runs: list[tuple[list[int], bool]] = []
    for token, label in zip(row.ids.tolist(), row.labels.tolist(), strict=True):
        assert label in (IGNORE, token)
        if not runs or runs[-1][1] != (label != IGNORE):
            runs.append(([], label != IGNORE))
        runs[-1][0].append(token)
    eos = tokenizer.eos_token
    return [(tokenizer.decode([tokenizer.eos_token_id, *run]).removeprefix(eos), trained) for run, trained in runs]


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
