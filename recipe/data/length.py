"""Rows to the length of the model: what `truncation` says is done with those that are longer than `max_length`."""

from recipe.data.tokenization import Encoded

NO_LABEL = "no trained token within max_length"
TOO_LONG = "longer than max_length"


def fit(row: Encoded, max_length: int, policy: str) -> tuple[list[Encoded], str | None]:
    """Bring a row to at most `max_length` tokens by `truncation`'s policy ('drop', 'right' or 'split').

    Returns:
        The pieces that hold something to learn (one, unless split), and why there is none, or None.
    """
    length = len(row.ids)
    if length > max_length and policy == "drop":
        return [], TOO_LONG
    starts = range(0, length if policy == "split" else 1, max_length)
    pieces = [Encoded(row.ids[at : at + max_length], row.labels[at : at + max_length]) for at in starts]
    pieces = [piece for piece in pieces if piece.num_trained]
    return pieces, None if pieces else NO_LABEL
