"""`subquad inspect-memory`"""

from argparse import ArgumentParser, Namespace

from .arguments import add_dtype_and_device, majority, numbers, numbers_or_all
from .common import UsageError, find_model, load_reader, naming_options, read_prompt, signals_raise, usable_device


SUMMARY = "show the memory slots of a Raven after a text"
DESCRIPTION = """\
Show the content of a Raven's slot memories after a text (section 7 of the paper "Raven").

These files go to DIR:
  effective_lengths.png  the share of the tokens written to each slot (figures 5 and 8)
  layer00-head00.png     and so on: slots by tokens, the weight of a token in a slot at the end (figures 6 and 7);
                         with --mark, red slots hold marked tokens only, green ones other tokens only, blue ones both
  memory.json            the same numbers: `memories` lists, for each layer and head, the `effective_lengths`, `weight`
                         (sum of its holdings), `marked_weight` and `kinds` of every slot, and its `holdings`:
                         the positions of its tokens with their weights, without those below `floor`

A table of the effective lengths, divided by the length of the text, is printed: their median, their 90th percentile,
and the number of slots that hold marked tokens only.

examples:
  subquad inspect-memory "The password is 1378. Now tell me the password =" --model ./raven --out memory \\
      --mark 1378
  subquad inspect-memory - --model ./raven --out memory --layers 0,11,23 --heads 0 --force < book.txt
"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help="the text; `-` reads it, unchanged, from standard input")
    add("--model", required=True, metavar="MODEL", help="a model directory, or a model on the Hub")
    add("--out", required=True, metavar="DIR", help="directory for the files, created if it does not exist")
    add(
        "--mark",
        action="append",
        default=[],
        metavar="TEXT",
        help="mark the tokens that overlap with TEXT, everywhere in the prompt; may be repeated",
    )
    add(
        "--layers",
        type=numbers_or_all,
        metavar="N,N,...",
        help="numbers of slot memories, or all (default: the first, the middle and the last)",
    )
    add("--heads", type=numbers, metavar="N,N,...", help="numbers of heads (default: all)")
    add(
        "--threshold",
        type=majority,
        metavar="SHARE",
        help="with --mark: a slot counts as holding only marked (or other) tokens if they have at least this share of "
        "its weight (default: 0.9)",
    )
    add("--force", action="store_true", help="replace the files of an earlier run")
    add_dtype_and_device(parser)


def run(args: Namespace) -> None:
    if args.threshold is not None and not args.mark:
        raise UsageError("--threshold is about marked tokens: it needs --mark.")
    path = find_model(args.model)
    prompt = read_prompt(args.prompt)

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
    from transformers.utils import logging

    from subquad.models import REGISTRY

    logging.disable_progress_bar()
    model_type = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    inspectable = {name: architecture for name, architecture in REGISTRY.items() if architecture.inspection}
    if model_type not in inspectable:
        raise UsageError(
            f"{args.model} is of type {model_type}: only a model of type {', '.join(inspectable)} has slot memories."
        )
    inspection = inspectable[model_type].load_inspection()
    inspection.require_matplotlib()
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    tokenizer = load_reader(AutoTokenizer, args.model, path)
    try:  # everything that can be wrong is checked before the weights are loaded
        with naming_options("layers", "heads", "mark", "force"):
            layers = inspection.choose_layers(config, args.layers)
            heads = inspection.choose_heads(config, args.heads)
            inspection.read_prompt(tokenizer, prompt, args.mark)
            inspection.check_directory(args.out, inspection.file_names(layers, heads), args.force)
    except ValueError as error:
        raise UsageError(error) from error
    device = usable_device(args.device)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype, trust_remote_code=False).to(device)
    options = {} if args.threshold is None else {"threshold": args.threshold}
    report = inspection.inspect_memory(model, tokenizer, prompt, layers=layers, heads=heads, mark=args.mark, **options)
    with signals_raise():
        files = inspection.save(report, args.out, args.force)
    marked = f", {int(report.marked.sum())} of them marked" if args.mark else ""
    print(f"{len(report.ids):,} tokens{marked}; effective lengths as shares of that:")
    print(report.table())
    print(f"Wrote {', '.join(files)} to {args.out}.")
