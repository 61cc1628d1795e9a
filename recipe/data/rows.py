"""A row as it was read, and why one is not trained on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

# Longer rows are taken for a mistake (a file without line breaks, a binary column): they cost memory in every process.
MAX_ROW_BYTES = 4 << 20
CHUNK_ROWS = 500


class BadRow(ValueError):
    """A row that cannot be trained on: the user's to mend (`max_bad_rows`).

    Attributes:
        reason: the rule it breaks, the same words for each row that breaks it.
        detail: what was seen.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Dropped(Exception):
    """A row that a policy of the configuration leaves out; `reason` as in `BadRow`."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One row: its 1-based number in its file, and its fields, or why they could not be read."""

    number: int
    fields: dict[str, Any]
    problem: BadRow | None = None


class Chunk(Protocol):
    """Some neighbouring rows of a file, as they came from the disk; a worker makes rows of them.

    Attributes:
        size: its part of the source's `size`, for the progress bar.
    """

    @property
    def size(self) -> int: ...

    def rows(self) -> Iterator[Row]: ...

    def place(self, number: int) -> str:
        """Where row `number` is, for a person: 'chat.jsonl:12', 'chat.parquet row 12'."""
        ...


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, with a `BadRow` for whatever is wrong with `text`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow("not valid JSON", f"{error.msg} at column {error.pos + 1}") from None
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"{error.reason} at byte {error.start + 1}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise BadRow("not valid JSON", str(error)) from None
