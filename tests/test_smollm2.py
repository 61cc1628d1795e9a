"""A real pretrained model of Llama's architecture on real text: SmolLM2-135M-Instruct, Python's standard library."""

import os
import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.errors import UserError
from recipe.fetch import fetch_smollm2
from recipe.quickstart import stdlib_rows, write_rows
from tests.conftest import Launcher

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    try:
        fetch_smollm2(folder)
    except UserError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return folder


def test_smollm2(smollm2: Path, launch: Launcher, tmp_path: Path) -> None:
    """Loaded, it knows text (a wrong load would begin near ln 49,152 = 10.8); it learns; its export still answers."""
    data = tmp_path / "data.jsonl"
    write_rows(data, islice(stdlib_rows(Path(sysconfig.get_path("stdlib"))), 400))
    run = launch(
        tmp_path / "run",
        model_name_or_path=smollm2,
        dataset_name=data,
        chat_template_path="chatml",
        eos_token="<|im_end|>",
        max_length=256,
        packing=True,
        global_batch_size=4,
        max_steps=10,
        learning_rate=1e-4,
        save_strategy="no",
        activation_checkpointing=False,
        timeout=900,
    ).ok()
    losses = run.column("loss")
    assert "31 units (layers + 1)" in run.log
    assert losses[0] < 2.5
    assert sum(losses[-3:]) / 3 < losses[0]
    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "export")
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "export")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)
