"""The entry, disturbed at a chosen place: `python -m tests.disturbed` in the place of `recipe.train`.

DISTURB is "RANK:PHASE:WHAT": when that rank enters the first phase (`Watchdog.at`) that begins with PHASE, it sends
itself the signal WHAT, or raises if WHAT is "raise". "RANK::WHAT" is at once, before the checks. Empty: nothing.
"""

import os
import signal

from recipe.train import entry, leave
from recipe.watchdog import Watchdog


def disturb(rank: str, phase: str, what: str) -> None:
    if rank != os.environ["RANK"]:
        return
    at = Watchdog.at

    def act() -> None:
        if what == "raise":
            raise RuntimeError("disturbed, as the test wants")
        os.kill(os.getpid(), signal.Signals[what])

    def disturbed(self: Watchdog, entered: str, patient: bool = False) -> None:
        at(self, entered, patient)
        if entered.startswith(phase):
            Watchdog.at = at  # type: ignore[method-assign]
            act()

    if phase:
        Watchdog.at = disturbed  # type: ignore[method-assign]
    else:
        from recipe.stopping import StopRequest

        listen = StopRequest.listen

        def listening(self: StopRequest) -> None:
            listen(self)
            act()

        StopRequest.listen = listening  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["DISTURB"]:
        disturb(*os.environ["DISTURB"].split(":"))
    leave(entry())
