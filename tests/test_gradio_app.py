"""The example app for a browser: what it streams, without gradio, and the page itself where gradio is installed."""

import sys
import threading
from itertools import pairwise

import pytest
from chat_cases import END, save_model
from gradio_app import Conversation, Demo, Sampling, main


GREEDY = Sampling(max_new_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo(str(save_model(tmp_path_factory.mktemp("models") / "finch")), device="cpu")


def continuation(demo, text, tokens=12):
    """What the model says after a text that is read at once."""
    inputs = demo.tokenizer(text, return_tensors="pt")
    out = demo.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return demo.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])


def ask(demo, conversation, turns, message, images=(), system="", sampling=GREEDY):
    return list(demo.answer(conversation, turns, message, list(images), system, sampling))[-1][0]


def test_a_text_comes_token_by_token(demo):
    steps = list(demo.text("Hi", GREEDY))
    texts = [text for text, _ in steps]
    assert texts[-1] == "Hi" + continuation(demo, "Hi")
    assert len(set(texts)) == 12 and all(after.startswith(before) for before, after in pairwise(texts))
    assert steps[-1][1].startswith("The state holds 13 tokens in ")
    sampled = [list(demo.text("Hi", Sampling(12, seed=seed)))[-1][0] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_conversation_is_read_once_and_can_be_taken_back(demo):
    conversation = Conversation()
    first = ask(demo, conversation, 0, "Hi", system="Be kind")
    text = f"s: Be kind|u: Hi|a:{first}{END}u: And?|a:"
    assert first == continuation(demo, "s: Be kind|u: Hi|a:")
    second = ask(demo, conversation, 1, "And?")
    assert second == continuation(demo, text)
    third = ask(demo, conversation, 2, "So?")
    assert third == continuation(demo, f"{text}{second}{END}u: So?|a:")
    # "Retry", and another message after "Undo".
    assert ask(demo, conversation, 2, "So?") == third
    assert ask(demo, conversation, 1, "Why?") == continuation(demo, text.replace("And?", "Why?"))
    with pytest.raises(ValueError, match="no longer kept"):
        ask(demo, conversation, 3, "So?")
    assert ask(demo, conversation, 0, "Hi") == continuation(demo, "u: Hi|a:")


def test_a_stopped_answer_is_a_part_of_the_conversation(demo):
    conversation, before = Conversation(), threading.active_count()
    answer = demo.answer(conversation, 0, "Hi", [], "", Sampling(100_000, temperature=0))
    for _ in range(3):
        next(answer)
    answer.close()
    assert threading.active_count() == before
    session = conversation.sessions[1]
    said = session.cache.get_seq_length() + len(session.unread) - len("u: Hi|a:")
    text = "u: Hi|a:" + continuation(demo, "u: Hi|a:", said)
    assert ask(demo, conversation, 1, "And?") == continuation(demo, f"{text}{END}u: And?|a:")


def test_errors_come_to_who_asked_and_leave_the_conversation(demo, tmp_path, monkeypatch):
    conversation = Conversation()
    with pytest.raises(ValueError, match="is not a file"):
        ask(demo, conversation, 0, "Hi", [tmp_path / "missing.png"])
    with monkeypatch.context() as patch:
        patch.setattr(demo.model, "generate", lambda **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ask(demo, conversation, 0, "Hi")
        patch.setattr(demo.model, "generate", lambda **options: sys.exit(3))
        with pytest.raises(RuntimeError, match="The generation ended with SystemExit"):
            ask(demo, conversation, 0, "Hi")
    for texts in ({"message": "a" * 2**15 + "b"}, {"message": "a" * 2**14, "system": "a" * 2**14 + "b"}):
        with pytest.raises(ValueError, match="The text has 32,769 characters; at most 32,768 are read"):
            ask(demo, conversation, 0, **texts)
    with pytest.raises(ValueError, match="The text has 300,000 characters"):
        next(demo.text("a" * 300_000, GREEDY))
    with pytest.raises(ValueError, match="The message has 9 images; at most 8 are read"):
        ask(demo, conversation, 0, "Hi", ["a.png"] * 9)
    assert not conversation.sessions and not demo.lock.locked()


def test_it_says_in_one_line_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["gradio_app.py"])
    with pytest.raises(SystemExit, match=r'^gradio_app.py needs gradio: pip install "subquad\[demo\]"$'):
        main()
