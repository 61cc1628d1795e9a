"""A gate before the weights are read: rows packed into one block cannot see each other, in this very model class.

What keeps them apart is positions that restart, and an attention that looks at them; whether it does depends on the
model's code, on `attn_implementation` and on library versions, and nothing in the loss tells when it does not (it gets
better). So a block of the run's own data goes through the run's own collator into a small model of the run's own class,
and every row has to come out as it does alone. A control in which positions do not restart shows that a leak would be
seen.
"""

import copy
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from recipe.errors import UserError

MAX_TOKENS = 2048  # of the block; attention that is not fused needs memory that grows with the square
# Difference of hidden states after the last norm, where values are about 1: in fp32 the largest one. Flash Attention
# knows no fp32; in bf16 it is the mean over tokens of each one's largest, for rounding sends a few tokens of a mixture
# of experts to another expert.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "initializer_range": 0.2,  # ten times the usual: what a row sees has to show in two layers
    "attention_dropout": 0.0,
}


def check_isolation(
    config: PretrainedConfig,
    attention: str,
    device: torch.device,
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
    blocks: datasets.Dataset,
    trust_remote_code: bool = False,
) -> str:
    """Pass a packed block through a small model; returns a line for the log.

    Args:
        config: of the run's model.
        attention: the attention that the run's model uses.
        collate: the run's collator.
        blocks: packed data, with `seq_lengths`.

    Raises:
        UserError: a row saw its neighbours, or the gate could not tell.
    """
    batch_rows, lengths = _batch(blocks)
    if len(lengths) < 2:
        return "packing: there is one row, and nothing to keep apart"
    dtype = torch.bfloat16 if "flash" in attention else torch.float32
    try:
        model = _small_model(config, attention, dtype, device, trust_remote_code)
        batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in collate(batch_rows).items()}
        del batch["labels"]
        packed = _hidden(model, batch)
        joined = {"input_ids": batch["input_ids"], "position_ids": torch.arange(packed.shape[0], device=device)[None]}
        leaking = _hidden(model, joined)
        rows = batch["input_ids"][:, : sum(lengths)].split(lengths, dim=1)  # without padding
        alone = torch.cat([_hidden(model, {"input_ids": ids}) for ids in rows])
        worst, leak = (_apart(hidden[: len(alone)], alone, dtype) for hidden in (packed, leaking))
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"whether packed rows stay apart could not be tried on a small {config.model_type} model "
            f"({type(error).__name__}: {error}); set packing: false, or another attn_implementation"
        ) from error
    allowed, name = TOLERANCE[dtype], type(model).__name__
    if not worst <= allowed:
        raise UserError(
            f"packed rows see each other in {name} under attn_implementation {attention}: hidden states of a packed "
            f"row differ from the lone row's by {worst:.2g} (allowed {allowed:g}); set packing: false, or another "
            "attn_implementation"
        )
    if not leak > 3 * allowed:
        raise UserError(
            f"whether packed rows stay apart could not be told on a small {name}: a leak shows by {leak:.2g} and "
            f"{allowed:g} is allowed; set packing: false"
        )
    return (
        f"packing: {len(lengths)} rows of a batch come out of a small {name} ({attention}) as they do "
        f"alone, within {worst:.1g}; seeing each other they would differ by {leak:.1g}"
    )


def _apart(hidden: torch.Tensor, alone: torch.Tensor, dtype: torch.dtype) -> float:
    """How far two times the same hidden states, [tokens, hidden], are apart."""
    by_token = (hidden - alone).abs().amax(dim=1)
    return (by_token.max() if dtype == torch.float32 else by_token.mean()).item()


def _batch(blocks: datasets.Dataset) -> tuple[list[dict[str, Any]], list[int]]:
    """A block with several rows, or two blocks where there is none (a collator joins them too), cut to what the gate
    can take; and the lengths of the rows."""
    counts = pc.list_value_length(blocks.with_format("arrow")[:]["seq_lengths"]).to_numpy()
    several = np.flatnonzero(counts > 1)
    chosen = several[:1] if len(several) else np.arange(min(2, len(blocks)))
    cut: list[dict[str, Any]] = []
    kept: list[int] = []
    for at in chosen.tolist():
        block, start = blocks[at], 0
        ids: list[int] = []
        lengths: list[int] = []
        for length in block["seq_lengths"]:
            some = min(length, MAX_TOKENS // 2)
            if sum(kept) + some > MAX_TOKENS:
                break
            ids += block["input_ids"][start : start + some]
            lengths.append(some)
            kept.append(some)
            start += length
        cut.append({"input_ids": ids, "labels": ids, "seq_lengths": lengths})
    return [block for block in cut if block["input_ids"]], kept


def _small_model(
    config: PretrainedConfig, attention: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> torch.nn.Module:
    """A random model of the class that `config` asks for, as small as it goes, with each kind of layer."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    known = text.to_dict()
    for key, value in SIZES.items():
        if known.get(key) is not None:
            setattr(text, key, value)
    heads, key_heads = known.get("num_attention_heads"), known.get("num_key_value_heads")
    if key_heads is not None:
        text.num_key_value_heads = 4 if key_heads == heads else 2
    kinds = known.get("layer_types")
    text.num_hidden_layers = 2
    if kinds:
        text.layer_types = list(dict.fromkeys(kinds)) if len(set(kinds)) > 1 else kinds[:2]
        text.num_hidden_layers = len(text.layer_types)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            small, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    return model.eval()


@torch.no_grad()
def _hidden(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Hidden states after the last norm, [tokens, hidden], computed as training does (`recipe.loss`)."""
    return model.base_model(**inputs, use_cache=False).last_hidden_state[0].float()
