#!/usr/bin/env python3
"""The quick start's prompts: children's stories, from templates of our own wording. Writes three disjoint files."""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

TEMPLATES = (
    "Write a short story for children about a {adjective} {character} and a {object}.",
    "Tell me a bedtime story about a {adjective} {character} who finds a {object} {place}.",
    "Write a story for young children in which a {adjective} {character} loses a {object} {place}.",
    "Tell a short story about a {adjective} {character} who wants to share a {object} with a new friend.",
    "Write a gentle story about a {adjective} {character} who lives {place} and dreams of a {object}.",
    "Please write a children's story: a {adjective} {character} makes a {object} as a present for grandmother.",
    "Tell me a story with a happy ending about a {adjective} {character}, a {object} and a rainy day {place}.",
    "Write a story about the day when a {adjective} {character} learned to look after a {object}.",
)
ADJECTIVES = (
    *("brave", "shy", "curious", "sleepy", "cheerful", "clumsy", "tiny", "gentle", "lonely", "clever"),
    *("grumpy", "kind", "hungry", "patient", "silly", "proud", "careful", "noisy", "young", "forgetful"),
)
CHARACTERS = (
    *("rabbit", "fox", "bear", "mouse", "turtle", "kitten", "puppy", "squirrel", "duckling", "hedgehog"),
    *("frog", "pony", "penguin", "lamb", "beaver", "girl", "boy", "baker", "gardener", "fisherman"),
)
OBJECTS = (
    *("kite", "lantern", "drum", "red ball", "boat", "pumpkin", "blanket", "music box", "paper crown", "key"),
    *("wooden spoon", "snow globe", "teapot", "feather", "button", "map", "seashell", "bell", "cake", "star"),
)
PLACES = (
    *("in the forest", "by the river", "on a farm", "near the sea", "in a small village", "on top of a hill"),
    *("in a quiet garden", "at the edge of town", "under an old oak tree", "beside a frozen lake"),
)
SIZES = {"train_prompts.jsonl": 640, "held_out_prompts.jsonl": 48, "quick_prompts.jsonl": 24}


def is_reserved(character: str, thing: str) -> bool:
    """Whether this pair of nouns (one in eight) is kept out of the training prompts."""
    return (CHARACTERS.index(character) + 3 * OBJECTS.index(thing)) % 8 == 0


def draw(rng: random.Random, seen: set[tuple[str, ...]]) -> Iterator[tuple[bool, str]]:
    """Endless (pair is reserved, prompt); no combination of adjective, character and object comes twice."""
    while True:
        words = tuple(rng.choice(choices) for choices in (ADJECTIVES, CHARACTERS, OBJECTS))
        template, place = rng.choice(TEMPLATES), rng.choice(PLACES)
        if words in seen:
            continue
        seen.add(words)
        adjective, character, thing = words
        text = template.format(adjective=adjective, character=character, object=thing, place=place)
        yield is_reserved(character, thing), text


def make_prompts(
    seed: int = 0,
    sizes: Mapping[str, int] = SIZES,
    draw: Callable[[random.Random, set[tuple[str, ...]]], Iterator[tuple[bool, str]]] = draw,
) -> dict[str, list[str]]:
    """The prompts of each file. Half of those that are not trained on use pairs of words that training never sees."""
    rng, seen = random.Random(seed), set[tuple[str, ...]]()
    files: dict[str, list[str]] = {}
    for name, size in sizes.items():
        num_reserved = 0 if "train" in name else size // 2
        wanted = {True: num_reserved, False: size - num_reserved}
        files[name] = []
        for reserved, text in draw(rng, seen):
            if wanted[reserved]:
                wanted[reserved] -= 1
                files[name].append(text)
            if not any(wanted.values()):
                break
    return files


def write(files: Mapping[str, list[str]], folder: str) -> None:
    """Into the folder that the command line names, or else into `folder`."""
    place = Path(sys.argv[1] if len(sys.argv) > 1 else folder)
    for name, prompts in files.items():
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (place / name).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write(make_prompts(), "configs/quickstart")
