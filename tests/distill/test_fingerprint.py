"""Fingerprints: another target, data set or setting has another one; what computes the same has the same."""

import json
from pathlib import Path

import torch

from distill.data.examples import Example
from distill.teacher.fingerprint import cache_key, weights_sha256
from tests.distill.teacher_samples import K, cached, make_examples
from tests.fixtures import tiny_llama


def test_another_target_data_or_setting_has_another_cache(tmp_path: Path) -> None:
    model, examples = tiny_llama(), make_examples(3)
    weights, double = weights_sha256(model), torch.float64
    masked = [*examples[:2], Example(examples[2].input_ids, [True] * 5, "made")]
    keys = [
        cache_key(weights, double, examples, K, 1.0),
        cache_key(weights_sha256(tiny_llama(seed=1)), double, examples, K, 1.0),
        cache_key(weights, torch.float32, examples, K, 1.0),
        cache_key(weights, double, examples[:2], K, 1.0),
        cache_key(weights, double, masked, K, 1.0),
        cache_key(weights, double, examples, K + 1, 1.0),
        cache_key(weights, double, examples, K, 2.0),
        cache_key(weights, double, examples, K, 1.0, torch.tensor([1, 2])),
        cache_key(weights, double, examples, K, 1.0, torch.tensor([1, 3])),
    ]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
    cached(model, examples, tmp_path)
    cached(model, examples, tmp_path, top_k=2)
    cached(model, examples, tmp_path, vocab_ids=torch.tensor([1, 2, 7]))
    assert len(list(tmp_path.iterdir())) == 3


def test_weights_have_one_fingerprint_in_every_type_that_holds_them() -> None:
    half = tiny_llama().bfloat16()
    found = weights_sha256(half)
    assert weights_sha256(half.float()) == found
    with torch.no_grad():
        half.lm_head.weight[7, 3] += 1
    assert weights_sha256(half) != found
    half.config.rms_norm_eps *= 2
    assert len({found, weights_sha256(half)}) == 2
