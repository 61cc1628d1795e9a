"""What `recipe data` shows of the prepared rows, in a terminal and on its page."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from recipe.cli import main
from recipe.data import prepare
from recipe.data.page import write_page
from recipe.data.samples import BOLD, DIM, GREEN, RESET, paint, pick
from tests.conftest import ROOT


@pytest.fixture
def prepared(chats, write, data_args, train_args, tokenizer):
    return prepare(data_args(write(chats), eval_samples=5), train_args(packing=True), tokenizer)


def test_a_sample_is_one_row_of_a_block(prepared, tokenizer):
    samples = pick("train", prepared.train, 3, 0, tokenizer)
    assert len(samples) == 3 and samples == pick("train", prepared.train, 3, 0, tokenizer)
    for sample in samples:
        block = prepared.train[sample.block]
        text = "".join(stretch.text for stretch in sample.stretches)
        assert sample.num_tokens in block["seq_lengths"]
        assert text.count("<s>") == text.count("</s>") == len(sample.stretches) / 2
        assert text in tokenizer.decode(block["input_ids"]) or sample.block == 0
        for question, answer in zip(sample.stretches[::2], sample.stretches[1::2], strict=True):
            assert not question.trained and re.fullmatch(r"<s> \[INST\] .* \[/INST\]", question.text)
            assert answer.trained and answer.text.startswith(" ") and answer.text.endswith(" </s>")
    assert len(pick("train", prepared.train, 999, 0, tokenizer)) == len(prepared.train)


def test_colours_and_brackets_say_what_is_trained(prepared, tokenizer):
    (sample,) = pick("train", prepared.train, 1, 0, tokenizer)
    plain = paint(sample, tokenizer, colours=False)
    assert re.fullmatch(r"(<s> \[INST\] [^⟦]* \[/INST\]⟦ [^⟧]* </s>⟧)+", plain)
    painted = paint(sample, tokenizer, colours=True)
    assert painted.startswith(f"{DIM}{BOLD}<s>{RESET}{DIM}")
    assert f"{BOLD}</s>{RESET}{GREEN}" in painted
    without = re.sub("\033" + r"\[\d+m", "", painted)
    assert without == plain.replace("⟦", "").replace("⟧", "")


class Page(HTMLParser):
    """Checks that tags match, and collects the text by tag."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text = [], {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data


def test_page(chat, write, data_args, train_args, tokenizer, tmp_path):
    """One file with tables, histograms and samples, in which the data cannot break out of their place."""
    rows = [chat("<script>alert(1)</script> &amp;", "Four <b>. </b>")] * 6 + [chat("a")]
    prepared = prepare(data_args(write(rows), max_bad_rows=1), train_args(packing=True, max_length=256), tokenizer)
    samples = pick("train", prepared.train, 1, 0, tokenizer)
    write_page(tmp_path / "new" / "page.html", "Data of <x>", prepared.report, ["a note"], samples, ["<s>", "</s>"])
    text = (tmp_path / "new" / "page.html").read_text()
    page = Page(text)
    assert "<script" not in text and not re.search(r"src=|@import|url\((?!#)|<link|href=.http", text), (
        "it needs no other file"
    )
    assert page.text["title"] == "Data of <x>"
    assert "<script>alert(1)</script> &amp;" in page.text["span"]
    assert page.text["mark"].startswith("Marked Four <b>. </b> ")
    assert page.text["b"].endswith("<s></s>") and "no answer to the last turn" not in page.text["td"]
    assert "no answer" in page.text["td"]
    assert text.count("<svg") == 3, "lengths, trained shares, fill"


@pytest.fixture
def config(tiny_model, chats, write, tmp_path):
    """Keys of `recipe data` for the tiny model."""
    return [
        *("--model_name_or_path", str(tiny_model)),
        *("--dataset_name", write(chats)),
        *("--data_cache_dir", str(tmp_path / "cache")),
        *("--max_length", "200"),
        *("--chat_template_path", "llama2"),
        *("--assistant_only_loss", "true"),
        *("--eval_samples", "4"),
    ]


def test_command(config, capsys, tmp_path):
    assert main(["data", "--samples", "2", "--html", str(tmp_path / "page.html"), *config]) == 0
    printed = capsys.readouterr().out
    for line in (
        r"rows\.jsonl +messages +30 +30 +30 ",
        r"rows +26 +4",
        r"trained tokens +[\d,]+ \(\d+\.\d%\)",
        r"-- train, row \d+: \d+ tokens, \d+ trained; what is trained stands in ⟦ ⟧",
        r"-- eval, row \d+: ",
        r"page\.html is written",
    ):
        assert re.search(line, printed), f"{line} is not in\n{printed}"
    assert (tmp_path / "page.html").is_file()
    assert main(["data", "--json", *config]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["train"]["rows"] == 26 and report["warnings"] == []
    assert (
        list((tmp_path / "cache").glob("*/report.json"))[0].parent
        == tmp_path / "cache" / report["folder"].split("/")[-1]
    )


def test_command_replaces_the_configured_sources(config, chats, write, capsys):
    first, second = write(chats[:3], "a.jsonl"), write(chats[3:9], "b.jsonl")
    assert main(["data", *config, "--data", first, f"--data={second}"]) == 0
    assert re.search(r"rows +5 +4", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["--max_length", "100000"], "max_length is 100000 and the model has 256 positions; set at most 256"),
        (["--dataset_name", "nowhere.jsonl"], "dataset_name 'nowhere.jsonl': no such file or folder"),
        (["--model_name_or_path", "/nowhere"], "model_name_or_path '/nowhere' is no folder"),
        (["--truncation", "left"], "truncation: invalid choice: 'left'"),
        (["--html", "/dev/null/page.html"], "--html /dev/null/page.html cannot be written: .* give another file"),
    ],
)
def test_command_says_what_is_wrong(keys, problem, config, capsys):
    assert main(["data", *config, *keys]) == 2
    assert re.search(problem, capsys.readouterr().err)


OFFLINE = """
import socket, sys
def refuse(self, address):
    raise AssertionError(f"asked for {address}")
socket.socket.connect = socket.socket.connect_ex = refuse
from recipe.cli import main
sys.exit(main(["data", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_command_asks_nothing_of_the_network(config, tmp_path):
    """With nothing said about being offline."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment["HF_HOME"] = str(tmp_path / "hf")
    command = [sys.executable, "-c", OFFLINE, *config]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
