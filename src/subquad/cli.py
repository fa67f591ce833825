"""The command `subquad`. Whatever takes time to import is imported by the command that needs it."""

import argparse
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from textwrap import dedent

from . import __version__


DEFAULT_MODEL = "finch-abc"
# What an embedded model continues where no prompt is given: the header of a jig, in the one form that it knows.
ABC_HEADER = "X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n"
DTYPES = ("float32", "bfloat16", "float16")


class UsageError(Exception):
    """Arguments that parse and still make no sense together; exit code 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs the command line.

    Returns:
        0, 1 where the command failed, 2 where the arguments were wrong, 130 after Ctrl-C, 141 where the reader of the
        output went away.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    debug = args.debug or os.environ.get("SUBQUAD_DEBUG", "0") not in ("", "0")
    try:
        args.run(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if debug:
            raise
        print(f"subquad {args.command}: error: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, the function that does the work."""
    parser = argparse.ArgumentParser(
        prog="subquad", description="Sub-quadratic language models: run them, convert them, look at their sizes."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error (also SUBQUAD_DEBUG=1)")
    for add in (_add_generate, _add_convert, _add_info, _add_export, _add_push, _add_run, _add_inspect_memory):
        add(commands, common)
    return parser


def _add_command(commands, common, name: str, summary: str, description: str, run) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        parents=[common],
        help=summary,
        description=dedent(description),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def _add_generate(commands, common) -> None:
    command = _add_command(
        commands,
        common,
        "generate",
        "continue a text",
        f"""\
        Continue a text and print it as it is made.

        Without arguments {DEFAULT_MODEL} writes a tune in ABC notation, one of the small models that come with the
        package (eagle-abc, finch-abc, avey-abc, raven-abc, gecko-abc; `subquad info` tells their sizes). Of a tune,
        whatever model wrote it, --midi and --score make files; they need `pip install "subquad[music]"`.

        examples:
          subquad generate --seed 3
          subquad generate --model gecko-abc
          subquad generate --seed 3 --midi tune.mid --score tune.svg
          subquad generate $'X:1\\nT:Reel\\nM:4/4\\nL:1/8\\nK:G\\n' --temperature 0.7
          subquad generate "The Eiffel tower is in" --model RWKV/v6-Finch-1B6-HF --greedy --max-new-tokens 20
          subquad generate "Why is the sky blue?" --model ./my-finch --chat
          subquad generate "What is in the picture?" --model ./my-visualrwkv --image photo.jpg
          printf 'X:1\\nT:Air\\nM:3/4\\nL:1/8\\nK:Am\\n' | subquad generate -
        """,
        _generate,
    )
    command.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text to continue; `-` reads it from standard input as it is"
    )
    command.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="name of an embedded model, a model directory, or a model on the Hub (default: %(default)s)",
    )
    command.add_argument(
        "--max-new-tokens", type=_positive_int, default=512, metavar="N", help="most tokens to add (default: 512)"
    )
    command.add_argument("--greedy", action="store_true", help="take the likeliest token each time: no sampling")
    command.add_argument(
        "--temperature", type=_positive_float, metavar="T", help="below 1 more cautious, above 1 more varied"
    )
    command.add_argument(
        "--top-p",
        type=_probability,
        metavar="P",
        help="sample among the likeliest tokens that sum to this probability",
    )
    command.add_argument("--top-k", type=_positive_int, metavar="K", help="sample among the K likeliest tokens")
    command.add_argument("--seed", type=_seed, metavar="N", help="makes sampling repeatable")
    command.add_argument(
        "--chat", action="store_true", help="ask with the model's chat template, print the answer only"
    )
    command.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="put this picture before the question, of a model that reads images; as with --chat; may be given again",
    )
    command.add_argument(
        "--midi",
        metavar="FILE",
        help="write the tune that is printed to this .mid file, as it is played: with its repeats and both endings, "
        "at 120 quarter notes a minute if it does not say how fast (Q:)",
    )
    command.add_argument("--score", metavar="FILE", help="draw the tune that is printed in this .svg file")
    command.add_argument("--force", action="store_true", help="replace FILE")
    _add_dtype_and_device(command)


def _add_convert(commands, common) -> None:
    command = _add_command(
        commands,
        common,
        "convert",
        "make a model directory from a checkpoint",
        """\
        Convert a checkpoint into a directory that `from_pretrained` loads.

        SOURCE is a trainer's .pth file (RWKV-5.2, RWKV-6.0, Avey, Avey-B, Raven, Gecko, VisualRWKV-5.0 or -6.0) or a
        Hub model of type rwkv5, rwkv6, avey, avey-b, raven or gecko: its directory, or the model.safetensors or
        pytorch_model.bin in it, with the configuration and the tokenizer beside it. Of the two files NAME_rwkv.pth and
        NAME_visual.pth of a VisualRWKV either stands for both. What SOURCE is shows in the names and shapes of its
        tensors. Nothing in it is ever executed, and DEST appears complete or not at all.

        examples:
          subquad convert RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth ./finch-1b6
          subquad convert model.pth ./small --head-size-divisor 1 --tokenizer none
          subquad convert ./v5-Eagle-7B-HF ./eagle-7b --dtype bfloat16 --max-shard-size 2GB
          subquad convert visual.pth ./visual-3b --vision-tower ./clip-vit-large-patch14-336
        """,
        _convert,
    )
    command.add_argument("source", metavar="SOURCE", help="checkpoint file or model directory")
    command.add_argument("dest", metavar="DEST", help="directory to make; must not exist or be empty")
    command.add_argument(
        "--config",
        metavar="FILE",
        help="config.json to use in place of the Hub model's, or with a .pth file; sizes come from the tensors",
    )
    command.add_argument(
        "--tokenizer",
        default="auto",
        metavar="CHOICE",
        help="auto, rwkv-world, bytes, none, or a directory to copy from (default: auto, which copies the Hub model's "
        "and otherwise goes by the type of the model and the size of the vocabulary)",
    )
    command.add_argument(
        "--dtype", choices=("keep", *DTYPES), default="keep", help="dtype of every tensor (default: keep)"
    )
    command.add_argument(
        "--head-size-divisor",
        type=_positive_int,
        metavar="N",
        help="of Eagle and Finch: the group norm's epsilon is 1e-5 N²; no tensor tells it (default: the "
        "configuration's, else 8)",
    )
    command.add_argument(
        "--vision-tower",
        metavar="PATH",
        help="of VisualRWKV, where SOURCE has no vision tower: directory of the CLIP model that it was trained with",
    )
    command.add_argument(
        "--grid-size",
        type=int,
        metavar="N",
        help="of VisualRWKV: an image's patches are averaged to N x N; 0 leaves its class token only; no tensor tells "
        "it (default: the configuration's, else -1, all patches)",
    )
    command.add_argument(
        "--max-shard-size",
        type=_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="most bytes of one weight file, as 500MB or 5GB (default: 5GB)",
    )


def _add_info(commands, common) -> None:
    command = _add_command(
        commands,
        common,
        "info",
        "sizes and costs of a model",
        """\
        Print the sizes of a model and what a token costs. No weights are loaded.

        NAME is a preset, an embedded model, a model directory, or a checkpoint that `subquad convert` reads. FLOPs
        are counted as in appendix E of the paper "Eagle and Finch" (arXiv:2404.05892); Avey's are those of the matrix
        products of a full window, Avey-B's those for a token of a full split, Raven's and Gecko's those of the matrix
        products, full windows of attention and the memories.

        examples:
          subquad info finch-1.6b
          subquad info ./eagle-7b --json
        """,
        _info,
    )
    command.add_argument("name", metavar="NAME", help="preset or path")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _add_export(commands, common) -> None:
    command = _add_command(
        commands,
        common,
        "export",
        "make a repository that loads without subquad",
        """\
        Make a repository of a model directory that loads where subquad is not installed.

        OUT gets the weights, the configuration, the tokenizer, a card (the README.md of MODEL_DIR, if it has one), the
        licence and the code that they need, in files that lie beside one another, as transformers wants them. It loads
        with `from_pretrained(OUT, trust_remote_code=True)` where there are transformers and torch; where subquad is
        installed, without remote code. `subquad push` uploads the same.

        examples:
          subquad export ./my-finch ./my-finch-repository
          subquad convert RWKV-x060-World-1B6-v2.1.pth ./finch && subquad export ./finch ./finch-repository
        """,
        _export,
    )
    command.add_argument(
        "model_dir",
        metavar="MODEL_DIR",
        help="directory that `save_pretrained` or `subquad convert` wrote, with safetensors weights",
    )
    command.add_argument("out", metavar="OUT", help="directory to make; it must not exist or be empty")


def _add_push(commands, common) -> None:
    command = _add_command(
        commands,
        common,
        "push",
        "upload a model to the Hub",
        """\
        Upload a model directory to the Hugging Face Hub.

        The repository gets the weights, the configuration, the tokenizer, a card and the code that they need, so that
        anybody loads it with `from_pretrained(REPO_ID, trust_remote_code=True)`; where subquad is installed, it loads
        without remote code. All of it is one commit: an upload that breaks off changes nothing. The card is the
        README.md of MODEL_DIR, else the one that the repository has, else a new one.

        Log in with `hf auth login` first, or set HF_TOKEN.

        examples:
          subquad push ./my-finch my-finch --private
          subquad push ./my-finch my-team/my-finch --revision step-4000 --message "After 4000 steps"
          subquad push ./eagle-7b RWKV/v5-Eagle-7B-HF --create-pr
        """,
        _push,
    )
    command.add_argument(
        "model_dir",
        metavar="MODEL_DIR",
        help="directory that `save_pretrained` or `subquad convert` wrote, with safetensors weights",
    )
    command.add_argument(
        "repo_id", metavar="REPO_ID", help="OWNER/NAME, or NAME of a repository of yours; made where there is none"
    )
    command.add_argument("--private", action="store_true", help="nobody else sees a new repository")
    command.add_argument(
        "--revision", metavar="BRANCH", help="branch to commit to, made where there is none (default: main)"
    )
    command.add_argument("--create-pr", action="store_true", help="open a pull request, also where you may not write")
    command.add_argument("--message", metavar="TEXT", help="message of the commit (default: Upload model)")


def _add_run(commands, common) -> None:
    command = _add_command(
        commands,
        common,
        "run",
        "run the command of another package, to which these models are known",
        """\
        Run a command that another installed package brings, where subquad has been imported.

        Such a command loads models by what their configuration says, in a process that knows nothing of subquad. Run
        like this, it loads the architectures of subquad as it does those of transformers. (Processes that it starts do
        not: a script for torchrun or accelerate imports subquad itself.)

        examples:
          subquad run transformers serve ./finch-1b6
          subquad run lm_eval --model hf --model_args pretrained=./finch-1b6 --tasks lambada_openai
        """,
        _run,
    )
    command.add_argument("name", metavar="COMMAND", help="name of the command")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _add_inspect_memory(commands, common) -> None:
    command = _add_command(
        commands,
        common,
        "inspect-memory",
        "show what the slots of a Raven hold after a text",
        """\
        Show what the slot memories of a Raven hold after a text (section 7 of the paper "Raven").

        Into DIR go
          effective_lengths.png  of every slot, the part of the tokens that were written to it (figures 5 and 8)
          layer00-head00.png     and so on: slots by tokens, how much of a token a slot holds at the end (figures 6
                                 and 7); with --mark, red slots hold marked tokens only, green ones only others, blue
                                 ones both
          memory.json            the same numbers: `memories` lists, for each layer and head, the `effective_lengths`,
                                 `weight` (sum of what it holds), `marked_weight` and `kinds` of every slot, and its
                                 `holdings`, tokens (positions) with their weights, but for those below `floor`

        A table of the effective lengths, divided by that of the text, is printed: their median, the length that 90%
        do not exceed, and the number of slots that hold marked tokens only.

        examples:
          subquad inspect-memory "The password is 1378. Now tell me the password =" --model ./raven --out memory \\
              --mark 1378
          subquad inspect-memory - --model ./raven --out memory --layers 0,11,23 --heads 0 --force < book.txt
        """,
        _inspect_memory,
    )
    command.add_argument("prompt", metavar="PROMPT", help="the text; `-` reads it from standard input as it is")
    command.add_argument("--model", required=True, metavar="MODEL", help="a model directory, or a model on the Hub")
    command.add_argument(
        "--out", required=True, metavar="DIR", help="directory of the figures; made where there is none"
    )
    command.add_argument(
        "--mark",
        action="append",
        default=[],
        metavar="TEXT",
        help="mark the tokens that overlap with TEXT, wherever the prompt has it; may be given again",
    )
    command.add_argument(
        "--layers",
        type=_layers,
        metavar="N,N,...",
        help="numbers of slot memories, or all (default: the first, the middle and the last)",
    )
    command.add_argument("--heads", type=_numbers, metavar="N,N,...", help="numbers of heads (default: all)")
    command.add_argument(
        "--threshold",
        type=_majority,
        default=0.9,
        metavar="SHARE",
        help="share of a slot's weights from which it counts as holding marked (or other) tokens only (default: 0.9)",
    )
    command.add_argument("--force", action="store_true", help="replace files of an earlier call")
    _add_dtype_and_device(command)


def _add_dtype_and_device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="dtype of the weights (default: as stored)"
    )
    command.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: a GPU where there is one)"
    )


def _convert(args: argparse.Namespace) -> None:
    from subquad_conversion import convert

    from .info import format_bytes
    from .models import REGISTRY

    with _signals_raise():
        report = convert(
            args.source,
            args.dest,
            config=args.config,
            tokenizer=args.tokenizer,
            dtype=args.dtype,
            head_size_divisor=args.head_size_divisor,
            vision_tower=args.vision_tower,
            grid_size=args.grid_size,
            max_shard_size=args.max_shard_size,
            progress=sys.stderr.isatty(),
        )
    config = report.config.get_text_config()
    sizes = [f"{config.num_hidden_layers} layers of {config.hidden_size}"]
    sizes += REGISTRY[report.config.model_type].describe(report.config)
    print(f"Recognised {report.recognised.title}: {', '.join(sizes)}, vocabulary {config.vocab_size:,}.")
    size = f"{report.parameters:,} parameters, {format_bytes(report.bytes)} in {report.dtype}"
    print(f"Wrote {size}, to {report.directory}:")
    print(*(f"  {file}" for file in report.files), sep="\n")
    print(f"Tokenizer: {report.tokenizer or 'none'}.")
    for note in report.notes:
        print(f"Note: {note}.")


def _export(args: argparse.Namespace) -> None:
    from .hub import export

    with _signals_raise():
        files = export(args.model_dir, args.out)
    print(f"Wrote {args.out}:")
    print(*(f"  {file}" for file in files), sep="\n")
    print(f"It loads with from_pretrained({args.out!r}, trust_remote_code=True).")


def _push(args: argparse.Namespace) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import disable_progress_bars

    from .push import push

    if not os.path.isdir(args.model_dir):
        raise UsageError(f"{args.model_dir} is no directory.")
    if args.create_pr and args.revision:
        raise UsageError("--create-pr opens a pull request against main: leave out --revision.")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        with _signals_raise():
            commit = push(
                args.model_dir,
                args.repo_id,
                private=args.private or None,
                revision=args.revision,
                create_pr=args.create_pr,
                commit_message=args.message,
            )
    except HFValidationError as error:
        raise UsageError(error) from error
    if commit.pr_url:
        print(f"Opened the pull request {commit.pr_url}.")
        return
    branch = args.revision and f", revision={args.revision!r}"
    print(f"Pushed to {commit.repo_url}: {commit}")
    print(f"It loads with from_pretrained({commit.repo_url.repo_id!r}{branch or ''}, trust_remote_code=True).")


@contextmanager
def _signals_raise() -> Iterator[None]:
    """A signal that ends the process must pass through the code that takes the unfinished directory away."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # no other may set them
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        # One that is ignored stays so: nohup works that way.
        handlers = {number: signal.getsignal(number) for number in numbers}
        handlers = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}

    def stop(number, frame):
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)  # the cleaning up is not to be interrupted
        sys.exit(128 + number)

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _info(args: argparse.Namespace) -> None:
    import json
    from dataclasses import asdict

    from .info import UnknownModelError, describe, labelled

    try:
        info = describe(args.name)
    except UnknownModelError as error:
        raise UsageError(error) from error
    if args.json:
        print(json.dumps(asdict(info)))
        return
    print(info.name)
    for label, text in labelled(info).items():
        print(f"  {label:<13} {text}")


def _run(args: argparse.Namespace) -> None:
    from importlib.metadata import entry_points

    scripts = entry_points(group="console_scripts", name=args.name)
    if not scripts:
        raise UsageError(f"no installed package has the command {args.name!r}.")
    _put_classes_into_transformers()
    sys.argv = [args.name, *args.arguments]
    try:
        status = next(iter(scripts)).load()()
    except Exception:
        traceback.print_exc()  # its errors are not ours to shorten
        status = 1
    sys.exit(status)


def _put_classes_into_transformers() -> None:
    """`transformers serve` looks there, not in the Auto classes, for what `architectures` in a configuration names."""
    # Importing this puts another module in the place of `transformers`, and must not come after what follows.
    import transformers.processing_utils

    import subquad

    for _, _, heads in subquad.ARCHITECTURES.values():
        for head in heads.values():
            setattr(transformers, head, getattr(subquad, head))


def _generate(args: argparse.Namespace) -> None:
    if args.greedy and not (args.temperature is args.top_p is args.top_k is None):
        raise UsageError("--greedy does not sample: leave out --temperature, --top-p and --top-k.")
    from .info import embedded_model

    files = [file for file in (args.midi, args.score) if file is not None]
    if files:
        _check_music(args)
    path = _model_path(args.model)
    if missing := [file for file in args.image if not os.path.isfile(file)]:
        raise UsageError(f"{missing[0]} is no file.")
    chat = args.chat or bool(args.image)
    prompt = args.prompt
    if prompt is None:
        if embedded_model(args.model) is None or chat:
            raise UsageError("there is no PROMPT; give a text, or - to read it from standard input.")
        prompt = ABC_HEADER
    prompt = _read_prompt(prompt)

    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    auto_class = _generating_class(args, path)
    device = _usable_device(args.device)
    reader = transformers.AutoProcessor if args.image else transformers.AutoTokenizer
    reader = reader.from_pretrained(path, trust_remote_code=False)
    tokenizer = getattr(reader, "tokenizer", reader)
    if chat:
        if reader.chat_template is None:
            raise UsageError(f"{args.model} has no chat template; leave out --chat.")
        content = [*({"type": "image", "path": file} for file in args.image), {"type": "text", "text": prompt}]
        inputs = reader.apply_chat_template(
            [{"role": "user", "content": content if args.image else prompt}],
            add_generation_prompt=True,
            tokenize=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"].long()
    if ids.shape[1] == 0:
        if tokenizer.bos_token_id is None:
            raise UsageError("the prompt is empty, and this model has no token that begins a text.")
        ids = torch.tensor([[tokenizer.bos_token_id]])
    ids = ids.to(device)

    model = getattr(transformers, auto_class).from_pretrained(path, dtype=args.dtype, trust_remote_code=False)
    model = model.to(device).eval()
    options = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    if args.image:
        options["pixel_values"] = inputs["pixel_values"].to(device)
    if args.seed is not None:
        transformers.set_seed(args.seed)
    if chat and (end := _end_of_turn(tokenizer)):
        options["stopping_criteria"] = [_until(tokenizer, end, ids.shape[1])]
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.max_new_tokens,
        do_sample=not args.greedy,
        streamer=_character_streamer(tokenizer, skip_prompt=chat),
        **{name: value for name, value in options.items() if value is not None},
    )
    if files:
        from . import music

        text = tokenizer.decode(output[0, ids.shape[1] if chat else 0 :], skip_special_tokens=True)
        with _signals_raise():
            music.write(text, args.midi, args.score, args.force)
        print(f"Wrote {' and '.join(files)}.", file=sys.stderr)  # standard output is the text's


def _check_music(args: argparse.Namespace) -> None:
    from . import music

    music.require_music()
    try:
        music.check_files(args.midi, args.score, args.force)
    except ValueError as error:
        raise UsageError(error) from error


def _inspect_memory(args: argparse.Namespace) -> None:
    path = _model_path(args.model)
    prompt = _read_prompt(args.prompt)

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
    from transformers.utils import logging

    from .models.raven import inspect_memory as inspection

    inspection.require_matplotlib()
    logging.disable_progress_bar()
    model_type = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    if model_type != "raven":
        raise UsageError(f"{args.model} is of type {model_type}: only a model of type raven has slot memories.")
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    try:  # all that can be wrong, before the weights are loaded
        layers = inspection.choose_layers(config, args.layers)
        heads = inspection.choose_heads(config, args.heads)
        inspection.read_prompt(tokenizer, prompt, args.mark)
        inspection.check_directory(args.out, inspection.file_names(layers, heads), args.force)
    except ValueError as error:
        raise UsageError(error) from error
    device = _usable_device(args.device)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype, trust_remote_code=False).to(device)
    report = inspection.inspect_memory(
        model, tokenizer, prompt, layers=layers, heads=heads, mark=args.mark, threshold=args.threshold
    )
    with _signals_raise():
        files = inspection.save(report, args.out, args.force)
    marked = f", {int(report.marked.sum())} of them marked" if args.mark else ""
    print(f"{len(report.ids):,} tokens{marked}; effective lengths as parts of that:")
    print(report.table())
    print(f"Wrote {', '.join(files)} to {args.out}.")


def _model_path(name: str):
    """Where a model that generates is found: a directory, or its name on the Hub."""
    from .info import embedded_model
    from .presets import PRESETS

    path = embedded_model(name)
    if path is None and not os.path.isdir(name):
        if name in PRESETS:
            raise UsageError(f"{name} is a preset, sizes without weights; --model needs a trained model.")
        if os.path.isfile(name):
            raise UsageError(f"{name} is a file; `subquad convert` makes a model directory of it.")
        if "/" not in name:
            raise UsageError(f"{name!r} is neither an embedded model, nor a directory, nor an OWNER/NAME on the Hub.")
    return path or name


def _read_prompt(prompt: str) -> str:
    try:
        if prompt == "-":
            prompt = sys.stdin.read()
        prompt.encode()  # bytes of an argument that are not UTF-8 arrive as lone surrogates
    except UnicodeError as error:
        raise UsageError("the prompt is not UTF-8.") from error
    return prompt


def _usable_device(name: str | None):
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).item()  # fails on `meta`, which holds nothing
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UsageError(f"device {name!r} cannot be used: {_one_line(error)}") from error
    return device


def _generating_class(args: argparse.Namespace, path) -> str:
    """Name of the Auto class of a model that generates."""
    from transformers import PreTrainedConfig

    from . import ARCHITECTURES, lm_auto_class

    fields = {}
    with suppress(OSError, ValueError):  # loading the tokenizer or the model says what is wrong
        fields, _ = PreTrainedConfig.get_config_dict(path)
    model_type = fields.get("model_type")
    auto_class = lm_auto_class(model_type) if model_type in ARCHITECTURES else "AutoModelForCausalLM"
    if auto_class == "AutoModelForMaskedLM":
        raise UsageError(f"{args.model} is an encoder, of type {model_type}: it does not generate text.")
    if args.image and auto_class != "AutoModelForImageTextToText":
        raise UsageError(f"{args.model} is of type {model_type}: it reads no images; leave out --image.")
    return auto_class


def _end_of_turn(tokenizer) -> str:
    """What the chat template puts after an answer. World models are not trained to end theirs with a special token."""
    answer = "An answer."
    turns = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(turns, tokenize=False).rpartition(answer)[2]


def _until(tokenizer, end: str, prompt_length: int):
    import torch
    from transformers import StoppingCriteria

    class Until(StoppingCriteria):
        """Stops where `end` stands in the text after the prompt."""

        def __call__(self, input_ids, scores, **kwargs):
            done = [end in tokenizer.decode(row[prompt_length:]) for row in input_ids]
            return torch.tensor(done, device=input_ids.device)

    return Until()


def _character_streamer(tokenizer, skip_prompt: bool):
    from transformers import TextStreamer

    class CharacterStreamer(TextStreamer):
        """Prints every token at once, where its base class waits for the end of a word."""

        def put(self, value):
            if self.skip_prompt and self.next_tokens_are_prompt:
                self.next_tokens_are_prompt = False
                return
            self.next_tokens_are_prompt = False
            self.token_cache.extend(value.reshape(-1).tolist())
            text = self.tokenizer.decode(self.token_cache, **self.decode_kwargs)
            if text.endswith("�"):  # a character whose last bytes are still to come
                return
            self.on_finalized_text(text[self.print_len :])
            self.print_len = len(text)
            if text.endswith("\n"):
                self.token_cache, self.print_len = [], 0

    return CharacterStreamer(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)


def _positive_int(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def _seed(text: str) -> int:
    # The random generators take 32 bits.
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {2**32 - 1}, got {text!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be whole numbers from 0 on with commas between them, got {text!r}")
    return [int(part) for part in parts]


def _layers(text: str) -> list[int] | str:
    return text if text == "all" else _numbers(text)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _positive_float(text: str) -> float:
    if not 0 < _float(text) < float("inf"):
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, got {text!r} (--greedy takes the likeliest token)"
        )
    return float(text)


def _probability(text: str) -> float:
    if not 0 < _float(text) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return float(text)


def _majority(text: str) -> float:
    if not 0.5 < _float(text) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0.5 and at most 1, got {text!r}")
    return float(text)


def _size(text: str) -> int:
    from subquad_conversion.writer import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _one_line(error: Exception) -> str:
    text = ""
    for line in str(error).strip().splitlines():
        text = f"{text} {line.strip()}".lstrip()
        if not text.endswith(":"):
            break
    expected = isinstance(error, ValueError | OSError | UsageError | ImportError)
    return (text or type(error).__name__) if expected else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main())
