import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from recipe.plan.flops import flops_per_token, matmul_parameters

LLAMA2_7B = LlamaConfig()  # transformers' defaults are its dimensions
NUM_7B = 6_738_415_616


def multiplying(config, number: int) -> int:
    return matmul_parameters(number, config.vocab_size * config.hidden_size, config.tie_word_embeddings)


def test_llama2_7b():
    """6 x (6,738,415,616 - 131,072,000 of the embedding) + 12 x 32 layers x 4,096 x 2,048 tokens."""
    assert multiplying(LLAMA2_7B, NUM_7B) == 6_607_343_616
    assert flops_per_token(6_607_343_616, 32, 4096, 2048) == 39_644_061_696 + 3_221_225_472


def test_a_tied_embedding_is_the_heads_and_counts():
    assert multiplying(LlamaConfig(tie_word_embeddings=True), NUM_7B) == NUM_7B


@pytest.mark.parametrize("folder", ["tiny_model", "tied_model"])
def test_they_are_what_a_training_step_does(folder, request):
    """Counted operation by operation, forward and backward; norms are no multiplications of matrices, and 1 % of the
    parameters of a model as small as this."""
    folder = request.getfixturevalue(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.arange(200).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    config = model.config
    parameters = multiplying(config, model.num_parameters())
    expected = flops_per_token(parameters, config.num_hidden_layers, config.hidden_size, 200)
    assert expected == pytest.approx(counter.get_total_flops() / 200, rel=0.01)
