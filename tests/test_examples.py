"""The examples: the corpus of tunes, its checker, and runs of a few steps."""

import ast
import importlib
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from abc_check import AbcError, find_fault, is_valid_tune
from abc_corpus import Corpus, load_corpus, normalise, passages, transpose
from packaging.requirements import Requirement


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

HEADER = "X:1\nT:The Test\nM:6/8\nL:1/8\nK:G\n"
BODY = "D|GAG GAB|ded dBG|BAB AFD|EFE E2D|\nGAG GAB|ded dBG|BAB AFD|E3 G2:|\n"


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(("airdsAirs", "miscFolk"))


def test_examples_name_the_extras_that_have_their_packages():
    tomllib = pytest.importorskip("tomllib")  # not in Python 3.10
    extras = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    calls = 0
    for path in EXAMPLES.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "require"):
                continue
            named = call.keywords[0].value.value.split(",")
            installed = {Requirement(line).name.replace("-", "_") for extra in named for line in extras[extra]}
            wanted = {
                node.value for each in call.args for node in ast.walk(each) if isinstance(node, ast.Constant)
            } - {None}
            assert wanted <= installed, (path, wanted - installed)
            calls += 1
    assert calls > 10


def test_corpus_is_written_one_way(corpus):
    tunes = corpus.train + corpus.validation
    assert len(tunes) > 1200 and len(set(tunes)) == len(tunes)
    for tune in tunes:
        assert tune.isascii() and "\0" not in tune and "\r" not in tune and "\\" not in tune
        assert [line[:2] for line in tune.split("\n")[:5]] == ["X:", "T:", "M:", "L:", "K:"]
        assert tune.endswith(("|]\n", ":|\n")) and "\n\n" not in tune
        assert find_fault(tune, music21=False) is None, tune


def test_held_out_tunes_are_no_variants(corpus):
    known = set().union(*map(passages, corpus.train))
    assert all(len(passages(tune) & known) <= len(passages(tune)) / 2 for tune in corpus.validation)
    tune = corpus.train[0]
    assert passages(transpose(tune, random.Random(1))) == passages(tune)


@pytest.mark.fast
def test_normalise():
    raw = (
        "X: 12\nT: Caf\\'e \\\"Uber, The % really\nT:Second\nR:jig\nM: 6/8\nL:1/16\nN:a note\nK: E Minor\n"
        '|:"Em"{f}(E2>F2)~G2 .B2u=c2d2|vE6 HG6|\\\nE12|z12|[E2G2]x4 (3G2A2B2 z2|\nw:la la\n'
        "G6-G6|E12::B12|^F12|E12|E12"
    )
    assert normalise(raw) == (
        "X:1\nT:The Cafe Uber\nM:6/8\nL:1/8\nK:Em\n"
        "|:E>FG B=cd|E3 G3|E6|z6|\n[EG]z2 (3GABz|G3- G3|E6:|\n|:B6|^F6|E6|E6|]\n"
    )
    with pytest.raises(AbcError, match="unknown token 'w2"):
        normalise(raw.replace("z12", "w2"))


@pytest.mark.fast
def test_checker_accepts():
    assert is_valid_tune(HEADER + BODY)
    assert is_valid_tune(HEADER + "|:GAG GAB|ded dBG|BAB AFD|1 EFE E2D:|2 EFE E3|]")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no X field"),
        ("Once upon a time\n", "no header"),
        (HEADER, "no music"),
        (HEADER.replace("M:6/8\n", "") + BODY, "no M field"),
        (HEADER.replace("6/8", "six") + BODY, "not a metre"),
        (HEADER + "GAG GAB|ded dBG|\n", "notes, fewer"),
        (HEADER + "GAG GAB|ded dBG|ABcd|efga|abcd|\n", "full bars, fewer"),
        (HEADER + BODY.replace("|BAB AFD|", "|BAB AF|"), "inner bars"),
        (HEADER.replace("6/8", "4/4") + BODY, "full bars, fewer"),
        (HEADER + BODY.replace("G2:|", "G2GAB:|"), "longer than the metre"),
        (HEADER + BODY.replace("GAG", "G?G"), "unknown token '?G"),
        (HEADER + BODY.replace("GAG", "G>|AG"), "broken rhythm"),
        (HEADER + BODY + "M:4/4\n" + BODY, "changes M"),
        (HEADER + BODY.replace("GAG", "G/0AG"), "impossible length"),
    ],
)
def test_checker_refuses(text, fault):
    assert fault in (find_fault(text) or "")


@pytest.mark.thorough
def test_three_steps_give_a_directory_that_loads(tmp_path, capsys, monkeypatch):
    import torch

    output = tmp_path / "finch-abc"
    arguments = (
        f"finch --output {output} --folders miscFolk --seeds 2 --threads 1 --width 32 --layers 2 --batch-size 2"
    )
    arguments = f"{arguments} --validate-every 2 --checkpoint-every 2 --max-new-tokens 40".split()
    command = [sys.executable, str(EXAMPLES / "train_abc.py"), *arguments, "--steps", "2"]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    # In this process, which has imported torch. A run that is over is measured once more.
    second, third = (
        run_example("train_abc", capsys, monkeypatch, *arguments, "--steps", 3, "--resume") for _ in range(2)
    )
    assert "of 2 headers became valid tunes" in second
    # DeepSpeed, if it is installed, prints a dated line when it is imported.
    assert re.sub(r"^\[20.*\n", "", second, flags=re.MULTILINE) == re.sub(r"^\[20.*\n", "", third, flags=re.MULTILINE)

    from train_abc import bits_per_byte
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import subquad  # noqa: F401 (registers the architectures)

    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert model.dtype == torch.float32
    # The loss is measured between two steps, and before samples that dropout or a router's noise would spoil.
    for training in (True, False):
        bits_per_byte(model.train(training), [HEADER + BODY])
        assert model.training is training
    assert model.generation_config.do_sample and model.generation_config.eos_token_id == 0
    inputs = tokenizer(HEADER, return_tensors="pt")
    torch.manual_seed(0)
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=5)[0], skip_special_tokens=True)
    assert text.startswith(HEADER)
    assert json.loads((output / "config.json").read_text())["model_type"] == "rwkv6"
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "$" not in card and "of 2 |" in card
    # Safetensors alone, and nothing half written.
    assert {path.suffix for path in output.iterdir()} <= {".json", ".safetensors", ".md"}
    assert sorted(path.name for path in tmp_path.glob("finch-abc-*")) == [
        "finch-abc-checkpoint.pt",
        "finch-abc-samples.abc",
    ]


def test_an_example_says_in_one_line_what_it_lacks():
    code = """
import runpy, sys
from pathlib import Path
for package in ("accelerate", "datasets", "music21", "openai", "peft", "sentence_transformers", "torchao", "trl"):
    sys.modules[package] = None
for name in sys.argv[2:]:
    sys.argv = [name, "--output", "nothing"]
    sys.path.insert(0, str(Path(name).parent))
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as ending:
        print(ending.code)
"""
    names = (
        "finetune_sft",
        "finetune_grpo",
        "quantize",
        "retrieve",
        "serve_client",
        "state_tuning",
        "finetune_classifier",
        "train_long",
    )
    scripts = [str(EXAMPLES / f"{name}.py") for name in (*names, "distributed/train")]
    run = subprocess.run([sys.executable, "-c", code, "", *scripts], capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert [line.split(" needs ")[0] for line in lines] == scripts
    assert all(' pip install "subquad[' in line for line in lines)


TINY = ["--d-embed=32", "--n-layers=2", "--chunk-size=16", "--k=2", "--length=128", "--lr=1e-2", "--threads=1"]


def run_example(name, capsys, monkeypatch, *arguments):
    """Runs an example in this process, where torch has been imported; returns what it prints."""
    import torch

    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    capsys.readouterr()
    importlib.import_module(name).main()
    torch.set_num_threads(threads)
    return capsys.readouterr().out


@pytest.fixture
def encoder(tmp_path):
    """A directory of the kind that examples/train_avey_b_mlm.py leaves, without any training."""
    import torch

    from subquad import AveyBConfig, AveyBForMaskedLM

    torch.manual_seed(0)
    tokenizer = importlib.import_module("train_avey_b_mlm").train_tokenizer([HEADER + BODY], 300)
    config = AveyBConfig(vocab_size=len(tokenizer), d_embed=32, n_layers=2, chunk_size=16, k=2)
    AveyBForMaskedLM(config).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    return tmp_path / "encoder"


def test_masked_language_model(tmp_path, capsys, monkeypatch):
    from transformers import Trainer, pipeline

    def train(output, *arguments):
        arguments = ["--output", output, *TINY, "--folders", "miscFolk", *arguments]
        out = run_example("train_avey_b_mlm", capsys, monkeypatch, *arguments)
        numbers = re.findall(
            r"held out, (?:before|after) training: loss ([\d.]+) .*, ([\d.]+)% predicted correctly", out
        )
        return [tuple(map(float, pair)) for pair in numbers], out

    output = tmp_path / "avey-b-abc"
    first, _ = train(output, "--steps", 6, "--checkpoint-every", 4)
    assert train(tmp_path / "again", "--steps", 6)[0] == first  # the seed decides weights, order and masks
    assert train(tmp_path / "other", "--steps", 6, "--seed", 1)[0] != first
    steps, step = [], Trainer.training_step
    monkeypatch.setattr(Trainer, "training_step", lambda *args, **kwargs: steps.append(1) or step(*args, **kwargs))
    shutil.rmtree(tmp_path / "avey-b-abc-checkpoints" / "checkpoint-6")
    resumed, out = train(output, "--steps", 6, "--checkpoint-every", 4, "--resume")
    assert len(steps) == 2 and resumed[1][0] == pytest.approx(first[1][0], abs=0.05)  # some masks are others
    (before, _), (after, _) = first
    assert after < before - 0.1

    assert {path.name for path in output.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    text, hidden = re.search(r"\n\n(X:1\n.*)\n\[MASK\] was '(.*?)'; ", out, re.DOTALL).groups()
    assert hidden and "[MASK]" in text
    best = pipeline("fill-mask", model=str(output), device="cpu")(text)[0]
    score = re.search(rf"^ +([\d.]+)%  {re.escape(repr(best['token_str']))}$", out, re.MULTILINE)[1]
    assert float(score) == pytest.approx(100 * best["score"], abs=0.2)
    config = json.loads((output / "config.json").read_text())
    assert config["model_type"] == "avey-b" and config["d_embed"] == 32 and config["mask_token_id"] == 4


def test_masked_language_model_of_any_text(encoder, tmp_path, capsys, monkeypatch):
    path = tmp_path / "text.txt"
    documents = [f"Document {i} is about number {i}…\nand its line." for i in range(30)]
    path.write_text("\n\n \n".join(documents) + "\n\n", encoding="utf-8")
    module = importlib.import_module("train_avey_b_mlm")
    train, held_out = module.load_documents(path, [])
    assert sorted(train + held_out) == sorted(documents) and len(held_out) == 2
    tokenizer = module.train_tokenizer(documents, 300)
    rows = module.pack(tokenizer, documents, 64)
    ids = [token for row in rows for token in row["input_ids"]]
    assert {len(row["input_ids"]) for row in rows[:-1]} == {64} and 0 < len(rows[-1]["input_ids"]) <= 64
    assert tokenizer.decode(ids) == "".join(f"[CLS]{document}[SEP]" for document in documents)
    hidden, word = module.hide_a_token(tokenizer, documents[0])
    assert hidden.replace("[MASK]", word) == documents[0] and hidden.count("[MASK]") == 1

    out = run_example(
        *("train_avey_b_mlm", capsys, monkeypatch, "--output", tmp_path / "out", "--text", path, "--steps", 1),
        *(*TINY, "--tokenizer", encoder),
    )
    assert "28 documents in" in out and "2 in 1 held out" in out
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (encoder / "tokenizer.json").read_text()
    path.write_text("alone", encoding="utf-8")
    with pytest.raises(SystemExit, match="two documents"):
        module.load_documents(path, [])
    with pytest.raises(SystemExit, match="--vocabulary must be at least 261"):
        module.train_tokenizer(documents, 260)


@pytest.mark.thorough
def test_retrieval(corpus, encoder, tmp_path, capsys, monkeypatch):
    from sentence_transformers import SentenceTransformer

    importlib.import_module("retrieve")

    def metrics(out):
        numbers = re.findall(r"recall@1 ([\d.]+)%, recall@10 ([\d.]+)%, NDCG@10 ([\d.]+)", out)
        return [tuple(map(float, row)) for row in numbers]

    monkeypatch.setattr("retrieve.load_corpus", lambda folders: Corpus(corpus.train[:300], corpus.validation, {}))
    shared = ["--threads", 1]
    out = run_example(
        *("retrieve", capsys, monkeypatch, *shared, "--model", encoder, "--output", tmp_path / "tunes"),
        *("--steps", 30, "--lr", 1e-2),
    )
    assert f"{len(corpus.validation)} lines of held-out tunes" in out
    before, after = metrics(out)
    assert before[2] + 0.03 < after[2] and after[0] <= 100 * after[2] <= after[1]
    # What was saved is what was measured.
    query = "GAG GAB|ded dBG|BAB AFD|EFE E2D|"
    arguments = [*shared, "--model", tmp_path / "tunes", "--steps", 0, "--query", query, "--top-k", 3]
    out = run_example("retrieve", capsys, monkeypatch, *arguments)
    assert metrics(out) == [after]
    scores = [float(score) for score in re.findall(r"^  (-?[\d.]+)  ", out.split(query)[1], re.MULTILINE)]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    model = SentenceTransformer(str(tmp_path / "tunes"), device="cpu")
    assert model.encode([query]).shape == (1, 32)


@pytest.mark.thorough
def test_embeddings_and_reranker(corpus, tmp_path, capsys, monkeypatch):
    pytest.importorskip("rank_bm25")
    from subquad import StateIndex

    importlib.import_module("train_embedding_rwkv")
    few = Corpus(sorted(corpus.train, key=len)[:20], sorted(corpus.validation, key=len)[:4], {})
    monkeypatch.setattr("train_embedding_rwkv.load_corpus", lambda folders: few)
    sizes = ["--steps", 2, "--batch-size", 4, "--reranker-steps", 1, "--lines", 2, "--threads", 1]
    out = run_example("train_embedding_rwkv", capsys, monkeypatch, "--output", tmp_path / "tunes", *sizes)
    assert len(re.findall(r"recall@1 [\d.]+%, recall@10 [\d.]+%, MRR@10 [\d.]+", out)) == 10
    assert sorted(path.name for path in (tmp_path / "tunes").iterdir()) == ["embedding", "index", "reranker"]
    index = StateIndex.load(tmp_path / "tunes/index", tmp_path / "tunes/reranker")
    assert len(index) == 24 and len(index.rank("GAG GAB|ded dBG|", 3)) == 3


def test_rewards(tmp_path, capsys, monkeypatch):
    arguments = ["--output", tmp_path, "--steps", 1, "--prompts", 2, "--tunes", 2, "--max-new-tokens", 8]
    arguments += ["--threads", 1]
    out = run_example("finetune_grpo", capsys, monkeypatch, *arguments)
    assert re.findall(r"(before|after) training, the mean reward is \d\.\d\d", out) == ["before", "after"]
    module = importlib.import_module("finetune_grpo")
    assert module.share_of_full_bars(HEADER + "ABc def|" * 5) == 1.0
    assert module.share_of_full_bars(HEADER + "ABc def|ABc|ABc def|d2|ABc") == 0.25
    assert module.share_of_full_bars("no tune") == 0.0
