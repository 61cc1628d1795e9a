"""Samples as the model will see them: the prepared tokens themselves, in stretches that are trained or not."""

from dataclasses import dataclass

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from recipe.data.tokenization import IGNORE, special_tokens

GREEN, DIM, BOLD, RESET = "\033[32m", "\033[2m", "\033[1m", "\033[0m"
LEFT, RIGHT = "⟦", "⟧"  # around what is trained, where there are no colours


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of one row, decoded with their special tokens."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Sample:
    """One row of a data set; `block` is where it lies, if the data are packed."""

    split: str
    block: int
    num_tokens: int
    num_trained: int
    stretches: list[Stretch]


def pick(
    split: str, dataset: datasets.Dataset, count: int, seed: int, tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """`count` rows of the prepared `dataset`, drawn by `seed`: of each block that is drawn, one row."""
    generator = np.random.default_rng(seed)
    samples = []
    for at in generator.permutation(len(dataset))[:count]:
        row = dataset[int(at)]
        ids, labels = np.array(row["input_ids"]), np.array(row["labels"])
        lengths = row.get("seq_lengths", [len(ids)])
        chosen = int(generator.integers(len(lengths)))
        start = sum(lengths[:chosen])
        part = slice(start, start + lengths[chosen])
        samples.append(_sample(split, int(at), ids[part], labels[part], tokenizer))
    return samples


def _sample(split: str, block: int, ids: np.ndarray, labels: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Sample:
    trained = labels != IGNORE
    borders = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(ids)]
    # Decoded up to each border, not between borders: a decoder takes the space off the start of a text.
    texts = [str(tokenizer.decode(ids[:border].tolist())) for border in borders]
    stretches = [Stretch(texts[at + 1][len(texts[at]) :], bool(trained[borders[at]])) for at in range(len(borders) - 1)]
    return Sample(split, block, len(ids), int(np.count_nonzero(labels[1:] != IGNORE)), stretches)


def paint(sample: Sample, tokenizer: PreTrainedTokenizerBase, colours: bool) -> str:
    """A sample for a terminal: trained text in green and the rest dim, special tokens in bold; without `colours` the
    trained text stands in brackets."""
    if not colours:
        return "".join(f"{LEFT}{s.text}{RIGHT}" if s.trained else s.text for s in sample.stretches)
    special = special_tokens(tokenizer)
    painted = ""
    for stretch in sample.stretches:
        colour, text = GREEN if stretch.trained else DIM, stretch.text
        for token in special:
            text = text.replace(token, f"{BOLD}{token}{RESET}{colour}")
        painted += f"{colour}{text}{RESET}"
    return painted
