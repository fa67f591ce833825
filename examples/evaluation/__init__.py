"""
Compares small models of all architectures of subquad: run `python -m examples.evaluation --help` in the repository
root.
"""

import sys
from pathlib import Path


# The other examples are scripts that import each other by name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TASKS = {
    "mqar": "multi-query associative recall, by width and length",
    "needle": "a passkey or a number in a text many times as long as in training, by depth and length",
    "trials": "the needle with other recipes of the training: what was tried",
    "ablations": "every model with and without its paper's main idea",
    "positions": "loss by position in ABC tunes, and in one text of many tunes",
    "pairs": "loss by position where pairs repeat: are tokens beyond attention used?",
    "tracking": "products in groups (parity, S3, A5), in rows longer than in training",
    "encoders": "Avey-B beside BERT and ModernBERT: masked tokens, labels of tokens, retrieval",
    "speed": "speed and memory of reading and of writing, by length",
}
