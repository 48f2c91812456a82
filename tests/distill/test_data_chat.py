"""Chats: exactly the answers are supervised, whatever the template does, or the row is refused."""

from pathlib import Path

import pytest

from decode.errors import UsageError
from tests.distill.test_data_examples import ANSWER, USER, load, supervised_text
from tests.fixtures import CHATML, byte_tokenizer

ROLE = "{{ '<|im_start|>' + m['role'] + '\n' }}"
TEMPLATES = {
    "chatml": CHATML,
    "generation tags": "{% for m in messages %}" + ROLE + "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "no generation prompt": "{% for m in messages %}" + ROLE + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}",
    "blanks around": "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' <|im_end|>' }}{% endif %}{% endfor %}",
    "empty thought": "{% for m in messages %}" + ROLE + "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '(think)\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
}
UNCLEAR = {
    "counts the turns": "{{ messages | length }}" + CHATML,
    "changes the text": CHATML.replace("message['content']", "message['content'] | upper"),
    "no end of turn": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("content", ["ho", "assistant", "héllo\nwörld", "  ho \n", "a <|im_end|> b"])
def test_a01_exactly_the_answers_and_their_end_of_turn_are_supervised(
    tmp_path: Path, template: str, content: str
) -> None:
    tokenizer = byte_tokenizer(template)
    messages = [USER, ANSWER, USER, {"role": "assistant", "content": content}]
    (example,), _ = load(tmp_path, [{"messages": messages}], tokenizer)
    first, last = [], []
    for i, supervised in enumerate(example.mask):  # two runs of supervised tokens, one for each answer
        run = last if last or (first and not example.mask[i - 1]) else first
        if supervised:
            run.append(example.input_ids[i])
    assert "".join(tokenizer.decode(first).split()) == "ho<|im_end|>"
    assert "".join(tokenizer.decode(last).split()) == "".join((content + "<|im_end|>").split())
    assert last[-1] == tokenizer.eos_token_id


THOUGHTS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index %}"
    "{% endif %}{% endfor %}{% for m in messages %}" + ROLE + "{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index < ns.last %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
)
DROPS_THOUGHTS = {
    "plain": THOUGHTS + "{{ text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "generation tags": THOUGHTS + "{% if m['role'] == 'assistant' %}{% generation %}{{ text + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ text + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
}


@pytest.mark.parametrize("template", DROPS_THOUGHTS.values(), ids=DROPS_THOUGHTS)
def test_a01_an_answer_whose_thoughts_the_template_drops_is_read_and_not_supervised(
    tmp_path: Path, template: str
) -> None:
    tokenizer = byte_tokenizer(template)
    thought = {"role": "assistant", "content": "<think>one</think>ho"}
    rows = [{"messages": [USER, thought, USER, thought]}, {"messages": [USER, ANSWER, USER, thought]}]
    (dropped, kept), report = load(tmp_path, rows, tokenizer)
    assert supervised_text(dropped, tokenizer) == "<think>one</think>ho<|im_end|>"
    assert tokenizer.decode(dropped.input_ids).count("one") == 1
    assert supervised_text(kept, tokenizer) == "ho<|im_end|><think>one</think>ho<|im_end|>"
    assert report.num_rewritten == 1
    assert report.lines()[-1] == "1 answers within chats are read, not supervised: the chat template shortens them"


def test_a01_an_earlier_answer_that_is_changed_otherwise_is_refused(tmp_path: Path) -> None:
    changed = CHATML.replace(
        "message['content']", "(message['content'] if loop.last else message['content'] | replace('h', 'H'))"
    )
    with pytest.raises(UsageError, match=r"rows.jsonl:1: messages\[1\]: the chat template changes"):
        load(
            tmp_path,
            [{"messages": [USER | {"content": "a"}, ANSWER, USER | {"content": "a"}, ANSWER]}],
            byte_tokenizer(changed),
        )


@pytest.mark.parametrize("template", UNCLEAR.values(), ids=UNCLEAR)
def test_a01_template_that_hides_the_answer_is_refused_by_row(tmp_path: Path, template: str) -> None:
    rows = [{"messages": [USER, ANSWER]}]
    with pytest.raises(UsageError, match=r"rows.jsonl:1: messages\[1\]: the chat template"):
        load(tmp_path, rows, byte_tokenizer(template))
    with pytest.raises(UsageError, match=r"no example is left; 1 bad rows \(100.0 %\) skipped"):
        load(tmp_path, rows, byte_tokenizer(template), skip=True)


def test_a01_a_template_that_shortens_the_last_answer_too_is_refused(tmp_path: Path) -> None:
    always = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    thought = {"role": "assistant", "content": "<think>one</think>ho"}
    with pytest.raises(UsageError, match=r"rows.jsonl:1: messages\[3\]: the chat template changes"):
        load(tmp_path, [{"messages": [USER, thought, USER, thought]}], byte_tokenizer(always))
