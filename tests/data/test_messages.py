from pathlib import Path

import pytest

from recipe.data.messages import BadRow, RowFormat, normalize
from recipe.data.sources import open_sources
from recipe.errors import UserError

CHAT = RowFormat("chat", "text", "</s>", ("<unk>", "<s>", "</s>"))
TEXT = RowFormat("text", "content", "</s>", ())

S, U, A = ({"role": role, "content": "Hello"} for role in ("system", "user", "assistant"))


def with_content(message, content):
    return message | {"content": content}


@pytest.mark.parametrize("messages", [[U, A], [S, U, A], [U, A, U, A], [S, U, A, U, A, U, A]])
def test_good_chats(messages):
    assert CHAT.parse({"messages": messages, "tools": None, "source": "x"}) == {"messages": messages}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "'messages' must be a list of messages, not NoneType"),
        ("Hello", "'messages' must be a list of messages, not str"),
        ([], "has no assistant message, so no answer to learn"),
        ([S], "has no assistant message, so no answer to learn"),
        ([U], "has no assistant message, so no answer to learn"),
        ([U, A, U], "ends with a user message that has no answer"),
        ([U, U, A], "messages 1 and 2 are both from the user; turns must alternate"),
        ([S, U, A, A], "messages 3 and 4 are both from the assistant; turns must alternate"),
        ([A, U, A], "begins with the assistant; a user message must come first"),
        ([S, A], "begins with the assistant; a user message must come first"),
        ([U, S, A], "message 2 is from the system; only the first may be"),
        ([S, S, U, A], "message 2 is from the system; only the first may be"),
        ([U, "Hello"], "message 2 must have role and content, not be str"),
        ([U, {"content": "Hello"}], "message 2 has the unknown role None; roles are system, user, assistant"),
        ([U, {"role": "tool", "content": "x"}], "message 2 has the unknown role 'tool'; roles are system, user, assi"),
        ([U, {"role": ["user"], "content": "x"}], "message 2 has the unknown role ['user']"),
        ([U, {"role": "assistant"}], "message 2: content must be text, not NoneType"),
        ([U, with_content(A, 4)], "message 2: content must be text, not int"),
        ([U, with_content(A, "  \n")], "message 2 (assistant) is empty"),
        ([U, with_content(A, " </s> ")], "message 2 (assistant) is empty"),
        ([with_content(U, ""), A], "message 1 (user) is empty"),
        ([with_content(U, "a </s> b"), A], "message 1 (user) contains the control token </s>; take it out"),
        ([U, with_content(A, "a </s> b")], "message 2 (assistant) contains the control token </s>; take it out"),
        ([U, with_content(A, "a \ud83d")], r"holds '\ud83d', half of a surrogate pair; write the whole character"),
        ([U, A | {"tool_calls": [{"name": "f"}]}], "message 2 has tool_calls, which are not supported"),
        ([U, A | {"loss_weight": 0.5}], "message 2 has loss_weight 0.5; every answer is trained, with 1"),
        ([U, with_content(A, ["Hello"])], "message 2: only parts of the type 'text' are supported, not 'str'"),
        ([with_content(U, [{"type": "image"}]), A], "message 1: only parts of the type 'text' are supported, not 'im"),
        ([with_content(U, [{"type": "text"}]), A], "message 1: a text part must hold text, not NoneType"),
    ],
)
def test_bad_chats(messages, problem):
    with pytest.raises(BadRow) as error:
        CHAT.parse({"messages": messages})
    assert str(error.value).startswith(problem)


def test_tools_are_refused():
    with pytest.raises(BadRow, match="has tools, which are not supported"):
        CHAT.parse({"messages": [U, A], "tools": "[{}]"})


def test_typed_parts_are_joined_and_an_eos_of_the_answer_is_taken_off():
    parts = [{"type": "text", "value": "two", "text": None}, {"type": "text", "text": " plus"}]
    (user, answer) = CHAT.parse({"messages": [with_content(U, parts), with_content(A, "Four.</s></s> \n")]})["messages"]
    assert user["content"] == "two plus"
    assert answer["content"] == "Four."


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"text": "a", "id": 1}, "has no 'content'; its columns are text, id"),
        ({}, "has no 'content'; its columns are (none)"),
        ({"content": None}, "'content' must be text, not NoneType"),
        ({"content": ["a"]}, "'content' must be text, not list"),
        ({"content": " \n"}, "'content' is empty"),
        ({"content": "\ud83d"}, r"holds '\ud83d', half of a surrogate pair"),
    ],
)
def test_bad_texts(fields, problem):
    with pytest.raises(BadRow) as error:
        TEXT.parse(fields)
    assert str(error.value).startswith(problem)


def test_a_text_stays_as_it_is():
    assert TEXT.parse({"content": " <s>a </s>", "id": 1}) == {"text": " <s>a </s>"}


def normalize_rows(rows, row_format, write, data_args, tmp_path: Path):
    return normalize(open_sources(data_args(write(rows)))[0], row_format, tmp_path / "rows.arrow")


def test_normalize_writes_every_row_with_its_number(write, data_args, tmp_path, chat):
    rows = [chat("a", "b"), chat("a", "b", system="c")] * 1500
    dataset = normalize_rows(rows, CHAT, write, data_args, tmp_path)
    assert [row["messages"] for row in dataset] == [row["messages"] for row in rows]
    assert list(dataset["row"]) == list(range(1, 3001))


def test_normalize_lists_the_first_ten_and_the_total(write, data_args, tmp_path, chat):
    rows = [chat("a", "b"), *[chat("a")] * 12, ["no object"], chat("a", "b")]
    with pytest.raises(UserError) as error:
        normalize_rows(rows, CHAT, write, data_args, tmp_path)
    head, *listed = str(error.value).splitlines()
    assert "rows.jsonl: 13 of 15 rows cannot be trained on (mend them, or point dataset_name elsewhere)" in head
    assert head.endswith(", of which the first 10:")
    assert [line.split(" has ")[0].strip() for line in listed] == [f"line {number}" for number in range(2, 12)]


def test_normalize_lists_a_line_that_is_no_json_among_the_rest(tmp_path, data_args):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"content": "a"}\n{"content": \n{"content": ""}\n')
    with pytest.raises(UserError) as error:
        normalize(open_sources(data_args(str(path)))[0], TEXT, tmp_path / "rows.arrow")
    head, first, second = str(error.value).splitlines()
    assert "2 of 3 rows" in head and head.endswith("elsewhere):")
    assert first.strip().startswith("line 2 not valid JSON") and first.endswith("rows.jsonl:2)")
    assert second.strip() == "line 3 'content' is empty"


def test_normalize_refuses_an_empty_set(write, data_args, tmp_path):
    with pytest.raises(UserError, match="the data set is empty"):
        normalize_rows([], TEXT, write, data_args, tmp_path)
