"""Memory that PyTorch takes at its peak, counted on CPU in two ways."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that the allocator is asked for while `work` runs, inside of operations too, over what was alive before.
    Run `work` once before, or what is made once and kept counts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operations returned and that are still alive, without what an operation's CPU kernel
    takes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._found(tensor.untyped_storage())
        return results

    def _found(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.bytes -= self.sizes.pop(key)
