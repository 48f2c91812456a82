"""The loss in chunks equals the loss of all logits at once, in value and in every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distill.config import OPTIONS, LossConfig
from distill.fused import CHUNK_BYTES, Evaluate, chunk_size, chunked
from distill.laws import Columns, FullLaw, HeadLaw, Law
from distill.losses import LOSSES, Pair, log_overlap
from tests.distill.law_samples import LAWS, VOCAB_IDS, V, random_ids, random_logits

N, D = 23, 6


def evaluator(name: str, law: Law, columns: Columns, temperature: float = 1.0) -> Evaluate:
    """The weighted sum of a loss, as a student takes it."""
    weights, following = random_logits(N, seed=5).abs(), random_ids(N)
    options = {key: getattr(LossConfig(), key) for key in OPTIONS.get(name, ())}

    def evaluate(start: int, stop: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pair = Pair(law.part(start, stop), logits, columns, following[start:stop], temperature)
        losses = LOSSES[name](pair, **options)
        overlap = log_overlap(*(x.detach() for x in pair.aligned)).exp()
        return (weights[start:stop].to(losses.dtype) * losses).sum(), losses.detach(), overlap

    return evaluate


def make_head(size: int, bias: bool, dtype: torch.dtype = torch.float64) -> nn.Linear:
    head = nn.Linear(D, size, bias=bias, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(random_logits(size, D, seed=3) / 3)
        if bias:
            head.bias.copy_(random_logits(size, seed=4) / 3)
    return head


def run(hidden: Tensor, head: nn.Linear, evaluate: Evaluate, size: int | None, scale: float = 3.0) -> dict[str, Any]:
    """Value, results and gradients of `scale` times the loss; size None: all logits at once, by autograd."""
    hidden = hidden.detach().clone().requires_grad_()
    head.zero_grad()
    found = evaluate(0, N, head(hidden)) if size is None else chunked(hidden, head, evaluate, size)
    (scale * found[0]).backward()
    grads = {"hidden": hidden.grad, **{name: p.grad for name, p in head.named_parameters()}}
    return {"total": found[0].detach(), "losses": found[1], "overlap": found[2], **grads}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.allclose(found[key], value, rtol=tolerance, atol=tolerance), key


@pytest.mark.parametrize("vocab_ids", [None, VOCAB_IDS], ids=["all ids", "reduced"])
@pytest.mark.parametrize("kind", [*LAWS, "head"])
@pytest.mark.parametrize("name", LOSSES)
def test_chunks_equal_the_whole_in_fp64_and_fp32(name: str, kind: str, vocab_ids: Tensor | None) -> None:
    columns = Columns(V, vocab_ids)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):  # 1e-5: sums of 23 terms in fp32
        target = random_logits(N, V, dtype=dtype)
        if kind == "head":
            law: Law = HeadLaw(target, nn.Identity(), 2.0)
        else:
            law = LAWS[kind]((target / 2).log_softmax(-1), vocab_ids)
        evaluate = evaluator(name, law, columns, 2.0)
        head, hidden = make_head(len(columns.ids), bias=kind == "head", dtype=dtype), random_logits(N, D, dtype=dtype)
        expected = run(hidden, head, evaluate, None)
        for size in (1, 5, N, 100):
            assert_equal(run(hidden, head, evaluate, size), expected, tolerance)
        broken = run(hidden, head, evaluate, 5, scale=2.0)  # what comes from above is counted, once
        with pytest.raises(AssertionError):
            assert_equal(broken, expected, tolerance)


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Evaluate]:
    law = FullLaw(random_logits(N, V, dtype=dtype).log_softmax(-1))
    return random_logits(N, D, seed=1, dtype=dtype), make_head(V, True, dtype), evaluator("forward_kl", law, Columns(V))


def test_a_tied_head_adds_its_gradient_to_the_embeddings() -> None:
    _, _, evaluate = case()
    grads = []
    for size in (None, 5):
        table = nn.Embedding(V, D, dtype=torch.float64)
        head = nn.Linear(D, V, bias=False, dtype=torch.float64)
        with torch.no_grad():
            table.weight.copy_(random_logits(V, D))
        head.weight = table.weight
        hidden = table(random_ids(N)).tanh()
        found = evaluate(0, N, head(hidden)) if size is None else chunked(hidden, head, evaluate, size)
        found[0].backward()
        grads.append(table.weight.grad)
    assert torch.allclose(*grads, rtol=0, atol=1e-10)


def test_frozen_parts_get_no_gradient_and_others_are_not_changed_by_it() -> None:
    hidden, head, evaluate = case()
    expected = run(hidden, head, evaluate, None)
    head.requires_grad_(False).zero_grad()
    leaf = hidden.clone().requires_grad_()
    chunked(leaf, head, evaluate, 5)[0].backward()
    assert torch.allclose(leaf.grad * 3, expected["hidden"], rtol=0, atol=1e-10)
    assert head.weight.grad is None
    head.requires_grad_(True)
    chunked(hidden, head, evaluate, 5)[0].backward()  # the body is frozen
    assert torch.allclose(head.weight.grad * 3, expected["weight"], rtol=0, atol=1e-10)
    with torch.no_grad():
        found = chunked(leaf, head, evaluate, 5)
    assert not found[0].requires_grad
    assert torch.allclose(found[1], expected["losses"], rtol=0, atol=1e-12)


def test_no_position_gives_zero_and_zero_gradients() -> None:
    hidden, head = torch.zeros(0, D, dtype=torch.float64, requires_grad=True), make_head(V, True)

    def evaluate(start: int, stop: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return logits.sum(), logits.detach().sum(-1), logits.detach().sum(-1)

    total, losses, overlap = chunked(hidden, head, evaluate, 5)
    total.backward()
    assert total.item() == 0 and losses.shape == overlap.shape == (0,)
    assert hidden.grad is not None and hidden.grad.shape == (0, D)
    assert (head.weight.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_t13_under_autocast_products_are_rounded_as_the_plain_head_rounds_them(dtype: torch.dtype) -> None:
    hidden, head, evaluate = case(torch.float32)
    exact = run(hidden, head, evaluate, None)
    with torch.autocast("cpu", dtype):
        plain, found = (run(hidden, head, evaluate, size) for size in (None, 5))
    assert torch.equal(found["losses"], plain["losses"])  # the same logits, from there on in fp32
    assert found["weight"].dtype == found["hidden"].dtype == torch.float32
    for key in ("hidden", "weight", "bias"):
        error = (found[key] - exact[key]).norm() / exact[key].norm()
        assert error < 2 * (plain[key] - exact[key]).norm() / exact[key].norm() + 1e-6


def test_t22_gradients_do_not_wait_for_the_backward_pass() -> None:
    """What the law was made of may change, or be inference tensors, once the forward is done."""
    hidden, head, evaluate = case()
    expected = run(hidden, head, evaluate, None)
    with torch.inference_mode():
        law = FullLaw(random_logits(N, V).log_softmax(-1))
    leaf = hidden.clone().requires_grad_()
    total = chunked(leaf, head, evaluator("forward_kl", law, Columns(V)), 5)[0]
    with torch.inference_mode():
        law.log_probs.zero_()
    total.backward()
    assert torch.allclose(leaf.grad * 3, expected["hidden"], rtol=0, atol=1e-10)


def test_no_tensor_of_all_positions_and_ids_is_ever_made() -> None:
    hidden, head = random_logits(N, D), make_head(V, False)
    law = HeadLaw(random_logits(N, D, seed=1), make_head(V, False))
    evaluate, seen = evaluator("jensen_shannon", law, Columns(V)), []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor))
            return out

    with Sizes():
        run(hidden, head, evaluate, 4)
    assert max(seen) == max(N * D, V * D, 4 * V)
    seen.clear()
    with Sizes():
        run(hidden, head, evaluate, None)
    assert max(seen) == N * V  # the count does see it


def test_a_chunk_is_bounded_in_bytes() -> None:
    for width in (1000, 4096, 49152):
        assert 4 * width * chunk_size(width) <= CHUNK_BYTES < 4 * width * (chunk_size(width) + 1)
    assert chunk_size(10**9) == 1
