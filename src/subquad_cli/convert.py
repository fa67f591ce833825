"""`subquad convert`"""

import sys
from argparse import ArgumentParser, Namespace

from subquad.hub.foreign_files import naming
from subquad.quantization.methods import METHODS

from .arguments import DTYPES, positive_int, size
from .common import find_directory, naming_options, signals_raise


SUMMARY = "make a model directory from a checkpoint"
DESCRIPTION = """\
Convert a checkpoint to a directory that `from_pretrained` loads, or to the files of another program.

SOURCE is either
  - the .pth file of a trainer (RWKV-5.2, RWKV-6.0, RWKV-7, 7a and 7b, EmbeddingRWKV, Avey, Avey-B, Raven, Gecko,
    VisualRWKV-5.0, -6.0 and -7.00); if a VisualRWKV has two files, NAME_rwkv.pth and NAME_visual.pth, give one; or
  - a Hub model of type rwkv5, rwkv6, rwkv7, avey, avey-b, raven or gecko: its directory, or the model.safetensors or
    pytorch_model.bin in it, with the configuration and the tokenizer in the same directory; a Finch or a Goose in the
    format of flash-linear-attention, and a Goose of rwkv7-hf or rwkv-rs, too; or
  - an .st file of web-rwkv and Ai00 (RWKV-5.2, RWKV-6.0, RWKV-7); or
  - a .gguf file of llama.cpp (RWKV-6.0, RWKV-7), whose quantised weights become float32; or
  - with --base, an adapter, which is merged: the .pth file of RWKV-PEFT (LoRA, PiSSA, Bone, DiSHA) or a directory of
    PEFT (LoRA, MiSS); or
  - with --base, a reranker of EmbeddingRWKV, which becomes one model with its embedding model.

SOURCE is recognised by the names and shapes of its tensors. No code in SOURCE is ever run. DEST appears only
when it is complete. docs/how-to/formats.md has a table of all formats.

examples:
  subquad convert RWKV-x060-World-1B6-v2.1-20240328-ctx4096.pth ./finch-1b6
  subquad convert model.pth ./small --head-size-divisor 1 --tokenizer none
  subquad convert ./finch-1b6 ./finch-1b6-int8 --quantize int8
  subquad convert ./v5-Eagle-7B-HF ./eagle-7b --dtype bfloat16 --max-shard-size 2GB
  subquad convert visual.pth ./visual-3b --vision-tower ./clip-vit-large-patch14-336
  subquad convert adapter.pth ./tuned --base ./goose-0.4b --lora-alpha 32
  subquad convert rwkv0b1-reranker.pth ./reranker-0.1b --base rwkv0b1-emb-curriculum.pth
  subquad convert ./finch-1b6 finch-1b6.pth --to pth
  subquad convert ./finch-1b6 finch-1b6-q8.gguf --to gguf --gguf-type Q8_0
"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", help="checkpoint file, model directory or the name of an embedded model")
    add("dest", metavar="DEST", help="directory to make, which must be empty if it exists; or file to make, see --to")
    add(
        "--to",
        choices=("directory", "fla", "hub", "pth", "st", "gguf"),
        default="directory",
        help="what to write: a directory of this package (the default), of flash-linear-attention or as the RWKV "
        "organisation publishes them (hub), or a file of RWKV's trainers (pth), of web-rwkv and Ai00 (st, in float16) "
        "or of llama.cpp (gguf)",
    )
    add(
        "--gguf-type",
        metavar="TYPE",
        help="type of the weights of linear layers in a GGUF file: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0 "
        "(default: the dtype of SOURCE)",
    )
    add(
        "--config",
        metavar="FILE",
        help="config.json to use instead of the Hub model's, or with a .pth file; the tensors give the sizes",
    )
    add(
        "--tokenizer",
        default="auto",
        metavar="CHOICE",
        help="auto, rwkv-world, bytes, none, or a directory to copy from (default: auto, which copies the tokenizer "
        "of a Hub model and otherwise chooses by model type and vocabulary size)",
    )
    add("--dtype", choices=("keep", *DTYPES), default="keep", help="dtype of all tensors (default: keep)")
    add(
        "--quantize",
        choices=tuple(METHODS),
        help="round the weights of linear layers and embeddings to 8 bits, or of linear layers to 4, for "
        "inference on a CPU; the other tensors are float32, unless --dtype is given",
    )
    add(
        "--merge-tables",
        action="store_true",
        help="for RWKV-7a and 7b: merge the tables for inference, so that a lookup takes the place of a product; they "
        "cannot be split again",
    )
    add(
        "--head-size-divisor",
        type=positive_int,
        metavar="N",
        help="for Eagle and Finch: the group norm's epsilon is 1e-5 N², which is not stored in tensors (default: the "
        "configuration's, or 8)",
    )
    add(
        "--vision-tower",
        metavar="PATH",
        help="for VisualRWKV, if SOURCE does not contain the vision tower: directory of the CLIP model that it was "
        "trained with",
    )
    add(
        "--grid-size",
        type=int,
        metavar="N",
        help="for VisualRWKV: average the patches of an image to N x N; 0 keeps the class token only, -1 keeps all "
        "patches; not stored in tensors (default: the configuration's, or -1)",
    )
    add(
        "--base",
        metavar="PATH",
        help="if SOURCE is an adapter: its base model, in any format that SOURCE may have; if it is a reranker: the "
        "embedding model that it was trained with",
    )
    add(
        "--lora-alpha",
        type=float,
        metavar="N",
        help="if SOURCE is a LoRA of RWKV-PEFT: its alpha in training, which is not stored in the file",
    )
    add(
        "--pissa-init",
        metavar="FILE",
        help="if SOURCE is a PiSSA adapter of RWKV-PEFT: the init_pissa.pth that training wrote at its start",
    )
    add(
        "--max-shard-size",
        type=size,
        metavar="SIZE",
        help="maximum size of a weight file, such as 500MB or 5GB (default: 5GB)",
    )


def run(args: Namespace) -> None:
    from subquad.hub.info import format_bytes
    from subquad.models import REGISTRY
    from subquad_conversion import convert

    names = (
        "to",
        "gguf_type",
        "dtype",
        "quantize",
        "tokenizer",
        "max_shard_size",
        "head_size_divisor",
        "vision_tower",
        "grid_size",
        "merge_tables",
        "base",
        "lora_alpha",
        "pissa_init",
    )
    # Other names in the messages are fields of a configuration.
    given = [name for name in names if getattr(args, name) is not None or name == "base"]
    with signals_raise(), naming_options(*given), naming(args.source):
        report = convert(
            find_directory(args.source),
            args.dest,
            to=args.to,
            gguf_type=args.gguf_type,
            config=args.config,
            tokenizer=args.tokenizer,
            dtype=args.dtype,
            quantize=args.quantize,
            merge_tables=args.merge_tables,
            head_size_divisor=args.head_size_divisor,
            vision_tower=args.vision_tower,
            grid_size=args.grid_size,
            base=args.base,
            lora_alpha=args.lora_alpha,
            pissa_init=args.pissa_init,
            max_shard_size=args.max_shard_size,
            progress=sys.stderr.isatty(),
        )
    config = report.config.get_text_config()
    sizes = [f"{config.num_hidden_layers} layers of {config.hidden_size}"]
    sizes += REGISTRY[report.config.model_type].describe(report.config)
    print(f"Recognised {report.recognised.title}: {', '.join(sizes)}, vocabulary {config.vocab_size:,}.")
    written = f"{report.parameters:,} parameters, {format_bytes(report.bytes)} in {report.dtype}"
    print(f"Wrote {written}, to {report.directory}:")
    print(*(f"  {file}" for file in report.files), sep="\n")
    print(f"Tokenizer: {report.tokenizer or 'none'}.")
    for note in report.notes:
        print(f"Note: {note}.")
