"""`recipe data`: prepare a run's data outside any process group, and show them."""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from recipe.arguments import Arguments
from recipe.data import PreparedData, check, prepare
from recipe.data.samples import paint, pick
from recipe.data.tokenization import special_tokens
from recipe.errors import UserError, raise_if
from recipe.model import find_folder, load_config, load_tokenizer, positions_problems


def show(arguments: Arguments, num_samples: int, html: Path | None, as_json: bool) -> None:
    """Prepare the data of `arguments`, print what came of them and `num_samples` rows of each split.

    Raises:
        UserError: what is wrong with the keys, the model's tokenizer or the data.
    """
    data_args, model_args, train_args = arguments
    problems = check(data_args, train_args)
    if model_args.model_name_or_path is None:
        problems.append("model_name_or_path is not set; the data are tokenized for a model")
    raise_if(problems)
    folder, _ = find_folder(model_args, download=False)
    trust = train_args.trust_remote_code
    raise_if(positions_problems(load_config(folder, trust).max_position_embeddings, train_args.max_length))
    tokenizer = load_tokenizer(folder, trust, train_args.eos_token)
    began = time.perf_counter()
    data = prepare(data_args, train_args, tokenizer)
    took = time.perf_counter() - began
    if as_json:
        print(
            json.dumps({"folder": str(data.folder), **asdict(data.report), "warnings": data.report.warnings}, indent=1)
        )
    splits = [("train", data.train)] + ([("eval", data.eval)] if data.eval is not None else [])
    samples = [
        sample for name, split in splits for sample in pick(name, split, num_samples, train_args.seed, tokenizer)
    ]
    if not as_json:
        _print_report(data, took)
        colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for sample in samples:
            where = f"block {sample.block}" if train_args.packing else f"row {sample.block}"
            marks = "" if colours else "; what is trained stands in ⟦ ⟧"
            print(f"\n-- {sample.split}, {where}: {sample.num_tokens} tokens, {sample.num_trained} trained{marks}")
            print(paint(sample, tokenizer, colours))
    if html is not None:
        from recipe.data.page import write_page  # matplotlib, which nobody waits for who wants no page

        title = f"Data of {', '.join(source.name for source in data.report.sources)}"
        notes = [*data.notes, f"Tokenized for {model_args.model_name_or_path}; prepared in {data.folder}."]
        try:
            write_page(html, title, data.report, notes, samples, special_tokens(tokenizer))
        except OSError as error:
            raise UserError(f"--html {html} cannot be written: {error}; give another file") from None
        if not as_json:
            print(f"\nrecipe: {html} is written")


def _print_report(data: PreparedData, took: float) -> None:
    report = data.report
    for note in data.notes:
        print(f"recipe: {note}")
    rate = f"{report.rows_read / max(took, 1e-9):,.0f} rows/s" if took > 0.5 else "from the cache or as good as"
    print(f"recipe: {data.folder}: {took:.1f} s ({rate})")
    for table in (report.source_table(), report.reason_table(), report.split_table()):
        if table:
            print("\n" + _aligned(table))
    for warning in report.warnings:
        print(f"\nrecipe: warning: {warning}")


def _aligned(table: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    numeric = [
        all(row[column][:1].isdigit() or row[column] in ("", "-") for row in table[1:]) for column in range(len(widths))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in table
    )
