"""Tokenizer, chat templates and streamed text."""

import json
import random
from itertools import pairwise

import pytest
import regex
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from stepgraph.model.checkpoint.embedded import embedded_path
from stepgraph.model.checkpoint.errors import CheckpointError
from stepgraph.model.checkpoint.gguf_file import GGUFFile
from stepgraph.model.tokenizer import StreamDecoder, Tokenizer

TEXTS = [
    "Hello, world!",
    " leading and  double   spaces \n\n\t tabs\r\nand lines \n",
    "It's we'll they'd I'm you've don't",
    "In 2024, pi is 3.14159265 and 1,000,000 people; ½ cup, x², Ⅷ, ١٢٣, 四",
    "def f(x: int = 0) -> str:\n    return f'{x!r:>8}'  # comment\n\n\nif __name__ == \"__main__\":\n\tf(42)",
    "café naïve Ångström — “quotes” … €5 ßtraße",
    "你好，世界。日本語テキスト한국어 кириллица ελληνικά עברית العربية हिन्दी ไทย",
    "😀👍🏽👨‍👩‍👧‍👦🇫🇷 ❤️‍🔥 mixed🙂text",
    "a\u0301 \u200b\ufeff\u00a0\u3000 \u2028 \x00\x07",
    "𝕌𝕟𝕚𝕔𝕠𝕕𝕖 𒀀 🜁",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!!!!!======",
    "",
]
MESSAGES = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "é?"},
]


@pytest.fixture(scope="module")
def metadata():
    try:
        return GGUFFile(embedded_path("smollm2-135m")).metadata
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm(metadata):
    return Tokenizer.from_gguf(metadata)


class ReferenceBPE:
    """Byte-level BPE written out: llama.cpp's two splits for `smollm`, then merges by rank. Knows no special tokens."""

    SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, metadata):
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in regex.split(r"(\p{N})", text):
            for word in self.SPLIT.findall(part):
                ids += [self.ids[piece] for piece in self.merge([self.letters[byte] for byte in word.encode()])]
        return ids

    def merge(self, pieces: list[str]) -> list[str]:
        while len(pieces) > 1:
            rank, i = min((self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(pieces)))
            if rank == 1 << 30:
                break
            pieces = [*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]]
        return pieces


@pytest.mark.embedded
@pytest.mark.parametrize("text", TEXTS)
def test_smollm_ids_equal_a_reference_and_round_trip(smollm, metadata, text):
    ids = smollm.encode(text)
    assert ids == ReferenceBPE(metadata).encode(text)
    assert smollm.decode(ids) == text


@pytest.mark.embedded
def test_smollm_known_ids(smollm):
    assert smollm.vocab_size == 49152
    assert (smollm.bos_token_id, smollm.eos_token_ids) == (1, (2,))
    assert smollm.special_tokens == dict(
        bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>", pad_token="<|im_end|>"
    )
    digits = smollm.encode("2024")
    assert [smollm.decode([token]) for token in digits] == ["2", "0", "2", "4"]


@pytest.mark.embedded
def test_special_tokens_are_whole_and_skipped_on_request(smollm):
    ids = smollm.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert 1 not in smollm.encode("< |im_start|>")
    assert smollm.decode(ids) == "user\nhi"
    assert smollm.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"


@pytest.mark.embedded
@pytest.mark.parametrize("seed", range(4))
def test_stream_of_text_never_shows_a_broken_character(smollm, seed):
    rng = random.Random(seed)
    for text in TEXTS:
        ids, stream, pieces = smollm.encode(text), StreamDecoder(smollm), []
        while ids:
            count = rng.randint(0, 5)
            pieces.append(stream.push(ids[:count]))
            ids = ids[count:]
            assert "\ufffd" not in pieces[-1]
            assert text.startswith("".join(pieces))
        assert "".join(pieces) == text  # nothing was left for flush
        assert stream.flush() == ""


@pytest.mark.embedded
@pytest.mark.parametrize("seed", range(4))
def test_stream_of_random_ids_equals_full_decode(smollm, seed):
    rng = random.Random(seed)
    ids = [rng.choice([rng.randrange(smollm.vocab_size), rng.randrange(17, 273)]) for _ in range(300)]  # 17–272: single bytes
    expected, stream, pieces, start = smollm.decode(ids), StreamDecoder(smollm), [], 0
    while start < len(ids):
        count = rng.randint(1, 6)
        pieces.append(stream.push(ids[start : start + count]))
        start += count
    assert any("\ufffd" in piece for piece in pieces)  # invalid bytes are shown once they are known to be invalid
    assert "".join(pieces) + stream.flush() == expected


@pytest.mark.embedded
def test_stream_emits_what_is_complete(smollm):
    emoji = smollm.encode("👨")
    assert len(emoji) > 1
    stream = StreamDecoder(smollm)
    assert stream.push([*smollm.encode("ok"), *emoji[:-1]]) == "ok"
    assert stream.push([]) == ""
    assert stream.push(emoji[-1:]) == "👨"
    assert stream.push(emoji[:1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(smollm.encode(" new")) == " new"


@pytest.mark.embedded
def test_smollm_chat_form(smollm):
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    user = "<|im_start|>user\nhi<|im_end|>\n"
    hi = [{"role": "user", "content": "hi"}]
    assert smollm.apply_chat_template(hi) == system + user + "<|im_start|>assistant\n"
    assert smollm.apply_chat_template(hi, add_generation_prompt=False) == system + user
    own = [{"role": "system", "content": "Be brief."}, *hi]
    assert smollm.apply_chat_template(own) == f"<|im_start|>system\nBe brief.<|im_end|>\n{user}<|im_start|>assistant\n"
    ids = smollm.encode(smollm.apply_chat_template(hi), add_special_tokens=False)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def tiny_backend() -> tokenizers.Tokenizer:
    """Bytes only, plus two special tokens."""
    vocab = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}{{ {'a': '<é&>'} | tojson }}",
    "loops": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "nothing": "{% if tools is none %}no tools{% endif %}{% if add_generation_prompt %}>{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "option": "{{ 'think' if enable_thinking else 'answer' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = Tokenizer(tiny_backend(), special_tokens=special, chat_template=TEMPLATES[name])
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_backend(), chat_template=TEMPLATES[name], **special)
    options = dict(add_generation_prompt=True, enable_thinking=True)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert ours.apply_chat_template(MESSAGES, **options) == expected
    assert expected


def test_template_has_a_clock():
    tokenizer = Tokenizer(tiny_backend(), chat_template="{{ strftime_now('%Y') | int > 2000 }}")
    assert tokenizer.apply_chat_template(MESSAGES) == "True"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template; use its prompts raw"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "cannot render these messages"),
        ("{{ messages[0].content.missing.deeper }}", "cannot render these messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|cannot render"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_template_errors(template, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(tiny_backend(), chat_template=template).apply_chat_template(MESSAGES)


def write_tokenizer(directory, config=None, **files):
    tiny_backend().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)
    return directory


def test_directory_with_special_tokens_and_template(tmp_path):
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "chat_template": "T", "pad_token": None}
    tokenizer = Tokenizer.from_hf(write_tokenizer(tmp_path, config), eos_token_ids=[7, 257])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (256, (257, 7))
    assert tokenizer.apply_chat_template([]) == "T"
    assert tokenizer.decode(tokenizer.encode("<s>é</s>")) == "é"


def test_template_file_comes_first(tmp_path):
    directory = write_tokenizer(tmp_path, {"chat_template": "old"}, chat_template__jinja="new")
    assert Tokenizer.from_hf(directory).apply_chat_template([]) == "new"


def test_named_templates_use_the_default(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert Tokenizer.from_hf(write_tokenizer(tmp_path, {"chat_template": named})).apply_chat_template([]) == "plain"


def test_special_tokens_map_fills_in(tmp_path):
    directory = write_tokenizer(tmp_path, {}, special_tokens_map__json='{"eos_token": {"content": "</s>"}}')
    assert Tokenizer.from_hf(directory).eos_token_ids == (257,)


def test_damaged_tokenizer_files(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.from_hf(tmp_path)
    write_tokenizer(tmp_path, tokenizer_config__json="{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        Tokenizer.from_hf(tmp_path)


def test_gguf_llama3_vocabulary():
    """Digits in threes, a word that is a token taken whole, and the start token added."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, "12", "123", "Ġab", "<|begin|>", "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "12 3"],
        "tokenizer.ggml.token_type": [1] * 259 + [3, 4],
        "tokenizer.ggml.bos_token_id": 259,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = [tokens.index(token) for token in ("<|begin|>", "123", "12", "3", "Ġab")]
    assert tokenizer.encode("12312 ab") == [259, 257, 256, 258]
    assert tokenizer.encode("123123 ab") == [ids[0], ids[1], ids[1], ids[4]]
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [260]
    assert tokenizer.decode([259, 260, 257]) == "<tool>123"  # user-defined tokens are text
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert Tokenizer.from_gguf(metadata).encode("12") == [256]
    metadata["tokenizer.ggml.merges"] = ["1 zz"]
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges do not fit"):
        Tokenizer.from_gguf(metadata)
