"""Fingerprints and keys: another target, tokenizer or setting has another one; what computes the same has the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.config import TeacherConfig
from distill.data.examples import Example
from distill.teacher.fingerprint import chat_template_sha256, content_of, tokenizer_sha256
from distill.teacher.key import UNKNOWN, WORDS, CacheKey, TextKey, cache_key, differences
from distill.weights import weights_sha256
from tests.distill.teacher_samples import cached, make_examples
from tests.fixtures import byte_tokenizer, tiny_llama

KEY = cache_key(
    TeacherConfig(kind="cached", top_k=5), "1" * 64, "torch.float32", 1.0, None, TextKey("2" * 64, "3" * 64, 512)
)
CHANGES: dict[str, tuple[Any, str]] = {
    "target_sha256": ("9" * 64, "target: its weights: 999999999999 in the cache, 111111111111 in this run"),
    "tokenizer_sha256": ("9" * 64, "target: its tokenizer: 999999999999 in the cache, 222222222222 in this run"),
    "chat_template_sha256": (None, "target: its chat template: none in the cache, 333333333333 in this run"),
    "draft_ids_sha256": ("9" * 64, "draft: the ids that it proposes: 999999999999 in the cache, all in this run"),
    "max_length": (256, "data.max_length: 256 in the cache, 512 in this run"),
    "mask_rule": (0, "the rule of what is supervised: 0 in the cache, 1 in this run"),
    "temperature": (2.0, "loss.temperature: 2.0 in the cache, 1.0 in this run"),
    "top_k": (4, "teacher.top_k: 4 in the cache, 5 in this run"),
    "sampled": (3, "teacher.sampled: 3 in the cache, none in this run"),
    "store": ("float16", "teacher.store: float16 in the cache, float32 in this run"),
    "dtype": ("torch.bfloat16", "model.dtype: torch.bfloat16 in the cache, torch.float32 in this run"),
    "format": (2, "the format of caches: 2 in the cache, 3 in this run"),
}


def changed(name: str) -> CacheKey:
    value = CHANGES[name][0]
    if name in vars(TextKey("", None, 0)):
        assert KEY.text is not None
        return replace(KEY, text=replace(KEY.text, **{name: value}))
    return replace(KEY, **{name: value})


@pytest.mark.parametrize("name", WORDS)
def test_every_part_of_a_key_makes_another_cache_and_is_named_with_both_values(name: str) -> None:
    other = changed(name)
    assert other.short != KEY.short
    assert differences(other.as_dict(), KEY.as_dict()) == [CHANGES[name][1]]
    assert differences(KEY.as_dict(), KEY.as_dict()) == []


def test_a_key_has_no_part_without_words_and_survives_json() -> None:
    assert KEY.as_dict().keys() == WORDS.keys()
    assert json.loads(json.dumps(KEY.as_dict())) == KEY.as_dict()
    several = {**KEY.as_dict(), "top_k": 1, "store": "float16"}
    assert [told.partition(":")[0] for told in differences(several, KEY.as_dict())] == [
        "teacher.top_k",
        "teacher.store",
    ]
    served = {**KEY.as_dict(), "target_sha256": UNKNOWN, "dtype": UNKNOWN}
    assert differences(served, KEY.as_dict()) == []


def test_caches_of_different_keys_lie_apart(tmp_path: Path) -> None:
    model, examples = tiny_llama(), make_examples(3)
    masked = [*examples[:2], Example(examples[2].input_ids, [True] * 5, "made")]
    for settings in ({}, {"top_k": 2}, {"vocab_ids": torch.tensor([1, 2, 7])}, {"temperature": 2.0}, {"sampled": 2}):
        cached(model, examples, tmp_path, **({} if "sampled" not in settings else {"top_k": 32}), **settings)
    cached(tiny_llama(seed=1), examples, tmp_path)
    folders = list(tmp_path.iterdir())
    assert len(folders) == 6
    cached(model, masked, tmp_path)  # another mask is another example of the same cache
    assert len(list(tmp_path.iterdir())) == 6


def test_examples_are_told_apart_by_ids_and_mask() -> None:
    ids = [1, 2, 3]
    found = [content_of(i, m) for i in (ids, [1, 2, 4], ids[:2]) for m in ([False, True, True], [True] * 3)]
    assert len(set(found)) == len(found)
    assert content_of([1, 2, 3], [False, True, True]) == found[0]


def test_a_tokenizer_has_one_fingerprint_whatever_was_done_with_it() -> None:
    tokenizer = byte_tokenizer()
    found, template = tokenizer_sha256(tokenizer), chat_template_sha256(tokenizer)
    tokenizer(["a", "longer"], padding=True, truncation=True, max_length=3)
    assert tokenizer_sha256(tokenizer) == found == tokenizer_sha256(byte_tokenizer())
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_sha256(tokenizer) == found and chat_template_sha256(tokenizer) not in (template, None)
    tokenizer.chat_template = None
    assert chat_template_sha256(tokenizer) is None
    tokenizer.add_tokens(["another"])
    assert tokenizer_sha256(tokenizer) != found


def test_weights_have_one_fingerprint_in_every_type_that_holds_them() -> None:
    half = tiny_llama().bfloat16()
    found = weights_sha256(half)
    assert weights_sha256(half.float()) == found
    with torch.no_grad():
        half.lm_head.weight[7, 3] += 1
    assert weights_sha256(half) != found
    half.config.rms_norm_eps *= 2
    assert len({found, weights_sha256(half)}) == 2
