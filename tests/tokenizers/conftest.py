import os
import random

import pytest
import rwkv
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

import subquad  # noqa: F401 (registers the architectures)
from subquad_tokenizers import RwkvWorldTokenizerFast


@pytest.fixture(scope="session")
def reference_file():
    return os.path.join(os.path.dirname(rwkv.__file__), "rwkv_vocab_v20230424.txt")


@pytest.fixture(scope="session")
def reference(reference_file):
    return TRIE_TOKENIZER(reference_file)


@pytest.fixture(scope="session")
def world():
    """A test that changes it takes a copy."""
    return RwkvWorldTokenizerFast()


def _random_unicode(seed, length):
    rng = random.Random(seed)
    # As many from the first planes as from everywhere, or hardly a letter would be among them.
    limits = (0x80, 0x250, 0x3000, 0x110000)
    points = (rng.randrange(rng.choice(limits)) for _ in range(length))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


TEXTS = {
    "empty": "",
    "letter": "a",
    "english": 'It was the best of times, it was the "worst" of times... 1,234.5 didn\'t cost $99!\n\nA new\tpage. ',
    "french": "L'été dernier, où étais-tu ? « Ça va », répondit-il — peut-être… Œuvre à 50 €.",
    "russian": "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
    "greek": "Στη γη της Ιωνίας, ο Όμηρος τραγούδησε.",
    "chinese": "孔子曰：“学而时习之，不亦说乎？”\n有朋自远方来，不亦乐乎。English混排123。",
    "japanese": "これは日本語のテストです。コンピューターで、カタカナとひらがな、漢字を「混ぜて」書きます！",
    "korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "arabic": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق، وقد وهبوا عقلا.",
    "hebrew": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "emoji": "🎉👨‍👩‍👧‍👦 ok 👍🏽🇫🇷❤️🫠 🎉🎉🎉",
    "mathematics": "∀ε>0 ∃δ: |x−a|<δ ⇒ ‖f(x)−f(a)‖ ≤ ε, ∑ᵢ₌₁ⁿ αᵢ = ½ 𝔸𝕓",
    "code": 'def f(x: int = 0) -> str:\n    """Doc."""\n    return f"{x!r:>10}" if x != 1 else "\\n"\r\n\t\ta += 1\n',
    "minified": 'var a=function(e,t){return e&&t?[e.length,t["x"]]:null};for(i=0;i<10;i++){b.push({k:i<<2})}',
    "html": '<a href="https://example.org/?q=1&amp;r=%20">x</a><s>y</s></div>\r\n\r\n<!-- -->',
    "control": "".join(map(chr, range(0x20))) + "\x7f\x80\x9f\xa0\xad\u2028\u2029\ufeff\ufffd",
    "spaces": " " * 1000 + "x" + " " * 127,
    "newlines": "\n" * 1000 + " \n\t\r\n" * 50 + "\r" * 40,
    "long run": "a" * 3000 + "=" * 300 + "。\n" * 30 + "0" * 500 + "\u3000" * 100,
    "unicode": _random_unicode(0, 10_000),
    "letters": "".join(random.Random(1).choices("abcABC019 _-.(\n", k=10_000)),
}


@pytest.fixture(scope="session", params=sorted(TEXTS))
def text(request):
    return TEXTS[request.param]


@pytest.fixture(scope="session")
def texts():
    return list(TEXTS.values())
