"""`subquad generate`"""

import os
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from contextlib import suppress
from pathlib import Path

from ..foreign_files import reading
from .arguments import add_dtype_and_device, positive_int, probability, seed, temperature
from .common import (
    UsageError,
    find_model,
    load_reader,
    naming_options,
    read_prompt,
    signals_raise,
    usable_device,
)


DEFAULT_MODEL = "finch-abc"
# The prompt of an embedded model by default: the header of a jig, in the form that the training data have.
ABC_HEADER = "X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n"

SUMMARY = "continue a text"
DESCRIPTION = f"""\
Continue a text and print each token as soon as it is generated.

Without arguments, {DEFAULT_MODEL} writes a tune in ABC notation. It is one of the small models that come with the
package: eagle-abc, finch-abc, avey-abc, raven-abc and gecko-abc (`subquad info NAME` shows their sizes). --midi and
--score turn the tune into files, whatever model wrote it; they need `pip install "subquad[music]"`.

examples:
  subquad generate --seed 3
  subquad generate --model gecko-abc
  subquad generate --seed 3 --midi tune.mid --score tune.svg
  subquad generate $'X:1\\nT:Reel\\nM:4/4\\nL:1/8\\nK:G\\n' --temperature 0.7
  subquad generate "The Eiffel tower is in" --model RWKV/v6-Finch-1B6-HF --greedy --max-new-tokens 20
  subquad generate "Why is the sky blue?" --model ./my-finch --chat
  subquad generate "Why is the sky blue? (think a bit)" --model ./my-goose --chat --think
  subquad generate "What is in the picture?" --model ./my-visualrwkv --image photo.jpg
  printf 'X:1\\nT:Air\\nM:3/4\\nL:1/8\\nK:Am\\n' | subquad generate -
"""

# A conversation that shows what the chat template puts around an answer.
QUESTION = {"role": "user", "content": "A question."}
ANSWER = {"role": "assistant", "content": "An answer."}
NEXT = {"role": "user", "content": "Another question."}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="text to continue; `-` reads it, unchanged, from standard input")
    add(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="a model directory, the name of an embedded model, or a model on the Hub (default: %(default)s)",
    )
    add(
        "--max-new-tokens",
        type=positive_int,
        default=512,
        metavar="N",
        help="maximum number of new tokens (default: 512)",
    )
    add("--greedy", action="store_true", help="always take the most likely token instead of sampling")
    add("--temperature", type=temperature, metavar="T", help="below 1 more predictable, above 1 more varied")
    add("--top-p", type=probability, metavar="P", help="sample from the most likely tokens that sum to P")
    add("--top-k", type=positive_int, metavar="K", help="sample from the K most likely tokens")
    add("--seed", type=seed, metavar="N", help="seed of the sampling, which makes it repeatable")
    add(
        "--chat",
        action="store_true",
        help="put PROMPT into the model's chat template and print only the answer, which ends before the next turn",
    )
    add(
        "--think",
        action=BooleanOptionalAction,
        help="with --chat, for a model that can think before it answers: do so and print the thoughts too, or do not",
    )
    add(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="put this picture before the question and answer as with --chat, for a model that reads images; may be "
        "repeated",
    )
    add(
        "--midi",
        metavar="FILE",
        help="also write the printed tune to this .mid file, as it is played: with its repeats and both endings, at "
        "120 quarter notes a minute unless the tune gives a tempo (Q:)",
    )
    add("--score", metavar="FILE", help="also draw the printed tune in this .svg file")
    add("--force", action="store_true", help="replace FILE if it exists")
    add_dtype_and_device(parser)


def run(args: Namespace) -> None:
    from ..info import embedded_model

    if args.greedy and not (args.temperature is args.top_p is args.top_k is None):
        raise UsageError("--greedy does not sample: leave out --temperature, --top-p and --top-k.")
    files = [file for file in (args.midi, args.score) if file is not None]
    if files:
        _check_music(args)
    path = find_model(args.model)
    for file in args.image:
        if not os.path.isfile(file):
            raise UsageError(f"--image {file} is not a file.")
        _check_image(file)
    chat = args.chat or bool(args.image)
    if args.think is not None and not chat:
        raise UsageError("--think and --no-think are options of --chat.")
    prompt = args.prompt
    if prompt is None:
        if embedded_model(args.model) is None or chat:
            raise UsageError("PROMPT is missing; give a text, or - to read it from standard input.")
        prompt = ABC_HEADER
    prompt = read_prompt(prompt)

    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    auto_class = _auto_class(args, path)
    device = usable_device(args.device)
    reader = transformers.AutoProcessor if args.image else transformers.AutoTokenizer
    reader = load_reader(reader, args.model, path)
    tokenizer = getattr(reader, "tokenizer", reader)
    opening = end = ""
    if chat:
        if reader.chat_template is None:
            raise UsageError(f"{args.model} does not have a chat template; leave out --chat.")
        content = [*({"type": "image", "path": file} for file in args.image), {"type": "text", "text": prompt}]
        with reading(args.model, "the chat template"):
            thinking = {} if args.think is None else _thinking_option(tokenizer, args.think)
            if thinking is None:
                raise UsageError(f"{args.model} cannot be told whether to think; leave out --think and --no-think.")
            opening, end = _around_answer(tokenizer, thinking)
            inputs = reader.apply_chat_template(
                [{"role": "user", "content": content if args.image else prompt}],
                add_generation_prompt=True,
                tokenize=True,
                return_tensors="pt",
                return_dict=True,
                **thinking,
            )
    else:
        with reading(args.model, "the tokenizer"):
            inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"].long()
    if ids.shape[1] == 0:
        if tokenizer.bos_token_id is None:
            raise UsageError(f"the prompt is empty, and {args.model} does not have a BOS token to begin with.")
        ids = torch.tensor([[tokenizer.bos_token_id]])
    ids = ids.to(device)

    with reading(args.model, "the model"):
        model = getattr(transformers, auto_class).from_pretrained(path, dtype=args.dtype, trust_remote_code=False)
    model = model.to(device).eval()
    options = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    if args.image:
        if "pixel_values" not in inputs:
            raise UsageError(f"the processor of {args.model} does not read images; leave out --image.")
        options["pixel_values"] = inputs["pixel_values"].to(device)
    if args.seed is not None:
        transformers.set_seed(args.seed)
    if end:
        options |= {"stop_strings": [end], "tokenizer": tokenizer}
    with reading(args.model, "the prompt"):
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.max_new_tokens,
            do_sample=not args.greedy,
            streamer=character_streamer(tokenizer, skip_prompt=chat, opening=opening, end=end),
            **{name: value for name, value in options.items() if value is not None},
        )
    if files:
        from .. import music

        text = tokenizer.decode(output[0, ids.shape[1] if chat else 0 :], skip_special_tokens=True)
        text = text.partition(end)[0] if end else text
        with signals_raise():
            music.write(text, args.midi, args.score, args.force)
        print(f"Wrote {' and '.join(files)}.", file=sys.stderr)  # standard output has the text only


def _check_music(args: Namespace) -> None:
    from .. import music

    music.require_music()
    try:
        with naming_options("force"):
            music.check_files(args.midi, args.score, args.force)
    except ValueError as error:
        raise UsageError(error) from error


def _check_image(file: str) -> None:
    from PIL import Image

    with reading(file, "the image"), Image.open(file) as image:
        image.load()


def _auto_class(args: Namespace, path) -> str:
    """Name of the Auto class that loads the model."""
    from ..models import REGISTRY

    model_type = _model_type(path)
    if model_type is None:  # loading the tokenizer or the model will say what is wrong
        return "AutoModelForCausalLM"
    if (architecture := REGISTRY.get(model_type)) is None:
        raise UsageError(f"{args.model} is of type {model_type}, which is none of {', '.join(REGISTRY)}.")
    if architecture.is_encoder:
        raise UsageError(f"{args.model} is of type {model_type}, an encoder, which does not generate text.")
    if args.image and architecture.processor is None:
        raise UsageError(f"{args.model} is of type {model_type}, which does not read images; leave out --image.")
    return architecture.lm_auto_class


def _model_type(path) -> str | None:
    """The type of a model, or of the one that an adapter was trained on; None if the Hub does not tell."""
    from transformers import PreTrainedConfig

    from ..model_check import model_type_of
    from ..weight_files import adapted_model

    path = adapted_model(path, {})
    if os.path.isdir(path):
        return model_type_of(Path(path))
    with suppress(OSError, ValueError):
        return PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    return None


def _thinking_option(tokenizer, think: bool) -> dict[str, bool] | None:
    """The argument of the chat template that turns thinking on or off; None if the template does not have one."""
    for name in ("thinking", "enable_thinking"):
        prompts = {_render(tokenizer, QUESTION, add_generation_prompt=True, **{name: on}) for on in (True, False)}
        if len(prompts) == 2:
            return {name: think}
    return None


def _around_answer(tokenizer, thinking: dict[str, bool]) -> tuple[str, str]:
    """
    By the chat template: what the prompt begins the thoughts with, empty if there are to be none, and the text by
    which the answer ends. If only white space follows an answer, which may also be in the middle of one, the beginning
    of the user's next message belongs to that text.
    """
    before, _, end = _render(tokenizer, QUESTION, ANSWER).rpartition(ANSWER["content"])
    prompt = _render(tokenizer, QUESTION, add_generation_prompt=True, **thinking)
    opening = prompt[len(before) :] if any(thinking.values()) and prompt.startswith(before) else ""
    if not end.strip():
        turns = _render(tokenizer, QUESTION, ANSWER, NEXT)
        end = turns.rpartition(ANSWER["content"])[2].partition(NEXT["content"])[0]
    return opening, end.rstrip()


def _render(tokenizer, *messages: dict[str, str], **options) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def character_streamer(tokenizer, skip_prompt: bool, opening: str = "", end: str = ""):
    """
    A streamer that prints each token as soon as it is generated; `TextStreamer` waits for the end of a word. It prints
    `opening` before the first token, and nothing from `end` on.
    """
    from transformers import TextStreamer

    class CharacterStreamer(TextStreamer):
        held = opening

        def put(self, value):
            if self.skip_prompt and self.next_tokens_are_prompt:
                self.next_tokens_are_prompt = False
                return
            self.next_tokens_are_prompt = False
            self.token_cache.extend(value.reshape(-1).tolist())
            text = self.tokenizer.decode(self.token_cache, **self.decode_kwargs)
            if text.endswith("�"):  # the last bytes of a character are still missing
                return
            self.on_finalized_text(text[self.print_len :])
            self.print_len = len(text)
            if text.endswith("\n"):
                self.token_cache, self.print_len = [], 0

        def on_finalized_text(self, text, stream_end=False):
            text = self.held + text
            stop = text.find(end) if end else -1
            if stop < 0:  # the last characters may be the first ones of `end`
                begun = 0 if stream_end else max((n for n in range(len(end)) if text.endswith(end[:n])), default=0)
                stop = len(text) - begun
            self.held = "" if stream_end else text[stop:]
            super().on_finalized_text(text[:stop], stream_end)

    return CharacterStreamer(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
