import pytest

from recipe.data.formats import (
    ALPACA,
    MESSAGES,
    PROMPT_COMPLETION,
    PROMPT_COMPLETION_CHAT,
    SHAREGPT,
    TEXT,
    Reading,
    Text,
    recognise,
)
from recipe.data.messages import Chat, Turns
from recipe.data.rows import MAX_ROW_BYTES, BadRow

S, U, A = ({"role": role, "content": f"{role} text"} for role in ("system", "user", "assistant"))
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def parse(fields, text_field="text", completion_only=True, **policies):
    """By the format that the columns say."""
    found = recognise(fields, text_field, False)
    example = found.parse(fields, Reading(text_field, Turns(**policies), completion_only))
    assert isinstance(example, Chat if found.chat else Text)
    return example


def messages(*turns):
    return [{"role": role, "content": content} for role, content in turns]


QUESTION, ANSWER = {"from": "human", "value": "user text"}, {"from": "gpt", "value": "assistant text"}
ALPACA_ROW = {"instruction": "add", "output": "3"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"messages": [S, U, A], "source": "x"}, [S, U, A], id="messages"),
        pytest.param(
            {"messages": [U | {"content": [{"type": "text", "text": "user"}, {"type": "text", "text": " text"}]}, A]},
            [U, A],
            id="parts",
        ),
        pytest.param(
            {"messages": [U | {"content": [{"type": "text", "value": "user text", "text": None}]}, A]},
            [U, A],
            id="parts with value",
        ),
        pytest.param(
            {"messages": [U | {"weight": None, "name": None}, A | {"tool_calls": None, "tool_call_id": None}]},
            [U, A],
            id="columns that other rows fill",
        ),
        pytest.param({"conversations": [QUESTION, ANSWER]}, [U, A], id="ShareGPT"),
        pytest.param({"conversations": [QUESTION, ANSWER], "system": "system text"}, [S, U, A], id="ShareGPT, system"),
        pytest.param(
            {"conversations": [{"from": "system", "value": "system text"}, QUESTION, ANSWER], "system": ""},
            [S, U, A],
            id="ShareGPT, system turn",
        ),
        pytest.param({"conversations": [U, A]}, [U, A], id="messages under ShareGPT's name"),
        pytest.param(
            {
                "conversations": [
                    QUESTION,
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "3"},
                    ANSWER,
                ]
            },
            [U, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, A],
            id="ShareGPT, function call",
        ),
        pytest.param(ALPACA_ROW, messages(("user", "add"), ("assistant", "3")), id="Alpaca"),
        pytest.param(
            ALPACA_ROW | {"input": "1 and 2", "system": "system text", "history": [["a", "b"], ["c", "d"]]},
            [
                S,
                *messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
                *messages(("user", "add\n1 and 2"), ("assistant", "3")),
            ],
            id="Alpaca, all columns",
        ),
        pytest.param(
            ALPACA_ROW | {"input": "", "system": None, "history": []},
            messages(("user", "add"), ("assistant", "3")),
            id="Alpaca, empty columns",
        ),
        pytest.param(
            {"instruction": "", "input": "1 and 2", "output": "3"},
            messages(("user", "1 and 2"), ("assistant", "3")),
            id="Alpaca, input alone",
        ),
        pytest.param({"prompt": [S, U], "completion": [A]}, [S, U, A], id="prompt and completion"),
    ],
)
def test_chats(fields, expected):
    chat = parse(fields)
    assert chat.messages == expected
    assert chat.tools is None
    assert chat.trained == [True] * sum(message["role"] == "assistant" for message in expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": " <s>a </s>", "id": 1}, Text("", " <s>a </s>")),
        ({"prompt": "1 + 2 =", "completion": " 3"}, Text("1 + 2 =", " 3")),
        ({"prompt": "", "completion": " 3"}, Text("", " 3")),
    ],
)
def test_texts_stay_as_they_are(fields, expected):
    assert parse(fields) == expected


def test_text_in_a_column_of_another_name():
    assert parse({"content": "a"}, text_field="content") == Text("", "a")


def test_what_is_trained_of_prompt_and_completion():
    texts, chats = {"prompt": "a", "completion": "b"}, {"prompt": [U, A, U], "completion": [A]}
    assert parse(chats).trained == [False, True] and parse(chats).answers_only
    assert parse(texts, completion_only=False) == Text("", "ab")
    whole = parse(chats, completion_only=False)
    assert whole.trained == [True, True] and not whole.answers_only
    assert not parse({"messages": [U, A]}).answers_only


@pytest.mark.parametrize("tools", [[TOOL], [FUNCTION], '[{"name": "add", "parameters": {"type": "object"}}]'])
@pytest.mark.parametrize(
    "row", [{"messages": [U, A]}, {"conversations": [QUESTION, ANSWER]}, {"prompt": [U], "completion": [A]}]
)
def test_tools_are_functions_in_their_envelope(row, tools):
    assert parse(row | {"tools": tools}).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, "", " ", [], "[]"])
def test_no_tools(tools):
    assert parse({"conversations": [QUESTION, ANSWER], "tools": tools}).tools is None


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        CALL["function"],
        {"function": {"name": "add", "arguments": '{"a": 1}'}},
        [{"name": "add", "arguments": '{"a": 1}'}],
        '[{"name": "add", "arguments": {"a": 1}}]',
    ],
)
def test_tool_calls_have_arguments_as_a_mapping(call):
    calls = call if isinstance(call, list | str) else [call]
    chat = parse({"messages": [U, {"role": "assistant", "content": None, "tool_calls": calls}]})
    assert chat.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize("arguments", [None, "", " "])
def test_a_call_without_arguments_keeps_its_id_and_the_answers_text(arguments):
    call = {"id": "c1", "function": {"name": "now", "arguments": arguments}}
    tool = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "now"}
    chat = parse({"messages": [U, A | {"tool_calls": [call], "reasoning_content": "hm"}, tool, A]})
    assert chat.messages[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}}
    ]
    assert (chat.messages[1]["content"], chat.messages[1]["reasoning_content"]) == (A["content"], "hm")
    assert chat.messages[2] == tool


@pytest.mark.parametrize(
    ("columns", "asked", "expected"),
    [
        ({"messages", "conversations", "prompt", "completion", "instruction", "output", "text"}, False, MESSAGES),
        ({"conversations", "prompt", "completion", "instruction", "output", "text"}, False, SHAREGPT),
        ({"prompt", "completion", "instruction", "output", "text"}, False, PROMPT_COMPLETION),
        ({"instruction", "output", "prompt", "text"}, False, ALPACA),
        ({"instruction", "text"}, False, TEXT),
        ({"messages", "text"}, True, TEXT),
        ({"messages"}, True, MESSAGES),
        ({"prompt", "instruction"}, False, None),
        (set(), True, None),
    ],
)
def test_recognise_by_columns(columns, asked, expected):
    assert recognise(dict.fromkeys(columns, "a"), "text", asked) is expected


@pytest.mark.parametrize(("prompt", "expected"), [("a", PROMPT_COMPLETION), ([U], PROMPT_COMPLETION_CHAT)])
def test_recognise_prompt_and_completion_by_the_prompt(prompt, expected):
    assert recognise({"prompt": prompt, "completion": None}, "text", False) is expected


LONG = "a" * (MAX_ROW_BYTES + 1)


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        ({"messages": None}, "not a list of messages", "'messages' is NoneType"),
        ({"messages": "a"}, "not a list of messages", "'messages' is str"),
        ({"messages": [U, "a"]}, "not a message", "message 2 is str"),
        ({"messages": [U, A], "tools": "[{"}, "tools are not valid JSON", "line 1 column 3"),
        ({"messages": [U, A], "tools": "[" * 100_000}, "tools are not valid JSON", "recursion"),
        ({"messages": [U, A], "tools": "3"}, "tools are not a list of functions", "int"),
        ({"messages": [U, A], "tools": ["add"]}, "tools are not a list of functions", "list"),
        ({"messages": [U, A], "tools": [{"function": "add"}]}, "tools are not a list of functions", "no name"),
        ({"messages": [U, A], "tools": [{"type": "search"}]}, "tools are not a list of functions", "no name"),
        ({"messages": [U, A], "tools": [{"name": "\ud83d"}]}, "half of a surrogate pair", "tools holds '\\ud83d'"),
        ({"conversations": [QUESTION, ANSWER], "system": 3}, "not text", "'system': content is int"),
        ({"conversations": {"from": "human"}}, "not a list of messages", "'conversations' is dict"),
        (ALPACA_ROW | {"history": "a"}, "not Alpaca", "'history' must be a list of pairs"),
        (ALPACA_ROW | {"history": [["a"]]}, "not Alpaca", "'history' must be a list of pairs"),
        (ALPACA_ROW | {"history": [["a", "b"], ["c", 4]]}, "not text", "'history' 2: content is int"),
        (ALPACA_ROW | {"input": 3}, "not text", "'input' is int"),
        (ALPACA_ROW | {"instruction": None}, "not text", "'instruction': content is NoneType"),
        (ALPACA_ROW | {"output": None}, "not text", "'output': content is NoneType"),
        (ALPACA_ROW | {"output": "\0"}, "NUL character", "'output' holds one"),
        (ALPACA_ROW | {"output": " "}, "empty message", "'output' (assistant) has no text"),
        ({"prompt": "a", "completion": [A]}, "not text", "'completion' is list"),
        ({"prompt": "a", "completion": " \n"}, "empty", "'completion' has no text"),
        ({"prompt": "\ud83d", "completion": "a"}, "half of a surrogate pair", "'prompt' holds '\\ud83d'"),
        ({"prompt": [U], "completion": "a"}, "not a list of messages", "'completion' is str"),
        ({"prompt": [U], "completion": [A, 3]}, "not a message", "completion message 2 is int"),
        ({"prompt": None, "completion": [A]}, "not a list of messages", "'prompt' is NoneType"),
        ({"text": None}, "not text", "'text' is NoneType"),
        ({"text": ["a"]}, "not text", "'text' is list"),
        ({"text": " \n"}, "empty", "'text' has no text"),
        ({"text": "a\0"}, "NUL character", "'text' holds one"),
        ({"text": "a \ud83d"}, "half of a surrogate pair", "'text' holds '\\ud83d'"),
        pytest.param({"text": LONG}, "larger than 4 MiB", "'text' has 4,194,305 characters", id="long text"),
        pytest.param(
            {"messages": [U, A | {"content": LONG}]}, "larger than 4 MiB", "message 2 has 4,194,305", id="long answer"
        ),
    ],
)
def test_bad_rows(fields, reason, detail):
    with pytest.raises(BadRow) as error:
        parse(fields)
    assert error.value.reason == reason
    assert detail in error.value.detail


def test_text_of_the_largest_size():
    assert len(parse({"text": LONG[1:]}).text) == MAX_ROW_BYTES


@pytest.mark.parametrize(
    ("found", "column"),
    [(MESSAGES, "messages"), (SHAREGPT, "conversations"), (PROMPT_COMPLETION, "prompt"), (TEXT, "content")],
)
def test_a_later_row_without_the_column(found, column):
    """The first row says what the format is."""
    for fields, columns in (({"id": 1, "a": 2}, "id, a"), ({}, "(none)")):
        with pytest.raises(BadRow) as error:
            found.parse(fields, Reading("content", Turns()))
        assert error.value.args == ("missing column", f"'{column}'; its columns are {columns}")
