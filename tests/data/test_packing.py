import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from recipe.data.packing import pack

MAX_LENGTH = 32


def make_rows(num_rows: int) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, MAX_LENGTH + 1, (num_rows,), generator=generator).tolist()
    ids = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": [[-100, *row[1:]] for row in ids]})


def unpack(blocks: datasets.Dataset, column: str) -> list[list[int]]:
    rows = []
    for block in blocks:
        start = 0
        for length in block["seq_lengths"]:
            rows.append(block[column][start : start + length])
            start += length
        assert start == len(block[column]) <= MAX_LENGTH
    return rows


def test_blocks_hold_every_row_once_and_whole():
    rows = make_rows(200)
    blocks = pack(rows, MAX_LENGTH)
    assert blocks.column_names == ["input_ids", "labels", "seq_lengths"]
    for column in ("input_ids", "labels"):
        assert sorted(unpack(blocks, column)) == sorted(rows[column])
    assert len(blocks) < 125, "200 rows of 17 tokens on average fill 107 blocks of 32"


def test_packing_is_deterministic_over_batches(monkeypatch):
    monkeypatch.setattr("recipe.data.packing.BATCH_ROWS", 64)
    rows = make_rows(200)
    assert pack(rows, MAX_LENGTH).to_dict() == pack(rows, MAX_LENGTH).to_dict()
    assert sorted(unpack(pack(rows, MAX_LENGTH), "input_ids")) == sorted(rows["input_ids"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_row_has_the_logits_it_has_alone(attention):
    """Case D7, through TRL's collator, for every row of a batch of several blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval()
    blocks = pack(make_rows(12), MAX_LENGTH)
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(list(blocks))
    assert "attention_mask" not in batch, "an all-ones mask makes rows see their neighbours"
    labels, positions = batch.pop("labels"), batch["position_ids"]
    with torch.no_grad():
        # Without a cache, as in training: with one, transformers takes the batch for a single row, and rows leak.
        batch["use_cache"] = False
        packed = model(**batch).logits[0]
        start = 0
        for ids in unpack(blocks, "input_ids"):
            end = start + len(ids)
            alone = model(input_ids=torch.tensor([ids])).logits[0]
            torch.testing.assert_close(packed[start:end], alone, atol=1e-5, rtol=0)
            assert positions[0, start:end].tolist() == list(range(len(ids)))
            assert labels[0, start] == -100
            assert labels[0, start + 1 : end].tolist() == ids[1:]
            start = end
        assert start == packed.shape[0]
        for leak in ({"attention_mask": torch.ones_like(batch["input_ids"])}, {"use_cache": True}):
            leaking = model(**batch | leak).logits[0]
            assert (leaking - packed).abs().max() > 1e-3, "this test can tell rows that see each other"


def test_the_loss_of_a_packed_epoch_is_the_unpacked_ones_token_by_token():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    ).eval()

    def losses(batch: dict) -> torch.Tensor:
        """The loss of each labelled token, in order."""
        labels = batch.pop("labels")[0, 1:]
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits[0, :-1]
        labelled = labels != -100
        return torch.nn.functional.cross_entropy(logits[labelled], labels[labelled], reduction="none")

    rows = make_rows(60)
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    blocks = pack(rows, MAX_LENGTH)
    packed = torch.cat([losses(collate([block])) for block in blocks])
    by_row = {tuple(row["input_ids"]): losses(collate([row])) for row in rows}
    alone = torch.cat([by_row[tuple(ids)] for ids in unpack(blocks, "input_ids")])
    assert len(alone) == sum(len(ids) - 1 for ids in rows["input_ids"])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
