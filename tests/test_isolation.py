"""The gate that packed rows stay apart: it passes where they do, and stops where they do not."""

import datasets
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MixtralConfig, Qwen3Config
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from recipe.errors import UserError
from recipe.isolation import MAX_TOKENS, check_isolation

CPU = torch.device("cpu")


def blocks(*rows_of_blocks):
    """Packed blocks of rows of these lengths."""
    made = []
    for number, lengths in enumerate(rows_of_blocks):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 300, (sum(lengths),), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": ids, "seq_lengths": list(lengths)})
    return datasets.Dataset.from_list(made)


def collator(**kwargs):
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, **kwargs)


def check(config=None, attention="sdpa", collate=None, packed=None):
    return check_isolation(
        config or LlamaConfig(vocab_size=300), attention, CPU, collate or collator(), packed or blocks([30, 20, 50])
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(vocab_size=300, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8),
        Qwen3Config(vocab_size=300),
        Gemma3TextConfig(vocab_size=300, sliding_window=16),
        MixtralConfig(vocab_size=300),
    ],
    ids=lambda config: config.model_type,
)
def test_rows_are_apart_in_models_of_several_kinds(config, attention):
    line = check(config, attention)
    assert line.startswith("packing: 3 rows of a batch come out of a small ")
    assert float(line.rsplit(" ", 1)[1]) > 0.5, "a leak would have been seen"


@pytest.mark.parametrize("num_tokens", [None, 64])
def test_padding_at_the_end_is_no_leak(num_tokens):
    check(collate=collator(pad_to_multiple_of=num_tokens))


def without_positions(rows):
    batch = collator()(rows)
    del batch["position_ids"]
    return batch


def with_a_mask_of_ones(rows):
    """As in case D7: an all-ones mask makes the attention forget the positions."""
    batch = collator()(rows)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def with_positions_that_go_on(rows):
    """Apart for flash attention, which looks at the lengths, and not for any other."""
    batch = collator()(rows)
    return {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1])[None]}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("collate", [without_positions, with_a_mask_of_ones, with_positions_that_go_on])
def test_a_leak_is_refused(collate, attention):
    with pytest.raises(
        UserError, match=f"packed rows see each other in LlamaForCausalLM under .* {attention}: .* differ"
    ):
        check(collate=collate, attention=attention)


def test_a_gate_that_cannot_tell_says_so(monkeypatch):
    monkeypatch.setattr("recipe.isolation.TOLERANCE", {torch.float32: 100.0})
    with pytest.raises(UserError, match="could not be told on a small LlamaForCausalLM: a leak shows by"):
        check()


def test_a_model_that_cannot_be_tried_is_refused_with_the_way_out():
    with pytest.raises(UserError, match="could not be tried on a small llama model .*no_such.*; set packing: false"):
        check(attention="no_such")


def test_the_random_numbers_of_the_run_are_untouched():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    check()
    assert torch.equal(torch.rand(3), expected)


def test_a_block_with_several_rows_is_found_wherever_it_is_and_long_rows_are_cut():
    assert check(packed=blocks([40], [10], [30, 20, 5])).startswith("packing: 3 rows")
    assert check(packed=blocks(*[[9]] * 500, [3, 3, 3])).startswith("packing: 3 rows")
    assert check(packed=blocks([4 * MAX_TOKENS, 5, 4 * MAX_TOKENS])).startswith("packing: 2 rows")


def test_blocks_of_one_row_are_joined_as_a_batch_of_several_is():
    assert check(packed=blocks([40], [10], [7])).startswith("packing: 2 rows")
    assert check(packed=blocks([4 * MAX_TOKENS], [4 * MAX_TOKENS])).startswith("packing: 2 rows")
    assert check(packed=blocks([40])) == "packing: there is one row, and nothing to keep apart"
