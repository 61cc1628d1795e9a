"""What a finished run did: its numbers from metrics.jsonl, its loss as a picture, and its export put to use.

recipe quickstart report runs/quickstart --resumed-at 30
"""

import json
import statistics
import textwrap
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws into files, with no display
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, logging

from recipe.callbacks.metrics import FILE as METRICS
from recipe.errors import UserError
from recipe.run_folder import EXPORT

RUN, CURVE = "run", "loss.png"
QUESTION = "Write the Python function __len__(self).\nReturn the number of items in the container."
SAMPLE_TOKENS = 48


def report(folder: Path, resumed_at: int) -> None:
    """Print a summary of the quickstart's run, draw its loss, load its export and let it answer.

    Args:
        folder: of the quickstart; the run is in `folder`/run.
        resumed_at: last step before the run was stopped.

    Raises:
        UserError: the run has no metrics, or its export is not there.
        RuntimeError: the export lacks weights of its model, or has others.
    """
    run_dir = folder / RUN
    steps = read_metrics(run_dir / METRICS)
    draw_loss(steps, resumed_at, run_dir / CURVE)
    model, tokenizer = load_export(run_dir / EXPORT)
    lines = {
        "loss": loss_line(steps, resumed_at),
        "speed": speed_line(steps),
        "memory": memory_line(steps),
        "export": f"{model.num_parameters() / 1e6:.1f} M parameters in {str(model.dtype).removeprefix('torch.')}; "
        "loads in transformers with no key missing and none left over",
        "asked": QUESTION,
        "answers": answer(model, tokenizer, QUESTION) + "\n(Python's shape; its sense takes more training)",
        "files": f"{run_dir}\n{EXPORT}/  the model, for AutoModelForCausalLM.from_pretrained\n"
        f"{METRICS}  a line a step\n{CURVE}  the loss\ncheckpoint-*/  to go on from",
    }
    for name, text in lines.items():
        print(textwrap.indent(text, " " * 9).replace(" " * 9, f"{name:<9}", 1))


def read_metrics(path: Path) -> list[dict]:
    """The training steps of a metrics file, in order. Raises `UserError` where there are none."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; has the run been started?")
    steps = [line for line in map(json.loads, path.read_text().splitlines()) if "loss" in line]
    if not steps:
        raise UserError(f"{path} has no training step in it")
    return steps


def loss_line(steps: list[dict], resumed_at: int) -> str:
    before = [step for step in steps if step["step"] <= resumed_at]
    after = [step for step in steps if step["step"] > resumed_at]
    if not before or not after:
        raise UserError(
            f"the run has steps {steps[0]['step']} to {steps[-1]['step']}; --resumed-at {resumed_at} is not inside"
        )
    parts = [
        f"{part[0]['loss']:.2f} → {part[-1]['loss']:.2f} (steps {part[0]['step']} to {part[-1]['step']})"
        for part in (before, after)
    ]
    return ", stopped and resumed, ".join(parts)


def speed_line(steps: list[dict]) -> str:
    speed = statistics.median(step["tokens_per_second"] for step in steps)
    ranks = len(steps[-1]["peak_memory_bytes"])
    line = f"{speed:,.0f} tokens/s on {ranks} rank{'s' * (ranks > 1)} (median step)"
    if "mfu" in steps[-1]:
        line += f", {statistics.median(step['mfu'] for step in steps):.1%} of the GPUs' peak"
    return line


def memory_line(steps: list[dict]) -> str:
    peaks = [max(by_step) for by_step in zip(*(step["peak_memory_bytes"] for step in steps), strict=True)]
    return "peak " + ", ".join(f"{peak / 1e9:.2f} GB on rank {rank}" for rank, peak in enumerate(peaks))


def draw_loss(steps: list[dict], resumed_at: int, path: Path) -> None:
    """Draw loss by step, with the point at which the run was stopped and resumed."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([step["step"] for step in steps], [step["loss"] for step in steps], color="#2a6f97", linewidth=1.8)
    axes.axvline(resumed_at + 0.5, color="#8d99ae", linestyle="--", linewidth=1.2)
    axes.annotate(
        "stopped and resumed",
        (resumed_at + 0.5, 0.95),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        color="#6c757d",
        va="top",
    )
    axes.set(xlabel="step", ylabel="loss (nats a trained token)", xlim=(0, steps[-1]["step"] + 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=144)


def load_export(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load an export as its users will, and check that every weight was found."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no export; has the run come to its end?")
    logging.disable_progress_bar()
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = {
        kind: sorted(found[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if found[kind]
    }
    if wrong:
        raise RuntimeError(f"{folder} does not fit its model: {wrong}")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The likeliest answer to `question`, but for a penalty on repetition, which so young a model falls into."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=SAMPLE_TOKENS, do_sample=False, repetition_penalty=1.2)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()
