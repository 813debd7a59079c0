"""Varied prompts from templates: a user's questions, tasks and small talk, with slots filled from lists.

A head drafts best on what it was trained on, so the kinds follow what models are asked: explanations, code, summaries, lists,
stories, arithmetic, rewriting, extraction, advice, letters, translation, comparison, role play. None is a benchmark's prompt.
"""

import random
from collections.abc import Iterator
from string import Formatter

SLOTS: dict[str, tuple[str, ...]] = {
    "topic": (
        "photosynthesis", "the water cycle", "black holes", "plate tectonics", "vaccines", "inflation", "the French Revolution",
        "the Roman Empire", "supply and demand", "electric motors", "neural networks", "the immune system", "tides",
        "magnetism",
        "the printing press", "democracy", "climate change", "volcanoes", "DNA", "the Silk Road", "earthquakes", "sound waves",
        "compound interest", "the digestive system", "batteries", "rainbows", "the Renaissance", "gravity",
        "bees and pollination",
        "recycling", "the Industrial Revolution", "how airplanes fly", "the internet", "encryption", "antibiotics",
        "fermentation",
        "the solar system", "ocean currents", "the human heart", "memory and learning", "jazz music", "chess openings",
        "the Olympic Games", "coral reefs", "rice farming", "wind power", "the Cold War", "the stock market", "sleep", "coffee",
    ),
    "thing": (
        "bicycle", "laptop", "garden", "kitchen", "houseplant", "backpack", "guitar", "camera", "tent", "fish tank", "website",
        "resume", "birthday party", "small business", "book club", "science project", "road trip", "budget", "workout plan",
        "vegetable soup", "wooden table", "chicken coop", "podcast", "newsletter", "rain barrel", "picnic", "treehouse",
    ),
    "person": (
        "a teacher", "a nurse", "a firefighter", "a sailor", "a young inventor", "a lonely lighthouse keeper", "a baker",
        "a retired detective", "a robot", "a dragon who is afraid of fire", "a fox", "two sisters", "a time traveller",
        "a king",
        "a street musician", "a librarian", "a mountain guide", "a gardener", "an astronaut", "a painter", "a chess player",
    ),
    "place": (
        "a small village", "a city under the sea", "an old train", "a desert", "a space station", "a forest in winter",
        "a busy market", "an island", "a castle", "a school", "a hospital", "Paris", "Tokyo", "a farm", "a library at night",
    ),
    "feeling" : ("courage", "friendship", "hope", "loss", "curiosity", "kindness", "patience", "jealousy", "home",
    "forgiveness" ),
    "code_task": (
        "reverses a string", "checks whether a number is prime", "counts the words in a text",
        "finds the largest number in a list",
        "computes the factorial of a number", "removes duplicates from a list", "merges two sorted lists",
        "sorts a list of tuples",
        "checks whether a string is a palindrome", "computes the average of a list", "converts Celsius to Fahrenheit",
        "finds the second smallest element", "counts vowels", "flattens a nested list", "reads a CSV file and sums a column",
        "generates the first n Fibonacci numbers", "rotates a list by k places", "groups words by their first letter",
        "validates an email address", "computes the greatest common divisor", "implements binary search",
        "builds a stack class",
        "finds common elements of two lists", "capitalises each word", "checks balanced brackets", "transposes a matrix",
    ),
    "language": ("Python", "JavaScript", "Java", "C", "Go", "Rust", "TypeScript", "SQL", "Bash"),
    "many": ("three", "four", "five", "six", "seven", "eight", "ten"),
    "audience": ("a child", "a beginner", "a college student", "an expert", "my grandmother", "a new colleague"),
    "tone": ("friendly", "formal", "funny", "short", "polite", "serious", "enthusiastic"),
    "recipient": ("my boss", "a customer", "my landlord", "a friend", "the city council", "a hotel", "a teacher", "my team"),
    "reason": (
        "a late delivery", "a day off", "a broken heater", "a birthday invitation", "a refund", "a job application",
        "a thank you",
        "a meeting next week", "a noise complaint", "a reference letter", "a change of address", "an apology for being late",
    ),
    "foreign": ("French", "Spanish", "German", "Italian", "Portuguese"),
    "sentence": (
        "The weather is nice today.", "Where is the train station?", "I would like a cup of tea, please.", "She lost her keys.",
        "We will meet at noon tomorrow.", "The children are playing in the park.", "This book changed my life.",
        "He don't like to going shopping on weekend.", "Their going to the store becuase they needs milk.",
        "The report was wrote by me and my colleague yesterday.", "It is important that everyone arrive on time.",
    ),
    "name" : ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kofi", "Lena", "Maya",
    "Omar" ),
    "object": ("apples", "books", "marbles", "tickets", "pencils", "cookies", "stamps", "coins", "eggs", "flowers", "chairs"),
    "passage": (
        "Bees visit flowers to collect nectar. While doing so they carry pollen from one flower to the next, which lets plants "
        "make seeds. In recent years the number of bees has fallen because of pesticides, disease and the loss of meadows.",
        "The town council met on Monday to discuss the new bridge. It will cost four million dollars and take two years to "
        "build. Shop owners fear the noise, but drivers hope for shorter trips. A final vote is planned for March.",
        "Maria opened her bakery ten years ago with a single oven. Today she employs twelve people and sells bread in three "
        "towns. She says the secret is patience: her sourdough rests for two days before it is baked.",
        "A new study followed 2,000 adults for five years. Those who walked at least thirty minutes a day slept better and "
        "reported less stress. The authors warn that the study cannot prove that walking was the cause.",
        "The old lighthouse was built in 1874 from local stone. For a century its lamp guided ships around the reef. It was "
        "switched off in 1978, and since last summer it has been a small museum run by volunteers.",
        "Solar panels turn sunlight into electricity. Their price has fallen by ninety percent in a decade, and many houses "
        "now make more power than they use at noon. Storing that power for the evening remains the harder problem.",
        "Order 5521 was shipped on 3 May to Oslo. It holds two lamps at 40 euros each and one chair at 95 euros. The customer "
        "paid by card and asked for delivery before noon. A discount of ten percent was applied.",
    ),
    "pair": (
        "cats and dogs", "tea and coffee", "renting and buying a home", "Python and JavaScript", "trains and planes",
        "novels and films", "city life and country life", "solar and wind power", "lists and tuples", "RAM and a hard disk",
        "running and swimming", "viruses and bacteria", "socialism and capitalism", "frogs and toads", "TCP and UDP",
    ),
    "problem": (
        "I cannot fall asleep", "my computer is slow", "I am nervous before exams", "my plants keep dying",
        "I spend too much money",
        "my cat scratches the sofa", "I forget names", "I am always late", "my bread does not rise", "I want to learn faster",
        "my neighbour is loud", "I feel lonely in a new city", "my phone battery dies quickly", "I cannot focus at work",
    ),
    "role": ("a travel guide", "a job interviewer", "a pirate", "a doctor", "a strict editor", "a chef", "a football coach"),
}  # fmt: skip

TEMPLATES: tuple[str, ...] = (
    "What is {topic}?", "Explain {topic} to {audience}.", "How does {topic} work?",
    "Why does {topic} matter? Give {many} reasons.",
    "Write a short paragraph about {topic}.", "Give me {many} facts about {topic}.", "What are common myths about {topic}?",
    "Describe the history of {topic} in {many} sentences.", "Write {many} quiz questions about {topic} with answers.",
    "Tell me something surprising about {topic} and then about {topic2}.", "Is {topic} related to {topic2}? Explain.",
    "Write a {language} function that {code_task}.", "Write a {language} program that {code_task} and explain each step.",
    "Show me how to write {language} code that {code_task}. Add comments and an example.",
    "Write unit tests for a function that {code_task}.", "What is the time complexity of code that {code_task}?",
    "Here is my task: write code that {code_task}, then code that {code_task2}. Use {language}.",
    "Summarize this text in one sentence:\n\n{passage}", "Summarize the following in {many} bullet points:\n\n{passage}",
    "Read the text and answer: what happened, and why?\n\n{passage}", "Rewrite this text for {audience}:\n\n{passage}",
    "List all names, numbers and dates in this text:\n\n{passage}",
    "Give this text a title and explain your choice:\n\n{passage}",
    "List {many} things I need for a {thing}.", "How do I start a {thing}? Give me step-by-step instructions.",
    "Make a checklist for a {thing}.", "What mistakes should I avoid with a {thing}?", "Plan a {thing} for {many} people.",
    "Write a story about {person} in {place}.", "Write a story about {person} who learns about {feeling}.",
    "Write the opening of a novel set in {place}. The main character is {person}.",
    "Continue this story: {person} entered {place} and",
    "Write a poem about {feeling}.", "Write a dialogue between {person} and {person2} about {feeling}.",
    "{name} has {a} {object} and buys {b} more. Then {name2} takes {c}. How many {object} are left? Show your steps.",
    "What is {a} times {b}? Explain how you got there.", "What is {a} plus {b} minus {c}?", "Compute {c} percent of {big}.",
    "A box holds {b} {object}. How many boxes are needed for {big} {object}?", "Solve for x: {c}x + {a} = {big}.",
    "A train travels {big} miles in {c} hours. What is its average speed?",
    "Count from {a} to {a_plus} and name the even numbers.",
    "{name} is {b} years old and {name2} is {c} years younger. How old will {name2} be in {a} years?",
    "Write a {tone} email to {recipient} about {reason}.", "Write a letter to {recipient} because of {reason}.",
    "Draft a {tone} message about {reason} and then a shorter version.", "Translate into {foreign}: {sentence}",
    "Correct the grammar: {sentence}", "Rewrite this in a {tone} tone: {sentence}", "Compare {pair}.",
    "What are the advantages and disadvantages of {pair}?", "Make a table that compares {pair}.",
    "Which is better, {pair}, and why?",
    "{problem}. What can I do?", "{problem}. Give me {many} tips.", "My friend says: \"{problem}.\" How should I answer?",
    "Pretend to be {role} and talk to me about {topic}.", "You are {role}. Give advice to someone who says: {problem}.",
    "Write a product description for a {thing}.", "Write a job advert for {person}.", "Invent {many} names for a {thing} shop.",
    "Hello! Can you help me with a {thing}?", "Good morning. I want to talk about {topic}.",
    "What do you think about {feeling}?",
    "Tell me a joke about {topic}.", "Create a weekly schedule for {person}.",
    "Give me a recipe that uses {object} or vegetables.",
    "Write a JSON object that describes {person} with {many} fields.", "Write an HTML page about {topic}.",
    "Write a SQL query that counts {object} by name and sorts them.", "Define these words: {feeling}, {feeling2}.",
)  # fmt: skip


def _number(rng: random.Random, slot: str, used: dict[str, str]) -> str:
    if slot == "a_plus":
        return str(int(used["a"]) + rng.randint(5, 15))
    return str(rng.randint(*{"a": (3, 60), "b": (4, 40), "c": (2, 12), "big": (60, 900)}[slot]))


def fill(template: str, rng: random.Random) -> str:
    """The template with its slots filled; `{topic2}` is another choice from the same list as `{topic}`."""
    used: dict[str, str] = {}
    for _, slot, _, _ in Formatter().parse(template):
        if slot is None or slot in used:
            continue
        kind = slot.rstrip("2")
        if kind in SLOTS:
            used[slot] = rng.choice([choice for choice in SLOTS[kind] if choice not in used.values()])
        else:
            used[slot] = _number(rng, slot, used)
    text = template.format(**used)
    return text[0].upper() + text[1:]


def template_prompts(seed: int) -> Iterator[str]:
    """Endless prompts, none twice in a row of a hundred thousand; every template is used equally often."""
    rng, seen = random.Random(seed), set()
    while True:
        for template in rng.sample(TEMPLATES, len(TEMPLATES)):
            text = fill(template, rng)
            if text not in seen:
                seen.add(text)
                yield text
            if len(seen) > 100_000:
                seen.clear()
