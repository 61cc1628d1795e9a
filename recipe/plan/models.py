"""Where a model's dimensions come from: the names of published models, config.json, or text."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from recipe.errors import UserError
from recipe.plan.shape import DIMENSIONS, Shape


def known(name: str) -> Shape | None:
    """The dimensions of a published model, by its name or hub id, of which the last part counts."""
    key = name.rsplit("/", 1)[-1].lower()
    for suffix in ("-hf", "-chat", "-instruct", "-base"):
        key = key.replace(suffix, "")
    key = re.sub(r"-v0\.[12]$", "", key)  # the third has another vocabulary
    for short, long in (("meta-llama", "llama"), ("llama2", "llama-2"), ("llama3", "llama-3"), ("gpt2", "gpt-2")):
        key = key.replace(short, long)
    return _KNOWN.get(key)


def by_name(name: str) -> Shape:
    """A model by a name that is known here.

    Raises:
        UserError: it is not known.
    """
    shape = known(name)
    if shape is None:
        near = get_close_matches(name.lower(), _KNOWN, n=1, cutoff=0.0)[0]
        raise UserError(
            f"the dimensions of '{name}' are not known here (the nearest known name is '{near}'); give a folder with "
            "config.json, or dimensions: hidden=4096,layers=32,heads=32,kv_heads=8,intermediate=14336,vocab=128256"
        )
    return shape


def from_text(text: str) -> Shape:
    """Dimensions as `hidden=4096,layers=32,...`; `kv_heads` is heads and `head_dim` hidden / heads, if not given."""
    given: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in DIMENSIONS or not value.strip().isdecimal():
            raise UserError(f"'{part}' in '{text}' is no dimension; give {', '.join(DIMENSIONS)} as key=number")
        given[key.strip()] = int(value)
    missing = [key for key in ("hidden", "layers", "heads", "intermediate", "vocab") if key not in given]
    if missing:
        raise UserError(f"'{text}' lacks {', '.join(missing)}")
    return _sized(text, **given)


def from_file(path: Path, name: str | None = None) -> Shape:
    """From a model's config.json; it is called by its folder, where it has no other name."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no configuration but {type(config).__name__}")
    return from_config(config, name or path.parent.name)


def from_config(config: Mapping[str, Any], name: str) -> Shape:
    """From the keys of a model's config.json.

    Raises:
        UserError: a key is missing, or the model's type is not known here.
    """
    kind = config.get("model_type")
    family = _FAMILIES.get(kind or "")
    if family is None:
        raise UserError(
            f"{name} has model_type '{kind}', and the planner knows {', '.join(sorted(_FAMILIES))}; give dimensions "
            "(hidden=...,layers=...) for a model of Llama's kind"
        )
    names, traits = family
    wanted = {key: names.get(key, standard) for key, standard in _LLAMA.items()}
    found = {key: config[theirs] for key, theirs in wanted.items() if config.get(theirs) is not None}
    if kind in ("gpt2", "mpt") and "hidden" in found:
        found.setdefault("intermediate", int(config.get("expansion_ratio", 4)) * found["hidden"])
    missing = [wanted[key] for key in ("hidden", "layers", "heads", "intermediate", "vocab") if key not in found]
    if missing:
        raise UserError(f"{name}: config.json lacks {', '.join(missing)}")
    extra: dict[str, Any] = dict(traits)
    if kind == "gpt2":
        extra["positions"] = config.get("n_positions", 1024)
    if kind == "mpt" and config.get("learned_pos_emb", True) and not _alibi(config):
        extra["positions"] = config.get("max_seq_len", 2048)
    biased = [key for key in ("attention_bias", "mlp_bias") if config.get(key)]
    if biased and kind in ("llama", "qwen3"):
        raise UserError(f"{name} has {' and '.join(biased)}, which the planner does not know")
    extra["max_positions"] = next((config[key] for key in _POSITIONS if key in config), None)
    if config.get("tie_word_embeddings") is not None:
        extra["tied"] = config["tie_word_embeddings"]
    return _sized(name, **found, **extra)


def to_config(shape: Shape) -> dict[str, Any]:
    """A config.json of a model of these dimensions.

    Raises:
        UserError: of a family that is not Llama's.
    """
    if not (shape.gated and shape.rms_norm) or shape.biases:
        raise UserError(f"{shape.name} is not of Llama's kind; give a folder with its config.json")
    kind, family = (
        ("qwen3", "Qwen3") if shape.qk_norms else ("qwen2", "Qwen2") if shape.qkv_biases else ("llama", "Llama")
    )
    sizes = {theirs: getattr(shape, ours) for ours, theirs in _LLAMA.items()}
    return sizes | {
        "model_type": kind,
        "architectures": [f"{family}ForCausalLM"],
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_positions or 131072,
    }


def _alibi(config: Mapping[str, Any]) -> bool:
    """Whether an MPT's attention counts distances, which leaves positions without weights."""
    return bool((config.get("attn_config") or {}).get("alibi", True))


def _sized(name: str, *, hidden: int, heads: int, **given: Any) -> Shape:
    given.setdefault("kv_heads", heads)
    if "head_dim" not in given:
        whole = isinstance(hidden, int) and isinstance(heads, int)
        if not whole or heads < 1 or hidden % heads:
            raise UserError(f"{name}: hidden {hidden} is not a multiple of heads {heads}; give head_dim")
        given["head_dim"] = hidden // heads
    return Shape(name=name, hidden=hidden, heads=heads, **given)


# The names of the dimensions in config.json, and what a family has that Llama has not.
_LLAMA = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
GPT2 = {
    "gated": False,
    "rms_norm": False,
    "tied": True,
    "biases": True,
    "dropout": True,
    "stepwise_gelu": True,
}
MPT = {"gated": False, "rms_norm": False, "tied": True}
_FAMILIES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "llama": ({}, {}),
    "mistral": ({}, {}),
    "qwen2": ({"head_dim": "-"}, {"qkv_biases": True}),
    "qwen3": ({}, {"qk_norms": True}),
    "gpt2": (
        {"hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "intermediate": "n_inner", "kv_heads": "-"},
        GPT2,
    ),
    "mpt": ({"hidden": "d_model", "layers": "n_layers", "heads": "n_heads", "kv_heads": "-"}, MPT),
}


def _llama(name: str, *sizes: int, **traits: Any) -> Shape:
    hidden, layers, heads, kv_heads, intermediate, vocab = sizes
    return _sized(
        name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        vocab=vocab,
        **traits,
    )


_KNOWN = {
    shape.name: shape
    for shape in (
        _llama("llama-2-7b", 4096, 32, 32, 32, 11008, 32000, max_positions=4096),
        _llama("llama-2-13b", 5120, 40, 40, 40, 13824, 32000, max_positions=4096),
        _llama("llama-2-34b", 8192, 48, 64, 8, 22016, 32000, max_positions=4096),
        _llama("llama-2-70b", 8192, 80, 64, 8, 28672, 32000, max_positions=4096),
        _llama("llama-3-8b", 4096, 32, 32, 8, 14336, 128256, max_positions=8192),
        _llama("llama-3-70b", 8192, 80, 64, 8, 28672, 128256, max_positions=8192),
        _llama("llama-3.2-1b", 2048, 16, 32, 8, 8192, 128256, max_positions=131072, tied=True),
        _llama("llama-3.2-3b", 3072, 28, 24, 8, 8192, 128256, max_positions=131072, tied=True),
        _llama("llama-3.1-405b", 16384, 126, 128, 8, 53248, 128256, max_positions=131072),
        _llama("mistral-7b", 4096, 32, 32, 8, 14336, 32000, max_positions=32768),
        _llama("smollm2-135m", 576, 30, 9, 3, 1536, 49152, max_positions=8192, tied=True),
        _llama("yi-34b", 7168, 60, 56, 8, 20480, 64000, max_positions=4096),
        _llama("qwen2.5-7b", 3584, 28, 28, 4, 18944, 152064, max_positions=131072, qkv_biases=True),
        _llama("qwen2.5-32b", 5120, 64, 40, 8, 27648, 152064, max_positions=131072, qkv_biases=True),
        _llama("qwen2.5-72b", 8192, 80, 64, 8, 29568, 152064, max_positions=131072, qkv_biases=True),
        _llama("qwen3-8b", 4096, 36, 32, 8, 12288, 151936, max_positions=40960, qk_norms=True),
        _llama("qwen3-32b", 5120, 64, 64, 8, 25600, 151936, max_positions=40960, qk_norms=True, head_dim=128),
        _llama("gpt-2-large", 1280, 36, 20, 20, 5120, 50257, max_positions=1024, positions=1024, **GPT2),
        _llama("gpt-2-xl", 1600, 48, 25, 25, 6400, 50257, max_positions=1024, positions=1024, **GPT2),
    )
}
_KNOWN |= {
    name: replace(_KNOWN[same], name=name, max_positions=131072)
    for name, same in (
        ("llama-3.1-8b", "llama-3-8b"),
        ("llama-3.1-70b", "llama-3-70b"),
        ("llama-3.3-70b", "llama-3-70b"),
    )
}
