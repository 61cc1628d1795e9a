"""The formats that rows come in, each turned into a chat or a text.

| format | columns |
|---|---|
| messages | `messages`: a list of role and content, as OpenAI's API has it; `tools` |
| ShareGPT | `conversations`: a list of from and value, with function_call and observation turns; `tools`, `system` |
| Alpaca | `instruction`, `output`; `input`, `system`, `history` |
| prompt/completion | both a text, or both a list of messages; the completion alone is trained |
| text | the column that `dataset_text_field` names |
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from recipe.data.messages import Chat, Turn, Turns, check_text, parse_turn
from recipe.data.rows import BadRow


class Text(NamedTuple):
    """`prompt` is context ('' for none); `text` is trained."""

    prompt: str
    text: str


Example = Chat | Text


@dataclass(frozen=True)
class Format:
    """How the rows of a source are read. `chat` and `prompted` say what `parse` returns: a chat, a text with prompt."""

    name: str
    chat: bool
    prompted: bool
    parse: Callable[[dict[str, Any], "Reading"], Example]


@dataclass(frozen=True)
class Reading:
    """What the configuration says about reading a row.

    Attributes:
        text_field: column of a text row.
        turns: policies for turns.
        completion_only: train the completion of a prompt/completion row alone.
    """

    text_field: str
    turns: Turns
    completion_only: bool = True


def _messages(fields: dict[str, Any], reading: Reading) -> Chat:
    return reading.turns.chat(_turns(fields, "messages"), _tools(fields.get("tools")))


def _sharegpt(fields: dict[str, Any], reading: Reading) -> Chat:
    turns = _turns(fields, "conversations")
    if fields.get("system"):
        turns.insert(0, parse_turn("'system'", {"role": "system", "content": fields["system"]}))
    return reading.turns.chat(turns, _tools(fields.get("tools")))


def _alpaca(fields: dict[str, Any], reading: Reading) -> Chat:
    turns = []
    if fields.get("system"):
        turns.append(parse_turn("'system'", {"role": "system", "content": fields["system"]}))
    history = fields.get("history") or []
    if not isinstance(history, list) or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in history):
        raise BadRow("not Alpaca", "'history' must be a list of pairs, a question and an answer")
    for number, (question, answer) in enumerate(history, 1):
        turns.append(parse_turn(f"'history' {number}", {"role": "user", "content": question}))
        turns.append(parse_turn(f"'history' {number}", {"role": "assistant", "content": answer}))
    instruction, context = fields.get("instruction"), fields.get("input")
    if context is not None and not isinstance(context, str):
        raise BadRow("not text", f"'input' is {type(context).__name__}")
    if isinstance(instruction, str) and context:
        instruction = f"{instruction}\n{context}" if instruction else context
    turns.append(parse_turn("'instruction'", {"role": "user", "content": instruction}))
    turns.append(parse_turn("'output'", {"role": "assistant", "content": fields.get("output")}))
    return reading.turns.chat(turns, None)


def _prompt_completion(fields: dict[str, Any], reading: Reading) -> Text:
    prompt, text = _text(fields, "prompt"), _text(fields, "completion")
    if not text.strip():
        raise BadRow("empty", "'completion' has no text")
    return Text(prompt, text) if reading.completion_only else Text("", prompt + text)


def _prompt_completion_chat(fields: dict[str, Any], reading: Reading) -> Chat:
    prompt, completion = (_turns(fields, column, f"{column} message") for column in ("prompt", "completion"))
    if reading.completion_only:
        prompt = [turn._replace(trained=False) for turn in prompt]
    chat = reading.turns.chat([*prompt, *completion], _tools(fields.get("tools")))
    return chat._replace(answers_only=reading.completion_only)


def _plain_text(fields: dict[str, Any], reading: Reading) -> Text:
    text = _text(fields, reading.text_field)
    if not text.strip():
        raise BadRow("empty", f"'{reading.text_field}' has no text")
    return Text("", text)


MESSAGES = Format("messages", chat=True, prompted=False, parse=_messages)
SHAREGPT = Format("ShareGPT", chat=True, prompted=False, parse=_sharegpt)
ALPACA = Format("Alpaca", chat=True, prompted=False, parse=_alpaca)
PROMPT_COMPLETION = Format("prompt/completion", chat=False, prompted=True, parse=_prompt_completion)
PROMPT_COMPLETION_CHAT = Format("prompt/completion messages", chat=True, prompted=True, parse=_prompt_completion_chat)
TEXT = Format("text", chat=False, prompted=False, parse=_plain_text)


def recognise(fields: dict[str, Any], text_field: str, text_field_asked: bool) -> Format | None:
    """The format of a row by its columns; None where it is none of these.

    A column that the user names as `dataset_text_field` goes first, then chats, then text.
    """
    if text_field_asked and text_field in fields:
        return TEXT
    if "messages" in fields:
        return MESSAGES
    if "conversations" in fields:
        return SHAREGPT
    if "prompt" in fields and "completion" in fields:
        return PROMPT_COMPLETION if isinstance(fields["prompt"], str) else PROMPT_COMPLETION_CHAT
    if "instruction" in fields and "output" in fields:
        return ALPACA
    return TEXT if text_field in fields else None


def _turns(fields: dict[str, Any], column: str, called: str = "message") -> list[Turn]:
    value = fields.get(column)
    if column not in fields:
        raise BadRow("missing column", f"'{column}'; its columns are {', '.join(map(str, fields)) or '(none)'}")
    if not isinstance(value, list):
        raise BadRow("not a list of messages", f"'{column}' is {type(value).__name__}")
    return [parse_turn(f"{called} {number}", turn) for number, turn in enumerate(value, 1)]


def _text(fields: dict[str, Any], column: str) -> str:
    if column not in fields:
        raise BadRow("missing column", f"'{column}'; its columns are {', '.join(map(str, fields)) or '(none)'}")
    text = fields[column]
    if not isinstance(text, str):
        raise BadRow("not text", f"'{column}' is {type(text).__name__}")
    check_text(f"'{column}'", text)
    return text


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Function schemas; ShareGPT has them as JSON in a text, and without the envelope that templates expect."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadRow("tools are not valid JSON", str(error)) from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("tools are not a list of functions", type(value).__name__)
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    if not all(isinstance(tool["function"], dict) and isinstance(tool["function"].get("name"), str) for tool in tools):
        raise BadRow("tools are not a list of functions", "one has no name of a function")
    check_text("tools", json.dumps(tools, ensure_ascii=False, default=str))
    return tools
