import pytest
import torch
from torch.nn.functional import cross_entropy

from recipe.errors import UserError
from recipe.plan.setup import LOSSES, STRATEGIES
from tests.plan.cases import a_setup
from tests.plan.measured import peak_bytes

TOKENS, VOCAB, HIDDEN = 256, 4000, 8


def kept(logits: torch.Tensor, labels: torch.Tensor) -> None:
    """As a caller that holds fp32 logits until the backward pass has ended."""
    logits = logits.float()
    cross_entropy(logits, labels).backward()


def freed(logits: torch.Tensor, labels: torch.Tensor) -> None:
    loss = cross_entropy(logits.float(), labels)
    del logits
    loss.backward()


def chunked(logits: torch.Tensor, labels: torch.Tensor) -> None:
    parts = zip(logits.chunk(8), labels.chunk(8), strict=True)
    loss = sum(cross_entropy(part.float(), label, reduction="sum") for part, label in parts)
    del logits, parts
    loss.backward()


@pytest.mark.parametrize("loss", [kept, freed, chunked], ids=lambda loss: loss.__name__)
def test_bytes_of_a_logit_are_what_a_loss_takes(loss):
    """A head and its loss in bf16, from the hidden states; in so narrow a model the logits are nearly all."""
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    labels = torch.randint(0, VOCAB, (TOKENS,))

    def step() -> None:
        weight.grad = None
        loss(hidden @ weight.T, labels)

    step()
    assert peak_bytes(step) / (TOKENS * VOCAB) == pytest.approx(LOSSES[loss.__name__], rel=0.02)


def test_counts_that_cannot_be_are_told_at_once():
    with pytest.raises(UserError) as caught:
        a_setup(num_nodes=0, gpus_per_node=-1, seq_len=0, micro_batch=0, accumulation=0, checkpointing="some")
    assert caught.value.problems[0] == "num_nodes is 0; give 1 or more"
    assert caught.value.problems[-1].startswith("checkpointing is 'some'; give one of full, none, attention")
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize(
    ("strategy", "shards"),
    [("DDP", 1), ("NO_SHARD", 1), ("ZERO1", 1), ("SHARD_GRAD_OP", 16), ("FULL_SHARD", 16), ("HYBRID_SHARD", 8)],
)
def test_a_parameter_is_split_among(strategy, shards):
    assert a_setup(strategy=STRATEGIES[strategy]).shards == shards


def test_tokens():
    setup = a_setup(micro_batch=3, seq_len=1000, accumulation=2)
    assert setup.tokens == 3000
    assert setup.tokens_per_step == 3000 * 2 * 16
