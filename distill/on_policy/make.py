"""Makes a run's pool of texts from its settings, and checks beforehand that it can be had."""

from collections.abc import Sequence
from functools import partial

from decode.errors import UsageError, require
from decode.model_facts import context_limit
from decode.models import LoadedModel
from decode.processors import check_token_ids
from distill.config import FitConfig, TextsConfig
from distill.data.examples import Example, load_prompts
from distill.drafts.frozen import as_served
from distill.on_policy.pool import Pool
from distill.on_policy.pool_teacher import PoolTeacher
from distill.on_policy.sources import Pair, Prompts, Source, own_texts, proposals, replays
from distill.on_policy.traces import read_traces
from distill.teacher import Teacher
from distill.teacher.cached import CachedTeacher, score_laws
from distill.teacher.choose import runner_of
from distill.teacher.fingerprint import examples_sha256, ids_sha256


def make_pool(config: FitConfig, target: LoadedModel, draft: LoadedModel, train: Sequence[Example]) -> Pool | None:
    """The pool of a run on `train`; None where no fraction asks for one, which costs nothing.

    Its texts are made later, from the draft as it then stands. Raises UsageError naming the setting at fault.
    """
    rows, on_policy, replay, reinforce = config.data.max_length, config.on_policy, config.replay, config.reinforce
    prompts = partial(_prompts, config, target, draft, train)
    sources = []
    if on_policy.wanted:
        check_token_ids(on_policy.sampling, target.vocab_size)
        sources.append(Source("on_policy", on_policy, prompts("on_policy", on_policy), own_texts(on_policy)))
    if replay.wanted:
        check_token_ids(replay.sampling, target.vocab_size)
        logged = [] if replay.log is None else read_traces(replay.log, replay.weight, rows, target.vocab_size)
        found = prompts("replay", replay) if replay.num_texts else []
        sources.append(Source("replay", replay, found, replays(replay, rows), logged))
    if reinforce.wanted:
        make = proposals(reinforce, config.loss.temperature)
        sources.append(Source("reinforce", reinforce, prompts("reinforce", reinforce), make))
    if not sources:
        return None
    return Pool(
        sources,
        lambda model: Pair(target, as_served(draft, model, target.model), config.model.backend),
        seed=config.seed,
        accumulate=config.optimizer.accumulate,
        packing=config.data.packing,
    )


def _prompts(
    config: FitConfig,
    target: LoadedModel,
    draft: LoadedModel,
    train: Sequence[Example],
    section: str,
    texts: TextsConfig,
) -> Prompts:
    """Distinct prompts, in order, that leave room for max_new_tokens in a row and in either model."""
    room = min(config.data.max_length, context_limit(target.model), context_limit(draft.model))
    longest = room - texts.max_new_tokens
    legal = f"less than {room}: a text has to fit in a row (data.max_length) and in both models, its prompt with it"
    require(longest >= 1, f"{section}.max_new_tokens", texts.max_new_tokens, legal)
    if texts.prompts is None:
        found, origin = [example.prompt_ids for example in train], "the training rows have"
    else:
        found = load_prompts(texts.prompts, target.tokenizer, None, target.vocab_size)
        origin = f"{texts.prompts} has"
    distinct = [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found) if 1 <= len(ids) <= longest]
    if not distinct:
        raise UsageError(
            f"{section}.prompts: {origin} no prompt of 1 to {longest} tokens, which leave room for "
            f"{section}.max_new_tokens {texts.max_new_tokens}"
        )
    return distinct


def with_pool(
    teacher: Teacher, pool: Pool, config: FitConfig, target: LoadedModel, draft: LoadedModel, num_train: int
) -> Teacher:
    """`teacher`, of `num_train` rows, who also knows the texts of `pool`. An online one knows every text."""
    if not isinstance(teacher, CachedTeacher):
        return teacher

    def score(texts: Sequence[Example]) -> CachedTeacher:
        return score_laws(
            runner_of(target.model),
            texts,
            top_k=config.teacher.top_k,
            temperature=config.loss.temperature,
            vocab_ids=draft.vocab_ids,
            batch_size=config.teacher.batch_size,
        )

    return PoolTeacher(teacher, num_train, pool, score)


def content_of(pool: Pool | None) -> str:
    """A checksum of what a pool's files hold: its prompts and logged texts; empty where there is none."""
    if pool is None:
        return ""
    logged = [text for source in pool.sources for text in source.fixed]
    told = "".join([examples_sha256(logged), *(repr(text.weights) for text in logged)])
    return ids_sha256([*(ids for source in pool.sources for ids in source.prompts), list(told.encode())])
