"""Every storage of a walk on fake tensors (`recipe.plan.dry_run`), once, from its allocation to its end, as what it
turned out to be."""

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp  # noqa: F401 - defines the operators torch.ops.fsdp
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS = "parameters", "gradients", "optimizer", "buffers"  # this rank's, at rest
GATHERED = "gathered"  # whole parameters
GATHERING = "gathering"  # the all-gather's own buffers: FSDP2's whole output, FSDP1's shard in the compute dtype
UNREDUCED = "unreduced"  # whole gradients of a unit
REDUCING = "reducing"  # the reduce-scatter's own buffers: a whole unit in the reduce dtype, and what comes of it
ACTIVATIONS = "activations"  # what a forward pass leaves; `recipe.loss` leaves the gradient of the head, too
TEMPORARY = "temporary"  # the rest: a recomputed layer and gradients of activations among it

aten, c10d, fsdp = torch.ops.aten, torch.ops.c10d, torch.ops.fsdp
FLASH, FLASH_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
# Arguments of operators that say what a storage is, whatever made it.
_KINDS: dict[Any, dict[int | str, str]] = {
    fsdp.all_gather_copy_in.default: {0: GATHERING, 1: GATHERING},
    fsdp.split_with_sizes_copy.default: {"out": GATHERED},
    fsdp.chunk_cat.default: {0: UNREDUCED, "out": REDUCING},
    c10d.allgather_.default: {0: GATHERED, 1: GATHERING},
    c10d._reduce_scatter_base_.default: {0: REDUCING, 1: REDUCING},
}


class _Block:
    """One storage. What it is may show only when it is gone."""

    __slots__ = ("kind", "size", "end")

    def __init__(self) -> None:
        self.kind, self.size = TEMPORARY, 0
        self.end: weakref.ref


class Ledger(TorchDispatchMode):
    """Writes down the fake storages that operators make under it, in order, and adds them up by phase in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = True
        self.flash_calls = 0
        self._blocks: dict[int, _Block] = {}  # those alive, by the address of torch's object
        self._events: list[tuple[_Block, int]] = []  # a block, and the bytes that it grew by
        self._phases: list[tuple[str, int]] = []  # a name, and its first event

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented  # DTensor and the like; they come again, as operators on their local parts
        kwargs = kwargs or {}
        if not self.looks:
            return func(*args, **kwargs)
        self.flash_calls += func is FLASH
        if func is aten.index.Tensor:
            args = (args[0], _without_masks(args[1]))
        if hidden := _inside(func, args):
            self.see(torch.empty(hidden, dtype=torch.uint8))
        result = func(*args, **kwargs)
        for value in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            self.see(value)
        for place, kind in _KINDS.get(func, {}).items():
            self._name(tree_leaves(args[place] if isinstance(place, int) else kwargs[place]), kind)
        return result

    def see(self, value: object) -> None:
        """Write down that there is the storage of a fake tensor, if it is new or has another size."""
        if isinstance(value, FakeTensor) and value.fake_device.type != "meta":
            self._see(value.untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Write down what is no operator, of a storage that was seen."""
        if storage._cdata in self._blocks:
            self._see(storage)

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block()
            block.end = weakref.ref(storage, partial(self._ended, key))
        if size != block.size:
            self._events.append((block, size - block.size))
            block.size = size

    def _ended(self, key: int, _: weakref.ref) -> None:
        block = self._blocks.pop(key)
        self._events.append((block, -block.size))

    def _name(self, tensors: Iterable[object], kind: str) -> None:
        """Say what the storages of `tensors` are, if nothing is known of them."""
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                self._settle(self._blocks[tensor.untyped_storage()._cdata], kind)

    def whole_gradient(self, parameter: torch.Tensor) -> None:
        """Say so of the gradient that `parameter` has by now: FSDP1 casts it where FSDP2 has an operator."""
        self._name([parameter.grad], UNREDUCED)

    def leave(self, kind: str) -> None:
        """Say what everything alive is of which nothing is known."""
        for block in self._blocks.values():
            self._settle(block, kind)

    @staticmethod
    def _settle(block: _Block, kind: str) -> None:
        block.kind = kind if block.kind == TEMPORARY else block.kind

    def hold(self, tensors: Iterable[torch.Tensor], kind: str) -> int:
        """Say what the storages of `tensors` are, whatever was known of them; returns their bytes."""
        held = {}
        for tensor in tensors:
            self.see(tensor)
            key = tensor.untyped_storage()._cdata
            held[key] = self._blocks[key]
        for block in held.values():
            block.kind = kind
        return sum(block.size for block in held.values())

    def phase(self, name: str) -> None:
        """A phase begins; one that was there before goes on."""
        self._phases.append((name, len(self._events)))

    def peaks(self) -> dict[str, dict[str, int]]:
        """What is alive in each phase when it is most: bytes by kind."""
        alive, total = Counter[str](), 0
        peaks: dict[str, tuple[int, Counter[str]]] = {}
        ends = [first for _, first in self._phases[1:]] + [len(self._events)]
        for (name, first), end in zip(self._phases, ends, strict=True):
            if name not in peaks or total > peaks[name][0]:
                peaks[name] = total, alive.copy()
            for block, growth in self._events[first:end]:
                alive[block.kind] += growth
                total += growth
                if total > peaks[name][0]:
                    peaks[name] = total, alive.copy()
        return {name: {kind: size for kind, size in at.items() if size} for name, (_, at) in peaks.items()}


class LookingAway:
    """DTensor finds the shape of a result by making it of fake tensors, whole. That is in any run, and no memory."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def __enter__(self) -> None:
        self.ledger.looks = False

    def __exit__(self, *_: object) -> None:
        self.ledger.looks = True


def _without_masks(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices in the place of masks. How many a mask chooses is its content, which a fake one lacks: all, here."""
    plain: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            plain += torch.empty(index.dim(), index.numel(), dtype=torch.int64).unbind()
        else:
            plain.append(index)
    return plain


def _inside(func: Any, args: Any) -> int:
    """Bytes that an operator's CUDA kernels take for themselves, where they are as large as an activation.

    logsumexp makes the exponentials of its input (aten/src/ATen/native/ReduceOps.cpp); Flash Attention's backward pass
    adds the queries' gradients up in fp32 and makes those of keys and values for every head (csrc/flash_attn/
    flash_api.cpp, mha_bwd).
    """
    if func is aten.logsumexp.default:
        return args[0].nbytes
    if func is FLASH_BACKWARD:
        _, query, key, *_ = args
        return 4 * query.numel() + (2 * query.nbytes if key.shape[1] != query.shape[1] else 0)
    return 0
