"""Loading what fit wrote: checkpoints as drafts, the checkpoints of a run."""

from pathlib import Path

import pytest
import torch

from decode.config import ModelConfig
from decode.errors import UsageError
from decode.models import LoadedModel
from distill.drafts.load import best_checkpoint, checkpoints_of, load_draft
from distill.drafts.shapes import Shape
from tests.draft_files import strong, write_checkpoint
from tests.fixtures import byte_tokenizer

CONFIG = ModelConfig(device="cpu", backend="eager")


@pytest.mark.parametrize("folder", ["draft", "reduced"])
def test_a_checkpoint_loads_as_what_was_trained(
    folder: str, request: pytest.FixtureRequest, loaded_target: LoadedModel, tmp_path: Path
) -> None:
    origin: Path = request.getfixturevalue(folder)
    trained = strong(load_draft(origin, loaded_target, CONFIG))
    file = write_checkpoint(tmp_path / "run", 100, trained, origin)
    again = load_draft(file, loaded_target, CONFIG)
    ids = torch.tensor([[1, 70, 200, 258]])
    assert torch.equal(again.model(input_ids=ids).logits, trained.model(input_ids=ids).logits)
    assert not again.model.training
    assert not any(p.requires_grad for p in again.model.parameters())
    assert (again.vocab_ids is None) == (folder == "draft")


@pytest.mark.parametrize("change", ["lose", "rename", "shape"])
def test_t34_a_checkpoint_with_wrong_weights_is_refused_with_its_keys(
    change: str, draft: Path, loaded_target: LoadedModel, tmp_path: Path
) -> None:
    file = write_checkpoint(tmp_path / "run", 1, load_draft(draft, loaded_target, CONFIG), draft)
    content = torch.load(file, weights_only=True)
    weight = content["state_dict"].pop("student.model.model.layers.1.mlp.up_proj.weight")
    if change == "rename":
        content["state_dict"]["student.model.layers.1.mlp.up_proj.weight"] = weight
    if change == "shape":
        content["state_dict"]["student.model.model.layers.1.mlp.up_proj.weight"] = weight[:-1]
    torch.save(content, file)
    with pytest.raises(UsageError, match=r"checkpoint .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_draft(file, loaded_target, CONFIG)


def test_x09_prefixes_of_wrappers_are_dropped(draft: Path, loaded_target: LoadedModel, tmp_path: Path) -> None:
    trained = strong(load_draft(draft, loaded_target, CONFIG))
    file = write_checkpoint(tmp_path / "run", 1, trained, draft)
    content = torch.load(file, weights_only=True)
    state = content["state_dict"]
    content["state_dict"] = {
        f"module.student.model._orig_mod.{n.removeprefix('student.model.')}": v for n, v in state.items()
    }
    torch.save(content, file)
    assert load_draft(file, loaded_target, CONFIG).model.state_dict().keys() == trained.model.state_dict().keys()


def test_files_that_are_no_checkpoints_are_refused_in_one_line(
    draft: Path, loaded_target: LoadedModel, tmp_path: Path
) -> None:
    (tmp_path / "text.ckpt").write_text("hello")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    torch.save({"object": Shape(32, 2)}, tmp_path / "pickle.ckpt")
    for name, words in (
        ("text", "cannot be read"),
        ("other", "has no draft_config"),
        ("pickle", "cannot be read"),
        ("gone", "there is no checkpoint"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            load_draft(tmp_path / f"{name}.ckpt", loaded_target, CONFIG)
        assert "\n" not in str(caught.value)


def test_d35_another_tokenizer_is_refused_for_folders_and_checkpoints(
    draft: Path, loaded_target: LoadedModel, tmp_path: Path
) -> None:
    file = write_checkpoint(tmp_path / "run", 1, load_draft(draft, loaded_target, CONFIG), draft)
    swapped = LoadedModel(loaded_target.model, byte_tokenizer(swap=(65, 66)), "swapped")
    for path in (draft, file):
        with pytest.raises(UsageError, match="id 65"):
            load_draft(path, swapped, CONFIG)


def test_checkpoints_of_a_run_begin_with_the_untrained_draft(
    draft: Path, loaded_target: LoadedModel, tmp_path: Path
) -> None:
    run, trained = tmp_path / "run", load_draft(draft, loaded_target, CONFIG)
    for step in (200, 50):
        write_checkpoint(run, step, trained, draft)
    (run / "checkpoints" / "last.ckpt").write_bytes(b"")
    assert checkpoints_of(run) == [
        (0, draft),
        (50, run / "checkpoints" / "step-000050.ckpt"),
        (200, run / "checkpoints" / "step-000200.ckpt"),
    ]
    assert best_checkpoint(run).name == "step-000050.ckpt"
    (run / "best.json").unlink()
    with pytest.raises(UsageError, match=r"no best\.json yet"):
        best_checkpoint(run)
    with pytest.raises(UsageError, match="holds no checkpoint yet"):
        checkpoints_of(tmp_path)
