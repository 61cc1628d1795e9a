import pytest
import torch
from transformers import DataCollatorForLanguageModeling as PretrainingCollator
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from recipe.data.template import TEMPLATES
from recipe.data.tokenization import IGNORE, fit, num_trained, tokenize
from recipe.errors import UserError

LLAMA2 = TEMPLATES["llama2"].read_text()
BOS, EOS = 1, 2


def tokenize_chats(chats, tokenizer, template=LLAMA2, assistant_only_loss=True):
    batch = {"row": list(range(1, len(chats) + 1)), "messages": [chat["messages"] for chat in chats]}
    encoded = tokenize(batch, tokenizer, template, assistant_only_loss)
    return list(zip(encoded["input_ids"], encoded["labels"], strict=True))


def tokenize_texts(texts, tokenizer):
    encoded = tokenize({"row": list(range(1, len(texts) + 1)), "text": texts}, tokenizer, None, False)
    assert encoded["labels"] == encoded["input_ids"]
    return encoded["input_ids"]


def trained_spans(labels, tokenizer):
    """The text of each unbroken run of trained tokens."""
    spans, run = [], []
    for label in [*labels, IGNORE]:
        if label != IGNORE:
            run.append(label)
        elif run:
            spans.append(tokenizer.decode(run))
            run = []
    return spans


@pytest.mark.parametrize("system", [None, "be lazy"])
@pytest.mark.parametrize("answers", [("Four .",), ("Four .", "4"), ("a", "\n b", "~", " the\n\nfox ", "9.5")])
def test_trained_tokens_are_the_answers_and_their_eos(answers, system, tokenizer, chat):
    """Case D4. Unbroken from the first token after [/INST] to eos: white space before eos is part of the way there."""
    turns = [turn for answer in answers for turn in ("two ?", answer)]
    ((ids, labels),) = tokenize_chats([chat(*turns, system=system)], tokenizer)
    assert [span.strip() for span in trained_spans(labels, tokenizer)] == [
        f"{answer.strip()} </s>" for answer in answers
    ]
    assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))
    assert ids.count(BOS) == ids.count(EOS) == labels.count(EOS) == len(answers)
    assert BOS not in labels


def test_a_batch_is_its_rows(tokenizer, chat):
    chats = [chat("two ?", "Four ."), chat("a", "b", "c", "d", system="e"), chat("What ?", "the fox")]
    together = tokenize_chats(chats, tokenizer)
    assert together == [row for one in chats for row in tokenize_chats([one], tokenizer)]


def test_without_assistant_only_loss_every_token_is_trained(tokenizer, chat):
    ((ids, labels),) = tokenize_chats([chat("two ?", "Four .")], tokenizer, assistant_only_loss=False)
    assert ids == labels
    assert ids[0] == BOS and ids[-1] == EOS and ids.count(EOS) == 1


def test_eos_is_trained_even_if_it_is_the_padding(tokenizer, chat):
    """Case D1: pretraining's collator masks every pad token, so every eos; TRL's keeps the labels it is given."""
    rows = [
        {"input_ids": ids, "labels": labels}
        for ids, labels in tokenize_chats([chat("two ?", "Four ."), chat("two ?", "the quick brown fox")], tokenizer)
    ]
    for pad in (0, EOS):
        labels = DataCollatorForLanguageModeling(pad_token_id=pad)(rows)["labels"]
        assert [(row == EOS).sum() for row in labels] == [1, 1]
        assert labels[0, len(rows[0]["labels"]) :].tolist() == [IGNORE] * (
            len(rows[1]["labels"]) - len(rows[0]["labels"])
        )
    tokenizer.pad_token = tokenizer.eos_token
    batch = PretrainingCollator(tokenizer, mlm=False)([{"input_ids": row["input_ids"]} for row in rows])
    assert EOS not in batch["labels"], "the fault this test is about is no more"


def generate_after_training(rows, prompt):
    """Fit a tiny model to `rows` of (ids, labels), then continue `prompt` greedily; returns the new tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(
        [{"input_ids": ids, "labels": labels} for ids, labels in rows]
    )
    for _ in range(60):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.1
    output = model.eval().generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=EOS)
    return output[0, len(prompt) :].tolist()


def test_a_model_trained_on_the_labels_answers_and_stops(tokenizer, chat):
    """Case D1, to its end."""
    questions = {"two ?": "Four .", "What ?": "a lazy dog", "Hello": "the fox"}
    rows = tokenize_chats([chat(*turns) for turns in questions.items()], tokenizer)
    prompt = tokenizer.apply_chat_template(chat("What ?")["messages"], chat_template=LLAMA2)["input_ids"]
    assert tokenizer.decode(generate_after_training(rows, prompt)) == "a lazy dog </s>"


@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("text", ["the fox", "<s>the fox", "<s><s>the fox", "the fox</s>", " <s>the fox</s></s>\n"])
def test_text_has_one_bos_and_one_eos(text, adds_eos, tokenizer, eos_adding_tokenizer):
    """Case D2, whoever else would add one: the text, the tokenizer, or both."""
    (plain,) = tokenize_texts(["the fox"], tokenizer)
    assert plain == [BOS, *tokenizer("the fox", add_special_tokens=False)["input_ids"], EOS]
    assert tokenize_texts([text], eos_adding_tokenizer if adds_eos else tokenizer) == [plain]


def test_text_keeps_the_control_tokens_within(tokenizer):
    (ids,) = tokenize_texts(["<s>[INST] two ? [/INST] Four . </s><s>[INST] What ? [/INST] dog </s>"], tokenizer)
    assert ids.count(BOS) == ids.count(EOS) == 2
    assert (ids[0], ids[-1]) == (BOS, EOS)


def test_tokenizer_that_adds_no_bos(tokenizer):
    tokenizer.add_bos_token = False
    tokenizer.update_post_processor()
    bare, with_bos = tokenize_texts(["the fox", "<s>the fox"], tokenizer)
    assert BOS not in bare and with_bos == [BOS, *bare]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% generation %}{% endgeneration %}{{ messages[0].content }}",
            "marks 0 of the . tokens of row 1 as the assist",
        ),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", r"marks (.) of the \1 tokens of row 1"),
        (
            "{% for m in messages %}a{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endfor %}",
            "row 1 has 1 answers and 0 trained </s> .*set eos_token to the token that ends an answer",
        ),
        (
            "a{% generation %}{{ messages[1].content + eos_token + eos_token }}{% endgeneration %}",
            "row 1 has 1 answers and 2 trained </s> .its trained tokens end in 'Four.</s></s>'",
        ),
        (TEMPLATES["chatml"].read_text(), "row 1 has 1 answers and 0 trained </s>"),
    ],
)
def test_mask_that_cannot_be_meant(template, message, tokenizer, chat):
    with pytest.raises(UserError, match=message):
        tokenize_chats([chat("two ?", "Four.")], tokenizer, template)


@pytest.mark.parametrize("template", ["{{ messages[1].content }}", "{{ eos_token + messages[1].content }}"])
def test_template_without_eos(template, tokenizer, chat):
    with pytest.raises(UserError, match="a chat must end in the eos token.*: row 1 ends in '.*Four.' and eos is </s>"):
        tokenize_chats([chat("two ?", "Four.")], tokenizer, template, assistant_only_loss=False)


def test_template_that_refuses_a_row_names_it(tokenizer, chat):
    """Case D8: the row is named, whichever place it has in the batch."""
    batch = {"row": [7, 8, 9], "messages": [chat("a", "b")["messages"]] * 2 + [chat("a", "b", "c")["messages"][1:]]}
    with pytest.raises(UserError, match="the chat template refuses line 9: TemplateError: roles must go"):
        tokenize(batch, tokenizer, LLAMA2, True, "line")
    with pytest.raises(UserError, match="the chat template refuses row 7: TemplateSyntaxError"):
        tokenize(batch, tokenizer, "{% if %}", False)


def test_fit_cuts_the_end_and_drops_what_has_no_label_left():
    """Case D5."""
    batch = {
        "row": [1, 2, 3, 4],
        "input_ids": [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5, 6]],
        "labels": [[-100, 2, 3], [-100, -100, -100, 4, 5], [-100, -100, -100, -100, 5], [5, -100]],
    }
    assert fit(batch, 4, split=False) == {
        "row": [1, 2],
        "input_ids": [[1, 2, 3], [1, 2, 3, 4]],
        "labels": [[-100, 2, 3], [-100, -100, -100, 4]],
        "num_trained": [2, 1],
    }
    assert fit(batch, 3, split=False)["row"] == [1]
    assert num_trained([5, -100]) == 0, "the model shifts labels: the first one never counts"


def test_fit_splits_long_rows_when_asked():
    batch = {"row": [1], "input_ids": [[*range(8)]], "labels": [[-100, -100, -100, 3, 4, 5, 6, 7]]}
    fitted = fit(batch, 3, split=True)
    assert fitted["input_ids"] == [[3, 4, 5], [6, 7]], "the first piece has no label"
    assert fitted["row"] == [1, 1]
    assert fitted["num_trained"] == [2, 1]
