"""What the quickstart trains: a small Llama with its own tokenizer, on the functions of Python's standard library.

    recipe quickstart prepare runs/quickstart

Nothing is downloaded: the rows are (docstring → function) pairs read from the library that every Python brings. Another
version of Python gives somewhat other rows.
"""

import ast
import json
import os
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

DATA, MODEL = "data.jsonl", "model"
# Tests, an editor, demonstrations, installed packages; and tkinter, a seventh of all rows with nearly one answer.
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "turtledemo", "lib2to3", "site-packages", "dist-packages", "tkinter"}
# Characters. Shorter ones say nothing, longer ones do not fit in the quickstart's blocks of 256 tokens.
DOCSTRING_LENGTHS = range(30, 300)
BODY_LENGTHS = range(20, 400)
UNK, BOS, EOS = "<unk>", "<s>", "</s>"  # Llama-2's
VOCAB_SIZE = 4096


def prepare(folder: Path) -> None:
    """Write the data and the model to `folder`, where they are not there yet."""
    logging.disable_progress_bar()  # of transformers, at every file it writes
    data, model = folder / DATA, folder / MODEL
    folder.mkdir(parents=True, exist_ok=True)
    if not data.exists():
        write_rows(data, stdlib_rows(Path(sysconfig.get_path("stdlib"))))
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    print(f"recipe: {len(rows):,} rows, docstring → function, from the standard library: {data}")
    if not (model / "config.json").exists():
        write_model(model, rows)
    tokens, parameters = VOCAB_SIZE, sum(p.numel() for p in small_llama().parameters())
    print(f"recipe: a random Llama of {parameters / 1e6:.1f} M parameters, {tokens:,} tokens: {model}", flush=True)


# -- data --------------------------------------------------------------------------------------------------------------


def stdlib_rows(library: Path) -> Iterator[dict]:
    """Chat rows from the Python files under `library`, in the order of their paths; no answer comes twice.

    Yields:
        `{"messages": [user, assistant]}`: the user gives signature and docstring, the assistant the function without
        its docstring.
    """
    seen = set()
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            for question, answer in function_pairs(path.read_bytes()):
                if answer not in seen:
                    seen.add(answer)
                    yield {"messages": [_message("user", question), _message("assistant", answer)]}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def function_pairs(source: bytes) -> Iterator[tuple[str, str]]:
    """The functions of one file that have a docstring and a body of a sensible length, as (question, answer)."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # some library files are broken on purpose
        return
    lines = source.decode("utf-8", "replace").splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or len(docstring) not in DOCSTRING_LENGTHS:
            continue
        first, rest = node.body[0], node.body[1]
        if first.lineno == node.lineno or rest.lineno == first.end_lineno:  # not on lines of its own
            continue
        head = lines[node.lineno - 1 : first.lineno - 1]
        body = lines[first.end_lineno : node.end_lineno]
        answer = textwrap.dedent("\n".join(line for line in head + body if line.strip()))
        if len(answer) in BODY_LENGTHS:
            yield f"Write the Python function {node.name}({ast.unparse(node.args)}).\n{docstring}", answer


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    draft = path.with_name(path.name + ".tmp")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(draft, path)


# -- model -------------------------------------------------------------------------------------------------------------


def write_model(folder: Path, rows: list[dict]) -> None:
    """A tokenizer trained on `rows` and a random model with its vocabulary, as a Hugging Face folder."""
    train_tokenizer(message["content"] for row in rows for message in row["messages"]).save_pretrained(folder)
    small_llama().save_pretrained(folder)  # writes config.json, by which the folder is known to be complete


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Llama-2's special tokens. It adds none by itself: the chat template writes
    them."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[UNK, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=UNK, bos_token=BOS, eos_token=EOS)


def small_llama(seed: int = 0) -> LlamaForCausalLM:
    """Llama-2-70B in small: the same layers and the same 8 queries to a key, random."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.05,  # near 1/sqrt(256); the usual 0.02 suits a width of thousands, and the loss jumps
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
