"""The entry, disturbed at a chosen place: `python -m tests.disturbed` in the place of `recipe.train`.

DISTURB is "RANK:PHASE:WHAT": when that rank enters the first phase (`Watchdog.at`, or of its saver's thread,
`Saver.enter`) that begins with PHASE, it sends itself the signal WHAT; or raises, if WHAT is "raise"; or runs a
command, "sh COMMAND"; or sets its clock, "clock SECONDS". "RANK::WHAT" is at once, before the checks. Empty: nothing.
"""

import os
import signal
import subprocess
import time
from typing import Any

from recipe.checkpoint.saver import Saver
from recipe.train import entry, leave
from recipe.watchdog import Watchdog


def disturb(rank: str, phase: str, what: str) -> None:
    if rank != os.environ["RANK"]:
        return
    done = False

    def act() -> None:
        nonlocal done
        if done:
            return
        done = True
        if what == "raise":
            raise RuntimeError("disturbed, as the test wants")
        kind, _, rest = what.partition(" ")
        if kind == "clock":
            now = time.time
            time.time = lambda: now() + float(rest)
        elif kind == "sh":
            subprocess.run(rest, shell=True, check=True)
        else:
            os.kill(os.getpid(), signal.Signals[what])

    def after(method: Any) -> Any:
        def disturbed(self: Any, entered: str, *args: Any, **kwargs: Any) -> None:
            method(self, entered, *args, **kwargs)
            if entered.startswith(phase):
                act()

        return disturbed

    if phase:
        Watchdog.at = after(Watchdog.at)  # type: ignore[method-assign]
        Saver.enter = after(Saver.enter)  # type: ignore[method-assign]
    else:
        from recipe.stopping import StopRequest

        listen = StopRequest.listen

        def listening(self: StopRequest) -> None:
            listen(self)
            act()

        StopRequest.listen = listening  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["DISTURB"]:
        disturb(*os.environ["DISTURB"].split(":", 2))
    leave(entry())
