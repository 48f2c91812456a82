"""Makes an untrained draft for a target: a small Llama-type model with the target's tokenizer and vocabulary."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from decode.draft_vocab import DRAFT_VOCAB_FILE
from decode.errors import UsageError, require
from decode.health import check_healthy
from decode.models import LoadedModel, load_model, narrow_head
from distill.config import InitConfig
from distill.drafts.embeddings import EMBEDDING_STD, HEAD_STD, principal_directions, project
from distill.drafts.fit_cost import by_cost
from distill.drafts.from_target import chosen_layers, layer_list, project_layers, pruned, set_tie
from distill.drafts.shapes import Depth, Shape, candidate_shapes, fixed_shape
from distill.drafts.vocab import GUARD_CHANNEL, DraftVocab, choose_draft_vocab, pin_guard_channel, widen_head
from distill.folders import check_output, whole_folder, write_record
from distill.outputs import check_writable
from distill.runs import plain, provenance, write_json_atomic

MADE_BY = "draftsmith init"
DEFAULT_CONTEXT = 8192  # for targets that state none
DEFAULT_ROPE_THETA = 10_000.0


def init_draft(config: InitConfig) -> Path:
    """Make the draft that `config` asks for and return its folder.

    A folder that the same settings made before is left as it is. Raises UsageError for an output that holds anything
    else, a target that no draft can serve, and sizes that are out of reach.
    """
    output = Path(config.output).expanduser().resolve()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    wanted = _settings(config)
    record = check_output(output, MADE_BY)
    if record is not None:
        _check_same(record, wanted, output)
        console.print(f"{output} is there already, made with the same settings")
        return output
    check_writable(output)
    target = load_model(config.target, config.model, role="target")
    check_healthy(target, "target")
    vocab = _draft_vocab(config, target)
    if vocab is not None:
        console.print(vocab.describe(target.vocab_size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        draft = _make(config, target, vocab, console)
    with whole_folder(output) as folder:
        save_draft(draft, target, None if vocab is None else vocab.ids, folder)
        write_record(folder, {"made_by": MADE_BY, **wanted, **provenance(config)})
    return output


def _settings(config: InitConfig) -> dict[str, Any]:
    """All that decides the draft, the content of the data file included."""
    settings = plain(config)
    del settings["output"], settings["model"]
    files = [Path(name).expanduser() for name in config.data]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None for file in files]
    return {"settings": settings, "data_sha256": digests}


def _check_same(record: dict[str, Any], wanted: dict[str, Any], output: Path) -> None:
    old, new = record.get("settings"), wanted["settings"]
    old = old if isinstance(old, dict) else {}
    for key in new:
        if old.get(key) != new[key]:
            raise UsageError(
                f"output: {output} holds a draft made with {key} {old.get(key)!r}, not {new[key]!r}; "
                "remove it or choose another"
            )
    if record.get("data_sha256") != wanted["data_sha256"]:
        raise UsageError(
            f"output: {output} holds a draft made from other contents of data; remove it or choose another"
        )


def _draft_vocab(config: InitConfig, target: LoadedModel) -> DraftVocab | None:
    if config.draft_vocab_size is None:
        return None
    from distill.data.examples import load_examples

    real = min(target.vocab_size, len(target.tokenizer))  # rows beyond the tokenizer are padding of the table
    require(
        config.draft_vocab_size <= real, "draft_vocab_size", config.draft_vocab_size, f"at most {real}, the real tokens"
    )
    examples, _ = load_examples(
        config.data, target.tokenizer, max_length=2**31, on_bad_row="skip", vocab_size=target.vocab_size
    )
    special = target.tokenizer.all_special_ids
    return choose_draft_vocab(examples, config.draft_vocab_size, target.vocab_size, target.eos_token_ids, special)


def _make(config: InitConfig, target: LoadedModel, vocab: DraftVocab | None, console: Console) -> Any:
    """The draft that `config` asks for, fp32 on the CPU, with a head of full size. Draws from the global generator."""
    if config.start == "layers":
        return _cut_out(config, target, console)
    if config.fit_cost_ratio is None:
        shape = fixed_shape(config)
    else:
        candidates = candidate_shapes(config.num_layers)
        shape = by_cost(candidates, lambda s: _blank(target, s, vocab), target, config, console)
    layers = None
    if config.start == "width":
        layers = chosen_layers(config.layers, shape.num_layers, len(layer_list(target.model)[1]))
        shape = replace(shape, num_layers=len(layers))
    console.print(f"draft: {shape.describe()}")
    return build_draft(target, shape, vocab, config.embeddings == "projection", bool(config.tie), layers)


def _cut_out(config: InitConfig, target: LoadedModel, console: Console) -> Any:
    """Whole layers of the target: those asked for, or as many as the cost ratio allows."""
    available = len(layer_list(target.model)[1])
    if config.fit_cost_ratio is not None:
        depths = [Depth(count) for count in range(1, available)]
        count = by_cost(depths, lambda d: pruned(target.model, range(d.num_layers)), target, config, console).num_layers
        layers = chosen_layers(None, count, available)
    else:
        layers = chosen_layers(config.layers, config.num_layers, available)
    console.print(f"draft: layers {', '.join(map(str, layers))} of the target's {available}")
    draft = pruned(target.model, layers).to(device="cpu", dtype=torch.float32)
    set_tie(draft, config.tie)
    return draft


def _blank(target: LoadedModel, shape: Shape, vocab: DraftVocab | None) -> Any:
    """A model of this shape with any healthy numbers in it: only time is measured."""
    with no_init_weights():
        model: Any = LlamaForCausalLM(llama_config(target, shape))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    if vocab is not None:
        narrow_head(model, vocab.ids)
    return model


def build_draft(
    target: LoadedModel,
    shape: Shape,
    vocab: DraftVocab | None,
    projected: bool,
    tie: bool = False,
    layers: Sequence[int] | None = None,
) -> LlamaForCausalLM:
    """An untrained Llama-type draft with a head of full size, fp32 on the CPU. Draws from torch's global generator.

    `layers` of the target are projected on its channels where they are given (start: width).
    """
    model = LlamaForCausalLM(llama_config(target, shape, tie))
    torch.nn.init.normal_(model.lm_head.weight, std=HEAD_STD)
    if not tie:
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    first_channel = 0 if vocab is None else GUARD_CHANNEL + 1
    if projected:
        _project_tables(model, target, first_channel)
    if layers is not None:
        project_layers(model, target, layers, first_channel)
    if vocab is not None:
        pin_guard_channel(model)
        narrow_head(model, vocab.ids)
        _start_from_frequencies(model, vocab)
        widen_head(model, vocab.ids, target.vocab_size)
    return model.eval()


@torch.no_grad()
def _start_from_frequencies(model: LlamaForCausalLM, vocab: DraftVocab) -> None:
    """The head reads a constant in the guard channel, so its column there is a bias: how often each token occurs."""
    model.lm_head.weight[:, GUARD_CHANNEL] = vocab.log_frequency


@torch.no_grad()
def _project_tables(model: LlamaForCausalLM, target: LoadedModel, first_channel: int) -> None:
    """Channels from `first_channel` on of both tables: the target's rows along the leading directions of its inputs."""
    inputs = target.model.get_input_embeddings().weight.float().cpu()
    outputs = target.model.get_output_embeddings().weight.float().cpu()
    width = model.config.hidden_size - first_channel
    directions = principal_directions(inputs, width)
    if model.config.tie_word_embeddings:  # a head of deviation 1 would begin far too sure of itself
        model.lm_head.weight.copy_(project(inputs, directions, width, HEAD_STD, equal_variances=True))
        return
    model.model.embed_tokens.weight[:, first_channel:] = project(
        inputs, directions, width, EMBEDDING_STD, equal_variances=True
    )
    model.lm_head.weight[:, first_channel:] = project(outputs, directions, width, HEAD_STD, equal_variances=False)


def llama_config(target: LoadedModel, shape: Shape, tie: bool = False) -> LlamaConfig:
    """A Llama-type config of `shape` with the target's vocabulary, context, rotary base and special ids."""
    settings = target.model.config.get_text_config()
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special: dict[str, Any] = {name: getattr(settings, name, None) for name in names}
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=getattr(settings, "max_position_embeddings", None) or DEFAULT_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(settings)},
        rms_norm_eps=1e-5,
        initializer_range=shape.hidden_size**-0.5,  # measured, see embeddings.py
        tie_word_embeddings=tie,
        **special,
    )


def _rope_theta(settings: Any) -> float:
    """The target's rotary base; of a target with one per layer type, that of full attention."""
    rope = getattr(settings, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta") or DEFAULT_ROPE_THETA)


def save_draft(
    model: Any, target: LoadedModel, vocab_ids: Tensor | None, folder: Path, generation: dict[str, Any] | None = None
) -> None:
    """Write a plain model folder: weights, configs, the target's tokenizer and chat template, the draft's vocabulary.

    `model` has a head of full size. Its generation config is made anew: the target's special ids and `generation`;
    nothing that the target's own might hold (a temperature, say) can make the save fail.
    """
    ids = {name: getattr(target.model.generation_config, name, None) for name in ("bos_token_id", "pad_token_id")}
    eos = sorted(target.eos_token_ids)
    ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    model.generation_config = GenerationConfig(**ids, **(generation or {}))
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    if vocab_ids is not None:
        write_json_atomic(folder / DRAFT_VOCAB_FILE, {"vocab_ids": vocab_ids.tolist()})
