"""Whether a plan fits, and the smallest changes that would make it fit, each with its price."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from recipe.plan import fitted, host, memory, speed
from recipe.plan.setup import OPTIMIZERS, STRATEGIES, Setup

FITS, TIGHT, TOO_LARGE = "fits", "tight", "does not fit"


def verdict(setup: Setup) -> str:
    """Tight is what runs, and has PyTorch's allocator give back memory and take it anew, or has less to spare than the
    prediction is off."""
    if memory.needed(setup) > setup.gpu.memory:
        return TOO_LARGE
    spare = memory.needed(setup) <= fitted.COMFORTABLE * setup.gpu.memory
    return FITS if spare and memory.wanted(setup) <= setup.gpu.memory else TIGHT


@dataclass(frozen=True)
class Change:
    """Keys to change, as a user would write them, and what becomes of the plan.

    Args:
        speed: tokens/s/GPU, as a multiple of the plan's.
    """

    keys: tuple[str, ...]
    setup: Setup
    speed: float
    verdict: str

    @property
    def worth(self) -> float:
        """Speed, of which being tight takes as much as the prediction is off."""
        return self.speed * (1.0 if self.verdict == FITS else 0.96)

    def line(self) -> str:
        price = f"{self.speed - 1:+.0%} tokens/s/GPU"
        need = memory.needed(self.setup) / 2**30
        on_host = host.resting(self.setup) / 1e9
        beside = f", {on_host:,.0f} GB of host memory a node" if on_host else ""
        return f"{' and '.join(self.keys)}: {self.verdict}, {need:.1f} GiB, {price}{beside}"


def changes(setup: Setup, most: int = 4) -> list[Change]:
    """The smallest changes after which the plan fits: of one key, and of two where that is worth more, `most` of each,
    the best first; of three where nothing less helps. [] if it fits, or if nothing does."""
    if verdict(setup) == FITS:
        return []
    singles = list(_singles(setup))
    found: list[Change] = []
    for together in (1, 2, 3):
        if together == 3 and found:
            break
        enough = 1.02 * max((change.worth for change in found), default=0.0)
        tried = (_changed(setup, chosen) for chosen in combinations(singles, together))
        more = [change for change in tried if change is not None and change.worth > enough]
        found += sorted(more, key=lambda change: -change.worth)[: most if together == 1 else most // 2]
    return found


def _changed(setup: Setup, steps: Sequence["_Step"]) -> Change | None:
    """The plan after `steps`; None if it is no better, or nothing that trains."""
    if len({step.about for step in steps}) < len(steps):
        return None
    after = setup
    for step in steps:
        after = step.apply(after)
    said = verdict(after)
    if not after.trains or said == TOO_LARGE or said == verdict(setup):
        return None
    rate = speed.estimate(after).tokens_per_second_per_gpu / speed.estimate(setup).tokens_per_second_per_gpu
    return Change(tuple(step.text for step in steps), after, rate, said)


@dataclass(frozen=True)
class _Step:
    about: str
    text: str
    apply: Callable[[Setup], Setup]


def _set(**values: Any) -> Callable[[Setup], Setup]:
    return lambda setup: replace(setup, **values)


def _smaller_batch(to: int) -> Callable[[Setup], Setup]:
    return lambda s: replace(s, micro_batch=to, accumulation=s.accumulation * s.micro_batch // to)


def _half_as_long(setup: Setup) -> Setup:
    return replace(setup, seq_len=setup.seq_len // 2, accumulation=setup.accumulation * 2)


def _more_nodes(times: int) -> Callable[[Setup], Setup]:
    return lambda s: replace(s, num_nodes=s.num_nodes * times, accumulation=max(1, s.accumulation // times))


def _singles(setup: Setup) -> Iterator[_Step]:
    """Changes of one key that save memory, with the tokens of a step as they are where that can be."""
    if setup.micro_batch > 1:
        smaller = max(d for d in range(1, setup.micro_batch) if setup.micro_batch % d == 0)
        yield _Step("batch", f"per_device_train_batch_size: {smaller}", _smaller_batch(smaller))
    if setup.checkpointing == "none":
        yield _Step("recompute", "activation_checkpointing: true", _set(checkpointing="full"))
    if not setup.flash and setup.gpu.bf16:
        yield _Step("attention", "attn_implementation: flash_attention_2", _set(flash=True))
    if setup.strategy.name in ("NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
        key = "fsdp_sharding_strategy: FULL_SHARD" if setup.fsdp == 1 else "fsdp_reshard_after_forward: true"
        yield _Step("strategy", key, _set(strategy=STRATEGIES["FULL_SHARD"]))
    if setup.optimizer.temporaries:
        yield _Step("optimizer", "optim: adamw_torch_fused", _set(optimizer=OPTIMIZERS["adamw_torch_fused"]))
    if not setup.offload:
        for name in ("paged_adamw_32bit", "adamw_8bit"):
            if OPTIMIZERS[name] != setup.optimizer:
                yield _Step("optimizer", f"optim: {name}", _set(optimizer=OPTIMIZERS[name]))
        yield _Step("offload", "fsdp_offload_params: true", _set(offload=True))
    if setup.master_bytes == 4 and setup.compute_bytes == 2:
        yield _Step("dtype", "param_dtype: bfloat16 (loses small updates)", _set(master_bytes=2))
    if setup.seq_len > 1024:
        yield _Step("length", f"max_length: {setup.seq_len // 2} (twice the global_batch_size)", _half_as_long)
    if not setup.strategy.within_node:
        for times in (2, 4):
            if setup.accumulation % times == 0:
                yield _Step("nodes", f"{setup.num_nodes * times} nodes", _more_nodes(times))
            elif times == 2:
                larger = f"{setup.num_nodes * times} nodes, and as much larger a global_batch_size"
                yield _Step("nodes", larger, _more_nodes(times))
