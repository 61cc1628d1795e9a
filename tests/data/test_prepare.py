import json
from pathlib import Path

import datasets
import pytest

from recipe.data import check, prepare
from recipe.data.report import NO_LABEL, Report
from recipe.data.template import TEMPLATES
from recipe.errors import UserError


def answers_of(row, tokenizer):
    return [a.strip() for a in tokenizer.decode([i for i in row["labels"] if i != -100]).split("</s>")[:-1]]


def test_chats(chats, write, data_args, train_args, tokenizer):
    prepared = prepare(data_args(write(chats)), train_args(), tokenizer)
    assert prepared.train.column_names == ["input_ids", "labels"] and prepared.eval is None
    for row, chat in zip(prepared.train, chats, strict=True):
        assert answers_of(row, tokenizer) == [m["content"] for m in chat["messages"] if m["role"] == "assistant"]
    report = prepared.report
    assert report.kind == "chat" and report.eval is None and not report.warnings
    assert (report.train.rows_read, report.train.rows_kept, report.train.rows_truncated) == (30, 30, 0)
    assert report.train.tokens == sum(len(ids) for ids in prepared.train["input_ids"])
    assert report.train.trained_tokens == sum(label != -100 for row in prepared.train["labels"] for label in row)
    assert report.train.length_max == max(len(ids) for ids in prepared.train["input_ids"])


def test_template_is_handed_on_where_the_tokenizer_needs_another(chats, write, data_args, train_args, tokenizer):
    template = TEMPLATES["llama2"].read_text()
    assert prepare(data_args(write(chats)), train_args(), tokenizer).template == template
    tokenizer.chat_template = template
    own = prepare(data_args(write(chats)), train_args(chat_template_path=None), tokenizer)
    assert own.template is None
    text = train_args(assistant_only_loss=False)
    assert prepare(data_args(write([{"text": "the fox"}])), text, tokenizer).template is None


def test_texts_in_the_column_asked_for(write, data_args, train_args, tokenizer):
    args = train_args(dataset_text_field="content", assistant_only_loss=False, chat_template_path=None)
    prepared = prepare(data_args(write([{"content": "the fox"}, {"content": "<s>a dog</s>"}])), args, tokenizer)
    assert [tokenizer.decode(ids) for ids in prepared.train["input_ids"]] == ["<s> the fox</s>", "<s> a dog</s>"]
    assert prepared.train["labels"][:] == prepared.train["input_ids"][:]


@pytest.mark.parametrize("eval_packing", [None, False])
def test_packing(eval_packing, chats, write, data_args, train_args, tokenizer):
    args = data_args(write(chats), eval_samples=6)
    flat = prepare(args, train_args(), tokenizer)
    packed = prepare(args, train_args(packing=True, eval_packing=eval_packing), tokenizer)
    assert packed.train.column_names == ["input_ids", "labels", "seq_lengths"]
    assert ("seq_lengths" in packed.eval.column_names) is (eval_packing is None)
    assert all(sum(block["seq_lengths"]) == len(block["input_ids"]) <= 128 for block in packed.train)
    assert sum(len(block) for block in packed.train["seq_lengths"]) == 24
    report = packed.report.train
    assert report.tokens == flat.report.train.tokens == sum(len(ids) for ids in packed.train["input_ids"])
    assert report.num_blocks == len(packed.train) < 24
    assert report.packing_efficiency == report.tokens / (report.num_blocks * 128) > 0.5
    assert packed.report.eval.num_blocks == (len(packed.eval) if eval_packing is None else None)


def test_packed_data_are_the_same_each_time_and_for_any_number_of_processes(
    chats, write, data_args, train_args, tokenizer, tmp_path
):
    path = write(chats)
    made = []
    for number, num_proc in enumerate((None, None, 2)):
        args = data_args(path, eval_samples=3)
        args.data_cache_dir = str(tmp_path / str(number))
        prepared = prepare(args, train_args(packing=True, dataset_num_proc=num_proc), tokenizer)
        made.append((prepared.fingerprint, prepared.train.to_dict(), prepared.eval.to_dict(), prepared.report))
    assert made[0] == made[1] == made[2]


def test_held_out_rows_are_chosen_by_the_seed(chats, write, data_args, train_args, tokenizer):
    path = write(chats)

    def split(seed):
        prepared = prepare(data_args(path, eval_samples=5), train_args(seed=seed), tokenizer)
        rows = prepared.train["input_ids"][:], prepared.eval["input_ids"][:]
        assert [len(part) for part in rows] == [25, 5]
        assert prepared.report.eval.rows_read == 5
        return rows

    everything = prepare(data_args(path), train_args(), tokenizer).train["input_ids"][:]
    train, evaluation = split(seed=0)
    assert sorted(train + evaluation) == sorted(everything)
    assert train == [row for row in everything if row in train], "in the order of the file"
    assert split(seed=1)[1] != evaluation


def test_test_split_of_a_saved_folder(chats, data_args, train_args, tokenizer, tmp_path):
    path = tmp_path / "saved"
    splits = {name: datasets.Dataset.from_list(part) for name, part in (("train", chats[:20]), ("dev", chats[20:]))}
    datasets.DatasetDict(splits).save_to_disk(path)
    prepared = prepare(data_args(str(path), dataset_test_split="dev"), train_args(), tokenizer)
    assert (len(prepared.train), len(prepared.eval)) == (20, 10)


def test_problems_of_both_splits_are_listed(chat, data_args, train_args, tokenizer, tmp_path):
    splits = {name: datasets.Dataset.from_list([chat("a")]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError) as error:
        prepare(data_args(str(tmp_path / "saved"), dataset_test_split="test"), train_args(), tokenizer)
    assert len(error.value.problems) == 2


def test_shuffle_dataset(chats, write, data_args, train_args, tokenizer):
    plain = prepare(data_args(write(chats)), train_args(), tokenizer).train["input_ids"][:]
    shuffled = prepare(data_args(write(chats)), train_args(shuffle_dataset=True), tokenizer).train["input_ids"][:]
    assert shuffled != plain and sorted(shuffled) == sorted(plain)


def test_rows_longer_than_max_length(chat, write, data_args, train_args, tokenizer):
    """Case D10, with a row of 1,100 tokens, and D5: an answer that begins past the end leaves nothing to learn."""
    long_answer, long_question = chat("two ?", "~" * 1085), chat("~" * 1100, "Four .")
    rows = [chat("two ?", "Four .")] * 8 + [long_answer, long_question]
    prepared = prepare(data_args(write(rows)), train_args(max_length=1024), tokenizer)
    assert [len(ids) for ids in prepared.train["input_ids"]][8:] == [1024]
    assert prepared.train["labels"][8][-1] == prepared.train["input_ids"][8][-1] != tokenizer.eos_token_id
    assert all(any(label != -100 for label in labels[1:]) for labels in prepared.train["labels"])
    report = prepared.report.train
    assert (report.rows_kept, report.rows_truncated, report.rows_dropped) == (9, 1, {NO_LABEL: 1})
    assert 1024 < report.length_p99 <= report.length_max and report.length_p50 < 20
    (warning,) = prepared.report.warnings
    assert warning.startswith("train: 2 of 10 rows (20.0%) are longer than max_length 1024 and lose their end; p99 ")
    assert prepared.report.lines()[-1] == f"WARNING {warning}"
    assert "1 dropped (no trained token within max_length), 1 truncated to 1024 tokens" in prepared.report.lines()[0]


def test_rows_are_split_when_asked(chat, write, data_args, train_args, tokenizer):
    rows = [chat("two ?", "~" * 300), chat("two ?", "Four .")]
    args = train_args(packing=True, packing_strategy="bfd_split")
    prepared = prepare(data_args(write(rows)), args, tokenizer)
    report = prepared.report.train
    assert (report.rows_kept, report.rows_truncated, report.num_blocks) == (2, 0, 3)
    assert report.tokens == sum(len(ids) for ids in prepared.train["input_ids"]) > 300


def test_nothing_left(chat, write, data_args, train_args, tokenizer):
    with pytest.raises(
        UserError, match=r"train: no row of 2 has a trained token within max_length 8; raise it \(the sh"
    ):
        prepare(data_args(write([chat("~" * 20, "b")] * 2)), train_args(max_length=8), tokenizer)


def test_report_is_kept_as_json(chats, write, data_args, train_args, tokenizer):
    args = data_args(write(chats), eval_samples=4)
    prepared = prepare(args, train_args(packing=True), tokenizer)
    path = Path(args.data_cache_dir) / prepared.fingerprint / "report.json"
    assert json.loads(path.read_text())["train"]["rows_read"] == 26
    assert Report.load(path) == prepared.report
    assert [line.split(":")[0] for line in prepared.report.lines()] == ["train"] * 3 + ["eval"] * 3
    assert prepared.report.lines()[0] == "train: 26 chat rows read, 26 kept, 0 truncated to 128 tokens"


def test_eos_token_is_taken_over(chat, write, data_args, train_args, tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    path = write([chat("two ?", "Four .")])
    with pytest.raises(UserError, match="line 1 has 1 answers and 0 trained </s>"):
        prepare(data_args(path), train_args(chat_template_path="chatml"), tokenizer)
    with pytest.raises(UserError, match="eos_token '<end>' is not in the tokenizer's vocabulary"):
        prepare(data_args(path), train_args(chat_template_path="chatml", eos_token="<end>"), tokenizer)
    prepared = prepare(data_args(path), train_args(chat_template_path="chatml", eos_token="<|im_end|>"), tokenizer)
    (labels,) = prepared.train["labels"]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode([label for label in labels if label != -100]) == "Four .<|im_end|>"


@pytest.mark.parametrize(
    ("data", "train", "problem"),
    [
        ({"dataset_streaming": True}, {}, "dataset_streaming is not supported"),
        ({"eval_samples": -1}, {}, "eval_samples must be 0 or more, not -1"),
        ({"eval_samples": 2, "dataset_test_split": "test"}, {}, "eval_samples 2 and dataset_test_split 'test' are two"),
        ({}, {"max_length": None}, "max_length is not set; give the tokens of a row"),
        ({}, {"max_length": 1}, "max_length must be 2 tokens or more, not 1"),
        ({}, {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy 'wrapped' does not keep rows apart"),
        ({}, {"truncation_mode": "keep_end"}, "truncation_mode 'keep_end' is not supported; set keep_start"),
        ({}, {"completion_only_loss": True}, "completion_only_loss is for prompt/completion rows; use messages and"),
        ({}, {"dataset_num_proc": 0}, "dataset_num_proc must be 1 or more, not 0"),
    ],
)
def test_keys_that_are_wrong(data, train, problem, data_args, train_args, tokenizer):
    (found,) = check(data_args("nowhere.jsonl", **data), train_args(**train))
    assert found.startswith(problem)
    with pytest.raises(UserError, match=problem[:20]):
        prepare(data_args("nowhere.jsonl", **data), train_args(**train), tokenizer)


def test_every_wrong_key_is_listed(data_args, train_args):
    assert check(data_args("nowhere.jsonl"), train_args()) == []
    problems = check(data_args(None, dataset_streaming=True), train_args(max_length=None))
    assert len(problems) == 3 and problems[0].startswith("dataset_name is not set; give a .jsonl")


def test_what_the_rows_and_the_tokenizer_rule_out(chats, write, data_args, train_args, tokenizer, monkeypatch):
    with pytest.raises(UserError, match="assistant_only_loss needs chat rows, and .* has text in 'text'"):
        prepare(data_args(write([{"text": "the fox"}])), train_args(), tokenizer)
    with pytest.raises(UserError, match="eval_samples 30 leaves nothing of 30 rows to train on; set it lower"):
        prepare(data_args(write(chats), eval_samples=30), train_args(), tokenizer)
    args = data_args(write(chats))
    args.data_cache_dir = args.dataset_name
    with pytest.raises(UserError, match="data_cache_dir '.*rows.jsonl' cannot be made: .* File exists"):
        prepare(args, train_args(), tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="the tokenizer has no eos token"):
        prepare(data_args(write(chats)), train_args(), tokenizer)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(UserError, match="LlamaTokenizer is not a fast tokenizer"):
        prepare(data_args(write(chats)), train_args(), tokenizer)
