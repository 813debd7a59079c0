"""Varied prompts to train a draft head on, from WordNet and the Python standard library; no benchmark's text is among them.

    python benchmarks/training_prompts.py --wordnet /usr/share/wordnet --count 12000 > prompts.jsonl

WordNet 3 (Debian's `wordnet-base`) gives topics, definitions and example sentences of the nouns that its tagged texts use; the
standard library gives functions to explain, complete, test and rewrite. The same files and seed give the same prompts.
"""

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

WORD_PROMPTS = (
    "What is {a_word}?",
    "Explain {word} in simple terms.",
    'What does the word "{word}" mean? Use it in two sentences.',
    "Write a short essay about {word}.",
    "Tell me about {word} and {other}.",
    "What is the difference between {word} and {other}?",
    "How are {word} and {other} connected?",
    "List five facts about {word}.",
    "Write a short story about {word}.",
    "Write a poem about {word}.",
    "Give me ten words that have to do with {word}.",
    "Write an introduction to {word} for a blog post.",
    "Define {word}, {other} and {third}.",
    "I am writing about {word}. Suggest an outline with headings.",
    "What should everyone know about {word}?",
    "Write a conversation between two friends about {word}.",
    "Rewrite this definition so that a child understands it: {word}: {gloss}.",
    'Which word is meant? "{gloss}" Explain your answer.',
    'Is this a good definition of {word}? "{gloss}" Improve it.',
    "Translate into French: {example}",
    "Translate into Spanish: {example}",
    "Correct any mistakes in this sentence: {example}",
    "Continue this text: {example}",
    "What happens in this sentence, and who is involved? {example}",
    "Rewrite this in three different styles: {example}",
    "Find the nouns and verbs in this sentence: {example}",
    "Put these in order and explain why: {word}, {other}, {third}.",
    "Make a table with the columns word and meaning for: {word}, {other}, {third}.",
    "As an expert on {word}, answer a beginner's three most common questions.",
    "Argue for and against {word}.",
    "Give a JSON list of three objects about {word}, each with a name and a description.",
    "Write a news report in which {word} and {other} play a part.",
    "What would the world be like without {word}?",
    "How has {word} changed over the last hundred years?",
    "Write a persuasive letter about {word}.",
    "Classify as living, object or idea: {word}, {other}, {third}.",
)

NUMBER_PROMPTS = (
    "{who} sells {a} {things} a day for {b} dollars each. How much money does {who} make in {c} days?",
    "A shop has {a} {things} in {b} boxes with the same number in each. {who} buys {c} boxes. How many {things} is that?",
    "{who} reads {a} pages a day. A book has {big} pages. How many days does it take, and how many pages are left "
    "on the last day?",
    "{who} has ${big}. {things} cost ${b} each. How many can {who} buy, and how much is left?",
    "There are {big} {things}. {c} in every {b} are broken. How many work? Think step by step.",
    "{who} is twice as old as {who2}, who is {b}. How old will they be together in {c} years?",
    "A recipe for {c} people needs {a} grams of flour. How much is needed for {b} people?",
    "{who} walks {c} km on Monday and {b} km more each day after. How far has {who} walked by Friday?",
    "{who} earns ${b} an hour, and half as much again after {a} hours a week. What is the pay for {big} hours?",
    "Solve step by step: ({a} + {b}) * {c} - {big}.",
    "What is {c}% of {big}? Show the work.",
    "If x + {a} = {big}, what is x?",
)

CODE_PROMPTS = (
    "Complete this Python function:\n\n{head}",
    "{head}",
    "What does this Python code do?\n\n{code}",
    "Write a docstring for this function:\n\n{bare}",
    "Add type hints and comments:\n\n{code}",
    "Write a test for this function:\n\n{bare}",
    "Find possible bugs in this code:\n\n{code}",
    "Rewrite this in JavaScript:\n\n{bare}",
    "Write a Python function `{name}`: {doc}",
    "Rename the variables so that the code is easier to read:\n\n{bare}",
)

NAMES = ("Tom", "Ada", "Mei", "Lucas", "Sofia", "Noor", "Peter", "Julia", "Ravi", "Hannah", "Leo", "Amara", "Nina", "Oscar")


class Word(NamedTuple):
    name: str
    gloss: str
    example: str


def words(folder: Path) -> list[Word]:
    """Nouns whose first sense is tagged in WordNet's texts, with an example sentence of theirs or of another."""
    synsets = {}
    for line in (folder / "data.noun").read_text(encoding="latin-1").splitlines():
        if not line.startswith(" "):
            synsets[line[:8]] = line.partition(" | ")[2]
    found = []
    for line in (folder / "index.noun").read_text(encoding="latin-1").splitlines():
        parts = line.split()
        if line.startswith(" ") or int(parts[-1 - int(parts[2])]) == 0:
            continue
        gloss = synsets[parts[-int(parts[2])]]
        examples = [text for text in re.findall(r'"([^"]+)"', gloss) if text.count(" ") >= 4]
        found.append(
            Word(parts[0].replace("_", " "), re.sub(r';? *".*', "", gloss).strip("; "), examples[0] if examples else "")
        )
    return found


def functions(folder: Path) -> Iterator[dict[str, str]]:
    """Documented functions of at most 16 lines in the top-level modules of a library."""
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if not doc or len(node.body) < 2 or node.end_lineno - node.lineno > 16:
                continue
            code = ast.get_source_segment(text, node)
            bare = ast.unparse(ast.FunctionDef(**{**vars(node), "body": node.body[1:]}))
            head = ast.unparse(ast.FunctionDef(**{**vars(node), "body": node.body[:1]}))
            yield {"name": node.name, "doc": doc.split("\n\n")[0], "code": code, "bare": bare, "head": head}


def prompts(wordnet: Path, seed: int) -> Iterator[str]:
    rng, topics, library = random.Random(seed), words(wordnet), list(functions(Path(sysconfig.get_path("stdlib"))))
    examples = [word.example for word in topics if word.example]
    while True:
        kind = rng.random()
        if kind < 0.6:
            word, other, third = rng.sample(topics, 3)
            article = "an" if word.name[0] in "aeiou" else "a"
            example = word.example or rng.choice(examples)
            yield rng.choice(WORD_PROMPTS).format(
                word=word.name, other=other.name, third=third.name, gloss=word.gloss, a_word=f"{article} {word.name}",
                example=example[0].upper() + example[1:],
            )  # fmt: skip
        elif kind < 0.8:
            who, who2 = rng.sample(NAMES, 2)
            yield rng.choice(NUMBER_PROMPTS).format(
                who=who, who2=who2, things=rng.choice(topics).name + "s", a=rng.randint(5, 60), b=rng.randint(3, 30),
                c=rng.randint(2, 12), big=rng.randint(60, 900),
            )  # fmt: skip
        else:
            yield rng.choice(CODE_PROMPTS).format(**rng.choice(library))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="folder with data.noun and index.noun")
    parser.add_argument("--count", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seen: set[str] = set()
    for prompt in prompts(args.wordnet, args.seed):
        if len(seen) >= args.count:
            break
        if prompt not in seen:
            seen.add(prompt)
            print(json.dumps({"prompt": prompt}))


if __name__ == "__main__":
    main()
