"""A run's sources and how their rows are read: the format of each, and the one chat template for all."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from recipe.arguments import TrainArguments
from recipe.data.formats import Format, Reading, recognise
from recipe.data.messages import Turns
from recipe.data.sources import Source
from recipe.data.template import resolve_template
from recipe.errors import UserError, raise_if

DEFAULT_TEXT_FIELD = "text"  # TRL's; another one was asked for


@dataclass(frozen=True)
class Input:
    """A source, and how its rows are read."""

    source: Source
    format: Format
    reading: Reading


def inputs_of(opened: list[Source], turns: Turns, args: TrainArguments) -> list[Input]:
    """Recognise the format of each source by its first row that can be read.

    Raises:
        UserError: of each source that is empty, cannot be read, or has columns that are no format.
    """
    inputs, problems = [], []
    for source in opened:
        text_field = source.spec.text_field or args.dataset_text_field
        asked = source.spec.text_field is not None or text_field != DEFAULT_TEXT_FIELD
        reading = Reading(text_field, turns, args.completion_only_loss is not False)
        try:
            inputs.append(Input(source, _format(source, text_field, asked), reading))
        except UserError as error:
            problems += error.problems
    raise_if(problems)
    return inputs


def _format(source: Source, text_field: str, asked: bool) -> Format:
    unread = ""
    for chunk in source.chunks():
        for row in chunk.rows():
            if row.problem is not None:
                unread = unread or f"no row can be read: {chunk.place(row.number)}: {row.problem}"
                continue
            found = recognise(row.fields, text_field, asked)
            if found is not None:
                return found
            columns = ", ".join(map(str, row.fields)) or "no columns"
            raise UserError(
                f"{source.name}: rows need messages, conversations, prompt and completion, instruction and output, or "
                f"dataset_text_field's '{text_field}'; {chunk.place(row.number)} has {columns}; set "
                "dataset_text_field, or rename the columns"
            )
    raise UserError(f"{source.spec.key} '{source.spec.path}': {unread or 'the data set is empty'}")


def answers_only(args: TrainArguments) -> bool:
    """Whether answers alone are trained, where there are answers."""
    return args.assistant_only_loss is not False


def template_of(inputs: list[Input], args: TrainArguments, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template that the inputs need; None where there are no chats.

    Raises:
        UserError: answers alone are asked for and there are texts, or the template does not mark answers.
    """
    texts = [one for one in inputs if not one.format.chat and not one.format.prompted]
    if args.assistant_only_loss and texts:
        one = texts[0]
        raise UserError(
            f"assistant_only_loss needs chats, and {one.source.name} has text in '{one.reading.text_field}', where "
            "nothing tells an answer from a question; set assistant_only_loss: false, or give rows of messages"
        )
    chats = [one for one in inputs if one.format.chat]
    if not chats:
        return None
    marks = answers_only(args) or any(one.format.prompted and one.reading.completion_only for one in chats)
    return resolve_template(tokenizer, args.chat_template_path, marks)
