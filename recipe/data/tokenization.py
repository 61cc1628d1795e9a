"""Rows to token ids and labels, and rows to the length of the model.

All functions are for batched `datasets.Dataset.map`: lists in, lists out. A label is the token's own id where the token
is trained and -100 where it is not; the model shifts labels by one, so the first label of a row never counts.
"""

from typing import Any

from jinja2 import TemplateError
from transformers import BatchEncoding, PreTrainedTokenizerBase

from recipe.data.messages import Message
from recipe.errors import UserError

IGNORE = -100


def num_trained(labels: list[int]) -> int:
    """How many labels of one row reach the loss."""
    return sum(label != IGNORE for label in labels[1:])


def tokenize(
    batch: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    assistant_only_loss: bool,
    unit: str = "row",
) -> dict[str, list[Any]]:
    """Tokenize a batch of normalized rows, without truncation.

    Args:
        batch: `row` (numbers, for messages), and `messages` or `text`.
        template: Chat template, for rows of `messages`; `None` for rows of `text`.
        assistant_only_loss: Train answers only: what the template marks, which has to include each answer's eos.
        unit: What the numbers in `row` count, 'line' or 'row', for messages.

    Returns:
        `row`, `input_ids` and `labels`, one list of ints a row.

    Raises:
        UserError: the template refuses a row, or leaves eos out, or marks nothing or everything as trained.
    """
    if template is None:
        input_ids = _tokenize_texts(batch["text"], tokenizer)
        return {"row": batch["row"], "input_ids": input_ids, "labels": input_ids}
    places = [f"{unit} {number}" for number in batch["row"]]
    encoded = _apply_template(places, batch["messages"], tokenizer, template, assistant_only_loss)
    labels = encoded["input_ids"]
    if assistant_only_loss:
        labels = [
            [token if trained else IGNORE for token, trained in zip(ids, mask, strict=True)]
            for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        ]
    for place, messages, ids, row_labels in zip(places, batch["messages"], encoded["input_ids"], labels, strict=True):
        if assistant_only_loss:
            _check_mask(place, messages, row_labels, tokenizer)
        else:
            _check_end(place, ids, tokenizer)
    return {"row": batch["row"], "input_ids": encoded["input_ids"], "labels": labels}


def _tokenize_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """One bos if the tokenizer adds one or the text has it, never two; exactly one eos at the end."""
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    bare, had_bos = [], []
    for text in texts:
        had_bos.append(bos is not None and text.lstrip().startswith(bos))
        while bos is not None and text.lstrip().startswith(bos):
            text = text.lstrip().removeprefix(bos)
        while text.rstrip().endswith(eos):
            text = text.rstrip().removesuffix(eos)
        bare.append(text)
    rows = []
    for ids, with_bos in zip(tokenizer(bare)["input_ids"], had_bos, strict=True):
        while ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]
        if with_bos and ids[:1] != [tokenizer.bos_token_id]:
            ids = [tokenizer.bos_token_id, *ids]
        rows.append([*ids, tokenizer.eos_token_id])
    return rows


def _apply_template(
    places: list[str],
    conversations: list[list[Message]],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    mask: bool,
) -> BatchEncoding:
    def apply(conversations: list[list[Message]]) -> BatchEncoding:
        encoded = tokenizer.apply_chat_template(
            conversations, chat_template=template, return_dict=True, return_assistant_tokens_mask=mask
        )
        assert isinstance(encoded, BatchEncoding)
        return encoded

    try:
        return apply(conversations)
    except TemplateError:
        for place, messages in zip(places, conversations, strict=True):
            try:
                apply([messages])
            except TemplateError as error:
                raise UserError(
                    f"the chat template refuses {place}: {type(error).__name__}: {error}; change it or "
                    "chat_template_path"
                ) from None
        raise


def _check_mask(place: str, messages: list[Message], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Some tokens of a row are trained, not all, and eos once for each answer (trl#4879, transformers#22794)."""
    trained = [label for label in labels if label != IGNORE]
    if len(trained) in (0, len(labels)):
        raise UserError(
            f"assistant_only_loss: the chat template marks {len(trained)} of the {len(labels)} tokens of {place} as "
            "the assistant's, where it should mark some and not all; set chat_template_path to a template whose "
            "{% generation %} marks enclose the answers"
        )
    num_answers = sum(message["role"] == "assistant" for message in messages)
    num_eos = trained.count(tokenizer.eos_token_id)
    if num_eos != num_answers:
        raise UserError(
            f"each answer must end in one trained eos token, or the model never learns to stop: {place} has "
            f"{num_answers} answers and {num_eos} trained {tokenizer.eos_token} (its trained tokens end in "
            f"{tokenizer.decode(trained[-8:])!r}); set eos_token to the token that ends an answer in the chat "
            "template, or chat_template_path to a template that writes the tokenizer's"
        )


def _check_end(place: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """With a loss on every token, eos ends the row; only white space may follow it (ChatML ends in a line break)."""
    last = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] == tokenizer.eos_token_id), None)
    if last is None or str(tokenizer.decode(ids[last + 1 :])).strip():
        raise UserError(
            f"a chat must end in the eos token, or the model never learns to stop: {place} ends in "
            f"{tokenizer.decode(ids[-8:])!r} and eos is {tokenizer.eos_token}; set eos_token to the token that ends "
            "an answer in the chat template, or chat_template_path to a template that writes the tokenizer's"
        )


def fit(batch: dict[str, list[Any]], max_length: int, split: bool) -> dict[str, list[Any]]:
    """Bring tokenized rows to `max_length` tokens, and drop what then holds nothing to learn.

    Args:
        batch: `row`, `input_ids` and `labels`.
        max_length: Tokens kept of a row, from its start.
        split: Keep the rest of a long row too, as further rows (`packing_strategy: bfd_split`).

    Returns:
        `row`, `input_ids`, `labels` and `num_trained` (labels that reach the loss, at least 1) of what is left.
    """
    fitted: dict[str, list[Any]] = {"row": [], "input_ids": [], "labels": [], "num_trained": []}
    for row, ids, labels in zip(batch["row"], batch["input_ids"], batch["labels"], strict=True):
        for start in range(0, len(ids) if split else 1, max_length):
            piece = labels[start : start + max_length]
            if trained := num_trained(piece):
                fitted["row"].append(row)
                fitted["input_ids"].append(ids[start : start + max_length])
                fitted["labels"].append(piece)
                fitted["num_trained"].append(trained)
    return fitted
