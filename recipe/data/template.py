"""Chat templates: which one a run uses, with `{% generation %}` marks around what is trained when they are needed."""

import copy
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from recipe.errors import UserError

TEMPLATES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}


def read_template(tokenizer: PreTrainedTokenizerBase, name_or_path: str | None) -> str:
    """Return the text of the chat template that `chat_template_path` names; `None` names the tokenizer's own.

    Args:
        name_or_path: 'llama2', 'chatml' (any file in `templates/`), a path to a .jinja file, or `None`.

    Raises:
        UserError: there is no such template.
    """
    names = ", ".join(TEMPLATES)
    if name_or_path is None:
        template = tokenizer.chat_template
        if isinstance(template, dict):  # named variants
            template = template.get("default")
        if not template:
            raise UserError(f"the tokenizer has no chat template; set chat_template_path to one of {names} or a file")
        return template
    if name_or_path in TEMPLATES:
        template = TEMPLATES[name_or_path].read_text()
        return _spaced(template) if name_or_path == "llama2" and _takes_space(tokenizer) else template
    path = Path(name_or_path).expanduser()
    if path.suffix not in (".jinja", ".j2") or not path.is_file():
        raise UserError(
            f"chat_template_path '{name_or_path}' is neither one of {names} nor an existing .jinja file; "
            "set it to one of these, or leave it out to use the tokenizer's own template"
        )
    return path.read_text()


def resolve_template(
    tokenizer: PreTrainedTokenizerBase, name_or_path: str | None, assistant_only_loss: bool = False
) -> str:
    """Return the text of the chat template to tokenize with.

    With `assistant_only_loss` it has `{% generation %}` marks: its own, or those of TRL's training version of it.

    Raises:
        UserError: there is no such template, or it has no marks and TRL knows no marked version.
    """
    template = read_template(tokenizer, name_or_path)
    if not assistant_only_loss or has_generation_markers(template):
        return template
    unmarked = copy.copy(tokenizer)
    unmarked.chat_template = template
    try:
        marked = get_training_chat_template(unmarked)
    except ValueError:  # what TRL raises for a template it does not know
        marked = None
    if marked is None:
        whose = "the tokenizer's own chat template" if name_or_path is None else f"chat_template_path '{name_or_path}'"
        raise UserError(
            f"assistant_only_loss needs {{% generation %}} marks around the answers, and {whose} has none; "
            f"set chat_template_path to one of {', '.join(TEMPLATES)} or to a file with the marks, "
            "or set assistant_only_loss: false"
        )
    return marked


def _takes_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a space written after bos makes the "▁[INST]" of Meta's SentencePiece model, which sets one there itself.

    Llama-2's tokenizer.json sets one too, and a second would follow. transformers' `LlamaTokenizer` sets it where texts
    begin, and after bos only with `legacy=True` (never twice), which `save_pretrained` (5.24) forgets.
    """
    tokens = tokenizer.backend_tokenizer.encode(f"{tokenizer.bos_token} [INST]", add_special_tokens=False).tokens
    return "".join(tokens[1:]) == "▁[INST]"


def _spaced(template: str) -> str:
    """The template with the space written out."""
    return template.replace("bos_token + '[INST] '", "bos_token + ' [INST] '")
