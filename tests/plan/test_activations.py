"""Against what autograd keeps for the backward pass of real layers, on CPU and to the byte."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from recipe.plan import activations
from recipe.plan.models import from_config
from recipe.plan.setup import CHECKPOINTING
from recipe.plan.shape import Shape
from tests.plan.cases import a_setup
from tests.plan.measured import Alive

ROWS, LENGTH, LAYERS = 2, 64, 3
TOKENS = ROWS * LENGTH
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_hidden_layers": LAYERS,
    "vocab_size": 300,
}
MHA, GQA = {"num_key_value_heads": 8}, {"num_key_value_heads": 2}
GPT2_SIZES = {"n_embd": 128, "n_head": 8, "n_layer": LAYERS, "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def of_llamas_kind(kind: type[PretrainedConfig], **changes: Any) -> PretrainedConfig:
    return kind(**SIZES, bos_token_id=1, eos_token_id=2, **changes)


def shape_of(config: PretrainedConfig) -> Shape:
    return from_config(config.to_dict(), "tiny")


class Saved:
    """What autograd saves while it counts, by storage, without what is no activation: parameters, buffers, tables of
    positions, and what is of whole numbers or bools (tokens, the causal mask)."""

    def __init__(self, model: PreTrainedModel):
        self.left_out = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self.kept: dict[int, torch.Tensor] = {}
        self.counts = False
        for module in model.modules():
            if module.__class__.__name__.endswith("RotaryEmbedding"):
                module.register_forward_hook(lambda module, args, tables: self.leave_out(tables))

    def leave_out(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tables = tensors  # alive, or their numbers would be given to others
        self.left_out |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        if self.counts and tensor.is_floating_point() and key not in self.left_out:
            self.kept[key] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())

    @contextmanager
    def counting(self):
        self.counts = True
        yield
        self.counts = False


def build(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()


def run(model: PreTrainedModel, saved: Saved) -> torch.Tensor:
    ids = torch.arange(TOKENS).reshape(ROWS, LENGTH) % model.config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        return model(input_ids=ids, use_cache=False).logits


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    (layers,) = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return layers


def saved_by_a_layer(model: PreTrainedModel) -> float:
    """Bytes a token that the first layer saves."""
    saved, layer = Saved(model), layers_of(model)[0]
    run_layer = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with saved.counting():
            return run_layer(*args, **kwargs)

    layer.forward = forward
    run(model, saved)
    return saved.bytes / TOKENS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "config",
    [
        of_llamas_kind(LlamaConfig, **MHA),
        of_llamas_kind(LlamaConfig, **GQA),
        of_llamas_kind(MistralConfig, **GQA),
        of_llamas_kind(Qwen2Config, **GQA),
        of_llamas_kind(Qwen3Config, head_dim=16, **GQA),
        of_llamas_kind(Qwen3Config, head_dim=32, **GQA),
    ],
    ids=["Llama", "Llama, grouped", "Mistral", "Qwen2", "Qwen3", "Qwen3, wide heads"],
)
def test_a_layer_keeps_what_autograd_saves(config, attention, dtype):
    """sdpa's kernel keeps here what flash attention keeps on a GPU: its output and a normalizer a head and token."""
    planned = activations.whole_layer(shape_of(config), dtype.itemsize, attention == "sdpa", LENGTH)
    assert saved_by_a_layer(build(config, dtype, attention)) == planned


def test_a_layer_of_gpt2_keeps_masks_of_a_byte():
    """Three dropouts keep a mask each: of the probabilities, of attention's output and of the MLP's. On a GPU a mask is
    of bools; on CPU it is of the input's dtype, 3 bytes more."""
    config = GPT2Config(**GPT2_SIZES)
    planned = activations.whole_layer(shape_of(config), 4, False, LENGTH)
    on_cpu = 3 * (config.n_head * LENGTH + 2 * config.n_embd)
    assert saved_by_a_layer(build(config, torch.float32, "eager")) == planned + on_cpu


def test_a_layer_of_gpt2_without_dropout():
    config = GPT2Config(**GPT2_SIZES, **NO_DROPOUT)
    planned = activations.whole_layer(replace(shape_of(config), dropout=False), 4, False, LENGTH)
    assert saved_by_a_layer(build(config, torch.float32, "eager")) == planned


def test_a_layer_of_mpt():
    """GELU in one kernel, LayerNorm without biases. The causal mask is of bools and one for all layers."""
    config = MptConfig(d_model=128, n_heads=8, n_layers=LAYERS, vocab_size=300)
    planned = activations.whole_layer(shape_of(config), 4, False, LENGTH)
    assert saved_by_a_layer(build(config, torch.float32, "eager")) == planned


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (of_llamas_kind(LlamaConfig, **GQA), torch.bfloat16),
        (of_llamas_kind(LlamaConfig, **GQA), torch.float32),
        (of_llamas_kind(Qwen3Config, head_dim=32, **GQA), torch.bfloat16),
        (GPT2Config(**GPT2_SIZES, **NO_DROPOUT), torch.float32),
    ],
    ids=["Llama in bf16", "Llama in fp32", "Qwen3", "GPT-2"],
)
def test_a_model_keeps_what_autograd_saves(config, dtype, checkpointing):
    """All layers and the final norm; checkpointed, a layer keeps its input alone."""
    model = build(config, dtype, "sdpa")
    if checkpointing == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    saved = Saved(model)
    with saved.counting():
        run(model, saved)
    setup = a_setup(
        shape=replace(shape_of(config), dropout=False),
        compute_bytes=dtype.itemsize,
        seq_len=LENGTH,
        micro_batch=ROWS,
        checkpointing=checkpointing,
    )
    assert saved.bytes == activations.kept(setup) + activations.final_norm(setup)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("flash", [True, False])
def test_what_is_kept_and_what_comes_up_anew_are_a_whole_layer(checkpointing, flash):
    """In the backward pass of a layer it is all there, whatever was kept of it."""
    setup = a_setup(checkpointing=checkpointing, flash=flash, seq_len=512)
    whole = activations.whole_layer(setup.shape, 2, flash, 512) * setup.tokens
    gradients = activations.recomputed(a_setup(checkpointing="none", flash=flash, seq_len=512))
    kept = setup.tokens * activations.kept_layer(setup)
    if checkpointing == "alternate":  # the layer that is recomputed
        kept = setup.tokens * setup.compute_bytes * setup.shape.hidden
    assert kept + activations.recomputed(setup) == pytest.approx(whole + gradients)


def test_attention_that_is_recomputed_leaves_what_flash_attention_leaves_out():
    whole = activations.kept_layer(a_setup(checkpointing="none", flash=False))
    rest = activations.kept_layer(a_setup(checkpointing="attention", flash=False))
    assert whole - rest == activations.scores(a_setup().shape, 2, 2048) == 6 * 64 * 2048
    assert activations.kept_layer(a_setup(checkpointing="attention")) == activations.kept_layer(
        a_setup(checkpointing="none")
    )


def test_korthikantis_figure():
    """34 + 5 a s / h bytes times s b h, of a GPT layer in 16 bits with dropout (arXiv 2205.05198, equation 1). In
    transformers, and under autocast, softmax is of fp32: a score is 2 bytes more. Norms' statistics, 16 bytes a token,
    are left out there."""
    shape = replace(shape_of(GPT2Config(n_embd=1024, n_head=16)), stepwise_gelu=False)
    theirs = 34 * 1024 + 5 * 16 * 512
    assert activations.whole_layer(shape, 2, False, 512) == theirs + 2 * 16 * 512 + 16


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (of_llamas_kind(LlamaConfig, **MHA), torch.bfloat16),
        (of_llamas_kind(LlamaConfig, **MHA), torch.float32),
        (GPT2Config(**GPT2_SIZES), torch.float32),
    ],
    ids=["Llama in bf16", "Llama in fp32", "GPT-2"],
)
def test_scores_gradients_are_what_the_backward_pass_has_at_its_peak(config, dtype):
    """Of one layer, so small beside the length that the scores are nearly all."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    if isinstance(config, GPT2Config):
        small = {"n_embd": 32, "n_inner": 32, "n_head": 4}
    length = 1024
    model = build(type(config)(**{**config.to_dict(), **small, "num_hidden_layers": 1}), dtype, "eager").base_model
    model.zero_grad(set_to_none=False)
    setup = a_setup(
        shape=shape_of(model.config),
        compute_bytes=dtype.itemsize,
        flash=False,
        seq_len=length,
        checkpointing="none",
    )
    with Alive() as alive:
        hidden = model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False).last_hidden_state
        kept = alive.peak = alive.bytes
        hidden.backward(torch.ones_like(hidden))
    assert 0.94 < (alive.peak - kept) / activations.recomputed(setup) < 1
