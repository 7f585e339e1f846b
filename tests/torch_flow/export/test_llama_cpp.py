"""GGUF files run by a real llama.cpp: the same tokens, the same greedy text, nearly the same probabilities.

``pip install xllamacpp`` brings llama.cpp and its server as a wheel; without it these tests are skipped.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from tests.torch_flow.export.programs import loaded_by
from tests.torch_flow.export.test_gguf import EXACT, ROUNDED, WORDS, bpe, model_of, of_transformers, sentencepiece  # noqa: F401
from tests.torch_flow.export.test_gguf_architectures import FAMILIES, network
from tests.torch_flow.export.test_gguf_encoders import ENCODERS, encoder
from tests.torch_flow.export.test_gguf_encoders import network as network_of
from tests.torch_flow.export.test_reload import quantized
from tests.torch_flow.export.test_vocabularies import unigram
from torch import nn

from quark.errors import ModelError
from quark.numerics.ggml import GGML
from quark.torch.export.api import export_gguf
from quark.torch.quantization.config.config import QConfig

gguf = pytest.importorskip("gguf")
xllamacpp = pytest.importorskip("xllamacpp")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PROMPT, STEPS = "the quick brown", 40
LIMITS = {"F16": 0.02}  # of log probabilities; else llama.cpp rounds activations to int8
TOP = 5
TYPES = [row.kind for row in GGML.values()]
SCHEMES = {**EXACT, **ROUNDED}
CASES = [
    *(("llama", scheme, "sentencepiece", None) for scheme in SCHEMES),
    *((family, "Q4_0", "bpe", None) for family in ("llama", "mistral", "qwen2")),
    *(("llama", None, "sentencepiece", kind) for kind in ("F16", *TYPES)),
]


@cache
def trained(family: str, folder: Path) -> nn.Module:
    """A model that has learnt the text by heart, so that its choices are clear."""
    model, ids = model_of(family).train(), torch.tensor([tokenizer_of(folder)[0](" ".join([WORDS] * 3))])
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(60):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())  # GGUF keeps what is not quantized in float16
    assert loss < 0.5
    return model.eval()


def tokenizer_of(folder: Path) -> Any:
    if (folder / "tokenizer.model").is_file():
        processor = pytest.importorskip("sentencepiece").SentencePieceProcessor(
            model_file=str(folder / "tokenizer.model")
        )
        return processor.encode, processor.decode
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return (lambda text: made(text)["input_ids"]), made.decode


class Program:
    """llama.cpp with a model."""

    def __init__(self, path: Path, embeds: bool = False) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = 128
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = 1
        parameters.warmup = False
        if embeds:
            parameters.embedding = True
            parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE
        self.server = xllamacpp.Server(parameters)

    def ask(self, name: str, **fields: Any) -> Any:
        data = json.dumps(fields).encode()
        request = Request(f"{self.server.listening_address}/{name}", data, {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            return json.load(answer)


@pytest.mark.parametrize(("family", "scheme", "vocabulary", "kind"), CASES)
def test_greedy_text_is_the_same(
    family: str, scheme: str | None, vocabulary: str, kind: str | None, request: Any, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(vocabulary)
    encode, decode = tokenizer_of(folder)
    model = copy.deepcopy(trained(family, folder))
    if scheme is not None:
        model = quantized(model, QConfig(SCHEMES[scheme], exclude=["lm_head"]))
    export_gguf(model, tmp_path, family, folder, weight_type=kind)
    if kind is not None:
        model = of_transformers(tmp_path / f"{family}.gguf").eval()  # the values that were rounded, decoded
    program = Program(tmp_path / f"{family}.gguf")
    ids = encode(PROMPT)
    assert program.ask("tokenize", content=PROMPT, add_special=False)["tokens"] == ids
    told = program.ask(
        "completion", prompt=ids, n_predict=STEPS, temperature=0, n_probs=TOP, return_tokens=True, ignore_eos=True,
        cache_prompt=False,
    )  # fmt: skip
    expected = model.generate(torch.tensor([ids]), max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False)
    assert told["tokens"] == expected[0, len(ids) :].tolist()
    text = decode(told["tokens"])
    assert told["content"].strip() == text.strip()
    assert len(set(text.split())) > 4
    with torch.no_grad():
        ours = model(expected).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
    theirs = [
        [ours[k, entry["id"]].item() - entry["logprob"] for entry in step["top_logprobs"][:TOP]]
        for k, step in enumerate(told["completion_probabilities"])
    ]
    assert np.abs(theirs).max() < LIMITS.get(str(kind), 0.5)
    loaded_by("GGUF", f"{kind or scheme} ({family}, {vocabulary})", "xllamacpp")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_answers_as_transformers(family: str, request: Any, tmp_path: Path) -> None:
    """Log probabilities of all words, whole numbers in the file, so that nothing but the network can differ."""
    folder = request.getfixturevalue("bpe")
    model = network(family)
    export_gguf(model, tmp_path, family, folder, weight_type="F32", float_type="F32")
    program = Program(tmp_path / f"{family}.gguf")
    for first in range(3, 60):  # a word that is not a whole letter is answered without probabilities
        ids = list(range(first, first + 40))
        told = program.ask("completion", prompt=ids, n_predict=1, temperature=0, n_probs=300, ignore_eos=True)
        if "completion_probabilities" in told:
            break
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    entries = [entry for entry in told["completion_probabilities"][0]["top_logprobs"] if entry["logprob"] > -15]
    theirs = torch.tensor([entry["logprob"] for entry in entries])
    wanted = ours[[entry["id"] for entry in entries]]
    theirs, wanted = theirs - theirs.mean(), wanted - wanted.mean()
    assert len(theirs) > 200
    assert (theirs - wanted).norm() < 0.02 * wanted.norm()  # keys and values are float16 there
    loaded_by("GGUF", f"F32 of a float model ({family})", "xllamacpp")


def test_unigram_models_split_as_sentencepiece(tmp_path: Path) -> None:
    processor = unigram(tmp_path)
    export_gguf(model_of(), tmp_path, "llama", tmp_path)
    program = Program(tmp_path / "llama.gguf")
    for text in (WORDS, "quick foxes answering quantum scales", "the  quick ", "éè quick", "ﬁve"):
        assert program.ask("tokenize", content=text, add_special=False)["tokens"] == processor.encode(text), text


def test_unigram_models_of_json_split_as_transformers(tmp_path: Path) -> None:
    """Odd strings of letters, spaces, controls and other scripts; a step less is refused."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    trained = sentencepiece_model_pb2.ModelProto()
    unigram(tmp_path)
    trained.ParseFromString((tmp_path / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer.model").unlink()
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Precompiled(trained.normalizer_spec.precompiled_charsmap)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([WORDS, "été naïve 12 3,4! über", WORDS.upper()] * 20, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    export_gguf(model_of(), tmp_path, "llama", tmp_path, weight_type="F16")
    program = Program(tmp_path / "llama.gguf")
    draw = np.random.default_rng(0)
    odd = ["é", "ﬁ", "①", "ー", "日本", "😀", "!", ",", "12", "QUICK", "ü", "Ａ"]
    odd += ["<s>", "</s>", " </s> ", "<unk>"]
    pieces = [*WORDS.split(), *odd, "\t", "\n", "\u00a0", "\u200b", "x\ty", " ", "  "]
    texts = ["".join(draw.choice(pieces, draw.integers(1, 9))) for _ in range(300)]
    wrong = [
        text
        for text in texts
        if program.ask("tokenize", content=text, add_special=False)["tokens"] != made.encode(text).ids
    ]
    assert wrong == []
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**data, "normalizer": {"type": "Lowercase"}}))
    with pytest.raises(ModelError, match=r"'Lowercase', which llama\.cpp does not do"):
        export_gguf(model_of(), tmp_path / "other", "llama", tmp_path, weight_type="F16")


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(("kind", "limit"), [("F32", 0.001), ("F16", 0.002), ("Q8_0", 0.04)])
def test_an_encoder_gives_the_hidden_states_of_transformers(kind: str, limit: float, name: str, tmp_path: Path) -> None:
    """llama.cpp has GELU by tanh from a table of float16, and rounds what it multiplies with Q8_0 to 8 bits."""
    model = network_of(name, tmp_path)
    export_gguf(model, tmp_path / "out", name, tmp_path, weight_type=kind, float_type="F16" if kind == "F16" else "F32")
    program = Program(tmp_path / "out" / f"{name}.gguf", embeds=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the quick foxes jumps, a dog!", "中 The  ÁB", "a", "the quick fox, a dog! " * 2):
        ids = tokenizer(text)["input_ids"]
        assert program.ask("tokenize", content=text, add_special=True)["tokens"] == ids
        (answer,) = program.ask("embedding", content=text)
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).last_hidden_state[0]
        assert (torch.tensor(answer["embedding"]) - wanted).norm() < limit * wanted.norm()


def test_wordpiece_models_split_as_transformers(tmp_path: Path) -> None:
    """Odd strings. Marks that take a place of their own (Indic vowels) are left out: llama.cpp drops them."""
    export_gguf(encoder(tmp_path), tmp_path / "out", "bert", tmp_path, weight_type="F16")
    program = Program(tmp_path / "out" / "bert.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    draw = np.random.default_rng(0)
    odd = [
        *"éﬁ①ー中😀!12üＡİßΣ한€№«—`^~$+<|=²½Ⅷı़ั",
        "e\u0301",
        "\u200b",
        "\ufeff",
        "\u00ad",
        "\t",
        "\n",
        "\u00a0",
        "\u3000",
    ]
    odd += ["[MASK]", "[SEP]", "[UNK]", "[unused0]", "##s", "\x01", "\ufffd", "x" * 101, "'s"]
    pieces = [*["the", "Quick", "foxes", "jumps", "a", "ab", "dog"], *odd, " ", "  "]
    texts = ["".join(draw.choice(pieces, draw.integers(1, 9))) for _ in range(300)] + [f"a{one}b" for one in odd]
    wrong = [
        t for t in texts if program.ask("tokenize", content=t, add_special=True)["tokens"] != tokenizer(t)["input_ids"]
    ]
    assert wrong == []
