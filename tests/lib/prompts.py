"""Prompts of many kinds, and random ones that share prefixes."""

from __future__ import annotations

import random
from functools import cache

from tests.lib.reference import encode, tokenizer

TEXTS = [
    "The",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics state that",
    "def fibonacci(n):\n    ",
    '{"name": "Ada", "age": 36, "tags": ["math", "engines"], "born": {"year": 1815}, "' * 3,
    "SELECT customer, SUM(amount) FROM orders WHERE placed_at > '2024-01-01' GROUP BY " * 4,
    "Translate to French: The weather is nice today.\nFrench:",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181,",
    "Zoë ordered a café au lait — and “one” croissant. " * 5,
    "Les sanglots longs des violons de l'automne blessent mon cœur d'une langueur monotone. " * 3,
    "日本の首都は東京です。東京の人口は",
    "😀😃😄 These are called emojis. 👩‍👩‍👧‍👦🏳️‍🌈 " * 4,
    "Dear Sir or Madam,\n\nI am writing to complain about the service in your restaurant. " * 6,
    "<html>\n<head><title>Test</title></head>\n<body>\n<ul>\n<li>one</li>\n<li>two</li>\n" * 5,
    "    \n\n\t  indentation\n\t\tand more of it\n" * 8,
    "To be, or not to be, that is the question: " * 20,
    "A list of fruits:\n- apple\n- banana\n- cherry\n" * 24,
    "Water boils at 100 degrees Celsius at sea level, and at a lower temperature higher up. " * 14,
]
CHATS = [
    "What is the capital of France?",
    "Write a haiku about a cache that never lies, then explain each of its three lines.",
]

SUBJECTS = ["The keeper", "A clerk", "The engineer", "A visitor", "Her brother", "Nobody"]
VERBS = ["counted", "repaired", "painted", "forgot", "described", "sold", "carried"]
OBJECTS = ["the crates", "the pump", "a gauge", "the ferry", "two lamps", "an old map"]
PLACES = ["at the harbour", "by the mill", "in the library", "near the station", "on Monday"]


@cache
def varied() -> tuple[tuple[int, ...], ...]:
    """Twenty prompts of 1 to about 300 tokens."""
    chats = [
        tokenizer().encode(
            tokenizer().render_chat([{"role": "user", "content": question}]),
            add_special_tokens=False,
        )
        for question in CHATS
    ]
    return (*map(encode, TEXTS), *map(tuple, chats))


def tale(rng: random.Random, tokens: int) -> tuple[int, ...]:
    """Return a random text of exactly so many tokens."""
    sentences = [
        " ".join(map(rng.choice, (SUBJECTS, VERBS, OBJECTS, PLACES))) + f", entry {number}."
        for number in range(tokens // 8 + 1)
    ]
    ids = encode(" ".join(sentences), tokens)
    assert len(ids) == tokens
    return ids


def family(rng: random.Random, roots: int, branches: int, leaves: int) -> list[tuple[int, ...]]:
    """Return prompts that share beginnings: each root is the start of its branches, and so on."""
    prompts = []
    for _ in range(roots):
        root = tale(rng, rng.randint(33, 100))
        for _ in range(branches):
            branch = (*root, *tale(rng, rng.randint(10, 80)))
            prompts += [(*branch, *tale(rng, rng.randint(1, 40))) for _ in range(leaves)]
    return prompts
