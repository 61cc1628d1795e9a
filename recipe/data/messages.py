"""What a row is: a chat in `messages`, or a text in the column `dataset_text_field` names. Every row is looked at.

A bad row is an error, never dropped in silence: all are found in one pass, the first ten are listed with their place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow as pa

from recipe.data.sources import Source
from recipe.errors import UserError

Kind = Literal["chat", "text"]
Message = dict[str, str]

ROLES = ("system", "user", "assistant")
NUM_LISTED = 10
MESSAGE = pa.struct({"role": pa.string(), "content": pa.string()})
COLUMNS = {"chat": pa.field("messages", pa.list_(MESSAGE)), "text": pa.field("text", pa.string())}


class BadRow(ValueError):
    """Why a row cannot be trained on."""


@dataclass(frozen=True)
class RowFormat:
    """How this run reads a row.

    Attributes:
        kind: 'chat' or 'text'.
        text_field: Column of the text of a text row.
        eos_token: Taken off the end of an answer that already has it: the template writes it.
        special_tokens: Strings that the tokenizer would turn into control tokens wherever they stand in a message.
    """

    kind: Kind
    text_field: str
    eos_token: str
    special_tokens: Sequence[str]

    def parse(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return `{"messages": [{"role", "content"}, ...]}` or `{"text": str}`. Raises `BadRow`."""
        if self.kind == "text":
            return {"text": self._parse_text(fields)}
        if fields.get("tools"):
            raise BadRow("has tools, which are not supported")
        return {"messages": self._parse_messages(fields.get("messages"))}

    def _parse_text(self, fields: dict[str, Any]) -> str:
        if self.text_field not in fields:
            raise BadRow(f"has no '{self.text_field}'; its columns are {', '.join(fields) or '(none)'}")
        text = fields[self.text_field]
        if not isinstance(text, str):
            raise BadRow(f"'{self.text_field}' must be text, not {type(text).__name__}")
        if not text.strip():
            raise BadRow(f"'{self.text_field}' is empty")
        _check_encodable(text)
        return text

    def _parse_messages(self, value: Any) -> list[Message]:
        if not isinstance(value, list):
            raise BadRow(f"'messages' must be a list of messages, not {type(value).__name__}")
        messages = [self._parse_message(number, message) for number, message in enumerate(value, 1)]
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise BadRow("has no assistant message, so no answer to learn")
        if "system" in roles[1:]:
            raise BadRow(f"message {roles.index('system', 1) + 1} is from the system; only the first may be")
        first = 1 if roles[0] == "system" else 0
        if roles[first] == "assistant":
            raise BadRow("begins with the assistant; a user message must come first")
        for number, (role, following) in enumerate(zip(roles[first:], roles[first + 1 :], strict=False), first + 1):
            if role == following:
                raise BadRow(f"messages {number} and {number + 1} are both from the {role}; turns must alternate")
        if roles[-1] == "user":
            raise BadRow("ends with a user message that has no answer")
        return messages

    def _parse_message(self, number: int, message: Any) -> Message:
        if not isinstance(message, dict):
            raise BadRow(f"message {number} must have role and content, not be {type(message).__name__}")
        role = message.get("role")
        if role not in ROLES:
            raise BadRow(f"message {number} has the unknown role {role!r}; roles are {', '.join(ROLES)}")
        if message.get("tool_calls"):
            raise BadRow(f"message {number} has tool_calls, which are not supported")
        if role == "assistant" and message.get("loss_weight") not in (None, 1):
            raise BadRow(f"message {number} has loss_weight {message['loss_weight']}; every answer is trained, with 1")
        content = _content(number, message.get("content"))
        if role == "assistant":
            while content.rstrip().endswith(self.eos_token):
                content = content.rstrip().removesuffix(self.eos_token)
        if not content.strip():
            raise BadRow(f"message {number} ({role}) is empty")
        _check_encodable(content)
        for token in self.special_tokens:
            if token in content:
                raise BadRow(f"message {number} ({role}) contains the control token {token}; take it out")
        return {"role": role, "content": content}


def _check_encodable(text: str) -> None:
    """JSON can hold half of a surrogate pair, which is no character and has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"holds {text[error.start]!r}, half of a surrogate pair; write the whole character") from None


def _content(number: int, content: Any) -> str:
    """The text of a message: a string, or a list of `{"type": "text", "text" (or "value"): str}` parts, joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(f"message {number}: content must be text, not {type(content).__name__}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRow(f"message {number}: only parts of the type 'text' are supported, not {kind!r}")
        text = part.get("text") if part.get("text") is not None else part.get("value")
        if not isinstance(text, str):
            raise BadRow(f"message {number}: a text part must hold text, not {type(text).__name__}")
        texts.append(text)
    return "".join(texts)


def detect_kind(source: Source, text_field: str) -> Kind:
    """Tell from the first readable row whether the set is chat (`messages`, which goes first) or text.

    Raises:
        UserError: there is no row, none can be read, or the first that can has neither column.
    """
    unread = None
    for row in source.read():
        if row.problem is not None:
            unread = unread or row
        else:
            if "messages" in row.fields:
                return "chat"
            if text_field in row.fields:
                return "text"
            raise UserError(
                f"{source.name}: rows need a column 'messages' (chat) or dataset_text_field's '{text_field}' (text); "
                f"{source.unit} {row.number} has {', '.join(map(str, row.fields)) or 'no columns'}; "
                "set dataset_text_field, or convert the rows to messages of role and content"
            )
    if unread is not None:
        raise UserError(
            f"dataset_name '{source.name}': no row can be read; {source.unit} {unread.number} {unread.problem}"
        )
    raise UserError(f"dataset_name '{source.name}': the data set is empty")


def normalize(source: Source, row_format: RowFormat, path: Path) -> datasets.Dataset:
    """Validate every row of `source` and write the good ones to the Arrow file `path`, in bounded memory.

    Returns:
        The rows, memory-mapped: `messages` (list of role and content) or `text`, and `row`, the number in the source.

    Raises:
        UserError: any row is bad (the first `NUM_LISTED` are listed, and the total), or there is none.
    """
    problems: list[str] = []
    num_rows = num_bad = 0

    def good_rows() -> Iterator[dict[str, Any]]:
        nonlocal num_rows, num_bad
        for row in source.read():
            num_rows += 1
            try:
                if row.problem is not None:
                    raise BadRow(row.problem)
                yield {"row": row.number, **row_format.parse(row.fields)}
            except BadRow as error:
                num_bad += 1
                if num_bad <= NUM_LISTED:
                    problems.append(f"{source.unit} {row.number} {error}")

    _write_arrow(good_rows(), pa.schema([pa.field("row", pa.int64()), COLUMNS[row_format.kind]]), path)
    if num_bad:
        listed = f", of which the first {NUM_LISTED}" if num_bad > NUM_LISTED else ""
        raise UserError(
            f"{source.name}: {num_bad:,} of {num_rows:,} rows cannot be trained on (mend them, or point dataset_name "
            f"elsewhere){listed}:\n" + "\n".join(f"     {problem}" for problem in problems)
        )
    if not num_rows:
        raise UserError(f"dataset_name '{source.name}': the data set is empty")
    return datasets.Dataset.from_file(str(path))


def _write_arrow(rows: Iterator[dict[str, Any]], schema: pa.Schema, path: Path, batch_size: int = 1000) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        batch: list[dict[str, Any]] = []
        for row in rows:
            batch.append(row)
            if len(batch) == batch_size:
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
                batch = []
        writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
