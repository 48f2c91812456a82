#!/usr/bin/env python3
"""The study's second domain: small Python functions to write, from templates of our own wording. Two disjoint files."""

import random
from collections.abc import Iterator

from make_story_prompts import make_prompts, write

TEMPLATES = (
    "Write a Python function that {action} the {items} in {container}{condition}.",
    "Write a Python function named `{name}` that takes {container} and {action} its {items}{condition}.",
    "I have {container}. Write a Python function that {action} the {items} in it{condition}, with a short docstring.",
    "Please write a Python function that {action} the {items} of {container}{condition}, and show how to call it.",
    "How do I write a Python function that {action} all {items} in {container}{condition}?",
)
ACTIONS = (
    *("counts", "sorts", "reverses", "removes", "prints", "collects", "groups", "checks", "doubles", "joins"),
    *("finds the longest of", "finds the smallest of", "returns the first three of", "returns the unique ones of"),
)
ITEMS = (
    *("words", "even numbers", "names", "dates", "prices", "letters", "scores", "lines", "keys", "values"),
    *("vowels", "digits", "cities", "file names", "colours", "negative numbers", "ages", "email addresses"),
)
CONTAINERS = (
    *("a list", "a string", "a dictionary", "a tuple", "a text file", "a list of lists", "a CSV file", "a set"),
    *("a list of dictionaries", "a JSON string"),
)
CONDITIONS = (
    *("", " that start with a given letter", " without using a loop", " using a list comprehension"),
    *(" and ignores empty ones", " in alphabetical order", " and raises a ValueError when there are none"),
    *(" that are larger than a given limit", " and returns the result as a list"),
)
NAMES = ("process", "collect_items", "solve", "handle_data", "pick", "transform", "summarize", "clean_up")
SIZES = {"code_train_prompts.jsonl": 480, "code_held_out_prompts.jsonl": 48}


def is_reserved(items: str, container: str) -> bool:
    """Whether this pair (one in eight) is kept out of the training prompts."""
    return (ITEMS.index(items) + 3 * CONTAINERS.index(container)) % 8 == 0


def draw(rng: random.Random, seen: set[tuple[str, ...]]) -> Iterator[tuple[bool, str]]:
    """Endless (pair is reserved, prompt); no combination of action, items and container comes twice."""
    while True:
        action, items, container = (rng.choice(choices) for choices in (ACTIONS, ITEMS, CONTAINERS))
        template, name, condition = rng.choice(TEMPLATES), rng.choice(NAMES), rng.choice(CONDITIONS)
        if (action, items, container) in seen:
            continue
        seen.add((action, items, container))
        text = template.format(action=action, items=items, container=container, condition=condition, name=name)
        yield is_reserved(items, container), text


if __name__ == "__main__":
    write(make_prompts(sizes=SIZES, draw=draw), "configs/study")
