"""Chat templates of strangers: what they take is limited."""

import resource
import time

import jinja2
import pytest
from chat_cases import TEMPLATE, save_model
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from subquad_cli import main, templates
from subquad_cli.templates import in_process_of_its_own
from subquad_tokenizers import WORLD_CHAT_TEMPLATE


CHAT = [{"role": "user", "content": "é\ud800 < 3"}, {"role": "assistant", "content": "So.\n"}]
LARGE = [
    "{{ '%3000000000s' % 'a' }}",
    "{{ 'a'.ljust(3000000000) }}",
    "{% set x = namespace(y='aaaaaaaa') %}{% for i in range(40) %}{% set x.y = x.y ~ x.y %}{% endfor %}",
    "{% for i in range(99999) %}{% for i in range(99999) %}aaaaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
]
LONG = ["{% for i in range(99999) %}{% for j in range(99999) %}{% if false %}{% endif %}{% endfor %}{% endfor %}"]


def test_results_are_the_same():
    render = in_process_of_its_own(render_jinja_template)
    for chat_template in (WORLD_CHAT_TEMPLATE, TEMPLATE):
        given = {"conversations": [CHAT, CHAT[:1]], "chat_template": chat_template, "add_generation_prompt": True}
        assert render(**given) == render_jinja_template(**given)
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    given = {"conversations": [CHAT], "chat_template": marked, "return_assistant_tokens_mask": True}
    assert render(**given)[1][0] == [list(each) for each in render_jinja_template(**given)[1][0]]


@pytest.mark.parametrize(
    ("template", "kind", "message"),
    [
        ("{{ raise_exception('No system.') }}", jinja2.TemplateError, "^No system.$"),
        ("{% for %}", jinja2.TemplateError, "Expected"),
        ("{{ 1 + 'a' }}", TypeError, "unsupported operand"),
        ("{{ messages[0].content.encode().decode('a') }}", ValueError, "unknown encoding"),
        ("{{ 1 / 0 }}", ValueError, "division by zero"),
    ],
)
def test_errors_of_templates(template, kind, message):
    with pytest.raises(kind, match=message):
        in_process_of_its_own(render_jinja_template)([[{"role": "user", "content": "Hi"}]], chat_template=template)


@pytest.mark.parametrize("template", [*LARGE, *LONG])
def test_limits(template, tmp_path, monkeypatch, capsys):
    """Whatever a template does, the command ends soon, with one line."""
    monkeypatch.setattr(templates, "SECONDS", 1)
    save_model(tmp_path / "model", template=template)
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["generate", "--model", str(tmp_path / "model"), "--chat", "--max-new-tokens", "1", "Hi"]) == 1
    assert "The chat template takes more than" in capsys.readouterr().err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert time.monotonic() - begin < 60
    # From now on also for what transformers renders itself.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="The chat template takes more than"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
