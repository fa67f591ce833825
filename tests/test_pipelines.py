"""Every causal model in the pipelines of transformers. Avey-B is in test_encoder_pipelines.py."""

import threading

import pytest
from cases import each_causal, tiny_model
from transformers import TextIteratorStreamer, TextStreamer, pipeline

from subquad_tokenizers import WORLD_CHAT_TEMPLATE, ByteTokenizer


TEXTS = ["X:1", "K:D major, and then some more of it", "A", "|:dBG G2c:|"]
NEW_TOKENS = 12
GREEDY = {"do_sample": False, "max_new_tokens": NEW_TOKENS}


@pytest.fixture
def load(tmp_path):
    """A pipeline that reads its model and its tokenizer from a directory, and the model."""

    def load(task, model_type, auto_class, **fields):
        model = tiny_model(model_type, auto_class, vocab_size=128, **fields)
        if model.can_generate():
            model.generation_config.eos_token_id = None  # no text is shorter than the others
        model.save_pretrained(tmp_path)
        ByteTokenizer(chat_template=WORLD_CHAT_TEMPLATE).save_pretrained(tmp_path)
        pipe = pipeline(task, str(tmp_path), device="cpu")
        assert type(pipe.model) is type(model) and type(pipe.tokenizer) is ByteTokenizer
        return pipe, model

    return load


@pytest.fixture
def generator(load):
    return lambda model_type: load("text-generation", model_type, "AutoModelForCausalLM")


def continuation(model, tokenizer, prompt, **options):
    """The model's own continuation of a text or a conversation."""
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(prompt, return_tensors="pt", return_dict=True, **options)
    ids = model.generate(**inputs, **GREEDY)[0, inputs.input_ids.shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def texts(results):
    return [result["generated_text"] for (result,) in results]


@pytest.mark.quick_cases("rwkv6", "rwkv7", "raven")
@pytest.mark.fast
@each_causal
def test_text_generation(generator, model_type):
    pipe, model = generator(model_type)
    added = [continuation(model, pipe.tokenizer, text) for text in TEXTS]
    assert len(set(added)) == len(TEXTS)
    assert texts(pipe(text, **GREEDY) for text in TEXTS) == list(map(str.__add__, TEXTS, added))
    # A batch of three texts and one of a single text.
    assert texts(pipe(TEXTS, batch_size=3, return_full_text=False, **GREEDY)) == added
    drafts = {"prompt_lookup_num_tokens": 3, "return_full_text": False}
    assert texts([pipe(TEXTS[1], **drafts, **GREEDY)]) == added[1:2]

    stop = added[1][3:5]
    stopped = pipe(TEXTS[1], stop_strings=stop, tokenizer=pipe.tokenizer, return_full_text=False, **GREEDY)
    assert texts([stopped]) == [added[1][: added[1].index(stop) + 2]]


def test_streams(generator, capsys):
    pipe, model = generator("raven")
    expected = continuation(model, pipe.tokenizer, TEXTS[1])
    streamer = TextStreamer(pipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
    capsys.readouterr()
    pipe(TEXTS[1], streamer=streamer, **GREEDY)
    assert capsys.readouterr().out == expected + "\n"
    streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
    thread = threading.Thread(target=pipe, args=(TEXTS[1],), kwargs={"streamer": streamer, **GREEDY})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == expected and len(pieces) > 1


def test_conversations(generator):
    pipe, model = generator("gecko")
    chats = [
        [{"role": "user", "content": "Why?"}],
        [
            {"role": "system", "content": "You are a bird."},
            {"role": "user", "content": "Hello,\n\nyou!"},
            {"role": "assistant", "content": "Tweet."},
            {"role": "user", "content": "And now?"},
        ],
    ]
    answers = [continuation(model, pipe.tokenizer, chat, add_generation_prompt=True) for chat in chats]
    assert answers[0] != answers[1]
    expected = [[*c, {"role": "assistant", "content": a}] for c, a in zip(chats, answers, strict=True)]
    assert texts(pipe(chat, **GREEDY) for chat in chats) == expected
    assert texts(pipe(chats, batch_size=2, **GREEDY)) == expected
    # An answer that is begun goes on.
    begun = [*chats[0], {"role": "assistant", "content": "Because"}]
    rest = continuation(model, pipe.tokenizer, begun, continue_final_message=True)
    (result,) = pipe(begun, **GREEDY)
    assert result["generated_text"] == [*chats[0], {"role": "assistant", "content": "Because" + rest}]
