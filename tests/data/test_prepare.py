"""The whole way from files to blocks, through the one door."""

import json
from pathlib import Path

import datasets
import pytest

from recipe.data import check, load, prepare
from recipe.data.report import Report
from recipe.data.template import TEMPLATES
from recipe.errors import UserError


def answers_of(row, tokenizer):
    return [a.strip() for a in tokenizer.decode([i for i in row["labels"] if i != -100]).split("</s>")[:-1]]


def content(prepared):
    return prepared.train.to_dict(), prepared.eval.to_dict() if prepared.eval else None, prepared.report


def test_chats(chats, write, data_args, train_args, tokenizer):
    path = write(chats)
    prepared = prepare(data_args(path), train_args(), tokenizer)
    assert prepared.train.column_names == ["input_ids", "labels"] and prepared.eval is None
    for row, chat in zip(prepared.train, chats, strict=True):
        assert answers_of(row, tokenizer) == [m["content"] for m in chat["messages"] if m["role"] == "assistant"]
    report = prepared.report
    assert report.eval is None and not report.warnings
    (source,) = report.sources
    assert (source.name, source.format, source.rows_read, source.rows_kept, source.rows_used) == (
        path,
        "messages",
        30,
        30,
        30,
    )
    assert report.train.tokens == sum(len(ids) for ids in prepared.train["input_ids"])
    assert report.train.trained_tokens == sum(label != -100 for row in prepared.train["labels"] for label in row)
    assert report.train.lengths.longest == max(len(ids) for ids in prepared.train["input_ids"])
    assert sum(report.train.lengths.counts) == sum(report.train.trained) == 30
    assert prepared.origin() == [
        {"source": path, "format": "messages", "content": source.identity, "revision": None, "rows": 30}
    ]


def test_template_is_handed_on_where_the_tokenizer_needs_another(chats, write, data_args, train_args, tokenizer):
    chatml = TEMPLATES["chatml"].read_text()
    args = train_args(chat_template_path="chatml", assistant_only_loss=False, max_length=256)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    assert prepare(data_args(write(chats)), args, tokenizer).template == chatml
    tokenizer.chat_template = chatml
    assert (
        prepare(data_args(write(chats)), train_args(chat_template_path=None, max_length=256), tokenizer).template
        is None
    )
    text = train_args(assistant_only_loss=False)
    assert prepare(data_args(write([{"text": "the fox"}])), text, tokenizer).template is None


def test_texts_in_the_column_asked_for(write, data_args, train_args, tokenizer):
    args = train_args(dataset_text_field="content", assistant_only_loss=False, chat_template_path=None)
    prepared = prepare(data_args(write([{"content": "the fox"}, {"content": "<s>a dog</s>"}])), args, tokenizer)
    assert [tokenizer.decode(ids) for ids in prepared.train["input_ids"]] == ["<s> the fox</s>", "<s> a dog</s>"]
    assert prepared.train["labels"][:] == prepared.train["input_ids"][:]


def test_prompts_and_completions(write, data_args, train_args, tokenizer):
    """The completion alone is trained, whatever assistant_only_loss says, unless completion_only_loss is false."""
    rows = [{"prompt": "two ?", "completion": " Four ."}]
    for asked in (True, False):
        (row,) = prepare(data_args(write(rows)), train_args(assistant_only_loss=asked), tokenizer).train
        assert tokenizer.decode([i for i in row["labels"] if i != -100]) == "Four .</s>"
    args = train_args(assistant_only_loss=False, completion_only_loss=False)
    (row,) = prepare(data_args(write(rows)), args, tokenizer).train
    assert row["labels"] == row["input_ids"]


def test_a_mixture_of_formats_has_its_shares(chats, chat, write, data_args, train_args, tokenizer):
    alpaca = [{"instruction": "What ?", "input": str(at), "output": f"dog {at}"} for at in range(50)]
    sharegpt = [
        {"conversations": [{"from": "human", "value": str(at)}, {"from": "gpt", "value": "fox"}]} for at in range(4)
    ]
    sources = [
        {"path": write(chats, "a.jsonl"), "weight": 3},
        {"path": write(alpaca, "b.jsonl"), "weight": 2},
        {"path": write(sharegpt, "c.jsonl"), "weight": 0.5},
    ]
    prepared = prepare(data_args(None, datasets=sources), train_args(), tokenizer)
    assert [source.rows_used for source in prepared.report.sources] == [24, 16, 4], "c.jsonl is the first at its end"
    assert [source.format for source in prepared.report.sources] == ["messages", "Alpaca", "ShareGPT"]
    answers = [answers_of(row, tokenizer)[0].split()[0] for row in prepared.train]
    for half in (answers[:22], answers[22:]):
        assert [half.count("Four"), half.count("dog"), half.count("fox")] == [12, 8, 2], "and so has every stretch"
    other_seed = prepare(data_args(None, datasets=sources), train_args(seed=1), tokenizer)
    assert other_seed.fingerprint != prepared.fingerprint
    assert sorted(other_seed.train["input_ids"]) != sorted(prepared.train["input_ids"])


def test_samples_of_a_source(chats, write, data_args, train_args, tokenizer):
    sources = [
        {"path": write(chats, "a.jsonl"), "samples": 7},
        {"path": write(chats[:2], "b.jsonl"), "samples": 5},
        write(chats[2:5], "c.jsonl"),
    ]
    report = prepare(data_args(None, datasets=sources), train_args(), tokenizer).report
    assert [source.rows_used for source in report.sources] == [7, 5, 3]
    assert report.train.rows == 15


def test_data_on_the_command_line_replaces_the_configured(chats, write, data_args, train_args, tokenizer):
    args = data_args("nowhere.jsonl", data=[write(chats[:4], "a.jsonl"), write(chats[4:6], "b.jsonl")])
    assert prepare(args, train_args(), tokenizer).report.train.rows == 6


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
    assert report.num_blocks == len(packed.train) == sum(report.fill) < 24
    assert report.packing_efficiency == report.tokens / (report.num_blocks * 128) > 0.5
    assert packed.report.eval.num_blocks == (len(packed.eval) if eval_packing is None else None)


def test_prepared_data_are_the_same_each_time_and_for_any_number_of_processes(
    chats, chat, write, data_args, train_args, tokenizer, tmp_path
):
    """Over several chunks of two sources, with bad rows and over-long ones."""
    rows = [chat("two ?", f"Four . {at}" + " fox" * (at % 130)) for at in range(1500)] + [chat("a"), chat("b")]
    sources = [{"path": write(rows, "a.jsonl"), "weight": 1}, {"path": write(chats * 20, "b.jsonl"), "weight": 1}]
    made = []
    for number, num_proc in enumerate((1, 1, 2, 3)):
        args = data_args(None, datasets=sources, eval_samples=30, max_bad_rows=2, max_long_rows=1.0)
        args.data_cache_dir = str(tmp_path / str(number))
        prepared = prepare(args, train_args(packing=True, dataset_num_proc=num_proc), tokenizer)
        made.append((prepared.fingerprint, *content(prepared)))
    assert made[0] == made[1] == made[2] == made[3]
    assert made[0][3].sources[0].dropped and made[0][3].sources[0].bad, "the rows are of every kind"


def test_held_out_rows_are_chosen_by_the_seed(chats, write, data_args, train_args, tokenizer):
    path = write(chats)

    def split(seed):
        prepared = prepare(data_args(path, eval_samples=5), train_args(seed=seed), tokenizer)
        rows = prepared.train["input_ids"][:], prepared.eval["input_ids"][:]
        assert [len(part) for part in rows] == [25, 5]
        assert (prepared.report.train.rows, prepared.report.eval.rows) == (25, 5)
        return rows

    everything = prepare(data_args(path), train_args(), tokenizer).train["input_ids"][:]
    train, evaluation = split(seed=0)
    assert sorted(train + evaluation) == sorted(everything)
    assert train == [row for row in everything if row in train], "in the order of the file"
    assert split(seed=1)[1] != evaluation


def test_evaluation_sources(chats, write, data_args, train_args, tokenizer, tmp_path):
    path = tmp_path / "saved"
    splits = {name: datasets.Dataset.from_list(part) for name, part in (("train", chats[:20]), ("dev", chats[20:]))}
    datasets.DatasetDict(splits).save_to_disk(path)
    prepared = prepare(data_args(str(path), dataset_test_split="dev"), train_args(), tokenizer)
    assert (len(prepared.train), len(prepared.eval), prepared.report.leaked) == (20, 10, 0)
    args = data_args(str(path), eval_datasets=[{"path": str(path), "split": "dev"}, write(chats[:3])])
    prepared = prepare(args, train_args(), tokenizer)
    assert (len(prepared.train), len(prepared.eval), prepared.report.leaked) == (20, 13, 3)
    assert prepared.report.warnings == ["3 of the rows that are evaluated on are trained on too"]


def test_a_source_of_which_nothing_is_left(chats, chat, write, data_args, train_args, tokenizer):
    good, bad = write(chats, "good.jsonl"), write([chat("a")], "bad.jsonl")
    with pytest.raises(UserError, match=r"datasets\[1\] '.*bad.jsonl': no row is left to train on"):
        prepare(data_args(None, datasets=[good, bad], max_bad_rows=1), train_args(), tokenizer)
    with pytest.raises(UserError, match=r"eval_datasets\[0\] '.*bad.jsonl': no row is left to evaluate on"):
        prepare(data_args(good, eval_datasets=[bad], max_bad_rows=1), train_args(), tokenizer)


def test_duplicates_are_counted(chats, write, data_args, train_args, tokenizer):
    report = prepare(data_args(write([*chats, chats[0], chats[0], chats[7]])), train_args(), tokenizer).report
    assert (report.train.rows, report.train.duplicates) == (33, 3)


def test_shuffle_dataset(chats, write, data_args, train_args, tokenizer):
    plain = prepare(data_args(write(chats)), train_args(), tokenizer).train["input_ids"][:]
    shuffled = prepare(data_args(write(chats)), train_args(shuffle_dataset=True), tokenizer).train["input_ids"][:]
    assert shuffled != plain and sorted(shuffled) == sorted(plain)


# -- bad rows ------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(chats, chat, tmp_path):
    """A file with a bad row of every kind, and the line of each."""
    lines = [json.dumps(row) for row in chats]
    bad = {
        2: '{"messages": [',
        4: "[1, 2]",
        6: json.dumps({"messages": "hello"}),
        8: json.dumps({"text": "the fox"}),
        10: json.dumps({"messages": [{"role": "narrator", "content": "a"}]}),
        12: json.dumps(chat("two ?", "half \ud83d of it")),
        14: json.dumps(chat("two ?", "a\0b")),
        16: json.dumps(chat("two ?", "~" * 10_000_000)),
        18: json.dumps(chat("two ?", 7)),
        20: json.dumps(chat("two ?", "stop </s> here")),
    }
    for line, text in bad.items():
        lines.insert(line - 1, text)
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join(lines))
    return path, list(bad)


def test_bad_rows_stop_the_run_and_are_listed_by_line(broken, data_args, train_args, tokenizer):
    path, lines = broken
    with pytest.raises(UserError) as error:
        prepare(data_args(str(path)), train_args(), tokenizer)
    (problem,) = error.value.problems
    assert problem.startswith("10 of 40 rows are bad, and max_bad_rows is 0; mend them, or set max_bad_rows to leave")
    listed = problem.splitlines()[1:]
    assert sorted(int(line.split(":")[1]) for line in listed) == lines
    for text in (
        "2: not valid JSON: Expecting value",
        "4: not a JSON object",
        "6: not a list of messages",
        "8: missing column: 'messages'; its columns are text",
        "10: unknown role",
        "12: half of a surrogate pair",
        "14: NUL character",
        "16: larger than 4 MiB",
        "18: not text",
        "20: control token in a message: message 2 (assistant) holds </s>",
    ):
        assert f"{path}:{text}" in problem


def test_bad_rows_up_to_a_number_are_left_out_and_reported(broken, chats, data_args, train_args, tokenizer):
    path, lines = broken
    with pytest.raises(UserError, match="10 of 40 rows are bad, and max_bad_rows is 9"):
        prepare(data_args(str(path), max_bad_rows=9), train_args(), tokenizer)
    prepared = prepare(data_args(str(path), max_bad_rows=10), train_args(), tokenizer)
    assert [answers_of(row, tokenizer) for row in prepared.train] == [
        [m["content"] for m in chat["messages"] if m["role"] == "assistant"] for chat in chats
    ]
    (source,) = prepared.report.sources
    assert (source.rows_read, source.rows_kept, prepared.report.num_bad) == (40, 30, 10)
    assert sorted(reason.first for reason in source.bad) == sorted(f"{path}:{line}" for line in lines)
    assert f"1 left out: NUL character (first: {path}:14)" in prepared.lines()[0]
    with pytest.raises(UserError, match="the prepared data leave out 10 bad rows .first: .*, and max_bad_rows is 3"):
        prepare(data_args(str(path), max_bad_rows=3), train_args(), tokenizer)


def test_a_row_that_is_nested_too_deeply_is_one_bad_row(chat, write, data_args, train_args, tokenizer, tmp_path):
    """Python reads a few hundred brackets more than it writes."""
    path = tmp_path / "deep.jsonl"
    deep = "[" * 960 + "1" + "]" * 960
    row = chat("a", "b")
    row["messages"][1] = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": "DEEP"}}]}
    path.write_text(json.dumps(row).replace('"DEEP"', deep) + "\n" + json.dumps(chat("a", "b")))
    with pytest.raises(UserError, match="1 of 2 rows are bad(.|\n)*deep.jsonl:1: "):
        prepare(data_args(str(path)), train_args(), tokenizer)


def test_a_set_that_is_bad_throughout_is_not_read_to_its_end(chat, write, data_args, train_args, tokenizer):
    path = write([chat("a")] * 5000)
    with pytest.raises(UserError, match=r"1,\d00 of 1,\d00 rows are bad.*\(1,\d00 x no answer\)"):
        prepare(data_args(path), train_args(), tokenizer)


def test_bad_rows_of_all_sources_are_listed(chat, data_args, train_args, tokenizer, tmp_path):
    splits = {name: datasets.Dataset.from_list([chat("a")]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="2 of 2 rows are bad") as error:
        prepare(data_args(str(tmp_path / "saved"), dataset_test_split="test"), train_args(), tokenizer)
    assert str(error.value).count("saved row 1: no answer") == 2


@pytest.mark.parametrize(
    ("policy", "row", "rows_kept"),
    [
        ({"leading_assistant": "drop"}, [("assistant", "Hello"), ("user", "a"), ("assistant", "b")], 1),
        ({"leading_assistant": "trim"}, [("assistant", "Hello"), ("user", "a"), ("assistant", "b")], 2),
        ({"repeated_roles": "merge"}, [("user", "Hello"), ("user", "a"), ("assistant", "b")], 2),
        ({"repeated_roles": "drop"}, [("user", "Hello"), ("user", "a"), ("assistant", "b")], 1),
        ({"tool_turns": "drop"}, [("user", "a"), ("assistant", "b"), ("tool", "c"), ("assistant", "d")], 1),
        ({"empty_content": "drop"}, [("user", ""), ("assistant", "b")], 1),
    ],
)
def test_policies_for_turns(policy, row, rows_kept, chat, write, data_args, train_args, tokenizer):
    """Case D8: without a policy it is a bad row, with one it is as the policy says, and counted."""
    path = write([chat("two ?", "Four ."), {"messages": [{"role": role, "content": text} for role, text in row]}])
    with pytest.raises(UserError, match=f"1 of 2 rows are bad.*\n.*{path}:2: .*{next(iter(policy))}"):
        prepare(data_args(path), train_args(), tokenizer)
    (source,) = prepare(data_args(path, **policy), train_args(), tokenizer).report.sources
    assert source.rows_kept == rows_kept
    assert [reason.first for reason in source.dropped] == ([f"{path}:2"] if rows_kept == 1 else [])


# -- length --------------------------------------------------------------------------------------------------------


def test_rows_longer_than_max_length(chat, write, data_args, train_args, tokenizer):
    """Case D10, with a row of 1,100 tokens, and D5: an answer that begins past the end leaves nothing to learn."""
    path = write([chat("two ?", "Four .")] * 8 + [chat("two ?", "~" * 1085), chat("~" * 1100, "Four .")])
    with pytest.raises(
        UserError, match=r"2 of 10 rows .20.0%. are longer than max_length 1024.*\(max_long_rows\); raise"
    ):
        prepare(data_args(path), train_args(max_length=1024), tokenizer)
    dropped = prepare(data_args(path, max_long_rows=0.2), train_args(max_length=1024), tokenizer)
    (source,) = dropped.report.sources
    assert len(dropped.train) == source.rows_kept == 8 and not dropped.report.warnings
    assert [(reason.reason, reason.count, reason.first) for reason in source.dropped] == [
        ("longer than max_length", 2, f"{path}:9")
    ]
    assert 1024 < source.lengths.p99 <= source.lengths.longest and source.lengths.p50 < 20

    cut = prepare(data_args(path, truncation="right"), train_args(max_length=1024), tokenizer)
    assert [len(ids) for ids in cut.train["input_ids"]][8:] == [1024]
    assert cut.train["labels"][8][-1] == cut.train["input_ids"][8][-1] != tokenizer.eos_token_id
    assert all(any(label != -100 for label in labels[1:]) for labels in cut.train["labels"])
    assert (cut.report.train.rows, cut.report.train.rows_truncated) == (9, 1)
    assert [(reason.reason, reason.first) for reason in cut.report.sources[0].dropped] == [
        ("no trained token within max_length", f"{path}:10")
    ]
    (warning,) = cut.report.warnings
    assert warning.startswith("train: 1 of 9 rows (11.1%) are longer than max_length 1024 and lose their end; p99 ")
    assert cut.lines()[-1] == f"WARNING {warning}"


def test_rows_are_split_when_asked(chat, write, data_args, train_args, tokenizer):
    rows = [chat("two ?", "~" * 300), chat("two ?", "Four .")]
    prepared = prepare(data_args(write(rows), truncation="split"), train_args(packing=True), tokenizer)
    report = prepared.report.train
    assert (report.rows, report.rows_truncated, report.num_blocks) == (2, 1, 3)
    assert report.tokens == sum(len(ids) for ids in prepared.train["input_ids"]) > 300
    flat = prepare(data_args(write(rows), truncation="split"), train_args(), tokenizer)
    trained = [label for row in flat.train for label in row["labels"][1:] if label != -100]
    assert tokenizer.decode(trained).count("~") == 300, "each is trained once, and in order"
    assert trained.count(tokenizer.eos_token_id) == 2, "the end of the long answer too"


def test_nothing_left(chat, write, data_args, train_args, tokenizer):
    path = write([chat("~" * 20, "b")] * 2)
    with pytest.raises(UserError, match=r"no row of 2 has a trained token within max_length 8; raise it \(p50 of the"):
        prepare(data_args(path, truncation="right"), train_args(max_length=8), tokenizer)
    with pytest.raises(UserError, match=r"no row of 2 has a trained token within max_length 8"):
        prepare(data_args(path, max_long_rows=1.0), train_args(max_length=8), tokenizer)


def test_the_end_token_has_to_be_the_templates(chat, write, data_args, train_args, tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    path = write([chat("two ?", "Four .")])
    with pytest.raises(UserError, match="1 answers and 0 trained </s>"):
        prepare(data_args(path), train_args(chat_template_path="chatml"), tokenizer)
    tokenizer.eos_token = "<|im_end|>"
    args = train_args(chat_template_path="chatml")
    prepared = prepare(data_args(path), args, tokenizer)
    (labels,) = prepared.train["labels"]
    assert tokenizer.decode([label for label in labels if label != -100]) == "Four .<|im_end|>"
    mapped = load(data_args(path), prepared.fingerprint)
    assert mapped.train.to_dict() == prepared.train.to_dict() and mapped.template == prepared.template
    assert load(data_args(path), "0" * 16) is None


def test_the_same_content_by_another_name_is_reported_by_that_name(
    chats, chat, write, data_args, train_args, tokenizer
):
    first, second = (write([*chats, chat("a")], name) for name in ("a.jsonl", "b.jsonl"))
    for path in (first, second):
        prepared = prepare(data_args(path, max_bad_rows=1), train_args(), tokenizer)
        assert prepared.origin()[0]["source"] == path
        assert prepared.report.sources[0].bad[0].first == f"{path}:31"


def test_report_is_kept_as_json(chats, write, data_args, train_args, tokenizer):
    args = data_args(write(chats), eval_samples=4)
    prepared = prepare(args, train_args(packing=True), tokenizer)
    path = Path(args.data_cache_dir) / prepared.fingerprint / "report.json"
    assert json.loads(path.read_text())["train"]["rows"] == 26
    assert Report.load(path) == prepared.report
    lines = prepared.lines()
    assert lines[0] == f"{args.dataset_name}: messages, 30 rows read, 30 kept"
    assert [line.split(":")[0] for line in lines[1:]] == ["train"] * 2 + ["eval"] * 2


# -- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "train", "problem"),
    [
        ({"dataset_streaming": True}, {}, "dataset_streaming is not supported"),
        ({"eval_samples": -1}, {}, "eval_samples must be 0 or more, not -1"),
        ({"max_bad_rows": -1}, {}, "max_bad_rows must be 0 or more, not -1"),
        ({"max_long_rows": 5}, {}, "max_long_rows is a share of the rows, from 0 to 1, not 5"),
        ({}, {"max_length": None}, "max_length is not set; give the tokens of a row"),
        ({}, {"max_length": 1}, "max_length must be 2 tokens or more, not 1"),
        ({}, {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy 'wrapped' is not supported: blocks"),
        ({}, {"packing": True, "packing_strategy": "bfd_split"}, "packing_strategy 'bfd_split' is not supported"),
        ({}, {"eval_packing": True}, "eval_packing is true and packing is not; set packing: true"),
        ({}, {"truncation_mode": "keep_end"}, "truncation_mode 'keep_end' is not supported; see truncation"),
        ({}, {"padding_free": True}, "padding_free is true and packing is not; set packing: true"),
        ({}, {"seed": -1}, "seed must be 0 or more, not -1"),
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
    assert len(problems) == 3 and problems[0].startswith("dataset_name is not set; give a file (.jsonl")


def test_what_the_rows_and_the_tokenizer_rule_out(chats, write, data_args, train_args, tokenizer, monkeypatch):
    with pytest.raises(UserError, match="assistant_only_loss needs chats, and .* has text in 'text'"):
        prepare(data_args(write([{"text": "the fox"}])), train_args(), tokenizer)
    with pytest.raises(UserError, match="eval_samples 30 leaves nothing of 30 rows to train on; set it lower"):
        prepare(data_args(write(chats), eval_samples=30), train_args(), tokenizer)
    with pytest.raises(UserError, match="rows need messages, conversations, .*:1 has a, b; set dataset_text_field"):
        prepare(data_args(write([{"a": 1, "b": 2}])), train_args(), tokenizer)
    with pytest.raises(UserError, match="dataset_name '.*': the data set is empty"):
        prepare(data_args(write([])), train_args(), tokenizer)
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
