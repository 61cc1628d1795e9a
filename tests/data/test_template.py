import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import has_generation_markers, qwen3_chat_template, qwen3_training_chat_template

from recipe.data.messages import Chat
from recipe.data.template import TEMPLATES, read_template, resolve_template
from recipe.data.tokenization import IGNORE, Encoder
from recipe.errors import UserError
from tests.data.conftest import LLAMAS, byte_level_tokenizer, llama_tokenizer, make_tokenizer

# Written out by hand from Meta's reference (facebookresearch/llama, llama/generation.py, chat_completion).
SYSTEM = "<<SYS>>\nbe lazy\n<</SYS>>\n\n"
ONE = "two ? [/INST] Four . </s>"
TWO = f"{ONE}<s>[INST] What ? [/INST] dog </s>"
FIVE = f"{TWO}<s>[INST] a\nb [/INST] c\n\nd </s><s>[INST] 5 [/INST] 6 </s><s>[INST] over [/INST] the fox </s>"
LLAMA2 = {
    ("one turn", False): f"<s>[INST] {ONE}",
    ("one turn", True): f"<s>[INST] {SYSTEM}{ONE}",
    ("two turns", False): f"<s>[INST] {TWO}",
    ("two turns", True): f"<s>[INST] {SYSTEM}{TWO}",
    ("five turns", False): f"<s>[INST] {FIVE}",
    ("five turns", True): f"<s>[INST] {SYSTEM}{FIVE}",
}
TURNS = {
    "one turn": ("two ?", "Four ."),
    "two turns": ("two ?", "Four .", "What ?", "dog"),
    "five turns": ("two ?", "Four .", "What ?", "dog", "a\nb", "c\n\nd", "5", "6", "over", "the fox"),
}


@pytest.mark.parametrize(("turns", "system"), LLAMA2)
@pytest.mark.parametrize("space", ["", " ", "\n \n"])
def test_llama2_is_metas_reference(turns, system, space, tokenizer, chat):
    """Whatever white space stands around user messages and answers."""
    messages = chat(*(space + turn + space for turn in TURNS[turns]), system="be lazy" if system else None)["messages"]
    if system:  # the reference strips the user's text together with the system's, so not what stands between them
        messages[1]["content"] = messages[1]["content"].lstrip()
    text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATES["llama2"].read_text(), tokenize=False)
    assert text == LLAMA2[turns, system]


# Conversations for Meta's reference, which encodes each pair of turns by itself; white space around a turn is stripped.
TALKS = {
    1: [(" two ?\n", "\nFour .  ")],
    2: [("two  ?", "Four .\n\n- dog"), ("\tWhat ?", "🦊 é\u2003the fox")],
    5: [("a\nb", "c"), ("  5", "6  7"), ("over", "the\tfox\r\n"), ("你好", "e\u0301 ]"), ("[INST] ?", "<0x0A> . ")],
}


def metas_reference(talk, system, tokenizer):
    """Ids as chat_completion of facebookresearch/llama (llama/generation.py) makes them."""
    ids = []
    for at, (user, answer) in enumerate(talk):
        if at == 0 and system is not None:
            user = f"<<SYS>>\n{system}\n<</SYS>>\n\n{user}"
        text = f"[INST] {user.strip()} [/INST] {answer.strip()} "
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(encoded)[0].startswith("▁"), "SentencePiece's space"
        ids += [tokenizer.bos_token_id, *encoded, tokenizer.eos_token_id]
    return ids


@pytest.mark.parametrize("kind", LLAMAS)
@pytest.mark.parametrize("num_turns", TALKS)
@pytest.mark.parametrize("system", [None, "be lazy", " be\n\nlazy "])
def test_llama2_is_metas_reference_token_for_token(kind, num_turns, system, chat, tmp_path):
    """In training, and at inference with the tokenizer and template that are saved with the model."""
    tokenizer, talk = llama_tokenizer(kind), TALKS[num_turns]
    messages = chat(*(turn for pair in talk for turn in pair), system=system)["messages"]
    expected = metas_reference(talk, system, tokenizer)
    encoder = Encoder(tokenizer, resolve_template(tokenizer, "llama2", assistant_only_loss=True), answers_only=True)
    (row,) = encoder.encode([Chat(messages, None, [True] * num_turns)])
    assert row.ids.tolist() == expected

    tokenizer.chat_template = read_template(tokenizer, "llama2")
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.apply_chat_template(messages)["input_ids"] == expected
    prompt = saved.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    assert expected[: len(prompt)] == prompt
    assert (row.labels[len(prompt) - 1], row.labels[len(prompt)]) == (IGNORE, expected[len(prompt)])


@pytest.mark.parametrize(
    ("make", "argument", "written"),
    [
        (llama_tokenizer, "first", True),
        (llama_tokenizer, "never", True),
        (llama_tokenizer, "always", True),
        (llama_tokenizer, "shipped", False),
        (byte_level_tokenizer, False, False),
        (byte_level_tokenizer, True, False),
    ],
)
def test_the_space_after_bos_is_written_out_where_it_would_not_be_a_second(make, argument, written, chat):
    tokenizer = make(argument)
    tokenizer.bos_token = "<s>"
    template = read_template(tokenizer, "llama2")
    text = tokenizer.apply_chat_template(chat("a")["messages"], chat_template=template, tokenize=False)
    assert text == ("<s> [INST] a [/INST]" if written else "<s>[INST] a [/INST]")


@pytest.mark.parametrize(("name", "make"), [("chatml", byte_level_tokenizer), ("llama2", make_tokenizer)])
def test_the_prompt_at_inference_is_how_the_training_row_begins(name, make, chat):
    """In tokens too, so that the first token the model is asked for is the first it was trained on."""
    tokenizer = make()
    template = resolve_template(tokenizer, name, assistant_only_loss=True)
    messages = chat(*TURNS["two turns"], system="be lazy")["messages"]
    (row,) = Encoder(tokenizer, template, answers_only=True).encode([Chat(messages, None, [True, True])])
    prompt = tokenizer.apply_chat_template(messages[:-1], chat_template=template, add_generation_prompt=True)
    num_prompt = len(prompt["input_ids"])
    assert row.ids[:num_prompt].tolist() == prompt["input_ids"]
    assert [label != IGNORE for label in row.labels[num_prompt - 1 : num_prompt + 1]] == [False, True]


def test_chatml(tokenizer, chat):
    messages = chat("two ?", "Four .", system="be lazy")["messages"]
    text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATES["chatml"].read_text(), tokenize=False)
    assert text == (
        "<|im_start|>system\nbe lazy<|im_end|>\n<|im_start|>user\ntwo ?<|im_end|>\n"
        "<|im_start|>assistant\nFour .<|im_end|>\n"
    )


@pytest.mark.parametrize("messages", [[0, 0, 1], [1, 0], [0, 1, 1]])
def test_llama2_refuses_turns_that_do_not_alternate(messages, tokenizer):
    rows = [{"role": ("user", "assistant")[role], "content": "a"} for role in messages]
    with pytest.raises(Exception, match="roles must go system"):
        tokenizer.apply_chat_template(rows, chat_template=TEMPLATES["llama2"].read_text())


def test_names_paths_and_the_tokenizers_own(tokenizer, tmp_path):
    assert set(TEMPLATES) == {"llama2", "chatml"}
    assert all(has_generation_markers(resolve_template(tokenizer, name, True)) for name in TEMPLATES)
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert resolve_template(tokenizer, str(tmp_path / "own.jinja")) == "{{ messages }}"
    tokenizer.chat_template = "of the tokenizer"
    assert read_template(tokenizer, None) == "of the tokenizer"
    assert "[INST]" in read_template(tokenizer, "llama2")
    tokenizer.chat_template = {"default": "the default", "tools": "another"}
    assert read_template(tokenizer, None) == "the default"


def test_template_that_does_not_exist(tokenizer, tmp_path):
    with pytest.raises(
        UserError, match="the tokenizer has no chat template; set chat_template_path to one of chatml, ll"
    ):
        resolve_template(tokenizer, None)
    for name in ("llama3", str(tmp_path / "none.jinja"), str(tmp_path)):
        with pytest.raises(
            UserError, match=f"chat_template_path '{name}' is neither one of chatml, llama2 nor an exist"
        ):
            resolve_template(tokenizer, name)


def test_marks_are_asked_of_trl_only_where_they_are_needed(tokenizer):
    tokenizer.chat_template = qwen3_chat_template
    assert resolve_template(tokenizer, None, assistant_only_loss=False) == qwen3_chat_template
    assert resolve_template(tokenizer, None, assistant_only_loss=True) == qwen3_training_chat_template
    assert tokenizer.chat_template == qwen3_chat_template


def test_template_without_marks(tokenizer, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages }}")
    with pytest.raises(
        UserError, match=f"chat_template_path '{path}' has none; set chat_template_path to one of chatml"
    ):
        resolve_template(tokenizer, str(path), assistant_only_loss=True)
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(
        UserError, match="the tokenizer's own chat template has none; .* or set assistant_only_loss: false"
    ):
        resolve_template(tokenizer, None, assistant_only_loss=True)
