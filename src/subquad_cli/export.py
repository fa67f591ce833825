"""`subquad export`"""

from argparse import ArgumentParser, Namespace

from .arguments import add_model_directory
from .common import find_directory, signals_raise


SUMMARY = "make a repository that loads without subquad"
DESCRIPTION = """\
Make a model repository that loads without subquad.

OUT gets the weights, the configuration, the tokenizer, a model card (the README.md of MODEL_DIR, if there is one),
the licence and the modeling code, all in one flat directory, as transformers expects. With only transformers and torch
installed, it loads with `from_pretrained(OUT, trust_remote_code=True)`; with subquad installed, it loads without
remote code. `subquad push` uploads the same files.

examples:
  subquad export ./my-finch ./my-finch-repository
  subquad convert RWKV-x060-World-1B6-v2.1.pth ./finch && subquad export ./finch ./finch-repository
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_model_directory(parser)
    parser.add_argument("out", metavar="OUT", help="directory to make; it must be empty if it exists")


def run(args: Namespace) -> None:
    from subquad.hub.export import export

    with signals_raise():
        files = export(find_directory(args.model_dir), args.out)
    print(f"Wrote {args.out}:")
    print(*(f"  {file}" for file in files), sep="\n")
    print(f"It loads with from_pretrained({args.out!r}, trust_remote_code=True).")
