"""Chats and texts to token ids and labels. A label is the token's own id where the token is trained, else -100.

A model shifts labels by one, so the first label of a row never counts.

An answer is encoded apart from what stands before it, as it is when a model generates it: encoded together, a token
may reach over the border, and then the prompt that the model was trained on is not the one it is given. Tokenizers that
set a space before every text they encode (Llama-2's) cannot do that; the template's border is at a space there.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import has_generation_markers

from recipe.data.formats import Example, Text
from recipe.data.messages import Chat
from recipe.data.rows import BadRow

IGNORE = -100
LOST = "the chat template leaves something out"
MASK = "the loss mask cannot be right"
END = "no end token where an answer ends"

Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """One row: `ids` and `labels`, [tokens], int32."""

    ids: np.ndarray
    labels: np.ndarray

    @property
    def num_trained(self) -> int:
        """Labels that reach the loss."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE))


@dataclass
class Encoder:
    """Encodes rows for one run.

    Args:
        tokenizer: a fast one with an eos token.
        template: chat template; None where there are no chats.
        answers_only: train answers (what the template marks) and nothing else of a chat.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    answers_only: bool
    apart: bool = field(init=False)

    def __post_init__(self) -> None:
        self.backend: Tokenizer = self.tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.marked = self.template is not None and has_generation_markers(self.template)
        self.bos, self.eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        written = (re.escape(_as_json(token)) for token in special_tokens(self.tokenizer))
        self.special = re.compile("|".join(written) or "(?!)")
        self.apart = encodes_apart(self.backend)
        self.adds_eos = self.backend.encode("a").ids[-1:] == [self.eos]
        self.answer_prompt = self._answer_prompt() if self.marked else ""
        self.dropped = self._dropped() if self.template is not None else set()

    def encode(self, examples: Sequence[Example]) -> list[Encoded | BadRow]:
        """Encode many rows at once, without truncation; a row that cannot be trained on gives its reason."""
        texts = [at for at, example in enumerate(examples) if isinstance(example, Text)]
        chats = [at for at, example in enumerate(examples) if isinstance(example, Chat)]
        found: dict[int, Encoded | BadRow] = {}
        for indices, encode in ((texts, self._texts), (chats, self._chats)):
            if indices:
                found |= zip(indices, encode([examples[at] for at in indices]), strict=True)
        return [found[at] for at in range(len(examples))]

    # -- texts -----------------------------------------------------------------------------------------------------

    def _texts(self, rows: Sequence[Any]) -> list[Encoded | BadRow]:
        """One bos if the tokenizer adds one or the text has it, never two; exactly one eos at the end."""
        bare = [self._bare(row) for row in rows]
        parts = [[(prompt, False), (text, True)] if prompt else [(text, True)] for prompt, text, _ in bare]
        encoded: list[Encoded | BadRow] = []
        for one, (_, text, had_bos) in zip(self._parts(parts, add_special_tokens=True), bare, strict=True):
            if not text.strip():
                encoded.append(BadRow("empty", f"there is nothing to train on but {self.tokenizer.eos_token}"))
                continue
            ids, labels = one.ids, one.labels
            while len(ids) and ids[-1] == self.eos:
                ids, labels = ids[:-1], labels[:-1]
            if had_bos and ids[:1].tolist() != [self.bos]:
                first = IGNORE if labels[:1].tolist() == [IGNORE] else self.bos
                ids, labels = np.concatenate([[self.bos], ids]), np.concatenate([[first], labels])
            ids, labels = np.append(ids, self.eos), np.append(labels, self.eos)
            encoded.append(Encoded(ids.astype(np.int32), labels.astype(np.int32)))
        return encoded

    def _bare(self, row: Text) -> tuple[str, str, bool]:
        """Prompt and text without a bos before them or an eos after; and whether there was a bos."""
        bos, eos = self.tokenizer.bos_token or None, str(self.tokenizer.eos_token)
        prompt, text = row
        head = prompt or text
        had_bos = bos is not None and head.lstrip().startswith(bos)
        while bos is not None and head.lstrip().startswith(bos):
            head = head.lstrip().removeprefix(bos)
        prompt, text = (head, text) if prompt else ("", head)
        while text.rstrip().endswith(eos):
            text = text.rstrip().removesuffix(eos)
        return prompt, text, had_bos

    # -- chats -----------------------------------------------------------------------------------------------------

    def _chats(self, rows: Sequence[Any]) -> list[Encoded | BadRow]:
        found: list[Any] = []  # of each row its parts, or why it has none
        for row in rows:
            try:
                found.append(self._render(row))
            except BadRow as error:
                found.append(error)
        encoded = iter(self._parts([parts for parts in found if not isinstance(parts, BadRow)]))
        for at, parts in enumerate(found):
            if not isinstance(parts, BadRow):
                one = next(encoded)
                try:
                    self._check(rows[at], one)
                    found[at] = one
                except BadRow as error:
                    found[at] = error
        return found

    def _render(self, chat: Chat) -> list[tuple[str, bool]]:
        """The chat as text, in parts that are trained or not."""
        assert self.template is not None, "a run with chats has a template"
        messages = [self._without_end(number, message) for number, message in enumerate(chat.messages, 1)]
        for number, message in enumerate(messages, 1):
            self._check_control(f"message {number} ({message['role']})", message)
        self._check_control("the description of the tools", chat.tools)
        try:
            (text,), spans = self._apply(messages, chat.tools, return_assistant_tokens_mask=self.marked)
        except (TemplateError, TypeError) as error:  # TypeError: a template that adds what may be None
            raise BadRow("the chat template refuses it", f"{type(error).__name__}: {error}") from None
        _check_complete(text, messages, chat.tools, self.dropped)
        if self._whole(chat):
            return [(text, True)]
        if not self.answers_only and not chat.answers_only:
            raise BadRow(
                "loss weight", "an answer has the weight 0, and assistant_only_loss: false trains all of a chat"
            )
        if not self.marked:
            raise BadRow(
                MASK, f"some answers are not trained, and the chat template does not mark answers{MASK_WAY_OUT}"
            )
        return _parts(text, [self._tight(text, span) for span in _trained_spans(spans[0], chat.trained)])

    def _apply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **kwargs: Any) -> Any:
        """Texts of one chat, and the spans that are marked in each."""
        tokens = self.tokenizer.special_tokens_map
        return render_jinja_template([messages], tools, chat_template=self.template, **kwargs, **tokens)

    def _answer_prompt(self) -> str:
        """What the template writes for a model to go on from, such as ChatML's '<|im_start|>assistant'."""
        question = [{"role": "user", "content": "a"}]
        try:
            (without,), _ = self._apply(question, None)
            (with_prompt,), _ = self._apply(question, None, add_generation_prompt=True)
        except (TemplateError, TypeError):
            return ""
        return with_prompt[len(without) :] if with_prompt.startswith(without) else ""

    def _dropped(self) -> set[str]:
        """Which of 'system', 'tool', 'tools' and 'arguments' the template leaves out. Rows alone do not tell: what is
        left out of one may stand elsewhere in it, too."""
        roles = ("system", "user", "assistant")
        said = {role: f"what-the-{role}-says" for role in (*roles, "tool")}
        call = {"name": "call-of-a-tool", "arguments": {"what-the-tool-is-given": "an-argument"}}
        turns: list[dict[str, Any]] = [{"role": role, "content": said[role]} for role in roles]
        called: list[dict[str, Any]] = [
            *turns[1:2],
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": said["tool"]},
            turns[2],
        ]
        described = {"name": "description-of-a-tool", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": described}]
        dropped = set()
        for messages, given, expected in (
            (turns, None, {"system": said["system"]}),
            (called, tools, {"tool": said["tool"], "tools": described["name"], "arguments": "an-argument"}),
        ):
            try:
                (text,), _ = self._apply(messages, given)
            except (TemplateError, TypeError):
                continue  # one that refuses these says so of each row that has them
            dropped |= {what for what, shown in expected.items() if str(shown) not in text}
        return dropped

    def _tight(self, text: str, span: Span) -> Span:
        """A marked span without what a model never generates. TRL's marks of some templates enclose a part of the
        prompt for the answer, and a line break after the end token."""
        (start, end), prompt, eos = span, self.answer_prompt, str(self.tokenizer.eos_token)
        for before in range(len(prompt), -1, -1):
            if text.startswith(prompt, start - before) and before <= start and len(prompt) - before <= end - start:
                start += len(prompt) - before
                break
        after = text.rfind(eos, start, end)
        if after >= 0 and not text[after + len(eos) : end].strip():
            end = after + len(eos)
        return start, end

    def _whole(self, chat: Chat) -> bool:
        """Whether all of a chat is trained: questions too."""
        return not self.answers_only and not chat.answers_only and all(chat.trained)

    def _without_end(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        """Take off an eos that the row has already: the template writes it."""
        content, eos = message["content"], str(self.tokenizer.eos_token)
        if message["role"] != "assistant" or not content.rstrip().endswith(eos):
            return message
        while content.rstrip().endswith(eos):
            content = content.rstrip().removesuffix(eos)
        if not content.strip() and "tool_calls" not in message:
            raise BadRow("empty message", f"message {number} (assistant) has nothing but {eos}")
        return {**message, "content": content}

    def _check_control(self, where: str, value: Any) -> None:
        """No special token in any of the texts of a message, or of the tools."""
        if token := self.special.search(json.dumps(value, ensure_ascii=False, default=str)):
            raise BadRow("control token in a message", f"{where} holds {token[0]}; take it out")

    def _check(self, chat: Chat, row: Encoded) -> None:
        """Exactly one eos an answer, one bos where there is one, some tokens trained and not all (trl#4879)."""
        ids, labels = row.ids, row.labels
        if self.bos is not None and self.bos != self.eos:
            twice = np.flatnonzero((ids[1:] == self.bos) & (ids[:-1] == self.bos))
            if len(twice):
                raise BadRow("two bos in a row", f"at token {twice[0] + 1}; the template writes one too many")
        if self._whole(chat):
            last = np.flatnonzero(ids == self.eos)
            if not len(last) or str(self.tokenizer.decode(ids[last[-1] + 1 :].tolist())).strip():
                raise BadRow(END, f"it ends in {self._shown(ids)} and eos is {self.tokenizer.eos_token}{END_WAY_OUT}")
            return
        trained = ids[labels != IGNORE]
        if len(trained) in (0, len(ids)):
            raise BadRow(MASK, f"{len(trained)} of {len(ids)} tokens are marked as the assistant's{MASK_WAY_OUT}")
        num_ends, num_answers = int(np.count_nonzero(trained == self.eos)), sum(chat.trained)
        if num_ends != num_answers:
            raise BadRow(
                END,
                f"{num_answers} answers and {num_ends} trained {self.tokenizer.eos_token}; the trained tokens end in "
                f"{self._shown(trained)}{END_WAY_OUT}",
            )

    def _shown(self, ids: np.ndarray) -> str:
        return repr(self.tokenizer.decode(ids[-8:].tolist()))

    # -- parts -----------------------------------------------------------------------------------------------------

    def _parts(self, rows: list[list[tuple[str, bool]]], add_special_tokens: bool = False) -> list[Encoded]:
        """Encode rows given as parts of (text, trained); special tokens that are added before the first part share its
        label."""
        if self.apart:
            return self._encode_apart(rows, add_special_tokens)
        texts = ["".join(text for text, _ in parts) for parts in rows]
        encodings = self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        return [_masked(encoding, parts) for encoding, parts in zip(encodings, rows, strict=True)]

    def _encode_apart(self, rows: list[list[tuple[str, bool]]], add_special_tokens: bool) -> list[Encoded]:
        firsts = self.backend.encode_batch_fast([parts[0][0] for parts in rows], add_special_tokens=add_special_tokens)
        others = self.backend.encode_batch_fast(
            [text for parts in rows for text, _ in parts[1:]], add_special_tokens=False
        )
        rest, encoded = iter(others), []
        for first, parts in zip(firsts, rows, strict=True):
            pieces = [first.ids, *(next(rest).ids for _ in parts[1:])]
            if len(pieces) > 1 and add_special_tokens and self.adds_eos:
                pieces[0] = pieces[0][:-1]  # the text ends later
            ids = np.array([*chain.from_iterable(pieces)], np.int32)
            trained = np.repeat([trained for _, trained in parts], [len(piece) for piece in pieces])
            encoded.append(Encoded(ids, np.where(trained, ids, np.int32(IGNORE))))
        return encoded


END_WAY_OUT = (
    "; or the model never learns to stop. Set eos_token to the token that ends an answer in the chat template, or "
    "chat_template_path to a template that writes the tokenizer's"
)
MASK_WAY_OUT = "; set chat_template_path to a template whose {% generation %} marks enclose the answers"


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the tokenizer makes a control token of wherever it stands in a text."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def encodes_apart(backend: Tokenizer) -> bool:
    """Whether parts of a text, encoded one by one, decode to the text: the tokenizer sets no space before each."""
    parts = ["a user\n", " of", "it", "\n\nb"]
    ids = [token for part in parts for token in backend.encode(part, add_special_tokens=False).ids]
    return backend.decode(ids, skip_special_tokens=False) == "".join(parts)


def _trained_spans(spans: list[Span], trained: list[bool]) -> list[Span]:
    """Those of the template's marked spans whose answer is trained."""
    if all(trained):
        return [span for span in spans if span[1] > span[0]]
    if len(spans) != len(trained):
        raise BadRow(
            MASK, f"{len(trained)} answers, some with loss weight 0, and {len(spans)} marked spans{MASK_WAY_OUT}"
        )
    return [span for span, wanted in zip(spans, trained, strict=True) if wanted]


def _parts(text: str, spans: list[Span]) -> list[tuple[str, bool]]:
    """`text` cut at the borders of `spans`."""
    parts, at = [], 0
    for start, end in spans:
        parts += [(text[at:start], False), (text[start:end], True)]
        at = end
    parts.append((text[at:], False))
    return [part for part in parts if part[0]]


def _masked(encoding: Encoding, parts: list[tuple[str, bool]]) -> Encoded:
    """Labels of a text that was encoded as a whole: a token that reaches over a border belongs to what comes after."""
    ids = np.array(encoding.ids, np.int32)
    labels = np.full_like(ids, IGNORE)
    first_char = first = 0
    num_chars = sum(len(text) for text, _ in parts)
    for number, (text, trained) in enumerate(parts, 1):
        next_char = first_char + len(text)
        after = len(ids) if number == len(parts) else _token_at(encoding, next_char, num_chars)
        if trained:
            labels[first:after] = ids[first:after]
        first_char, first = next_char, after
    return Encoded(ids, labels)


def _token_at(encoding: Encoding, char: int, num_chars: int) -> int:
    """The token that holds character `char`, or the first one after it: a tokenizer may leave characters out."""
    found = (encoding.char_to_token(at) for at in range(char, num_chars))
    return next((token for token in found if token is not None), len(encoding))


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _check_complete(
    text: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, dropped: set[str]
) -> None:
    """What a template drops in silence (a system turn, a tool's), nobody would miss before the model is used.

    Args:
        dropped: what it is known to drop.
    """
    for number, message in enumerate(messages, 1):
        if message["role"] in dropped and message["content"].strip():
            raise BadRow(LOST, f"message {number} ({message['role']}) is not in what it writes")
        for shown in (message["content"].strip(), message.get("reasoning_content", "").strip()):
            # Llama 3.1's template writes what a tool says as JSON.
            if shown not in text and _as_json(shown) not in text:
                raise BadRow(LOST, f"message {number} ({message['role']}) is not in what it writes")
        for call in message.get("tool_calls", []):
            if call["function"]["name"] not in text or "arguments" in dropped:
                raise BadRow(LOST, f"message {number} calls {call['function']['name']}; see tool_turns")
    for tool in tools or []:
        if tool["function"]["name"] not in text or "tools" in dropped:
            raise BadRow(LOST, f"the description of the tool {tool['function']['name']}; see tool_turns")
