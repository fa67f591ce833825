"""Uploads to a Hub on this machine, and what is downloaded from there."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import peft  # before the server starts: bitsandbytes, which it imports, looks for kernels on the Hub on some CPUs
import pytest
import torch
import transformers
from cases import random_ids, small_world, tiny_model
from hub_server import HubServer
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor
from visual_cases import save_visual

import subquad_cli as cli
from subquad import embedded_model
from subquad.hub import export as hub
from subquad.hub.push import PushError, push, push_model
from subquad.modeling.versions import minor_version
from subquad_tokenizers import ByteTokenizer, RwkvWorldTokenizerFast


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub, the client's one endpoint, and a user logged in there. Nothing else can be reached."""
    from huggingface_hub import constants

    with HubServer() as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)  # made for the endpoint of its first call
        monkeypatch.setenv("HF_TOKEN", "hf_user")
        elsewhere, resolve = [], socket.getaddrinfo

        def resolve_here(host, port, *args, **kwargs):
            if host not in ("127.0.0.1", "localhost") or port != server.server_port:
                elsewhere.append((host, port))
                raise OSError(f"{host} is not the test's server")
            return resolve(host, port, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
        yield server
    huggingface_hub.close_session()
    assert not elsewhere
    assert not server.problems


@pytest.fixture
def directory(tmp_path):
    return saved(tiny_model("rwkv6"), tmp_path / "finch")


def run(capsys, *arguments, code=0):
    """Runs `subquad push`, and returns what it prints, of one that fails its one line of error."""
    capsys.readouterr()
    try:
        assert cli.main(["push", *map(str, arguments)]) == code
    except SystemExit as stop:
        assert stop.code == code
    out, err = capsys.readouterr()
    if code:
        assert not out
        return err.splitlines()[-1].removeprefix("subquad push: error: ")
    return out


def saved(model, path, tokenizer=None):
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def test_a_push_is_one_commit_of_what_export_writes(server, directory, tmp_path, capsys):
    ByteTokenizer().save_pretrained(directory)
    out = run(capsys, directory, "user/finch", "--message", "First")
    repository = server.repositories["user/finch"]
    hub.export(directory, tmp_path / "exported")
    exported = {path.name: path.read_bytes() for path in (tmp_path / "exported").iterdir()}
    assert repository.files.keys() - {".gitattributes"} == exported.keys()
    assert {name for name in exported if repository.files[name] != exported[name]} == {"README.md"}
    assert b'path = "user/finch"' in repository.files["README.md"]
    assert [commit.title for commit in repository.commits] == ["initial commit", "First"]
    assert repository.commits[-1].lfs == {"model.safetensors"}
    assert not repository.private
    assert f"{server.url}/user/finch/commit/{repository.commits[-1].oid}" in out
    run(capsys, directory, "finch")  # of the user whose token it is; nothing has changed
    assert len(repository.commits) == 2


def test_what_does_not_load_is_not_pushed(server, directory, capsys):
    states = load_file(directory / "model.safetensors")
    states["head.weight"][3] = float("nan")
    save_file(states, directory / "model.safetensors", {"format": "pt"})
    assert "head.weight holds NaN" in run(capsys, directory, "user/finch", code=1)
    with pytest.raises(ValueError, match="holds NaN"):
        push_model(tiny_model("rwkv6"), "user/finch", source=directory)
    assert "user/finch" not in server.repositories


def test_the_page_about_sharing_runs_as_printed(server, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parent.parent / "docs/how-to/share.md").read_text(encoding="utf-8")
    command = shlex.split(next(line for line in page.splitlines() if line.startswith("subquad push")))
    server.tokens["hf_user"] = (command[3].partition("/")[0], True)
    (tmp_path / "finch-1b6").symlink_to(embedded_model("finch-abc"))  # which is there, and a Finch
    monkeypatch.chdir(tmp_path)
    run(capsys, *command[2:])
    repository = server.repositories[command[3]]
    assert repository.private
    assert {"modeling_rwkv6.py", "model.safetensors", "tokenizer.json", "LICENSE", "NOTICE"} < repository.files.keys()


# Runs without our packages, and with the test's server as the only reachable host.
ELSEWHERE = """
import os, sys, urllib.parse

offline = "HF_HUB_OFFLINE" in os.environ
port = urllib.parse.urlsplit(os.environ["HF_ENDPOINT"]).port
here = [] if offline else [("127.0.0.1", port), ("localhost", port)]

def watch(event, arguments):
    if event == "socket.getaddrinfo" and arguments[:2] not in here:
        print(f"{arguments[:2]} was asked for", file=sys.stderr, flush=True)
        os._exit(70)  # an exception might be caught

sys.addaudithook(watch)
for name in ("subquad", "subquad_kernels", "subquad_tokenizers"):
    sys.modules[name] = None

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

ids, results = load_file("ids.safetensors")["ids"], {}
for repo_id in sys.argv[1:]:
    auto_class = AutoModelForMaskedLM if "avey-b" in repo_id else AutoModelForCausalLM
    model = auto_class.from_pretrained(repo_id, trust_remote_code=True).eval()
    with torch.no_grad():
        results[f"{repo_id} logits"] = model(ids).logits
    tokenizer = AutoTokenizer.from_pretrained(repo_id, trust_remote_code=True)
    results[f"{repo_id} ids"] = torch.tensor(tokenizer("Hello 12").input_ids)
if not offline:  # what was loaded so takes its code along
    model.push_to_hub("user/again")
    tokenizer.push_to_hub("user/again")
    again = auto_class.from_pretrained("user/again", trust_remote_code=True).eval()
    assert torch.equal(again(ids).logits, results[f"{repo_id} logits"])
    assert AutoTokenizer.from_pretrained("user/again", trust_remote_code=True)("Hello 12").input_ids
save_file(results, "results.safetensors")
"""


def elsewhere(path, *repo_ids, **environment):
    environment |= {"HF_HOME": str(path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", ELSEWHERE, *repo_ids]
    done = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return load_file(path / "results.safetensors")


@pytest.mark.thorough
def test_what_was_pushed_loads_without_this_package(server, tmp_path, capsys):
    """By the command and by `push_to_hub`, to public and private repositories, in one file of weights and several."""
    ids, expected = random_ids(2, 20), {}
    pushed = {
        "user/finch": (tiny_model("rwkv6"), RwkvWorldTokenizerFast()),
        "user/raven": (tiny_model("raven"), ByteTokenizer()),
        "user/avey-b": (tiny_model("avey-b"), ByteTokenizer()),
    }
    for repo_id, (model, tokenizer) in pushed.items():
        expected[f"{repo_id} logits"] = model(ids).logits.detach()
        expected[f"{repo_id} ids"] = torch.tensor(tokenizer("Hello 12").input_ids)
        if repo_id == "user/finch":
            run(capsys, saved(model, tmp_path / "finch", tokenizer), repo_id)
        else:
            assert model.push_to_hub(repo_id, private=True, max_shard_size="50KB").startswith(server.url)
            tokenizer.push_to_hub(repo_id)
    assert sum(name.endswith(".safetensors") for name in server.repositories["user/raven"].files) > 1
    assert server.repositories["user/raven"].private

    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    server.break_downloads = int(minor_version(huggingface_hub.__version__) > (1, 5))  # which gives up
    online = elsewhere(tmp_path, *pushed, HF_ENDPOINT=server.url, HF_TOKEN="hf_user")
    assert not server.break_downloads
    torch.testing.assert_close(online, expected, atol=1e-5, rtol=1e-5)
    requests = len(server.requests)
    offline = elsewhere(tmp_path, *pushed, HF_ENDPOINT=server.url, HF_HUB_OFFLINE="1")
    assert len(server.requests) == requests
    torch.testing.assert_close(offline, online, atol=0, rtol=0)

    # With this package, its own classes load it, and none of that code.
    model = transformers.AutoModelForCausalLM.from_pretrained("user/raven")
    assert type(model) is type(pushed["user/raven"][0])
    torch.testing.assert_close(model(ids).logits, expected["user/raven logits"])
    assert type(transformers.AutoTokenizer.from_pretrained("user/raven")) is ByteTokenizer


@pytest.mark.fast
def test_to_a_branch(server, directory, capsys):
    out = run(capsys, directory, "user/finch", "--revision", "step/4000", "--private")
    repository = server.repositories["user/finch"]
    assert "revision='step/4000'" in out
    assert repository.private
    assert repository.files.keys() == {".gitattributes"}
    assert "model.safetensors" in repository.resolve("step/4000").files
    tiny_model("rwkv6", seed=1).save_pretrained(directory)
    run(capsys, directory, "user/finch", "--revision", "step/4000")
    assert len(repository.refs["refs/heads/step/4000"]) == 3


def test_as_a_pull_request(server, directory, capsys):
    repository = server.repository("other/finch")
    assert "may not write to other/finch" in run(capsys, directory, "other/finch", code=1)
    out = run(capsys, directory, "other/finch", "--create-pr")
    assert out == f"Opened the pull request {server.url}/other/finch/discussions/1.\n"
    assert len(repository.commits) == 1
    assert "model.safetensors" in repository.resolve("refs/pr/1").files


def test_a_card_that_somebody_wrote_is_kept(server, directory, capsys):
    def card():
        return server.repositories["user/finch"].files["README.md"].decode()

    ByteTokenizer().push_to_hub("user/finch")
    assert "# Model Card for Model ID" in card()  # of transformers, which nobody wrote
    run(capsys, directory, "user/finch")
    assert card().count("# finch\n") == 1
    written = "---\nlicense: mit\n---\n\n# The finch of a user\n"
    server.repositories["user/finch"].files["README.md"] = written.encode()
    run(capsys, directory, "user/finch", "--message", "Again")
    assert card() == written
    tiny_model("rwkv6").push_to_hub("user/finch", tags=["birds"])
    assert ModelCard(card()).text == ModelCard(written).text
    assert ModelCard(card()).data.to_dict() == {"license": "mit", "tags": ["birds"]}
    (directory / "README.md").write_text("Mine.\n", encoding="utf-8")
    run(capsys, directory, "user/finch")
    assert card() == "Mine.\n"


@pytest.mark.parametrize("tokenizer_first", [True, False])
def test_a_tokenizer_may_be_pushed_by_itself(server, tokenizer_first):
    parts = [ByteTokenizer(), tiny_model("rwkv6")]
    for part in parts if tokenizer_first else parts[::-1]:
        part.push_to_hub("user/finch")
    card = server.repositories["user/finch"].files["README.md"].decode()
    assert ("AutoTokenizer.from_pretrained(path, trust_remote_code=True)" in card) == tokenizer_first
    assert "AutoModelForCausalLM.from_pretrained(" in card
    assert "No tokenizer" not in card


def test_a_model_that_is_saved_is_pushed_as_it_was_saved(server, tmp_path):
    model, directory = tiny_model("rwkv6"), tmp_path / "model"
    model.save_pretrained(directory, max_shard_size="50KB")
    push_model(model, "finch", source=str(directory), tags=["birds"])
    files = server.repositories["user/finch"].files
    saved = {path.name: path.read_bytes() for path in directory.glob("*.safetensors*")}
    assert len(saved) > 2
    assert {name: data for name, data in files.items() if ".safetensors" in name} == saved
    (directory / "README.md").write_text("Mine.\n", encoding="utf-8")
    push_model(model, "finch", source=directory)
    assert files.keys() == server.repositories["user/finch"].files.keys()
    assert server.repositories["user/finch"].files["README.md"] == b"Mine.\n"


def test_old_weights_do_not_stay(server):
    model, repository = tiny_model("rwkv6"), server.repository("user/finch")
    for name in ("model-of-ours.safetensors", "subquad_cache.py", "my_subquad.py"):
        repository.files[name] = b""
    for size, sharded in (("50KB", True), ("1GB", False), ("50KB", True)):
        model.push_to_hub("user/finch", max_shard_size=size)
        assert ("model.safetensors" in repository.files) != sharded
        assert ("model.safetensors.index.json" in repository.files) == sharded
        assert any(name.startswith("model-00001-of-") for name in repository.files) == sharded
        assert {"model-of-ours.safetensors", "my_subquad.py"} < repository.files.keys()
        assert "subquad_cache.py" not in repository.files


def test_push_to_hub_of_a_model_is_that_of_transformers(server, monkeypatch):
    model = tiny_model("rwkv5")
    model.add_model_tags("eagle-tag")
    commit = model.push_to_hub(
        "eagle", commit_message="Message", commit_description="Description", tags="birds", private=True
    )
    repository = server.repositories["user/eagle"]
    last = repository.commits[-1]
    assert commit == f"{server.url}/user/eagle/commit/{last.oid}"
    assert (last.title, last.description, repository.private) == ("Message", "Description", True)
    assert {"eagle-tag", "birds"} < set(ModelCard(last.files["README.md"].decode()).data.tags)
    opened = model.push_to_hub("user/eagle", create_pr=True, commit_message="Asks", max_shard_size="50KB")
    assert opened.pr_url == f"{server.url}/user/eagle/discussions/1"
    model.push_to_hub("user/eagle", revision="dev", token="hf_user", max_shard_size="60KB")
    assert repository.refs.keys() == {"refs/heads/main", "refs/pr/1", "refs/heads/dev"}
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        model.push_to_hub("user/eagle", token="hf_wrong")
    assert len(repository.commits) == 2


def test_of_adapters_no_model_is_pushed(server, any_peft):
    model = tiny_model("rwkv6")
    model.add_adapter(peft.LoraConfig(target_modules=["key"]))
    model.push_to_hub("user/adapter")
    expected = {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert server.repositories["user/adapter"].files.keys() - {"generation_config.json"} == expected


@pytest.mark.parametrize("tokenizer_class", [ByteTokenizer, RwkvWorldTokenizerFast])
def test_the_code_of_a_tokenizer_is_pushed_and_otherwise_not_saved(server, tmp_path, tokenizer_class):
    tokenizer = small_world(tmp_path) if tokenizer_class is RwkvWorldTokenizerFast else tokenizer_class()
    with pytest.raises(HfHubHTTPError):
        tokenizer.push_to_hub("user/tokenizer", token="hf_wrong")
    tokenizer.push_to_hub("user/tokenizer", commit_message="Words")
    repository = server.repositories["user/tokenizer"]
    assert repository.commits[-1].title == "Words"
    tokenizer.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "contained", self_contained=True)
    tokenizer.save_pretrained(tmp_path / "pushed", push_to_hub=True, repo_id="user/saved")
    plain, contained, pushed = (set(os.listdir(tmp_path / name)) for name in ("plain", "contained", "pushed"))
    assert contained - plain == {f"{tokenizer_class.__module__.rpartition('.')[2]}.py"}
    assert {Path(name).suffix for name in contained - plain} == {".py"}
    assert contained == pushed
    for files in (repository.files, server.repositories["user/saved"].files):
        assert files.keys() - {".gitattributes", "README.md"} == contained
    assert "auto_map" in json.loads(repository.files["tokenizer_config.json"])
    assert "auto_map" not in json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())


def test_an_upload_that_breaks_off_changes_nothing(server, directory, capsys, monkeypatch):
    server.break_uploads = 1000
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of the client, before it tries again
    error = run(capsys, directory, "user/finch", code=1)
    assert error.startswith("the upload to user/finch was interrupted and nothing was committed: ")
    repository = server.repositories["user/finch"]
    assert repository.refs.keys() == {"refs/heads/main"}
    assert len(repository.commits) == 1
    assert not server.objects
    server.break_uploads = 0  # not every client tries again by itself
    run(capsys, directory, "user/finch")
    assert len(repository.commits) == 2


@pytest.mark.fast
def test_without_a_token_that_is_right(server, directory, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert run(capsys, directory, "user/finch", code=1).startswith("the Hub does not accept the token: log in")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert run(capsys, directory, "user/finch", code=1).startswith("the token is missing: log in")
    with pytest.raises(PushError, match="does not accept the token"):
        push(directory, "user/finch", token="hf_wrong")
    assert not server.repositories


def test_where_the_user_may_not_write(server, directory, capsys, monkeypatch):
    assert 'under the namespace "other"' in run(capsys, directory, "other/finch", code=1)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert "may not write to reader/finch" in run(capsys, directory, "finch", code=1)
    assert not server.repositories


def test_what_is_to_be_private_does_not_become_public(server, directory, capsys):
    repository = server.repository("user/finch")
    assert run(capsys, directory, "user/finch", "--private", code=1) == "user/finch exists already and is public."
    for repo_id in ("user/finch", "finch"):
        with pytest.raises(ValueError, match="user/finch exists already and is public"):
            tiny_model("rwkv6").push_to_hub(repo_id, private=True)
    assert len(repository.commits) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["{tmp}/none", "user/finch"], 2, "{tmp}/none is not a directory."),
        (["{tmp}", "user/finch"], 1, "{tmp} has no `config.json`"),
        (["{finch}", "a/b/c"], 2, "Repo id must be in the form"),
        (["{finch}", "user/finch", "--create-pr", "--revision", "dev"], 2, "--create-pr opens a pull request"),
        (["{finch}"], 2, "the following arguments are required: REPO_ID"),
    ],
)
def test_what_cannot_be_pushed(server, directory, tmp_path, capsys, arguments, code, error):
    places = {"tmp": tmp_path, "finch": directory}
    assert error.format(**places) in run(capsys, *(each.format(**places) for each in arguments), code=code)
    assert not server.repositories


def test_a_hub_that_cannot_be_reached(server, directory, capsys):
    server.shutdown()
    server.server_close()
    assert run(capsys, directory, "user/finch", code=1).startswith(f"the connection to {server.url} failed: ")


@pytest.mark.parametrize("processor_first", [True, False])
def test_a_model_and_its_processor(server, tmp_path, processor_first):
    """Pushed one after the other, they give the repository of `subquad push`, apart from the card."""
    model, processor = save_visual(tmp_path / "visual")
    for part in (processor, model) if processor_first else (model, processor):
        part.push_to_hub("user/visual")
    files = server.repositories["user/visual"].files
    assert cli.main(["push", str(tmp_path / "visual"), "user/whole"]) == 0
    whole = server.repositories["user/whole"].files
    assert files.keys() == whole.keys() and "processing_visual_rwkv.py" in files
    for name in ("config.json", "processor_config.json", "tokenizer_config.json"):
        assert json.loads(files[name])["auto_map"].items() >= json.loads(whole[name])["auto_map"].items()
    assert type(AutoProcessor.from_pretrained("user/visual")) is type(processor)
