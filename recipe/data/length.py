"""Rows to the length of the model: what `truncation` says is done with those that are longer than `max_length`."""

from recipe.data.tokenization import IGNORE, Encoded

NO_LABEL = "no trained token within max_length"
TOO_LONG = "longer than max_length"


def fit(row: Encoded, max_length: int, policy: str) -> tuple[list[Encoded], str | None]:
    """Bring a row to at most `max_length` tokens by `truncation`'s policy ('drop', 'right' or 'split').

    A piece's first label never reaches the loss, so each piece of a split row begins with the last token of the one
    before: every token that is trained is trained once, an end token that stands alone at the end too.

    Returns:
        The pieces that hold something to learn (one, unless split), and why there is none, or None.
    """
    length = len(row.ids)
    if length > max_length and policy == "drop":
        return [], TOO_LONG
    starts = range(0, max(1, length - 1) if policy == "split" else 1, max_length - 1)
    parts = [slice(at, at + max_length) for at in starts]
    labels = [row.labels[part].copy() for part in parts]
    for later in labels[1:]:
        later[0] = IGNORE  # it was trained at the end of the piece before
    pieces = [Encoded(row.ids[part], own) for part, own in zip(parts, labels, strict=True)]
    pieces = [piece for piece in pieces if piece.num_trained]
    return pieces, None if pieces else NO_LABEL
