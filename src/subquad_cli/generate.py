"""`subquad generate`"""

import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace

from subquad.hub.foreign_files import reading

from . import start
from .answers import ChatFormat, character_streamer
from .arguments import add_dtype_and_device, add_sampling, positive_int, sampling_options
from .common import (
    UsageError,
    check_new_file,
    find_auto_class,
    find_model,
    load_reader,
    naming_options,
    read_image,
    read_prompt,
    read_session,
    signals_raise,
    usable_device,
)


DEFAULT_MODEL = "finch-abc"
# The prompt of an embedded model by default: the header of a jig, in the format of the training data.
ABC_HEADER = "X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n"

SUMMARY = "continue a text"
DESCRIPTION = f"""\
Continue a text and print each token as soon as it is generated.

Without arguments, {DEFAULT_MODEL} writes a tune in ABC notation. It is one of the small models that come with the
package: eagle-abc, finch-abc, goose-abc, avey-abc, raven-abc and gecko-abc (`subquad info NAME` shows their sizes).
--midi and --score turn the tune into files, whatever model wrote it; they need `pip install "subquad[music]"`.

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
  subquad generate --seed 3 --max-new-tokens 40 --state-out tune.state && subquad generate --state-in tune.state
"""


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
    add_sampling(parser)
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
        help="also write the printed tune to this .mid file, as played: with its repeats and both endings, at "
        "120 quarter notes a minute unless the tune gives a tempo (Q:)",
    )
    add("--score", metavar="FILE", help="also draw the printed tune in this .svg file")
    add(
        "--state-in",
        metavar="FILE",
        help="continue the text whose state is in this file, written by --state-out or /save of `subquad chat`; "
        "PROMPT follows it, or may be left out",
    )
    add("--state-out", metavar="FILE", help="also save the state at the end of the text, to continue it later")
    add("--force", action="store_true", help="replace FILE if it exists")
    add_dtype_and_device(parser)


def run(args: Namespace) -> None:
    from subquad.hub.info import embedded_models

    options = sampling_options(args)
    files = [file for file in (args.midi, args.score) if file is not None]
    if args.force and not files and args.state_out is None:
        raise UsageError("--force replaces a file: it needs --midi, --score or --state-out.")
    if files:
        _check_music(args)
    path = find_model(args.model)
    start.begin(args, path)
    for file in args.image:
        read_image("--image", file)
    chat = args.chat or bool(args.image)
    if args.think is not None and not chat:
        raise UsageError("--think and --no-think are options of --chat.")
    prompt = args.prompt
    if prompt is None and (chat or not args.state_in):
        if chat or args.model not in embedded_models():
            raise UsageError("PROMPT is missing; give a text, or - to read it from standard input.")
        prompt = ABC_HEADER
    prompt = read_prompt(prompt or "")
    if args.state_out is not None:
        check_new_file("--state-out", args.state_out, args.force)
    identity, saved = read_session(args.model, path, args.state_in, needed=args.state_out is not None)

    import torch
    import transformers
    from transformers.utils import logging

    from subquad.states.session import Session

    logging.disable_progress_bar()
    auto_class = find_auto_class(args.model, path, bool(args.image))
    device = usable_device(args.device)
    reader = transformers.AutoProcessor if args.image else transformers.AutoTokenizer
    reader = load_reader(reader, args.model, path)
    tokenizer = getattr(reader, "tokenizer", reader)
    opening = completes = end = ""
    if chat:
        with reading(args.model, "the chat template"):
            turns = ChatFormat(reader, args.model, args.think)
            opening, completes, end = turns.opening, turns.completes, turns.end
            inputs = turns.encode(prompt, args.image, saved and turns.after(**saved.text))
    else:
        with reading(args.model, "the tokenizer"):
            text = saved.text["rest"] + prompt if saved else prompt
            inputs = tokenizer(text, add_special_tokens=saved is None, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    if not ids and saved is None:
        if tokenizer.bos_token_id is None:
            raise UsageError(f"the prompt is empty, and {args.model} does not have a BOS token to begin with.")
        ids = [tokenizer.bos_token_id]
    if saved is not None and not (ids or saved.text["unread"]):
        raise UsageError(f"PROMPT is missing: the text of {args.state_in} ends where its state does.")

    with reading(args.model, "the model"):
        model = getattr(transformers, auto_class).from_pretrained(path, dtype=args.dtype, trust_remote_code=False)
    model = model.to(device).eval()
    start.ready(args)
    session = Session(model.new_cache()) if saved is None else saved.restore(model)
    if args.image:
        if "pixel_values" not in inputs:
            raise UsageError(f"the processor of {args.model} does not read images; leave out --image.")
        options |= {name: x.to(device) for name, x in inputs.items() if name.startswith("pixel_values")}
    if args.seed is not None:
        torch.manual_seed(args.seed)
    if end:
        options |= {"stop_strings": [end], "tokenizer": tokenizer}
    known = session.unread
    with reading(args.model, "the prompt"):
        new = session.generate(
            model,
            ids,
            max_new_tokens=args.max_new_tokens,
            streamer=character_streamer(tokenizer, chat, opening, end, known, completes),
            **options,
        )
    text = tokenizer.decode(new if chat else ids + new, skip_special_tokens=True)
    if chat:
        text = turns.shown(session.end_answer(tokenizer, new, end))
    if args.state_out is not None:
        session.end = f"{prompt}\n{text}" if chat else text
        with signals_raise():
            session.save(args.state_out, identity)
        print(f"Wrote {args.state_out}: {session.cache.get_seq_length():,} tokens.", file=sys.stderr)
    if files:
        from subquad.tools import music

        with signals_raise():
            music.write(text, args.midi, args.score, args.force)
        print(f"Wrote {' and '.join(files)}.", file=sys.stderr)  # standard output has the text only


def _check_music(args: Namespace) -> None:
    from subquad.tools import music

    music.require_music()
    try:
        with naming_options("force"):
            music.check_files(args.midi, args.score, args.force)
    except ValueError as error:
        raise UsageError(error) from error
