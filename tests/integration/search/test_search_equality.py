"""The service's top-k equals the library's own for 1,000 questions on each back end, at any concurrency."""

import asyncio
import functools
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from async_search_rl.config import Config
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.http import listening
from search.analyzer import terms
from search.backends import open_backend, open_rows
from search.client import SearchClient
from search.corpus import Corpus, open_corpus
from search.encoder import EncoderSpec
from search.engine import Retriever
from search.faiss_build import write_faiss
from search.faiss_index import FaissIndex
from search.hybrid import HybridIndex, fuse
from search.index import CorpusIndex, Index, RowIndex
from search.service import build_app
from tests.search_data import documents, questions, write_corpus

pytestmark = pytest.mark.integration
TOPK = 5
QUESTIONS = questions(1000)
Expected = list[list[tuple[int, float]]]


class WordVectors:
    """A stand-in encoder: the sum of a fixed random vector for each term, of length 1."""

    spec = EncoderSpec(path="word-vectors")
    device = "cpu"
    dimension = 32

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.stack([sum((self._vector(word) for word in words), np.zeros(32)) + 1e-6 for words in terms(texts)])
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    passages = queries

    @staticmethod
    @functools.cache
    def _vector(word: str) -> NDArray[np.float64]:
        return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_corpus(write_corpus(tmp_path_factory.mktemp("equality") / "corpus.jsonl", documents(1500)))


def lexical(backend: str, kernel: str = "numpy") -> Callable[[Corpus], RetrievalSection]:
    return lambda corpus: RetrievalSection(backend=backend, corpus=str(corpus.path), bm25_kernel=kernel, threads=2, cache_entries=0)


def dense_rows(corpus: Corpus, factory: str) -> FaissIndex:
    folder = Path(str(corpus.path) + ".index")
    path = folder / f"{factory.replace(',', '_')}.faiss"
    encoder = WordVectors()
    if not path.exists():
        write_faiss(encoder.passages(list(corpus.iter_contents())), factory, path)
    return FaissIndex(path, encoder, len(corpus), threads=1, nprobe=4)  # type: ignore[arg-type]


def of_bm25s(corpus: Corpus) -> Expected:
    import bm25s

    library = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    library.index(terms(list(corpus.iter_contents())), show_progress=False)
    found = library.retrieve(terms(QUESTIONS), k=TOPK, show_progress=False)
    return [
        [(int(row), float(score)) for row, score in zip(*pair, strict=True) if score > 0]
        for pair in zip(found.documents, found.scores, strict=True)
    ]


def of_rows(rows: RowIndex) -> Expected:
    """The index's own answer to one query at a time, without any service."""
    singles = [rows.rank([query], TOPK) for query in QUESTIONS]
    pairs = [zip(one.rows_QK[0].tolist(), one.scores_QK[0].tolist(), strict=True) for one in singles]
    return [[(row, score) for row, score in pair if row >= 0] for pair in pairs]


def of_faiss(corpus: Corpus, factory: str) -> Expected:
    index = faiss.read_index(str(dense_rows(corpus, factory)._path))
    if factory.startswith("IVF"):
        index.nprobe = 4
    if factory.startswith("HNSW"):
        index.hnsw.efSearch = 128
    scores, rows = index.search(WordVectors().queries(QUESTIONS), TOPK)
    return [list(zip(map(int, row), map(float, score), strict=True)) for row, score in zip(rows, scores, strict=True)]


async def served(open_index: Callable[[], Index], settings: RetrievalSection, clients: int) -> Expected:
    """What ``clients`` concurrent clients with connections of their own get from a running service."""
    retriever = Retriever(settings, open_index)
    async with listening(build_app(Config(retrieval=settings), retriever, None), "127.0.0.1", 0, None, stop_timeout_s=0.2) as url:
        await retriever.start()
        try:
            answers: dict[int, list[tuple[int, float]]] = {}
            left = list(range(len(QUESTIONS)))
            random.Random(clients).shuffle(left)

            async def client() -> None:
                async with SearchClient([url], topk=TOPK) as one:
                    while left:
                        taken = [left.pop() for _ in range(min(len(left), 1 + len(left) % 7))]
                        found = await asyncio.gather(*(one.search(QUESTIONS[i]) for i in taken))
                        for i, passages in zip(taken, found, strict=True):
                            answers[i] = [(int(passage.id.removeprefix("doc-")), passage.score) for passage in passages]

            async with asyncio.timeout(200):
                await asyncio.gather(*(client() for _ in range(clients)))
            return [answers[i] for i in range(len(QUESTIONS))]
        finally:
            await retriever.stop()


def require_equal(got: Expected, expected: Expected) -> None:
    assert [[row for row, _ in one] for one in got] == [[row for row, _ in one] for one in expected]
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose([score for _, score in mine], [score for _, score in theirs], atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (lexical("bm25"), of_bm25s),
        (lexical("tantivy"), lambda corpus: of_rows(open_rows(lexical("tantivy")(corpus), corpus, "tantivy"))),
        (lexical("rank_bm25"), lambda corpus: of_rows(open_rows(lexical("rank_bm25")(corpus), corpus, "rank_bm25"))),
    ],
    ids=["bm25", "tantivy", "rank_bm25"],
)
def test_lexical(corpus: Corpus, settings: Callable[[Corpus], RetrievalSection], expected: Callable[[Corpus], Expected]) -> None:
    section = settings(corpus)
    truth = expected(corpus)
    for clients in (1, 8, 64):
        require_equal(asyncio.run(served(functools.partial(open_backend, section), section, clients)), truth)


def test_compiled_bm25(corpus: Corpus) -> None:
    pytest.importorskip("numba")
    section = lexical("bm25", "numba")(corpus)
    truth = of_rows(open_rows(section, corpus, "bm25"))
    plain = of_bm25s(corpus)
    for mine, theirs in zip(truth, plain, strict=True):
        np.testing.assert_allclose([score for _, score in mine], [score for _, score in theirs], atol=1e-5)
    for clients in (1, 8, 64):
        require_equal(asyncio.run(served(functools.partial(open_backend, section), section, clients)), truth)


@pytest.mark.parametrize("factory", ["Flat", "HNSW32", "IVF16,Flat"])
def test_dense(corpus: Corpus, factory: str) -> None:
    section = lexical("dense")(corpus)
    truth = of_faiss(corpus, factory)
    for clients in (1, 8, 64):
        got = asyncio.run(served(lambda: CorpusIndex(dense_rows(corpus, factory), corpus_again(corpus)), section, clients))
        require_equal(got, truth)


def test_hybrid(corpus: Corpus) -> None:
    section = lexical("tantivy")(corpus)

    def halves() -> list[RowIndex]:
        return [open_rows(section, corpus, "tantivy"), dense_rows(corpus, "Flat")]

    def opened() -> Index:
        return CorpusIndex(HybridIndex(halves(), candidates=20, rrf_k=60), corpus_again(corpus))

    ranked = [half.rank(QUESTIONS, 20).rows_QK.tolist() for half in halves()]
    truth = [fuse([[row for row in half[i] if row >= 0] for half in ranked], 60)[:TOPK] for i in range(len(QUESTIONS))]
    for clients in (1, 8, 64):
        require_equal(asyncio.run(served(opened, section, clients)), truth)


def corpus_again(corpus: Corpus) -> Corpus:
    """The same corpus once more, for the service closes its own."""
    return open_corpus(corpus.path)
