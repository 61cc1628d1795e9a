"""The tokenizer, and the model on meta: its structure without its weights, in a second and on every rank."""

import importlib.util
import json
import tempfile
import warnings
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from recipe import hub
from recipe.arguments import ModelArguments
from recipe.errors import UserError
from recipe.loss import supports_summed_loss


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def find_folder(args: ModelArguments, download: bool) -> tuple[Path, list[str]]:
    """The local folder of the model's files, and warnings; a hub id is looked up in (or fetched to) the hub's cache.

    Without `download`, weights of a hub model that are not in the cache stay where they are, with a warning; then, and
    only then, the folder lacks weights that the hub has.

    Raises:
        UserError: no such folder, no config.json in it, or the hub does not give it.
    """
    name = args.model_name_or_path
    if name is None:
        raise UserError("no model: set model_name_or_path to a folder or a hub id")
    folder = Path(name)
    notes: list[str] = []
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
            raise UserError(f"model_name_or_path '{name}' is no folder and no hub id (owner/name)")
        folder, notes = hub.resolve(name, args.model_revision, download)
    if not (folder / "config.json").is_file():
        # from_pretrained would build a full-size default Llama here (transformers' config defaults).
        raise UserError(f"{folder} has no config.json; set model_name_or_path to a model's folder")
    return folder, notes


def load_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's configuration; one that comes with code of its own needs `trust_remote_code`."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, json.JSONDecodeError) as error:
        raise UserError(f"{folder}/config.json: {error}") from None


def positions_problems(positions: int | None, max_length: int | None) -> list[str]:
    """A model has been trained on so many positions (None: not known), and knows nothing of those after."""
    if positions is None or max_length is None or max_length <= positions:
        return []
    return [f"max_length is {max_length} and the model has {positions} positions; set at most {positions}"]


def load_tokenizer(
    folder: Path, trust_remote_code: bool = False, eos_token: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer, with a pad token: its own, else <unk>, else the end token; and with another end token, if asked.

    Padding never enters the loss, whichever token it is; an existing one is taken so that the embedding keeps its size.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise UserError(f"no tokenizer in {folder}: {error}") from None
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise UserError(f"eos_token '{eos_token}' is not in the tokenizer's vocabulary; set it to one that is")
        tokenizer.eos_token = eos_token
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    if "legacy" in vars(tokenizer):
        # Llama's: where spaces are set. transformers 5.24 forgets it in `save_pretrained`, and the exported tokenizer
        # would make other tokens than the run has trained on.
        tokenizer.init_kwargs["legacy"] = tokenizer.legacy
    return tokenizer


def attention_problems(args: ModelArguments, compute_dtype: torch.dtype, on_gpu: bool, here: bool = True) -> list[str]:
    """Why `attn_implementation` cannot be had; [] if it can. Flash Attention is never replaced in silence.

    Args:
        here: the run is on this machine, so that what is installed counts.
    """
    asked = args.attn_implementation or "sdpa"
    if "flash" not in asked:
        return []
    why = None
    if not on_gpu:
        why = "there is no GPU"
    elif compute_dtype != torch.bfloat16:
        why = f"it computes in bf16 or fp16 and the run computes in {compute_dtype}: set bf16: true"
    elif here and "/" not in asked and importlib.util.find_spec("flash_attn") is None:
        why = "the package flash-attn is not installed"
    if why is None:
        return []
    return [
        f"attn_implementation is {asked} and {why}. Ways out: install flash-attn "
        "(pip install flash-attn --no-build-isolation), set attn_implementation: kernels-community/flash-attn2 "
        "(pip install kernels), or set attn_implementation: sdpa"
    ]


def meta_model(
    config: PretrainedConfig, attention: str | None, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with parameters on meta in the master `dtype` and real buffers (RoPE in fp32)."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention or "sdpa", trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    return model


def load_generation_config(
    folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """The model's generation config, made valid, before training: Llama-2 ships one that cannot be saved again
    (do_sample false with temperature and top_p set; transformers#29988)."""
    try:
        if (folder / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(folder)
        else:
            generation = GenerationConfig.from_model_config(config)
        samples = generation.temperature not in (None, 1.0) or generation.top_p not in (None, 1.0)
        generation.do_sample = bool(generation.do_sample or samples)
        generation.eos_token_id = _with(generation.eos_token_id, tokenizer.eos_token_id)
        generation.pad_token_id = tokenizer.pad_token_id
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            generation.save_pretrained(scratch)
    except (ValueError, OSError) as error:
        raise UserError(f"{folder}/generation_config.json is not valid: {error}") from None
    return generation


def _with(ids: int | list[int] | None, end: int | None) -> int | list[int] | None:
    known = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if end is not None and end not in known:
        known = [*known, end]
    return known[0] if len(known) == 1 else known or None


def vocabulary_problems(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if len(tokenizer) <= config.vocab_size:
        return []
    return [
        f"the tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size} rows of embedding; resize the "
        "model once, offline, and set model_name_or_path to the result"
    ]


def head_problems(model: PreTrainedModel) -> list[str]:
    """The loss is computed from the hidden states by the head's plain projection."""
    if supports_summed_loss(model):
        return []
    return [
        f"{type(model).__name__} has a bias in its head, or scales or caps its logits, which this recipe's loss does "
        "not do; set model_name_or_path to a model of Llama's kind"
    ]
