"""Made-up documents and questions for the tests of retrieval."""

import json
import random
from pathlib import Path

KINDS = ["river", "mountain", "village", "castle", "forest", "harbour", "bridge", "valley"]
COLOURS = ["red", "green", "silver", "golden", "black", "white", "amber", "violet"]
ENDINGS = ["stone", "water", "field", "wood", "gate", "moor", "haven", "crest"]


def documents(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Made-up documents; the title of each is a word that no other has."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        name = f"{rng.choice(COLOURS)}{rng.choice(ENDINGS)}{i}"
        words = [rng.choice(KINDS + COLOURS + ENDINGS) for _ in range(rng.randint(5, 40))]
        made.append({"id": f"doc-{i}", "contents": f'"{name}"\n{name} is a {rng.choice(KINDS)} by the {" ".join(words)}.'})
    return made


def write_corpus(path: Path, docs: list[dict[str, str]]) -> Path:
    """``docs`` as JSON lines."""
    path.write_text("".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs), encoding="utf-8")
    return path


def questions(count: int, seed: int = 1) -> list[str]:
    """Made-up questions over the words of :func:`documents`."""
    rng = random.Random(seed)
    return [
        f"which {rng.choice(KINDS)} near the {rng.choice(COLOURS)} {rng.choice(ENDINGS)} {rng.choice(KINDS)} {i}"
        for i in range(count)
    ]
