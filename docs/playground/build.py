"""
Builds the playground: finch-abc as an ONNX program, and the packages from npm that run it and draw the score.

    python docs/playground/build.py build/docs/playground
    python -m http.server --directory build/docs        # then open http://localhost:8000/playground/
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from subquad import embedded_model
from subquad.tools.torch_export import export_program, inline_operators, save_onnx


SOURCE = Path(__file__).parent
PAGE = ("index.html", "playground.css", "playground.js")
# Of onnxruntime-web (MIT) and abcjs (MIT).
VENDOR = (
    "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
    "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
    "abcjs/dist/abcjs-basic-min.js",
    "abcjs/LICENSE.md",
)


def build(out: Path) -> None:
    """Writes the page, its program and its packages into a directory."""
    out.mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        shutil.copy(SOURCE / name, out / name)
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SOURCE / name, temporary)
        subprocess.run(["npm", "ci", "--silent", "--ignore-scripts"], cwd=temporary, check=True)
        for name in VENDOR:
            target = out / "vendor" / Path(name).name
            target.parent.mkdir(exist_ok=True)
            shutil.copy(Path(temporary, "node_modules", name), target)
    if not (out / "decode.onnx").exists():
        model = AutoModelForCausalLM.from_pretrained(embedded_model("finch-abc"), dtype=torch.float32).eval()
        save_onnx(inline_operators(export_program(model, length=1)), out / "decode.onnx")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the page")
    out = parser.parse_args().out
    if shutil.which("npm") is None:
        reason = "The playground was not built, because there is no npm."
        print(reason, file=sys.stderr)
        out.mkdir(parents=True, exist_ok=True)
        (out / "index.html").write_text(
            f"<!doctype html>\n<title>Playground</title>\n<p>{reason}</p>\n", encoding="utf-8"
        )
    else:
        build(out)
