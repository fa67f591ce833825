"""How the examples' `--help` looks."""

import argparse


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it is written, and the defaults."""
