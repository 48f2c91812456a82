"""fit from a cache that the command made: the same training; what belongs to something else is refused by name."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.config import ModelConfig
from decode.errors import UsageError
from decode.models import LoadedModel
from distill.cache import verify
from distill.config import (
    CacheConfig,
    DataConfig,
    LossConfig,
    OnPolicyConfig,
    ScoredDataConfig,
    SelectionConfig,
    ServerConfig,
    TeacherConfig,
)
from distill.teacher import scoring
from distill.teacher.store import read_index
from tests.distill.cache_samples import MODEL, change_weights, copied, made, replace_ids, rewrite
from tests.distill.openai_server import serving
from tests.draft_files import make_draft, save_target
from tests.fit_runs import fit_config, run_fit, tree, write_id_rows
from tests.fixtures import tiny_llama


@pytest.fixture(scope="module")
def whole(fit_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the rows of `fit_pair`, in several shards: read only."""
    folder = tmp_path_factory.mktemp("cache") / "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "SHARD_POSITIONS", 40)
        assert made(fit_pair, folder).size.shards > 3
        yield folder


@pytest.mark.usefixtures("stub_judging")
@pytest.mark.parametrize("kept", [{}, {"store": "float16"}, {"top_k": 32, "sampled": 4}], ids=str)
def test_fit_from_a_cache_is_the_fit_that_scores_for_itself(
    kept: dict[str, Any], fit_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(fit_pair, tmp_path / "c", **kept)
    before = tree(tmp_path / "c")
    teacher = TeacherConfig(kind="cached", **{"top_k": 8, **kept})
    own = run_fit(fit_pair, tmp_path / "own", teacher=teacher, max_steps=2)
    given = run_fit(fit_pair, tmp_path / "given", teacher=replace(teacher, cache=str(tmp_path / "c")), max_steps=2)
    assert f"teacher: cached, temperature 1, from {tmp_path / 'c'}" in capsys.readouterr().err
    assert tree(tmp_path / "c") == before and not (tmp_path / "given" / "teacher_cache").exists()
    for mine, other in zip(own.rows, given.rows, strict=True):
        assert mine["val/loss"] == pytest.approx(other["val/loss"], abs=1e-6)  # scored in other batches
        assert (mine["val/greedy_acceptance"] is None) == ("sampled" in kept)


@pytest.mark.usefixtures("stub_judging")
def test_a_larger_cache_serves_a_part_and_more_data_is_added(fit_pair: Path, whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "c")
    more = write_id_rows(tmp_path / "more.jsonl", count=12, seed=5)
    data = ScoredDataConfig(train=[str(fit_pair / "rows.jsonl"), str(more)], max_length=32)
    held_out = ScoredDataConfig(train=[str(fit_pair / "rows.jsonl")], validation=[str(more)], max_length=32)
    teacher = TeacherConfig(kind="cached", top_k=8, cache=str(folder))
    wanted = DataConfig(train=[str(more)], max_length=32, batch_size=2, validation_fraction=0.2)
    with pytest.raises(
        UsageError, match=rf"teacher.cache: {folder} lacks 12 of 12 examples; the first is .*more.jsonl:"
    ):
        run_fit(fit_pair, tmp_path / "run", teacher=teacher, data=wanted)
    before = read_index(folder)
    report = made(fit_pair, folder, data=data)
    assert 0 < report.num_scored < report.size.positions and report.size.examples == 42
    index = read_index(folder)
    assert before and index and before["shards"].items() < index["shards"].items()  # what was there is as it was
    assert made(fit_pair, folder, data=held_out).num_scored == 0
    assert run_fit(fit_pair, tmp_path / "run", teacher=teacher, data=wanted, max_steps=2).complete


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"loss": LossConfig(temperature=2.0)}, "loss.temperature: 1.0 in the cache, 2.0 in this run"),
    "top_k": ({"top_k": 9}, "teacher.top_k: 8 in the cache, 9 in this run"),
    "sampled": ({"top_k": 32, "sampled": 2}, "teacher.sampled: none in the cache, 2 in this run"),
    "store": ({"store": "float16"}, "teacher.store: float32 in the cache, float16 in this run"),
    "dtype": ({"dtype": "float64"}, r"model.dtype: torch.float32 in the cache, torch.float64 in this run"),
    "max_length": ({"max_length": 31}, "data.max_length: 32 in the cache, 31 in this run"),
    "target": ({"target": 7}, r"target: its weights: [0-9a-f]{12} in the cache, [0-9a-f]{12} in this run"),
    "template": ({"template": "{{ messages }}"}, r"target: its chat template: [0-9a-z]+ in the cache, [0-9a-f]{12} in"),
    "draft": ({"ids": True}, r"draft: the ids that it proposes: [0-9a-f]{12} in the cache, [0-9a-f]{12} in this run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cache_of_something_else_is_refused_with_both_values(
    name: str, fit_pair: Path, whole: Path, tmp_path: Path
) -> None:
    change, told = REFUSED[name]
    pair = copied(fit_pair, tmp_path / "pair")
    teacher = {key: value for key, value in change.items() if key in ("top_k", "sampled", "store")}
    settings: dict[str, Any] = {
        "teacher": TeacherConfig(kind="cached", cache=str(whole), **{"top_k": 8, **teacher}),
        "loss": change.get("loss", LossConfig()),
        "model": replace(MODEL, dtype=change.get("dtype", "auto")),
        "data": replace(fit_config(pair).data, max_length=change.get("max_length", 32)),
    }
    if "target" in change:
        change_weights(pair / "target")
    if "template" in change:
        (pair / "target" / "chat_template.jinja").write_text(change["template"])
    if "ids" in change:
        replace_ids(pair / "draft" / "draft_vocab.json")
    before = tree(whole)
    with pytest.raises(UsageError, match=rf"^teacher.cache: {whole} belongs to something else: [^\n]*{told}[^\n]*$"):
        run_fit(pair, tmp_path / "run", **settings)
    assert tree(whole) == before and not (tmp_path / "run").exists()


def test_a_cache_is_neither_extended_as_nor_taken_for_something_else(
    fit_pair: Path, whole: Path, tmp_path: Path
) -> None:
    before = tree(whole)
    with pytest.raises(UsageError, match=r"^output: .* a cache of something else: teacher.top_k: 8 in the cache, 9"):
        made(fit_pair, whole, top_k=9)
    assert tree(whole) == before
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match=r"^teacher.cache: .* holds no cache; `draftsmith cache --output"):
            run_fit(fit_pair, tmp_path / "run", teacher=TeacherConfig(kind="cached", top_k=8, cache=str(place)))
        with pytest.raises(UsageError, match=r"^verify: .* holds no cache"):
            verify(CacheConfig(verify=str(place)))


@pytest.mark.usefixtures("stub_judging")
def test_r13_a_run_goes_on_with_the_laws_that_it_began_with(fit_pair: Path, whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path / "c")
    teacher = TeacherConfig(kind="cached", top_k=8, cache=str(folder))
    run_fit(fit_pair, tmp_path / "run", teacher=teacher, max_steps=4)
    (tmp_path / "run" / "checkpoints" / "step-000004.ckpt").unlink()
    moved = copied(folder, tmp_path / "moved")
    kept = copied(tmp_path / "run", tmp_path / "kept")
    assert (
        run_fit(fit_pair, tmp_path / "run", teacher=replace(teacher, cache=str(moved)), max_steps=4).resumed_from == 2
    )
    rewrite(moved, lambda table: {**table, "log_probs": table["log_probs"] - 1e-6})
    with pytest.raises(UsageError, match=r"^teacher.cache: the laws that it holds have changed since"):
        run_fit(fit_pair, kept, teacher=replace(teacher, cache=str(moved)), max_steps=4)


@pytest.mark.usefixtures("stub_judging")
def test_a_server_scores_a_cache_and_fit_makes_sure_that_it_ran_this_target(
    loaded_target: LoadedModel, fit_pair: Path, tmp_path: Path
) -> None:
    draft = make_draft(fit_pair / "target", tmp_path / "draft")
    with serving(loaded_target) as server:
        config = ServerConfig(server.url, concurrency=3)
        report = made(fit_pair, tmp_path / "c", server=config, draft=None, model=ModelConfig())
        assert made(fit_pair, tmp_path / "c", server=config, draft=None, model=ModelConfig()).num_scored == 0
        with pytest.raises(UsageError, match=r"^sampled: 4 is not legal; expected null with server.url"):
            made(fit_pair, tmp_path / "d", server=config, draft=None, model=ModelConfig(), top_k=32, sampled=4)
    assert report.num_scored == report.size.positions > 100
    assert verify(CacheConfig(verify=str(tmp_path / "c"), model=MODEL)).compared.differences.max() < 1e-4
    teacher = TeacherConfig(kind="cached", top_k=8, cache=str(tmp_path / "c"))
    settings: dict[str, Any] = {"draft": str(draft), "teacher": teacher, "max_steps": 2}
    own = run_fit(fit_pair, tmp_path / "own", **{**settings, "teacher": replace(teacher, cache=None)})
    given = run_fit(fit_pair, tmp_path / "given", **settings)
    assert given.rows[-1]["val/loss"] == pytest.approx(own.rows[-1]["val/loss"], abs=1e-5)
    pair = copied(fit_pair, tmp_path / "pair")
    save_target(
        pair / "target", tiny_llama(1, vocab_size=259, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    )
    with pytest.raises(
        UsageError, match=r"^teacher.cache: .* was scored by a server with another target: 1\d\d positions"
    ):
        run_fit(pair, tmp_path / "other", **settings)


SAMPLED = TeacherConfig(kind="cached", sampled=4)
COMBINATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a loss": ({"loss": LossConfig("reverse_kl")}, "loss.name: 'reverse_kl' is not legal; expected forward_kl or data"),
    "a mix": (
        {"loss": LossConfig({"forward_kl": 1.0, "target_argmax": 0.5})},
        "loss.name: 'target_argmax' is not legal; expected forward_kl or data",
    ),
    "serve": ({"serve": "greedy"}, "serve: 'greedy' is not legal; expected sampled with teacher.sampled"),
    "selection": ({"selection": SelectionConfig("r")}, "selection.reference: 'r' is not legal; expected null with"),
    "on-policy": ({"on_policy": OnPolicyConfig(fraction=0.5)}, "on_policy.fraction: 0.5 is not legal; expected 0 with"),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_what_drawn_ids_cannot_tell_is_refused_by_name(name: str, fit_pair: Path, tmp_path: Path) -> None:
    change, told = COMBINATIONS[name]
    with pytest.raises(UsageError, match=f"^{told}"):
        run_fit(fit_pair, tmp_path / "run", teacher=SAMPLED, **change)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("stub_judging")
def test_drawn_ids_go_with_a_mix_with_the_datas_own_tokens(fit_pair: Path, tmp_path: Path) -> None:
    loss = LossConfig({"forward_kl": 1.0, "data": 0.1})
    assert run_fit(fit_pair, tmp_path / "run", teacher=SAMPLED, loss=loss, max_steps=2).complete


ALONE = {
    "cache_dir": ({"cache": "c", "cache_dir": "d"}, "teacher.cache_dir: 'd' is not legal; expected null beside"),
    "batch_size": ({"cache": "c", "batch_size": 8}, "teacher.batch_size: 8 is not legal; expected 4, the default"),
    "top_k": ({"sampled": 2, "top_k": 8}, "teacher.top_k: 8 is not legal; expected 32, the default, beside"),
    "sampled": ({"sampled": 0}, "teacher.sampled: 0 is not legal"),
}


@pytest.mark.parametrize("name", ALONE)
def test_settings_of_a_teacher_that_have_no_effect_together_are_refused(name: str) -> None:
    change, told = ALONE[name]
    with pytest.raises(UsageError, match=f"^{told}"):
        TeacherConfig(kind="cached", **change)
