"""Several rows in one block of `max_length` tokens, by TRL's best-fit-decreasing packing (arXiv:2404.10830).

Rows are never cut: `recipe.data.length.fit` has brought them to length. What keeps them apart in the model is
`seq_lengths`, from which TRL's padding-free collator makes positions that restart at each row.
"""

import datasets
from trl.data_utils import pack_dataset

# Rows that are packed together. More leave fewer half-full blocks (one or so each time); fewer need less memory
# (at most 8 bytes x 10,000 rows x max_length).
BATCH_ROWS = 10_000


def pack(dataset: datasets.Dataset, max_length: int) -> datasets.Dataset:
    """Pack rows into blocks of at most `max_length` tokens.

    Always in one process: shards of several would be packed apart, and the blocks depend on their number.

    Args:
        dataset: `input_ids` and `labels`, each row at most `max_length` long.

    Returns:
        Blocks: `input_ids` and `labels` (rows joined, longest first) and `seq_lengths` (length of each row, in tokens).
    """
    return pack_dataset(
        dataset,
        seq_length=max_length,
        strategy="bfd",
        map_kwargs={"batch_size": BATCH_ROWS, "load_from_cache_file": False, "desc": "Packing"},
    )
