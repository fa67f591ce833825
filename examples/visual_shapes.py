"""
Pictures of shapes and questions about them that have answers of one word: data for examples/train_visual_rwkv.py.

A picture has one to four coloured shapes at random positions on a plain background; they never overlap. A question is
about the colour of a shape, the shape of a colour, or the number of things. It is never ambiguous: a question about
the colour of the circle is only asked if there is one circle.

Everything is drawn from a seed. A picture is held out or not depending on its pixels, so a held-out picture is never
in the training data, for any seed.

    python examples/visual_shapes.py shapes.png     # a sheet of training pictures; prints their questions
"""

from __future__ import annotations

import random
import sys
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass

from PIL import Image, ImageDraw


SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 180),
    "orange": (245, 130, 30),
}
BACKGROUNDS = ((255, 255, 255), (200, 200, 200), (20, 20, 20))
MOST = 4  # shapes in a picture
HELD_OUT = 10  # one in this many pictures is held out
KINDS = ("colour", "shape", "count")


@dataclass(frozen=True)
class Thing:
    """A shape with its colour, its middle and half of its width, in pixels."""

    shape: str
    colour: str
    x: int
    y: int
    radius: int

    def touches(self, other: Thing) -> bool:
        return max(abs(self.x - other.x), abs(self.y - other.y)) <= self.radius + other.radius + 1

    def draw(self, canvas: ImageDraw.ImageDraw) -> None:
        x, y, radius, colour = self.x, self.y, self.radius, COLOURS[self.colour]
        box = (x - radius, y - radius, x + radius, y + radius)
        if self.shape == "circle":
            canvas.ellipse(box, fill=colour)
        elif self.shape == "square":
            canvas.rectangle(box, fill=colour)
        else:
            canvas.polygon(((x, box[1]), (box[0], box[3]), box[2:]), fill=colour)


@dataclass(frozen=True)
class Example:
    """A picture, its things, and a question of one of the `KINDS` with its answer."""

    image: Image.Image
    things: tuple[Thing, ...]
    kind: str
    question: str
    answer: str

    @property
    def description(self) -> str:
        """The picture described in words."""
        return ", ".join(f"{thing.colour} {thing.shape}" for thing in self.things)


def draw_scene(generator: random.Random, size: int) -> tuple[Image.Image, tuple[Thing, ...]]:
    """A picture of size x size pixels, and its things."""
    things, number = [], generator.randint(1, MOST)
    while len(things) < number:
        radius = generator.randint(size // 9, size // 7)
        x, y = (generator.randint(radius, size - 1 - radius) for _ in range(2))
        thing = Thing(generator.choice(SHAPES), generator.choice(tuple(COLOURS)), x, y, radius)
        if not any(map(thing.touches, things)):
            things.append(thing)
    image = Image.new("RGB", (size, size), generator.choice(BACKGROUNDS))
    for thing in things:
        thing.draw(ImageDraw.Draw(image))
    return image, tuple(things)


def questions(things: tuple[Thing, ...]) -> dict[str, list[tuple[str, str]]]:
    """All questions that the picture answers, with their answers, by kind."""
    shapes, colours = Counter(thing.shape for thing in things), Counter(thing.colour for thing in things)
    found = defaultdict(list)
    found["count"] = [(f"How many {shape}s are there?", str(shapes[shape])) for shape in SHAPES]
    found["count"].append(("How many shapes are there?", str(len(things))))
    for thing in things:
        if shapes[thing.shape] == 1:
            found["colour"].append((f"What colour is the {thing.shape}?", thing.colour))
        if colours[thing.colour] == 1:
            found["shape"].append((f"What shape is {thing.colour}?", thing.shape))
    return found


def is_held_out(image: Image.Image) -> bool:
    """Whether a picture is held out, which depends only on its pixels."""
    return zlib.crc32(image.tobytes()) % HELD_OUT == 0


class VisualShapes:
    """A sequence of `number` examples, each drawn when it is read, with only held-out pictures or without them."""

    def __init__(self, number: int, seed: int = 0, size: int = 56, held_out: bool = False):
        self.number, self.seed, self.size, self.held_out = number, seed, size, held_out

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self.number:
            raise IndexError(index)
        generator = random.Random(f"{self.seed} {index}")
        image, things = draw_scene(generator, self.size)
        while is_held_out(image) != self.held_out:
            image, things = draw_scene(generator, self.size)
        found = questions(things)
        kind = generator.choice([kind for kind in KINDS if found[kind]])
        question, answer = generator.choice(found[kind])
        return Example(image, things, kind, question, answer)


def chance(training, held_out) -> dict[str, float]:
    """
    The accuracy without looking at the pictures: always giving the most frequent answer to the same question in the
    training data. For each kind of question in `held_out`, and "all". Both arguments are iterables of [`Example`].
    """
    answers = defaultdict(Counter)
    for example in training:
        answers[example.question][example.answer] += 1
    guesses = {question: counter.most_common(1)[0][0] for question, counter in answers.items()}
    return accuracy(held_out, [guesses.get(example.question, "") for example in held_out])


def accuracy(examples, answers: list[str]) -> dict[str, float]:
    """The share of right answers to each kind of question in `examples`, and to "all"."""
    right = defaultdict(list)
    for example, answer in zip(examples, answers, strict=True):
        for kind in (example.kind, "all"):
            right[kind].append(answer == example.answer)
    return {kind: sum(right[kind]) / len(right[kind]) for kind in (*KINDS, "all") if kind in right}


if __name__ == "__main__":
    sheet = Image.new("RGB", (6 * 60, 4 * 60), "grey")
    for index, example in enumerate(VisualShapes(24)):
        sheet.paste(example.image, (index % 6 * 60 + 2, index // 6 * 60 + 2))
        print(f"row {index // 6 + 1}, picture {index % 6 + 1}: {example.question} {example.answer}")
    sheet.save(sys.argv[1])
