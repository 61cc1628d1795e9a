"""Random conversations against every template, on the tokenizers that it is used with.

Outside of it: half surrogates, NUL, control tokens and answers without text, which are bad rows; "▁" (U+2581), which
Llama's tokenizers read as a space; tokenizers that normalize texts (NFC), which then decode to another text; ChatML on
byte-level tokenizers that set a space before each text, where a token may hold both the line break before an answer and
one that the answer begins with.
"""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from trl.chat_template_utils import qwen2_5_chat_template

from recipe.data.formats import Text
from recipe.data.length import fit
from recipe.data.messages import Chat
from recipe.data.template import resolve_template
from recipe.data.tokenization import IGNORE, Encoded, Encoder
from tests.data.conftest import LLAMAS, SPECIAL, byte_level_tokenizer, llama_tokenizer, pieces

examples = settings(deadline=None, derandomize=True, database=None, max_examples=200)

# What tokenizers and templates may stumble over, between any characters at all.
AWKWARD = ["\n", "\n\n", "\r\n", " ", "   ", "\t", "\x85", "\u3000", "\u200b", "\x1b[0m", "\x1f", "\ufffd", "\ufeff"]
AWKWARD += ["e\u0301", "\u0301", "👩\u200d👧", "🦊", "नमस्ते", "你好", "the fox", "qui", "ck", "Four .", "assistant\n"]
AWKWARD += ["[INST]", "[/INST]", "<<SYS>>", "<|im", "</s", "<0x0A>", "<tool_call>", "{{ a }}", "{% generation %}", '"']
texts = st.lists(
    st.sampled_from(AWKWARD) | st.characters(exclude_categories=["Cs"], exclude_characters="\0▁"), max_size=8
).map("".join)
spoken = texts.filter(str.strip)
# Of each turn the question, the answer, and whether it is trained.
talks = st.lists(st.tuples(texts, spoken, st.booleans() | st.just(True)), min_size=1, max_size=5)
systems = st.none() | texts


def llama2(talk, system, gap):
    """What the template has to write, as (text, trained). `gap`: the space after a control token, whoever sets it."""
    for at, (question, answer, trained) in enumerate(talk):
        if at == 0 and system is not None:
            question = f"<<SYS>>\n{system}\n<</SYS>>\n\n{question}"
        yield f"<s>{gap}[INST] {question.strip()} [/INST]", False
        yield f" {answer.strip()} </s>", trained


def chatml(talk, system, gap, default=None):
    start, system = f"<|im_start|>{gap}", default if system is None else system
    if system is not None:
        yield f"{start}system\n{system}<|im_end|>{gap}\n", False
    for question, answer, trained in talk:
        yield f"{start}user\n{question}<|im_end|>{gap}\n{start}assistant\n", False
        yield f"{answer}<|im_end|>", trained
        yield f"{gap}\n", False


def qwen(talk, system, gap):
    return chatml(talk, system, gap, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")


def joined(parts):
    """Neighbours that are both trained, or both not, as one."""
    runs = []
    for text, trained in parts:
        if runs and runs[-1][1] == trained:
            text = runs.pop()[0] + text
        runs.append((text, trained))
    return runs


def case(name, tokenizer, template, write, gap=""):
    return pytest.param(tokenizer, resolve_template(tokenizer, template, True), write, gap, id=name)


def byte_level_llama(add_prefix_space):
    tokenizer = byte_level_tokenizer(add_prefix_space, bos_token="<s>")
    tokenizer.eos_token = "</s>"
    return tokenizer


CASES = [
    *(case(f"llama2 {kind}", llama_tokenizer(kind), "llama2", llama2, " ") for kind in (*LLAMAS, "never")),
    case("llama2 byte-level", byte_level_llama(False), "llama2", llama2),
    case("llama2 byte-level, spaces", byte_level_llama(True), "llama2", llama2, " "),
    case("chatml byte-level", byte_level_tokenizer(), "chatml", chatml),
    case("chatml first", llama_tokenizer("first", chatml=True), "chatml", chatml),
    case("chatml always", llama_tokenizer("always", chatml=True), "chatml", chatml, " "),
    case("chatml shipped", llama_tokenizer("shipped", chatml=True), "chatml", chatml, " "),
    case("own, patched by TRL", byte_level_tokenizer(chat_template=qwen2_5_chat_template), None, qwen),
]


def has_control_token(*written):
    return any(token in text for text in written for token in [*SPECIAL, "<|im_start|>", "<|im_end|>"])


@pytest.mark.parametrize(("tokenizer", "template", "write", "gap"), CASES)
@examples
@given(talk=talks, system=systems)
def test_trained_tokens_are_the_answers_and_their_end_and_no_others(tokenizer, template, write, gap, talk, system):
    assume(any(trained for _, _, trained in talk))
    assume(not has_control_token(system or "", *(text for turn in talk for text in turn[:2])))
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer, _ in talk:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    trained = [is_trained for _, _, is_trained in talk]
    (row,) = Encoder(tokenizer, template, answers_only=True).encode([Chat(messages, None, trained)])
    assert isinstance(row, Encoded), row
    assert pieces(row, tokenizer) == joined(write(talk, system, gap))
    assert row.labels.tolist().count(tokenizer.eos_token_id) == sum(trained)


def spaced(text):
    return text if text.startswith(" ") else f" {text}"


@pytest.mark.parametrize(
    ("tokenizer", "begin"),
    [
        pytest.param(byte_level_tokenizer(), lambda text: text, id="byte-level"),
        pytest.param(llama_tokenizer("first"), lambda text: "<s>" + spaced(text), id="first"),
        pytest.param(llama_tokenizer("always"), lambda text: "<s>" + spaced(text), id="always"),
        pytest.param(llama_tokenizer("shipped"), lambda text: f"<s> {text}", id="shipped"),
    ],
)
@examples
@given(prompt=texts, completion=spoken)
def test_of_a_text_the_completion_and_its_end_are_trained(tokenizer, begin, prompt, completion):
    """Where parts cannot be encoded apart, one token may reach over the border, and is trained."""
    assume(not has_control_token(prompt + completion))
    (row,) = Encoder(tokenizer, None, answers_only=False).encode([Text(prompt, completion)])
    assert isinstance(row, Encoded), row
    eos, runs = tokenizer.eos_token, pieces(row, tokenizer)
    assert "".join(text for text, _ in runs) == begin(prompt + completion) + eos
    assert [trained for _, trained in runs] in ([False, True], [True]) and runs[-1][0].endswith(completion + eos)
    over = runs[-1][0].removesuffix(completion + eos)
    if over and prompt:
        first = row.labels[row.labels != IGNORE][:1].tolist()
        assert len(over) < len(tokenizer.decode([tokenizer.eos_token_id, *first]).removeprefix(eos))
    assert row.labels.tolist().count(tokenizer.eos_token_id) == 1


@examples
@given(trained=st.lists(st.booleans(), min_size=1, max_size=40), max_length=st.integers(2, 12))
def test_pieces_of_a_split_row_lose_no_label_that_reaches_the_loss(trained, max_length):
    ids = np.arange(len(trained), dtype=np.int32)
    row = Encoded(ids, np.where(trained, ids, np.int32(IGNORE)))
    split, reason = fit(row, max_length, "split")
    kept = [int(label) for piece in split for label in piece.labels[1:] if label != IGNORE]
    assert kept == [at for at, is_trained in enumerate(trained) if is_trained and at], "each once, and in order"
    assert all(any(piece.labels[1:] != IGNORE) and len(piece.ids) <= max_length for piece in split)
    assert (reason is None) is bool(split)
