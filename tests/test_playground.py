"""The playground of the site in a browser: a tune appears as text and as a score, and can be played."""

import asyncio
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from tornado.websocket import websocket_connect
from transformers import AutoModelForCausalLM, AutoTokenizer

from subquad import embedded_model


SOURCE = Path(__file__).parent.parent / "docs/playground"
# Fills in the form, waits until the tune is written, and plays it.
WRITE = """
(async () => {
  const until = async (condition) => { while (!condition()) await new Promise((go) => setTimeout(go, 100)); };
  const element = (id) => document.getElementById(id);
  await until(() => !element("write").textContent.startsWith("Loading"));
  element("temperature").value = "0.1";
  element("write").click();
  await until(() => /Done|failed/.test(element("status").textContent));
  element("play").click();
  return {
    status: element("status").textContent,
    abc: element("abc").textContent,
    tokens: Number(element("tokens").textContent),
    speed: Number(element("speed").textContent),
    state: element("state").textContent,
    notes: document.querySelectorAll("#score .abcjs-note").length,
    width: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    hosts: [...new Set(performance.getEntriesByType("resource").map(({ name }) => new URL(name).host))],
  };
})()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for program in ("chromium", "npm"):
        if shutil.which(program) is None:
            message = f"needs {program}, on Debian the package of that name"
            pytest.skip(message)
    out = tmp_path_factory.mktemp("site") / "playground"
    spec = importlib.util.spec_from_file_location("playground_build", SOURCE / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(out)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=out))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()


async def evaluate(page: dict, expression: str) -> dict:
    """The value of a JavaScript expression in a page that has been read, or of what it promises."""
    connection = await websocket_connect(page["webSocketDebuggerUrl"])

    async def ask(expression: str):
        command = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        await connection.write_message(json.dumps({"id": 1, "method": "Runtime.evaluate", "params": command}))
        answer = json.loads(await connection.read_message())["result"]
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    while not await ask("Boolean(document.getElementById('write'))"):
        await asyncio.sleep(0.1)
    return await ask(expression)


def in_browser(url: str, expression: str, profile: Path) -> dict:
    """What an expression gives in the page, in Chromium without a window."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    command += [f"--user-data-dir={profile}", "--window-size=400,800", "--remote-allow-origins=*", url]
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        port = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (port.exists() and port.read_text()):
            assert time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.1)
        with urlopen(f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json") as pages:
            [page] = [page for page in json.load(pages) if page["url"] == url]
        return asyncio.run(asyncio.wait_for(evaluate(page, expression), 120))
    finally:
        browser.terminate()
        browser.wait()


@pytest.mark.thorough
def test_a_tune_in_the_browser(site, tmp_path):
    found = in_browser(site, WRITE, tmp_path)
    assert found["status"] == "Done."
    assert found["abc"].startswith("X:1\nT:The Finch\nM:6/8\nL:1/8\nK:D\n")
    assert found["tokens"] > 60 and found["speed"] > 0
    assert found["notes"] > 10
    assert found["width"] <= 0  # nothing is cut off on a phone
    assert found["hosts"] == [site.split("/")[2]]
    path = embedded_model("finch-abc")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    ids = tokenizer("\0" + found["abc"], return_tensors="pt").input_ids
    with torch.no_grad():
        out = model(ids, use_cache=True)
    size = sum(state.nbytes for state in out.cache.named_states().values())
    assert found["state"] == f"{size / 1024:.1f} KiB"
    # At a temperature of 0.1 each new token is nearly the most likely one.
    header = found["abc"].index("K:D\n") + len("K:D\n")
    logits = out.logits[0, header:-1]
    chosen = logits.gather(1, ids[0, header + 1 :, None])[:, 0]
    assert (logits.max(-1).values - chosen).max() < 0.5
