import os
import sys
from pathlib import Path


# Tests never look for anything on a network.
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
