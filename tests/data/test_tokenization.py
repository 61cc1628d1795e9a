import re

import numpy as np
import pytest
import torch
from transformers import DataCollatorForLanguageModeling as PretrainingCollator
from transformers import LlamaConfig, LlamaForCausalLM
from trl.chat_template_utils import llama3_1_chat_template, qwen2_5_chat_template, qwen3_5_think_chat_template
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from recipe.data.formats import Text
from recipe.data.length import NO_LABEL, TOO_LONG, fit
from recipe.data.messages import Chat
from recipe.data.rows import BadRow
from recipe.data.template import TEMPLATES, read_template, resolve_template
from recipe.data.tokenization import (
    END,
    IGNORE,
    LOST,
    MASK,
    Encoded,
    Encoder,
    _masked,
    encodes_apart,
)
from tests.data.conftest import IM_END, byte_level_tokenizer, llama_tokenizer, make_tokenizer, pieces

BOS, EOS = 1, 2


def of(row, trained=None, tools=None, **kwargs):
    """The `Chat` of a row of messages; `trained` of each answer, all if not given."""
    answers = sum(message["role"] == "assistant" for message in row["messages"])
    return Chat(row["messages"], tools, [True] * answers if trained is None else trained, **kwargs)


def encode(examples, tokenizer, template="llama2", answers_only=True):
    """`template`: a name of ours, None for the tokenizer's own (TRL's training version), or a template's text."""
    if template is None or template in TEMPLATES:
        template = resolve_template(tokenizer, template, answers_only)
    return Encoder(tokenizer, template, answers_only).encode(examples)


def encode_one(example, tokenizer, *args, **kwargs):
    (row,) = encode([example], tokenizer, *args, **kwargs)
    assert isinstance(row, Encoded), row
    return row


def refused(example, tokenizer, *args, **kwargs):
    (row,) = encode([example], tokenizer, *args, **kwargs)
    assert isinstance(row, BadRow)
    return row


def trained(row, tokenizer):
    return [text for text, is_trained in pieces(row, tokenizer) if is_trained]


# -- chats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [None, "be lazy"])
@pytest.mark.parametrize("answers", [("Four .",), ("Four .", "4"), ("a", "\n b", "~", " the\n\nfox ", "9.5")])
def test_llama2_trains_the_answers_and_their_eos(answers, system, chat):
    """Cases D2 and D4. Unbroken from the first token after [/INST] to eos: the space before eos is part of it."""
    tokenizer = llama_tokenizer("first")
    turns = [turn for answer in answers for turn in ("two ?", answer)]
    row = encode_one(of(chat(*turns, system=system)), tokenizer)
    assert trained(row, tokenizer) == [f" {answer.strip()} </s>" for answer in answers]
    ids, labels = row.ids.tolist(), row.labels.tolist()
    assert ids.count(BOS) == ids.count(EOS) == labels.count(EOS) == len(answers)
    assert BOS not in labels


OWN = {"chat_template": qwen2_5_chat_template}  # without marks: TRL has a training version of it


@pytest.mark.parametrize(("template", "kwargs"), [("chatml", {}), (None, OWN)])
def test_chatml_and_the_tokenizers_own_train_the_answers_and_their_end_token(template, kwargs, chat):
    """TRL's marks enclose the line break before an answer and the one after <|im_end|> too; a model writes neither."""
    tokenizer = byte_level_tokenizer(**kwargs)
    messages = chat("two ?", "Four .", "What ?", "a lazy\ndog", system="be lazy")
    row = encode_one(of(messages), tokenizer, template)
    assert pieces(row, tokenizer) == [
        (
            "<|im_start|>system\nbe lazy<|im_end|>\n<|im_start|>user\ntwo ?<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("Four .<|im_end|>", True),
        ("\n<|im_start|>user\nWhat ?<|im_end|>\n<|im_start|>assistant\n", False),
        ("a lazy\ndog<|im_end|>", True),
        ("\n", False),
    ]
    rendered = tokenizer.apply_chat_template(messages["messages"], chat_template=read_template(tokenizer, template))
    assert row.ids.tolist() == rendered["input_ids"], "what the model is given at inference"


def test_what_the_prompt_for_an_answer_holds_is_not_trained(chat):
    """This template's prompt opens the thoughts, which TRL marks as a part of the answer."""
    tokenizer = byte_level_tokenizer(chat_template=qwen3_5_think_chat_template)
    messages = chat("two ?", "Four .")["messages"]
    (untrained, _), (answer, is_trained), _ = pieces(encode_one(of({"messages": messages}), tokenizer, None), tokenizer)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert untrained == prompt and prompt.endswith("<think>\n")
    assert is_trained and answer == "\n</think>\n\nFour .<|im_end|>"


@pytest.mark.parametrize("template", ["llama2", "chatml"])
def test_loss_weights(template, chat):
    tokenizer = llama_tokenizer("first", chatml=template == "chatml")
    row = encode_one(of(chat("a", "Four", "b", "fox", "c", "dog"), [False, True, False]), tokenizer, template)
    assert trained(row, tokenizer) == ["fox<|im_end|>" if template == "chatml" else " fox </s>"]
    error = refused(of(chat("a", "Four", "b", "fox"), [False, True]), tokenizer, template, answers_only=False)
    assert error.reason == "loss weight" and "assistant_only_loss: false trains all of a chat" in error.detail


def test_without_assistant_only_loss_every_token_is_trained(tokenizer, chat):
    row = encode_one(of(chat("two ?", "Four .")), tokenizer, answers_only=False)
    assert row.ids.tolist() == row.labels.tolist()
    assert row.ids[0] == BOS and row.ids[-1] == EOS and np.count_nonzero(row.ids == EOS) == 1


def test_a_prompt_of_messages_is_never_trained(tokenizer, chat):
    """Of prompt/completion rows, whatever assistant_only_loss says."""
    example = of(chat("two ?", "Four ."), answers_only=True)
    assert trained(encode_one(example, tokenizer, answers_only=False), tokenizer) == [" Four . </s>"]


def test_a_batch_is_its_rows_in_their_order(chat):
    tokenizer = llama_tokenizer("first")
    chats = [of(chat("two ?", "Four .")), of(chat("a", "b", "c", "d", system="e")), of(chat("What ?", "the fox"))]
    bad = of({"messages": [{"role": "assistant", "content": "a"}]})
    examples = [Text("", "the fox"), chats[0], bad, chats[1], Text("a", "dog"), chats[2]]
    together = encode(examples, tokenizer)
    assert isinstance(together[2], BadRow)
    for example, row in zip(examples[:2] + examples[3:], together[:2] + together[3:], strict=True):
        alone = encode_one(example, tokenizer)
        assert row.ids.tolist() == alone.ids.tolist() and row.labels.tolist() == alone.labels.tolist()
        assert row.ids.dtype == row.labels.dtype == np.int32


@pytest.mark.parametrize("answer", ["Four .</s>", "Four .</s></s> \n", "Four . </s>"])
def test_an_eos_that_the_answer_has_already_is_not_doubled(answer, tokenizer, chat):
    expected = encode_one(of(chat("two ?", "Four .")), tokenizer)
    assert encode_one(of(chat("two ?", answer)), tokenizer).ids.tolist() == expected.ids.tolist()


# -- templates that cannot be trained with --------------------------------------------------------------------------

MARKED = "{% generation %}{{ messages[1].content + eos_token }}{% endgeneration %}"
BOTH = "{{ messages[0].content + messages[1].content + eos_token }}"


@pytest.mark.parametrize(
    ("template", "reason", "detail"),
    [
        ("{% generation %}{% endgeneration %}" + BOTH, MASK, r"^0 of \d+ tokens"),
        ("{% generation %}" + BOTH + "{% endgeneration %}", MASK, r"^(\d+) of \1 tokens"),
        (
            "{{ messages[0].content }}" + MARKED.replace("+ eos_token", "") + "{{ eos_token }}",
            END,
            "^1 answers and 0 trained </s>; the trained tokens end in 'Four.'",
        ),
        (
            "{{ messages[0].content }}" + MARKED.replace("eos_token", "eos_token + eos_token"),
            END,
            "^1 answers and 2 trained </s>; the trained tokens end in 'Four.</s></s>'",
        ),
        (
            "{{ messages[0].content }}" + MARKED.replace("eos_token", "'<|im_end|>'"),
            END,
            "^1 answers and 0 trained </s>.*Set eos_token to the token that ends an answer in the chat template",
        ),
        ("{{ bos_token + bos_token + messages[0].content }}" + MARKED, "two bos in a row", "^at token 1"),
        ("{% if %}", "the chat template refuses it", "^TemplateSyntaxError"),
        ("{{ 'a' + messages[0].name }}" + BOTH, "the chat template refuses it", "^UndefinedError: .*name"),
        ("a" + MARKED, LOST, r"^message 1 \(user\) is not in what it writes"),
    ],
)
def test_templates_that_cannot_be_meant(template, reason, detail, chat):
    """Cases D2 and D4."""
    error = refused(of(chat("two ?", "Four.")), llama_tokenizer("first"), template)
    assert error.reason == reason
    assert re.search(detail, error.detail)
    if reason == MASK:
        assert "; set chat_template_path to a template whose {% generation %} marks" in error.detail


def test_a_template_without_marks_cannot_leave_an_answer_out(tokenizer, chat):
    template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    chats = [of(chat("a", "b", "c", "d")), of(chat("a", "b", "c", "d"), [True, False], answers_only=True)]
    good, bad = encode(chats, tokenizer, template, answers_only=False)
    assert isinstance(good, Encoded) and bad.reason == MASK and "set chat_template_path" in bad.detail


@pytest.mark.parametrize("before", ["", "{{ eos_token }}"])
def test_a_template_without_eos_where_all_is_trained(before, tokenizer, chat):
    template = before + "{{ messages[0].content + messages[1].content }}"
    error = refused(of(chat("two ?", "Four.")), tokenizer, template, answers_only=False)
    assert error.reason == END and "Four.' and eos is </s>; or the model never learns to stop" in error.detail


@pytest.mark.parametrize(
    ("roles", "template", "accepted"),
    [("ua", "llama2", True), ("sua", "llama2", True), ("au", "llama2", False), ("aua", "llama2", False)]
    + [("uua", "llama2", False), ("uata", "llama2", False), ("aua", "chatml", True), ("uuata", "chatml", True)],
)
def test_a_template_that_refuses_the_turns(roles, template, accepted):
    """Case D8: what the policies keep has to be something that the template takes."""
    tokenizer = llama_tokenizer("first", chatml=template == "chatml")
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[role], "content": f"{role}{at}"} for at, role in enumerate(roles)]
    (row,) = encode([of({"messages": messages})], tokenizer, template)
    assert isinstance(row, Encoded) is accepted
    if not accepted:
        assert row.reason == "the chat template refuses it" and row.detail.startswith("TemplateError: ")


# -- what a template leaves out, or should not be given ------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
TOOL_TALK = [
    {"role": "user", "content": "1 + 2 ?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sum": "3"}'},
    {"role": "assistant", "content": "Three ."},
]
WRITTEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'


@pytest.mark.parametrize("system", [None, "be lazy"])
@pytest.mark.parametrize(("template", "kwargs"), [("chatml", {}), (None, OWN)])
def test_tools_are_described_and_calls_trained(template, kwargs, system):
    tokenizer = byte_level_tokenizer(**kwargs)
    messages = [{"role": "system", "content": system}] * (system is not None) + TOOL_TALK
    row = encode_one(of({"messages": messages}, tools=[TOOL]), tokenizer, template)
    before, call, between, answer, _ = (text for text, _ in pieces(row, tokenizer))
    assert '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}' in before
    assert before.count("<|im_start|>system\n") == 1 and (system or "") in before
    assert before.endswith("<|im_start|>user\n1 + 2 ?<|im_end|>\n<|im_start|>assistant\n")
    assert call == WRITTEN_CALL + IM_END
    assert '{"sum": "3"}' in between and answer == "Three ." + IM_END


def test_chatml_writes_several_calls_after_the_text():
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}
    row = encode_one(of({"messages": [TOOL_TALK[0], message]}), byte_level_tokenizer(), "chatml")
    assert trained(row, byte_level_tokenizer()) == [f"Let me see.\n{WRITTEN_CALL}\n{WRITTEN_CALL}<|im_end|>"]


PLAIN = "{% for m in messages %}a{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endfor %}"
NO_ARGUMENTS = PLAIN.replace("eos_token", "(m.tool_calls or [{'function': {'name': ''}}])[0].function.name + eos_token")
NO_SYSTEM = PLAIN.replace("in messages", "in messages if m.role != 'system'")


@pytest.mark.parametrize(
    ("template", "messages", "tools", "detail"),
    [
        (NO_SYSTEM, [{"role": "system", "content": "be lazy"}, *TOOL_TALK[::3]], None, "message 1 (system) is not in"),
        (
            NO_SYSTEM,
            [{"role": "system", "content": "be lazy"}, {"role": "user", "content": "Say: be lazy"}, TOOL_TALK[3]],
            None,
            "message 1 (system) is not in",
        ),
        (PLAIN, TOOL_TALK, None, "message 2 calls add; see tool_turns"),
        (NO_ARGUMENTS, TOOL_TALK, None, "message 2 calls add; see tool_turns"),
        (PLAIN, TOOL_TALK[::3], [TOOL], "the description of the tool add; see tool_turns"),
        (PLAIN, [TOOL_TALK[0], TOOL_TALK[3] | {"reasoning_content": "hm"}], None, "message 2 (assistant) is not in"),
        ("chatml", [TOOL_TALK[0], TOOL_TALK[3] | {"reasoning_content": "hm"}], None, "message 2 (assistant) is not in"),
    ],
)
def test_what_a_template_drops_in_silence(template, messages, tools, detail):
    error = refused(of({"messages": messages}, tools=tools), byte_level_tokenizer(), template)
    assert error.reason == LOST and error.detail.startswith(detail)


def test_what_a_template_writes_as_json_is_not_left_out():
    """Llama 3.1's, of what a tool says."""
    tokenizer = byte_level_tokenizer(bos_token="<s>")
    tokenizer.add_special_tokens({"eos_token": "<|eot_id|>"})
    row = encode_one(of({"messages": TOOL_TALK}), tokenizer, llama3_1_chat_template, answers_only=False)
    assert r'"{\"sum\": \"3\"}"' in tokenizer.decode(row.ids)


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({0: {"content": "a </s> b"}}, "message 1 (user) holds </s>; take it out"),
        ({3: {"content": "a <s> b"}}, "message 4 (assistant) holds <s>"),
        ({3: {"content": f"a {IM_END} b"}}, "message 4 (assistant) holds <|im_end|>"),
        ({3: {"reasoning_content": "<|im_start|>"}}, "message 4 (assistant) holds <|im_start|>"),
        ({1: {"tool_calls": [{"function": {"name": "add", "arguments": {"a": ["</s>"]}}}]}}, "message 2 (assistant)"),
        ({2: {"name": "<s>"}}, "message 3 (tool) holds <s>"),
        ({"tools": [{"function": {"name": "add", "description": "</s>"}}]}, "the description of the tools holds </s>"),
    ],
)
def test_control_tokens_in_a_chat(change, detail):
    messages = [message | change.get(at, {}) for at, message in enumerate(TOOL_TALK)]
    error = refused(of({"messages": messages}, tools=change.get("tools")), byte_level_tokenizer(), "chatml")
    assert error.reason == "control token in a message" and error.detail.startswith(detail)


def test_control_tokens_that_json_escapes():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ['<|"|>']})
    messages = [{"role": "user", "content": '<|"|>'}, TOOL_TALK[3]]
    assert refused(of({"messages": messages}), tokenizer, "chatml").reason == "control token in a message"


def test_an_answer_that_is_nothing_but_an_eos(tokenizer, chat):
    error = refused(of(chat("a", " </s>\n")), tokenizer)
    assert str(error) == "empty message: message 2 (assistant) has nothing but </s>"


# -- encoding apart ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "argument", "expected"),
    [
        (byte_level_tokenizer, False, True),
        (byte_level_tokenizer, True, False),
        (llama_tokenizer, "never", True),
        (llama_tokenizer, "first", False),
        (llama_tokenizer, "always", False),
        (llama_tokenizer, "shipped", False),
    ],
)
def test_tokenizers_that_set_no_space_before_a_text_encode_apart(make, argument, expected):
    assert encodes_apart(make(argument).backend_tokenizer) is expected


@pytest.mark.parametrize(("template", "kwargs"), [("chatml", {}), (None, OWN)])
@pytest.mark.parametrize("answer", ["\n\n\nFour", "\nFour", "  Four", "\n", "\r\na"])
def test_an_answer_that_begins_with_white_space_is_trained_exactly(answer, template, kwargs, chat):
    """After the very tokens of the prompt at inference; encoded together, tokens would reach over the border."""
    tokenizer = byte_level_tokenizer(**kwargs)
    messages = chat("two ?", answer)["messages"]
    row = encode_one(of({"messages": messages}), tokenizer, template)
    assert trained(row, tokenizer) == [answer + IM_END]
    template = read_template(tokenizer, template)
    prompt = tokenizer.apply_chat_template(messages[:1], chat_template=template, add_generation_prompt=True)
    num_prompt = int(np.argmax(row.labels != IGNORE))
    assert row.ids[:num_prompt].tolist() == prompt["input_ids"]
    if answer[0] == "\n":
        joint = tokenizer.apply_chat_template(messages, chat_template=template)["input_ids"]
        assert joint[:num_prompt] != prompt["input_ids"], "the fault this test is about is no more"


def test_a_token_over_a_border_belongs_to_what_comes_after():
    """Where parts cannot be encoded apart."""
    backend = llama_tokenizer("first").backend_tokenizer
    encoding = backend.encode("a quick fox", add_special_tokens=False)
    assert encoding.tokens == ["▁a", "▁quick", "▁fox"]
    for cut, expected in ((2, 1), (3, 1), (5, 1), (8, 2)):
        row = _masked(encoding, [("a quick fox"[:cut], False), ("a quick fox"[cut:], True)])
        assert row.labels.tolist() == [IGNORE] * expected + encoding.ids[expected:]


# -- texts ---------------------------------------------------------------------------------------------------------

ADDING = {  # what the tokenizer adds by itself
    "nothing": {"add_bos_token": False},
    "bos": {},
    "eos": {"add_bos_token": False, "add_eos_token": True},
    "both": {"add_eos_token": True},
}


@pytest.mark.parametrize("adding", ADDING)
@pytest.mark.parametrize("text", ["the fox", "<s>the fox", "<s><s>the fox", "the fox</s>", " <s>the fox</s></s>\n"])
def test_text_has_at_most_one_bos_and_one_eos(text, adding):
    """Case D2, whoever else would add one: the text, the tokenizer, or both."""
    tokenizer = make_tokenizer(**ADDING[adding])
    row = encode_one(Text("", text), tokenizer)
    bos = [BOS] if "<s>" in text or adding in ("bos", "both") else []
    words = make_tokenizer()("the fox", add_special_tokens=False)["input_ids"]
    assert row.ids.tolist() == row.labels.tolist() == [*bos, *words, EOS]


@pytest.mark.parametrize("adding", ADDING)
@pytest.mark.parametrize("completion", [" fox", " fox</s>"])
@pytest.mark.parametrize("prompt", ["the", "<s>the"])
def test_of_prompt_and_completion_the_completion_and_eos_are_trained(prompt, completion, adding):
    tokenizer = make_tokenizer(**ADDING[adding])
    row = encode_one(Text(prompt, completion), tokenizer)
    bos = "<s>" if "<s>" in prompt or adding in ("bos", "both") else ""
    assert pieces(row, tokenizer) == [(f"{bos} the", False), (" fox</s>", True)]


@pytest.mark.parametrize("apart", [False, True])
def test_a_prompt_that_ends_in_the_middle_of_a_word(apart):
    """The completion's token reaches over the border, or the parts are encoded apart."""
    tokenizer = byte_level_tokenizer() if apart else llama_tokenizer("first")
    row = encode_one(Text("the qui", "ck fox"), tokenizer)
    expected = [("the qui", False), ("ck fox<|im_end|>", True)]
    assert pieces(row, tokenizer) == (expected if apart else [("<s> the", False), (" quick fox</s>", True)])


def test_texts_of_a_byte_level_tokenizer_that_adds_bos_and_eos():
    """Both are added once to the row, though prompt and completion are encoded apart."""
    tokenizer = byte_level_tokenizer(bos_token="<s>", add_bos_token=True, add_eos_token=True)
    assert tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id, "it adds eos"
    row = encode_one(Text(f"a{IM_END}\nb", "\n\nc"), tokenizer)
    assert pieces(row, tokenizer) == [(f"<s>a{IM_END}\nb", False), (f"\n\nc{IM_END}", True)]


def test_an_eos_at_the_end_of_a_prompt_stays():
    row = encode_one(Text(f"a{IM_END}", "b"), byte_level_tokenizer())
    assert pieces(row, byte_level_tokenizer()) == [(f"a{IM_END}", False), (f"b{IM_END}", True)]


def test_a_tokenizer_whose_bos_is_no_text(tokenizer):
    tokenizer.bos_token = ""
    (row,) = Encoder(tokenizer, None, answers_only=False).encode([Text("", "the fox")])
    assert row.ids[-1] == EOS


def test_text_keeps_the_control_tokens_within(tokenizer):
    row = encode_one(Text("", "<s>[INST] two ? [/INST] Four . </s><s>[INST] What ? [/INST] dog </s>"), tokenizer)
    ids = row.ids.tolist()
    assert ids.count(BOS) == ids.count(EOS) == 2
    assert (ids[0], ids[-1]) == (BOS, EOS)


@pytest.mark.parametrize("text", [Text("", "</s>"), Text("", "<s></s> </s>"), Text("a", " </s>")])
def test_a_text_that_is_nothing_but_control_tokens(text, tokenizer):
    assert str(refused(text, tokenizer)) == "empty: there is nothing to train on but </s>"


# -- length --------------------------------------------------------------------------------------------------------


def row_of(*labels):
    """A row of the ids 10, 11, ...; a label of 0 is an untrained token."""
    ids = np.arange(10, 10 + len(labels), dtype=np.int32)
    return Encoded(ids, np.where(np.array(labels, bool), ids, np.int32(IGNORE)))


SHORT, TAIL, LAST, SPREAD = (
    row_of(0, 1, 1),
    row_of(0, 0, 0, 1, 1),
    row_of(0, 0, 0, 0, 1),
    row_of(0, 0, 0, 1, 0, 0, 1, 1),
)


@pytest.mark.parametrize(
    ("row", "max_length", "policy", "kept", "reason"),
    [
        (SHORT, 3, "drop", [(10, 3)], None),
        (SHORT, 2, "drop", [], TOO_LONG),
        (TAIL, 4, "right", [(10, 4)], None),
        (TAIL, 3, "right", [], NO_LABEL),
        (LAST, 4, "right", [], NO_LABEL),
        (LAST, 4, "drop", [], TOO_LONG),
        (row_of(0, 0), 4, "drop", [], NO_LABEL),
        (row_of(1, 0), 4, "right", [], NO_LABEL),  # the model shifts labels: the first one never counts
        (row_of(1, 0, 0, 0, 0, 0, 0, 1), 4, "split", [(16, 2)], None),
        (TAIL, 3, "split", [(12, 3)], None),
        (LAST, 4, "split", [(13, 2)], None),
        (LAST, 5, "split", [(10, 5)], None),
        (SPREAD, 4, "split", [(10, 4), (13, 4), (16, 2)], None),
        (SPREAD, 3, "split", [(12, 3), (14, 3), (16, 2)], None),
        (row_of(0, 0, 0, 0), 2, "split", [], NO_LABEL),
    ],
)
def test_fit(row, max_length, policy, kept, reason):
    """Case D5: no piece without a label that reaches the loss. `kept`: first id and length of each piece."""
    fitted, why = fit(row, max_length, policy)
    assert [(piece.ids[0], len(piece.ids)) for piece in fitted] == kept
    assert why == reason
    for piece in fitted:
        assert piece.num_trained == np.count_nonzero(piece.labels[1:] != IGNORE) > 0
        at = piece.ids[0] - 10
        assert piece.labels[1:].tolist() == row.labels[at + 1 : at + len(piece.ids)].tolist()
        assert at == 0 or piece.labels[0] == IGNORE


# -- to its end ----------------------------------------------------------------------------------------------------


def as_rows(encoded):
    return [{"input_ids": row.ids.tolist(), "labels": row.labels.tolist()} for row in encoded]


def test_eos_is_trained_even_if_it_is_the_padding(tokenizer, chat):
    """Case D1: pretraining's collator masks every pad token, so every eos; TRL's keeps the labels it is given."""
    rows = as_rows(encode([of(chat("two ?", "Four .")), of(chat("two ?", "the quick brown fox"))], tokenizer))
    for pad in (0, EOS):
        labels = DataCollatorForLanguageModeling(pad_token_id=pad)(rows)["labels"]
        assert [(row == EOS).sum() for row in labels] == [1, 1]
        num_padded = len(rows[1]["labels"]) - len(rows[0]["labels"])
        assert labels[0, -num_padded:].tolist() == [IGNORE] * num_padded
    tokenizer.pad_token = tokenizer.eos_token
    batch = PretrainingCollator(tokenizer, mlm=False)([{"input_ids": row["input_ids"]} for row in rows])
    assert EOS not in batch["labels"], "the fault this test is about is no more"


def generate_after_training(rows, prompt):
    """Fit a tiny model to `rows`, then continue `prompt` greedily; returns the new tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
    for _ in range(60):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1
    output = model.eval().generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=EOS)
    return output[0, len(prompt) :].tolist()


def test_a_model_trained_on_the_labels_answers_and_stops(tokenizer, chat):
    """Case D1, to its end, with the template that is saved for inference."""
    questions = {"two ?": "Four .", "What ?": "a lazy dog", "Hello": "the fox"}
    rows = as_rows(encode([of(chat(*turns)) for turns in questions.items()], tokenizer))
    template = read_template(tokenizer, "llama2")
    prompt = tokenizer.apply_chat_template(chat("What ?")["messages"], chat_template=template)["input_ids"]
    assert tokenizer.decode(generate_after_training(rows, prompt)) == "a lazy dog </s>"
