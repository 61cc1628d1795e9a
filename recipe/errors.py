"""What a user did wrong, gathered: every problem of a run in one exception, raised before it costs anything.

And how a rank tells its launcher why it ended."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """One or more problems that the user can mend.

    Each problem says the rule, the value seen and the key to change. Entry points print it without a traceback
    and exit with code 2, which launchers take as "a rerun cannot help".
    """

    exit_code = 2

    def __init__(self, *problems: str):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems:\n" + "\n".join(f"  {i}. {p}" for i, p in enumerate(self.problems, 1))


def raise_if(problems: Iterable[str]) -> None:
    """Raise one `UserError` that lists all `problems`, or return if there are none."""
    found = list(problems)
    if found:
        raise UserError(*found)


REPORTED = "RECIPE_REPORTED"  # set where the launcher prints what `record` was given (`recipe.launch`)


def record(text: str, exit_code: int) -> None:
    """Leave `text`, and the code that the rank is about to end with, where torch's elastic launcher looks for why it
    ended (in its error file's format). Whole or not at all: the launcher may end a rank at any moment, and fails on a
    part of a file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "exit_code": exit_code}
        draft = Path(f"{path}.tmp")
        draft.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        draft.replace(path)
