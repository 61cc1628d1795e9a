from dataclasses import fields

import pytest

from recipe.arguments import DataArguments
from recipe.data.messages import ROLES, SYNONYMS, Turns, parse_turn
from recipe.data.rows import MAX_ROW_BYTES, BadRow, Dropped

CALL = {"function": {"name": "add", "arguments": {"a": 1}}}


def turns(roles, **changes):
    """A turn a letter (system, user, assistant, tool), each with its own text; `changes` to those named s1, a2, ..."""
    made = []
    for at, letter in enumerate(roles, 1):
        role = next(role for role in ROLES if role.startswith(letter))
        value = {"role": role, "content": f"{letter}{at}", **changes.get(f"{letter}{at}", {})}
        made.append(parse_turn(f"message {at}", value))
    return made


def chat(roles, tools=None, policies=None, **changes):
    return Turns(**policies or {}).chat(turns(roles, **changes), tools)


def contents(made):
    return [message["content"] for message in made.messages]


@pytest.mark.parametrize("roles", ["ua", "sua", "uaua", "suauaua", "uataua"])
def test_chats_that_need_no_policy(roles):
    made = chat(roles)
    assert [message["role"][0] for message in made.messages] == list(roles)
    assert contents(made) == [f"{letter}{at}" for at, letter in enumerate(roles, 1)]
    assert made.trained == [True] * roles.count("a")


LEADING = "begins with the assistant"
REPEATED = "two turns in a row"
EMPTY = {"content": " \n"}
CALLS = {"content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("policy", "roles", "changes", "by_choice"),
    [
        ("leading_assistant", "aua", {}, {"error": LEADING, "trim": ["u2", "a3"], "keep": ["a1", "u2", "a3"]}),
        ("leading_assistant", "saua", {}, {"trim": ["s1", "u3", "a4"], "keep": ["s1", "a2", "u3", "a4"]}),
        ("leading_assistant", "ataua", {}, {"trim": ["u4", "a5"]}),
        ("leading_assistant", "a", {}, {"trim": BadRow("no answer"), "keep": ["a1"]}),
        ("repeated_roles", "uua", {}, {"error": REPEATED, "merge": ["u1\n\nu2", "a3"], "keep": ["u1", "u2", "a3"]}),
        ("repeated_roles", "uaaa", {}, {"merge": ["u1", "a2\n\na3\n\na4"], "keep": ["u1", "a2", "a3", "a4"]}),
        ("repeated_roles", "uatta", {}, dict.fromkeys(["error", "merge"], ["u1", "a2", "t3", "t4", "a5"])),
        ("tool_turns", "uata", {}, {"error": "has tools", "keep": ["u1", "a2", "t3", "a4"]}),
        ("tool_turns", "ua", {"a2": CALLS}, {"error": "has tools", "keep": ["u1", ""]}),
        ("empty_content", "ua", {"u1": EMPTY}, {"error": "empty message", "keep": [" \n", "a2"]}),
        ("empty_content", "ua", {"a2": EMPTY}, {"error": "empty message", "keep": ["u1", " \n"]}),
        ("empty_content", "sua", {"s1": EMPTY}, {"error": "empty message", "keep": [" \n", "u2", "a3"]}),
        ("empty_content", "ua", {"a2": CALLS}, {"error": ["u1", ""]}),
    ],
)  # fmt: skip
def test_policies(policy, roles, changes, by_choice):
    for choice, expected in by_choice.items():
        if isinstance(expected, list):
            assert contents(chat(roles, policies={policy: choice}, **changes)) == expected
            continue
        reason = expected.reason if isinstance(expected, BadRow) else expected
        with pytest.raises(BadRow) as bad:
            chat(roles, policies={policy: choice}, **changes)
        assert bad.value.reason == reason
        if choice == "error":
            assert f"see {policy}" in bad.value.detail
            with pytest.raises(Dropped) as dropped:
                chat(roles, policies={policy: "drop"}, **changes)
            assert dropped.value.reason == reason, "counted under the same name"


def test_every_value_of_every_policy_is_tested():
    """Those that the keys' help names."""
    choices = {field.name: field.metadata.get("choices") for field in fields(DataArguments)}
    assert {field.name: set(choices[field.name]) for field in fields(Turns)} == {
        "leading_assistant": {"error", "drop", "trim", "keep"},
        "repeated_roles": {"error", "drop", "merge", "keep"},
        "tool_turns": {"error", "drop", "keep"},
        "empty_content": {"error", "drop", "keep"},
    }
    assert Turns.of(DataArguments(dataset_name="a")) == Turns()
    assert Turns.of(DataArguments(dataset_name="a", empty_content="drop", tool_turns="error")) == Turns(
        tool_turns="error", empty_content="drop"
    )


@pytest.mark.parametrize("choice", ["error", "drop"])
def test_tools_alone_make_a_chat_with_tools(choice):
    with pytest.raises(BadRow if choice == "error" else Dropped, match="has tools"):
        chat("ua", tools=[CALL], policies={"tool_turns": choice})
    assert chat("ua", tools=[CALL]).tools == [CALL]


KEEP = {"leading_assistant": "keep", "repeated_roles": "keep", "empty_content": "keep"}
TRIM = {"leading_assistant": "trim", "repeated_roles": "merge", "empty_content": "keep"}


@pytest.mark.parametrize("policies", [{}, KEEP, TRIM])
@pytest.mark.parametrize(
    ("roles", "reason", "detail"),
    [
        ("", "no answer", "there is no assistant's message"),
        ("s", "no answer", "there is no assistant's message"),
        ("u", "no answer", "there is no assistant's message"),
        ("uau", "no answer to the last turn", "message 3 is by the user"),
        ("uat", "no answer to the last turn", "message 3 is by the tool"),
        ("usa", "system turn in the middle", "message 2"),
        ("ssua", "system turn in the middle", "message 2"),
        ("asua", "system turn in the middle", "message 2"),
        ("uas", "system turn in the middle", "message 3"),
    ],
)
def test_no_policy_keeps_a_chat_without_an_answer_or_with_a_late_system_turn(roles, reason, detail, policies):
    """Case D8."""
    with pytest.raises(BadRow) as error:
        chat(roles, policies=policies)
    assert error.value.reason == reason
    assert error.value.detail.startswith(detail)


def test_an_empty_turn_leaves_no_empty_line_when_it_is_merged():
    made = chat("uua", policies={"repeated_roles": "merge", "empty_content": "keep"}, u2=EMPTY)
    assert contents(made) == ["u1", "a3"]


def test_merging_keeps_calls_and_thoughts_of_both_turns():
    extra = {"tool_calls": [CALL], "reasoning_content": "hm"}
    made = chat("uaa", policies={"repeated_roles": "merge"}, a2=extra, a3=extra)
    call = {"type": "function", **CALL}
    assert made.messages[1] == {
        "role": "assistant",
        "content": "a2\n\na3",
        "tool_calls": [call, call],
        "reasoning_content": "hm\n\nhm",
    }


@pytest.mark.parametrize("key", ["loss_weight", "weight", "train"])
@pytest.mark.parametrize(("weight", "trained"), [(0, False), (1, True), (0.0, False), (True, True), (None, True)])
def test_loss_weights(key, weight, trained):
    made = chat("uaua", a2={key: weight}, u1={key: 0})
    assert made.trained == [trained, True]
    assert key not in made.messages[1]


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"a2": {"loss_weight": 0.5}}, "loss weight", "message 2 (assistant) has loss_weight 0.5; give 0 or 1"),
        ({"a2": {"weight": 2}}, "loss weight", "message 2 (assistant) has weight 2; give 0 or 1"),
        ({"a2": {"train": "yes"}}, "loss weight", "message 2 (assistant) has train 'yes'; give 0 or 1"),
        ({"a2": {"weight": -1, "train": 1}}, "loss weight", "message 2 (assistant) has weight -1; give 0 or 1"),
        ({"u1": {"loss_weight": 1}}, "loss weight", "message 1 (user) has loss_weight 1; give 0: only answers are tr"),
        ({"a2": {"weight": 0}}, "nothing to learn", "every answer has the loss weight 0"),
        ({"a2": {"weight": 0, "train": 1}}, "nothing to learn", "every answer has the loss weight 0"),
        ({"a2": {"loss_weight": 1, "train": 0}}, "nothing to learn", "every answer has the loss weight 0"),
    ],
)
def test_loss_weights_that_are_refused(changes, reason, detail):
    with pytest.raises(BadRow) as error:
        chat("ua", **changes)
    assert error.value.reason == reason
    assert error.value.detail.startswith(detail)


def test_turns_of_two_weights_cannot_be_one():
    with pytest.raises(BadRow, match="turns of two loss weights cannot be merged: message 2 and message 3"):
        chat("uaa", policies={"repeated_roles": "merge"}, a2={"weight": 0})
    assert chat("uaa", policies={"repeated_roles": "keep"}, a2={"weight": 0}).trained == [False, True]


@pytest.mark.parametrize("named", [*ROLES, *SYNONYMS])
@pytest.mark.parametrize("key", ["role", "from"])
def test_roles_and_what_other_formats_call_them(named, key):
    turn = parse_turn("message 1", {key: named, "content": '{"name": "add"}'})
    assert turn.role == SYNONYMS.get(named, named) and turn.trained is (turn.role == "assistant")
    assert ("tool_calls" in turn.extra) is (named == "function_call")


U, A = {"role": "user"}, {"role": "assistant"}
AT = "message 7"


@pytest.mark.parametrize(
    ("value", "reason", "detail"),
    [
        (["user", "a"], "not a message", f"{AT} is list, not a mapping of role and content"),
        (None, "not a message", f"{AT} is NoneType"),
        ({"content": "a"}, "unknown role", f"{AT} is by None; roles are system, user, assistant, tool, human"),
        ({"role": "bot", "content": "a"}, "unknown role", f"{AT} is by 'bot'"),
        ({"role": ["user"], "content": "a"}, "unknown role", f"{AT} is by ['user']"),
        ({"role": "User", "content": "a"}, "unknown role", f"{AT} is by 'User'"),
        (A, "not text", f"{AT}: content is NoneType"),
        (A | {"content": 4}, "not text", f"{AT}: content is int"),
        (A | {"content": ["a"]}, "not text", f"{AT} has a part of the type 'str'; only 'text' can be trained on"),
        (U | {"content": [{"type": "image"}]}, "not text", f"{AT} has a part of the type 'image'"),
        (U | {"content": [{"text": "a"}]}, "not text", f"{AT} has a part of the type None"),
        (U | {"content": [{"type": "text"}]}, "not text", f"{AT} has a text part that holds NoneType"),
        (U | {"content": "a \ud83d"}, "half of a surrogate pair", f"{AT} holds '\\ud83d'; write the character"),
        (U | {"content": "a\0"}, "NUL character", f"{AT} holds one"),
        (U | {"content": "a" * (MAX_ROW_BYTES + 1)}, "larger than 4 MiB", f"{AT} has 4,194,305 characters"),
        (A | {"content": "a", "name": 3}, "not text", f"{AT}: name is int"),
        (A | {"content": "a", "reasoning_content": ["a"]}, "not text", f"{AT}: reasoning_content is list"),
        (A | {"content": "a", "reasoning_content": "\0"}, "NUL character", f"{AT} holds one"),
        (A | {"tool_calls": ["add"]}, "not a tool call", f"{AT} has no name of a function"),
        (A | {"tool_calls": [{"function": {"arguments": {}}}]}, "not a tool call", f"{AT} has no name of a function"),
        (A | {"tool_calls": [{"name": "\ud83d"}]}, "half of a surrogate pair", f"{AT} holds '\\ud83d'"),
        (A | {"tool_calls": [{"name": "add", "arguments": "{a"}]}, "tool call is not valid JSON", f"{AT}: "),
        ({"from": "function_call", "value": "add(1)"}, "tool call is not valid JSON", f"{AT}: "),
        ({"from": "function_call", "value": "[" * 100_000}, "tool call is not valid JSON", f"{AT}: "),
        ({"from": "function_call", "value": None}, "not a tool call", f"{AT} has no name of a function"),
    ],
)  # fmt: skip
def test_bad_turns(value, reason, detail):
    with pytest.raises(BadRow) as error:
        parse_turn(AT, value)
    assert error.value.reason == reason
    assert error.value.detail.startswith(detail)
    str(error.value).encode()  # it goes to a log


def test_openais_older_function_calls_and_other_names_of_thoughts():
    call = {"name": "add", "arguments": '{"a": 1}'}
    turn = parse_turn("message 2", {"role": "assistant", "content": None, "function_call": call, "thinking": "hm"})
    assert turn.content == "" and turn.extra["reasoning_content"] == "hm"
    assert turn.extra["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_content_that_would_be_left_out_in_silence():
    with pytest.raises(BadRow, match="content that is not read.*message 2 has 'refusal'"):
        parse_turn("message 2", {"role": "assistant", "content": "a", "refusal": "no"})
