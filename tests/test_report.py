"""A run's report: the right numbers, a picture, and an export that is whole."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from recipe import report
from recipe.errors import UserError


def step(number: int, **changes: object) -> dict:
    values = {"step": number, "loss": 10.0 / number, "tokens_per_second": 1000.0 * number}
    return values | {"peak_memory_bytes": [1_500_000_000 + number, 700_000_000]} | changes


def test_the_lines() -> None:
    steps = [step(number) for number in range(1, 6)]
    assert report.loss_line(steps, 2) == "10.00 → 5.00 (steps 1 to 2), stopped and resumed, 3.33 → 2.00 (steps 3 to 5)"
    assert report.speed_line(steps) == "3,000 tokens/s on 2 ranks (median step)"
    assert report.memory_line(steps) == "peak 1.50 GB on rank 0, 0.70 GB on rank 1"
    on_gpu = [step(1, mfu=0.4, peak_memory_bytes=[2_000_000_000])]
    assert report.speed_line(on_gpu) == "1,000 tokens/s on 1 rank (median step), 40.0% of the GPUs' peak"


@pytest.mark.parametrize("resumed_at", [0, 5, 9])
def test_a_resume_outside_the_run_is_refused(resumed_at: int) -> None:
    with pytest.raises(UserError, match=f"steps 1 to 5; --resumed-at {resumed_at} is not inside"):
        report.loss_line([step(number) for number in range(1, 6)], resumed_at)


def test_metrics_without_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (step(1), {"step": 1, "eval_loss": 3.0}, step(2))))
    assert [line["step"] for line in report.read_metrics(path)] == [1, 2]
    path.write_text("")
    with pytest.raises(UserError, match="has no training step"):
        report.read_metrics(path)


def test_the_curve_is_a_picture_with_a_line_in_it(tmp_path: Path) -> None:
    report.draw_loss([step(number) for number in range(1, 20)], 9, tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size == (1008, 576)
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 20)}
    assert (0x2A, 0x6F, 0x97) in colors and (255, 255, 255) in colors


def test_an_export_is_loaded_and_answers(tiny_model: Path) -> None:
    model, tokenizer = report.load_export(tiny_model)
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    assert not model.training
    assert isinstance(report.answer(model, tokenizer, "the quick brown"), str)


def test_an_export_that_lacks_a_weight_is_not_taken(tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_foot.weight"] = torch.zeros_like(weights.pop("lm_head.weight"))
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match=r"lm_head.weight.*lm_foot.weight"):
        report.load_export(tmp_path)
    with pytest.raises(UserError, match="holds no export"):
        report.load_export(tmp_path / "nothing")
