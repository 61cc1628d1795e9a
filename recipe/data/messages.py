"""Chats: turns as they were written, brought to what a template takes, by stated policies."""

import json
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

from recipe.arguments import DataArguments
from recipe.data.rows import MAX_ROW_BYTES, BadRow, Dropped

Role = Literal["system", "user", "assistant", "tool"]
ROLES = get_args(Role)
# What formats call them; `function_call` is an assistant's turn that holds a call and no text.
SYNONYMS = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
THOUGHTS = "reasoning_content"
THOUGHTS_TOO = ("thinking", "reasoning")  # other names of it, as transformers has them
UNREAD = ("refusal", "audio", "image", "images", "video", "videos")  # would be left out in silence
WEIGHTS = ("loss_weight", "weight", "train")  # LLaMA-Factory's, OpenAI's and axolotl's word for "train on this turn"


class Turn(NamedTuple):
    """One message. `trained` says whether an assistant's turn enters the loss; `where` is for messages to the user."""

    where: str
    role: str
    content: str
    trained: bool
    extra: dict[str, Any]  # tool_calls, name, tool_call_id, reasoning_content


class Chat(NamedTuple):
    """What a template is applied to: messages, the tools they may call, and for each answer whether it is trained.

    `answers_only`: nothing but answers is trained, whatever the run says of its other chats.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    trained: list[bool]
    answers_only: bool = False


@dataclass(frozen=True)
class Turns:
    """Policies for chats that not every template takes. 'error': a bad row; 'drop': the row is left out, and counted.

    Attributes:
        leading_assistant: the first turn is the assistant's. 'keep', or 'trim': leave that turn out.
        repeated_roles: two turns in a row by the user, or by the assistant. 'keep', or 'merge': one turn, with an empty
            line between the two.
        tool_turns: the chat has tools, or turns by tools. 'keep': the template has to show them.
        empty_content: a turn without text. 'keep'.

    A system turn is kept, and is the first one; in any other place it is an error. So is a chat without an answer, or
    that ends with a question.
    """

    leading_assistant: str = "error"
    repeated_roles: str = "error"
    tool_turns: str = "keep"
    empty_content: str = "error"

    @classmethod
    def of(cls, args: DataArguments) -> "Turns":
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def chat(self, turns: list[Turn], tools: list[dict[str, Any]] | None) -> Chat:
        """Apply the policies. Raises `BadRow`, `Dropped`."""
        if tools or any(turn.role == "tool" or "tool_calls" in turn.extra for turn in turns):
            self._allow("tool_turns", "has tools", "")
        for turn in turns:
            if not turn.content.strip() and "tool_calls" not in turn.extra:
                self._allow("empty_content", "empty message", f"{turn.where} ({turn.role}) has no text")
        _check_system(turns)
        turns = self._trim(turns)
        turns = self._merge(turns)
        _check_answers(turns)
        messages = [{"role": turn.role, "content": turn.content, **turn.extra} for turn in turns]
        trained = [turn.trained for turn in turns if turn.role == "assistant"]
        if not any(trained):
            raise BadRow("nothing to learn", "every answer has the loss weight 0")
        return Chat(messages, tools, trained)

    def _allow(self, policy: str, reason: str, detail: str) -> None:
        """Go on if `policy` is to keep (merge, trim) the row."""
        choice = getattr(self, policy)
        if choice == "error":
            raise BadRow(reason, f"{detail}{'; ' if detail else ''}see {policy}")
        if choice == "drop":
            raise Dropped(reason)

    def _trim(self, turns: list[Turn]) -> list[Turn]:
        first = next((at for at, turn in enumerate(turns) if turn.role != "system"), 0)
        if not turns or turns[first].role != "assistant":
            return turns
        self._allow("leading_assistant", "begins with the assistant", turns[first].where)
        if self.leading_assistant != "trim":
            return turns
        while first < len(turns) and turns[first].role != "user":  # what a tool says belongs to that turn
            turns = [*turns[:first], *turns[first + 1 :]]
        return turns

    def _merge(self, turns: list[Turn]) -> list[Turn]:
        merged: list[Turn] = []
        for turn in turns:
            last = merged[-1] if merged else None
            if last is None or turn.role != last.role or turn.role not in ("user", "assistant"):
                merged.append(turn)
                continue
            self._allow("repeated_roles", "two turns in a row", f"{last.where} and {turn.where} by the {turn.role}")
            merged.append(turn)
            if self.repeated_roles == "merge":
                merged[-2:] = [_merged(last, turn)]
        return merged


def _merged(first: Turn, second: Turn) -> Turn:
    if first.trained != second.trained:
        raise BadRow("turns of two loss weights cannot be merged", f"{first.where} and {second.where}")
    content = "\n\n".join(text for text in (first.content, second.content) if text.strip())
    extra = first.extra | second.extra
    if calls := first.extra.get("tool_calls", []) + second.extra.get("tool_calls", []):
        extra["tool_calls"] = calls
    if thoughts := [turn.extra[THOUGHTS] for turn in (first, second) if THOUGHTS in turn.extra]:
        extra[THOUGHTS] = "\n\n".join(thoughts)
    return Turn(first.where, first.role, content, first.trained, extra)


def _check_system(turns: list[Turn]) -> None:
    for turn in turns[1:]:
        if turn.role == "system":
            raise BadRow("system turn in the middle", f"{turn.where}; only the first may be one")


def _check_answers(turns: list[Turn]) -> None:
    roles = [turn.role for turn in turns]
    if "assistant" not in roles:
        raise BadRow("no answer", "there is no assistant's message")
    if roles[-1] != "assistant":
        raise BadRow("no answer to the last turn", f"{turns[-1].where} is by the {roles[-1]}")


def parse_turn(where: str, value: Any) -> Turn:
    """Read one message of any of the formats. Raises `BadRow`.

    Args:
        where: what to call it, such as 'message 3'.
        value: `{"role", "content"}` or ShareGPT's `{"from", "value"}`; content may be a list of parts.
    """
    if not isinstance(value, dict):
        raise BadRow("not a message", f"{where} is {type(value).__name__}, not a mapping of role and content")
    named = value.get("role") if value.get("role") is not None else value.get("from")
    role = SYNONYMS.get(named, named) if isinstance(named, str) else ""
    if role not in ROLES:
        raise BadRow("unknown role", f"{where} is by {named!r}; roles are {', '.join([*ROLES, *SYNONYMS])}")
    content = value.get("content") if value.get("content") is not None else value.get("value")
    extra: dict[str, Any] = {}
    if named == "function_call":
        extra["tool_calls"], content = _calls(where, content), ""
    elif value.get("function_call"):  # OpenAI's older form
        extra["tool_calls"], content = _calls(where, value["function_call"]), content or ""
    elif value.get("tool_calls"):
        extra["tool_calls"], content = _calls(where, value["tool_calls"]), content or ""
    text = _text(where, content)
    check_text(where, text)
    for key in UNREAD:
        if value.get(key):
            raise BadRow("content that is not read", f"{where} has '{key}'; take it out, or put it into the content")
    for key in ("name", "tool_call_id", *THOUGHTS_TOO, THOUGHTS):
        if value.get(key) is not None:
            if not isinstance(value[key], str):
                raise BadRow("not text", f"{where}: {key} is {type(value[key]).__name__}")
            check_text(where, value[key])
            extra[THOUGHTS if key in THOUGHTS_TOO else key] = value[key]
    return Turn(where, role, text, _trained(where, role, value), extra)


def _trained(where: str, role: str, value: dict[str, Any]) -> bool:
    weights = {key: value[key] for key in WEIGHTS if value.get(key) is not None}
    for key, weight in weights.items():
        if weight not in (0, 1) or (role != "assistant" and weight != 0 and key == "loss_weight"):
            allowed = "0 or 1" if role == "assistant" else "0: only answers are trained"
            raise BadRow("loss weight", f"{where} ({role}) has {key} {weight!r}; give {allowed}")
    return role == "assistant" and all(weights.values())


def _text(where: str, content: Any) -> str:
    """A string, or the joined parts of a list of `{"type": "text", "text" (or "value"): str}`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow("not text", f"{where}: content is {type(content).__name__}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRow("not text", f"{where} has a part of the type {kind!r}; only 'text' can be trained on")
        text = part.get("text") if part.get("text") is not None else part.get("value")
        if not isinstance(text, str):
            raise BadRow("not text", f"{where} has a text part that holds {type(text).__name__}")
        texts.append(text)
    return "".join(texts)


def _calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Calls as OpenAI's API has them, with arguments as a mapping, which is what templates write as JSON."""
    if isinstance(value, str):
        value = _json(where, value)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow("not a tool call", f"{where} has no name of a function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json(where, arguments) if arguments.strip() else {}
        function = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}  # what tool_call_id speaks of
        calls.append({**known, "type": "function", "function": function})
        check_text(where, json.dumps(calls[-1], ensure_ascii=False, default=str))
    return calls


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow("tool call is not valid JSON", f"{where}: {error}") from None


def check_text(where: str, text: str) -> None:
    """Raise `BadRow` for what is no text, or more than a row may be."""
    if len(text) > MAX_ROW_BYTES:
        raise BadRow(f"larger than {MAX_ROW_BYTES >> 20} MiB", f"{where} has {len(text):,} characters")
    if "\0" in text:
        raise BadRow("NUL character", f"{where} holds one; it is no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can hold it, and no text can
        raise BadRow("half of a surrogate pair", f"{where} holds {text[error.start]!r}; write the character") from None
