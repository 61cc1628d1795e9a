import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from recipe.plan.flops import flops_per_token, matmul_parameters, peak_flops

LLAMA2_7B = LlamaConfig()  # transformers' defaults are its dimensions
NUM_7B = 6_738_415_616


def test_llama2_7b():
    """6 x (6,738,415,616 - 131,072,000 of the embedding) + 12 x 32 layers x 4,096 x 2,048 tokens."""
    multiplying = matmul_parameters(LLAMA2_7B, NUM_7B)
    assert multiplying == 6_607_343_616
    assert flops_per_token(LLAMA2_7B, multiplying, 2048) == 39_644_061_696 + 3_221_225_472


def test_a_tied_embedding_is_the_heads_and_counts():
    assert matmul_parameters(LlamaConfig(tie_word_embeddings=True), NUM_7B) == NUM_7B


@pytest.mark.parametrize("folder", ["tiny_model", "tied_model"])
def test_they_are_what_a_training_step_does(folder, request):
    """Counted operation by operation, forward and backward; norms are no multiplications of matrices, and 1 % of the
    parameters of a model as small as this."""
    folder = request.getfixturevalue(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.arange(200).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    multiplying = matmul_parameters(model.config, model.num_parameters())
    assert flops_per_token(model.config, multiplying, 200) == pytest.approx(counter.get_total_flops() / 200, rel=0.01)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Tesla T4", None),
        ("cpu", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peak_of_a_gpu_by_its_name(name, peak):
    assert peak_flops(name) == peak
