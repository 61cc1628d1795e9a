from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from recipe import loss
from recipe.loss import _LinearCrossEntropy, attach_summed_loss, supports_summed_loss


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tokens to a chunk, so that 50 tokens are seven chunks and a rest."""
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 7)


def inputs(tokens: int = 50, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(40, 16, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(40, (tokens,))


def expected(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


# -- the function ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 7, 8, 14, 50])
@pytest.mark.parametrize("scale", [1.0, 0.003, -2.0])
def test_value_and_gradients_are_those_of_cross_entropy(tokens, scale, chunks):
    """Whatever the number of chunks, and under a scaled gradient from above: a mean over tokens of the global batch."""
    hidden, weight, labels = inputs(tokens)
    reference = expected(hidden, weight, labels)
    wanted = torch.autograd.grad(reference * scale, (hidden, weight))
    total = _LinearCrossEntropy.apply(hidden, weight, labels)
    found = torch.autograd.grad(total * scale, (hidden, weight))
    assert total.dtype == torch.float32 and total.shape == ()
    torch.testing.assert_close(total, reference, rtol=1e-6, atol=1e-6)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_chunks_do_not_change_the_result(monkeypatch):
    whole = _LinearCrossEntropy.apply(*inputs())
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 1)
    torch.testing.assert_close(_LinearCrossEntropy.apply(*inputs()), whole, rtol=1e-6, atol=1e-6)


def test_large_logits_do_not_overflow(chunks):
    hidden, weight, labels = inputs()
    total = _LinearCrossEntropy.apply(hidden * 1e4, weight, labels)
    assert torch.isfinite(total)
    torch.testing.assert_close(total, expected(hidden * 1e4, weight, labels))


def test_under_autocast_the_head_computes_in_bf16_and_the_loss_in_fp32(chunks):
    """Gradients arrive in the parameters' own dtype."""
    hidden, weight, labels = inputs()
    exact = torch.autograd.grad(expected(hidden, weight, labels), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        total = _LinearCrossEntropy.apply(hidden, weight, labels)
        reference = expected(hidden, weight, labels)
    total.backward()
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, reference, rtol=1e-4, atol=0)
    for parameter, wanted in zip((hidden, weight), exact, strict=True):
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - wanted).norm() / wanted.norm()
        assert 0 < error < 0.01


def test_bf16_parameters_without_autocast(chunks):
    hidden, weight, labels = inputs(dtype=torch.bfloat16)
    total = _LinearCrossEntropy.apply(hidden, weight, labels)
    total.backward()
    torch.testing.assert_close(total, expected(hidden, weight, labels), rtol=1e-4, atol=0)
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_no_labelled_token_is_a_loss_of_zero_with_gradients_of_zero():
    """D5: a mean over them would be NaN; and a rank without one has to take part in the backward pass all the same."""
    hidden, weight, labels = inputs(0)
    total = _LinearCrossEntropy.apply(hidden, weight, labels)
    total.backward()
    assert total.item() == 0.0
    assert hidden.grad.shape == (0, 16) and torch.equal(weight.grad, torch.zeros(40, 16))


def test_nothing_is_kept_where_no_gradient_is_asked_for(chunks):
    hidden, weight, labels = inputs()
    with torch.no_grad():
        total = _LinearCrossEntropy.apply(hidden, weight, labels)
    assert not total.requires_grad
    torch.testing.assert_close(total, expected(hidden, weight, labels).detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_one_of_the_two_may_be_frozen(frozen, chunks):
    hidden, weight, labels = inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    trained = weight if frozen == "hidden" else hidden
    (wanted,) = torch.autograd.grad(expected(hidden, weight, labels), trained)
    (found,) = torch.autograd.grad(_LinearCrossEntropy.apply(hidden, weight, labels), trained)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


# -- the model ---------------------------------------------------------------------------------------------------------

BATCH = {
    "input_ids": torch.tensor([[1, 5, 6, 7, 8, 2], [1, 9, 10, 2, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
    "labels": torch.tensor([[-100, -100, 6, 7, 8, 2], [-100, 9, 10, 2, -100, -100]]),
}
LABELLED = 7


def pair(folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model as it is, and with the summed loss attached."""
    plain, attached = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    attach_summed_loss(attached)
    return plain, attached


@pytest.mark.parametrize("folder", ["tiny_model", "tied_model"])
def test_the_summed_loss_is_the_models_own_times_the_labelled_tokens(folder, request, chunks):
    """T1: summed, so that it can be divided by the tokens of the whole global batch."""
    plain, attached = pair(request.getfixturevalue(folder))
    mean = plain(**BATCH).loss
    (mean * LABELLED).backward()
    total = attached(**BATCH, summed_loss=True)
    total.backward()
    torch.testing.assert_close(total, mean * LABELLED, rtol=1e-6, atol=1e-6)
    for (name, one), (_, other) in zip(attached.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_packed_rows_count_as_much_as_alone(tiny_model):
    """D7: position_ids restart, and the first token of a row has no label."""
    _, attached = pair(tiny_model)
    rows = [torch.tensor([[1, 5, 6, 7, 2]]), torch.tensor([[1, 9, 10, 2]])]
    alone = sum(attached(input_ids=row, labels=row, summed_loss=True) for row in rows)
    ids = torch.cat(rows, dim=1)
    labels, positions = ids.clone(), torch.cat([torch.arange(row.size(1)) for row in rows]).unsqueeze(0)
    labels[positions == 0] = -100
    packed = attached(input_ids=ids, labels=labels, position_ids=positions, summed_loss=True)
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)


def test_a_batch_without_labels_gives_zero_and_gradients(tiny_model):
    _, attached = pair(tiny_model)
    total = attached(**{**BATCH, "labels": torch.full((2, 6), -100)}, summed_loss=True)
    total.backward()
    assert total.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in attached.parameters())


def test_every_other_call_is_as_before(tiny_model):
    plain, attached = pair(tiny_model)
    for call in (BATCH, {**BATCH, "labels": None}, {**BATCH, "logits_to_keep": 1, "labels": None}):
        with torch.no_grad():
            wanted, found = plain(**call), attached(**call)
        assert torch.equal(wanted.logits, found.logits)
        assert (wanted.loss is None and found.loss is None) or torch.equal(wanted.loss, found.loss)
    assert plain.state_dict().keys() == attached.state_dict().keys()


def test_generation_is_as_before(tiny_model):
    """In a batch with padding on the left, where positions are made from the mask."""
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [8, 9, 10, 11, 12, 13]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    plain, attached = (
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for model in pair(tiny_model)
    )
    assert torch.equal(plain.sequences, attached.sequences)
    torch.testing.assert_close(plain.logits, attached.logits, rtol=0, atol=1e-6)


# -- which models ------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def test_llamas_are_supported(tiny_model, tied_model):
    for folder in (tiny_model, tied_model):
        assert supports_summed_loss(AutoModelForCausalLM.from_pretrained(folder))


def test_heads_that_do_more_than_project_are_not_supported():
    """A bias, a scale, a cap on the logits: left out of the loss, the model would be trained on another one."""
    models = {
        "bias": PhiForCausalLM(PhiConfig(**SMALL)),
        "logits_scaling": GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0)),
        "logit_scale": CohereForCausalLM(CohereConfig(**SMALL)),
        "softcapping": Gemma2ForCausalLM(Gemma2Config(**SMALL)),
    }
    supported = {name: supports_summed_loss(model) for name, model in models.items()}
    assert supported == dict.fromkeys(models, False)


def test_a_scale_of_one_is_supported():
    assert supports_summed_loss(GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=1.0)))
