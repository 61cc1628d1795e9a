"""The quickstart's data, tokenizer and model, made from nothing but Python."""

import ast
import json
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe import quickstart
from recipe.data import read_template

SOURCE = '''
class Box:
    def add(self, item, *, twice=False):
        """Put an item into the box, twice
        if that is wished.
        """
        # a comment
        self.items.append(item)

        return len(self.items)

    @property
    async def size(self) -> int:
        """Return the number of items in the box."""
        return len(self.items)

    def short(self):
        """Too short."""
        return len(self.items)

    def empty(self):
        """Say nothing, in a sentence that is long enough to be taken."""

    def one_line(self): """Everything on one line, docstring and body as well."""; return self.items + self.items
'''


def test_function_pairs() -> None:
    add, size = sorted(quickstart.function_pairs(SOURCE.encode()))
    signature = "add(self, item, *, twice=False)"
    body = "    # a comment\n    self.items.append(item)\n    return len(self.items)"
    assert add == (
        f"Write the Python function {signature}.\nPut an item into the box, twice\nif that is wished.",
        f"def {signature}:\n{body}",
    )
    assert size[1] == "async def size(self) -> int:\n    return len(self.items)"


@pytest.mark.parametrize("source", [b"def f(:", b"\x00", b"# -*- coding: utf-8 -*-\nx = '\xff'"])
def test_files_that_do_not_parse_are_passed_over(source: bytes) -> None:
    assert list(quickstart.function_pairs(source)) == []


def test_rows_come_by_path_once_each_and_without_tests(tmp_path: Path) -> None:
    for name in ("b/box.py", "a.py", "test/test_box.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SOURCE.replace("append", "extend") if name == "a.py" else SOURCE)
    rows = list(quickstart.stdlib_rows(tmp_path))
    answers = [row["messages"][1]["content"] for row in rows]
    assert len(answers) == len(set(answers)) == 3  # `size` is in both files
    assert "extend" in "".join(answers[:2]) and "append" in answers[2]
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    quickstart.prepare(folder)
    return folder


def test_the_standard_library_gives_a_real_data_set(prepared: Path) -> None:
    text = (prepared / quickstart.DATA).read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) > 2000
    for row in rows:
        function = ast.parse(row["messages"][1]["content"]).body[0]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None
    again = quickstart.stdlib_rows(Path(sysconfig.get_path("stdlib")))
    assert text == "".join(json.dumps(row) + "\n" for row in again)


def test_preparing_again_changes_nothing(prepared: Path) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}

    before = times()
    quickstart.prepare(prepared)
    assert times() == before


def test_the_tokenizer_keeps_text_and_adds_no_special_token(prepared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / quickstart.MODEL)
    text = "def f(x):\n    return {'é': x ** 2}\n\n\t# 日本"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not set(ids) & {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    assert len(tokenizer) == quickstart.VOCAB_SIZE
    chat = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "def add(): ..."}]
    ids = tokenizer.apply_chat_template(chat, chat_template=read_template(tokenizer, "llama2"))["input_ids"]
    assert (ids.count(tokenizer.bos_token_id), ids.count(tokenizer.eos_token_id)) == (1, 1)
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_the_tokenizer_is_the_same_each_time(prepared: Path) -> None:
    rows = [json.loads(line) for line in (prepared / quickstart.DATA).read_text().splitlines()]
    again = quickstart.train_tokenizer(message["content"] for row in rows for message in row["messages"])
    kept = AutoTokenizer.from_pretrained(prepared / quickstart.MODEL)
    assert again.backend_tokenizer.to_str() == kept.backend_tokenizer.to_str()


def test_the_model_is_the_same_each_time_and_leaves_the_random_state_alone(prepared: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    model = quickstart.small_llama()
    assert torch.equal(torch.rand(1), expected)
    saved, found = AutoModelForCausalLM.from_pretrained(prepared / quickstart.MODEL, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(prepared / quickstart.MODEL)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
