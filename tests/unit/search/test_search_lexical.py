"""Lexical back ends: what is built by parts equals what the library builds, and the scores equal the oracle's."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import bm25s
import msgspec
import numpy as np
import pytest
import tantivy
from rank_bm25 import BM25Okapi

import search.bm25_build
from async_search_rl.config.retrieval import RetrievalSection
from async_search_rl.errors import ConfigError, DataError
from search.analyzer import terms
from search.backends import lexical_backend, no_progress, open_backend, open_rows
from search.bm25 import Bm25Index
from search.bm25_build import build_bm25
from search.corpus import Corpus, index_folder
from search.index import NO_ROW
from search.manifest import Manifest, begin_build
from search.rank_bm25_index import RankBm25Index
from search.tantivy_index import TantivyIndex, build_tantivy
from tests.search_data import questions

K1, B = 0.9, 0.4


def library_index(corpus: Corpus) -> bm25s.BM25:
    index = bm25s.BM25(k1=K1, b=B, method="lucene")
    index.index(terms(list(corpus.iter_contents())), show_progress=False)
    return index


def built(corpus: Corpus, folder: Path) -> Path:
    build_bm25(corpus, folder, K1, B, no_progress)
    return folder


def test_a_build_by_parts_equals_the_librarys(
    make_corpus: Callable[[int], Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search.bm25_build, "CHUNK_DOCS", 64)
    corpus = make_corpus(300)
    ours = bm25s.BM25.load(built(corpus, tmp_path / "bm25"))
    theirs = library_index(corpus)
    assert ours.vocab_dict.keys() == theirs.vocab_dict.keys()
    for term, column in ours.vocab_dict.items():
        if not term:
            continue  # The empty term has no column.
        other = theirs.vocab_dict[term]
        mine = slice(*ours.scores["indptr"][column : column + 2])
        other_one = slice(*theirs.scores["indptr"][other : other + 2])
        np.testing.assert_array_equal(ours.scores["indices"][mine], theirs.scores["indices"][other_one])
        np.testing.assert_array_equal(ours.scores["data"][mine], theirs.scores["data"][other_one])
    assert not (tmp_path / "bm25" / "parts").exists()


def test_an_interrupted_build_goes_on(
    make_corpus: Callable[[int], Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search.bm25_build, "CHUNK_DOCS", 64)
    corpus = make_corpus(300)
    expected = built(corpus, tmp_path / "whole")

    def interrupt(done: int, total: int) -> None:
        if done >= 192:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_bm25(corpus, tmp_path / "parts", K1, B, interrupt)
    assert len(list((tmp_path / "parts" / "parts").glob("*.npz"))) == 3
    seen: list[int] = []
    build_bm25(corpus, tmp_path / "parts", K1, B, lambda done, total: seen.append(done))
    for name in ("data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy", "vocab.index.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (expected / name).read_bytes()


def test_ranking_equals_the_librarys(make_corpus: Callable[[int], Corpus], tmp_path: Path) -> None:
    corpus = make_corpus(300)
    index = Bm25Index(built(corpus, tmp_path / "bm25"), "numpy", threads=2)
    queries = questions(200)
    found = library_index(corpus).retrieve(terms(queries), k=5, show_progress=False)
    rows_QK, scores_QK = index.rank(queries, 5)
    np.testing.assert_array_equal(rows_QK, np.where(found.scores > 0, found.documents, NO_ROW))
    np.testing.assert_allclose(scores_QK, found.scores, atol=1e-5)
    index.close()


def test_scores_equal_the_oracles(make_corpus: Callable[[int], Corpus], tmp_path: Path) -> None:
    """rank_bm25 with Lucene's inverse document frequency scores (k1 + 1) times as much as Lucene's variant."""

    class Oracle(BM25Okapi):
        def _calc_idf(self, nd: dict[str, int]) -> None:
            self.idf = {term: math.log(1 + (self.corpus_size - n + 0.5) / (n + 0.5)) for term, n in nd.items()}

    corpus = make_corpus(120)
    oracle = Oracle(terms(list(corpus.iter_contents())), k1=K1, b=B)
    index = Bm25Index(built(corpus, tmp_path / "bm25"), "numpy", threads=1)
    queries = questions(50)
    rows_QK, scores_QK = index.rank(queries, 10)
    for words, rows, scores in zip(terms(queries), rows_QK, scores_QK, strict=True):
        expected = oracle.get_scores(words) / (K1 + 1)
        found = rows != NO_ROW
        np.testing.assert_allclose(scores[found], expected[rows[found]], atol=1e-5)
        np.testing.assert_allclose(scores[found], np.sort(expected)[::-1][: found.sum()], atol=1e-5)


def test_rank_bm25_equals_its_library(make_corpus: Callable[[int], Corpus]) -> None:
    corpus = make_corpus(120)
    index = RankBm25Index(corpus, K1, B)
    library = BM25Okapi(terms(list(corpus.iter_contents())), k1=K1, b=B)
    queries = questions(50)
    rows_QK, scores_QK = index.rank(queries, 5)
    for words, rows, scores in zip(terms(queries), rows_QK, scores_QK, strict=True):
        expected = library.get_scores(words)
        np.testing.assert_allclose(scores, expected[rows], atol=1e-5)
        assert all((-scores[i], rows[i]) < (-scores[i + 1], rows[i + 1]) for i in range(4))


def test_tantivy_equals_its_library_and_orders_ties_by_row(make_corpus: Callable[[int], Corpus], tmp_path: Path) -> None:
    corpus = make_corpus(300)
    build_tantivy(corpus, tmp_path / "tantivy", no_progress)
    index = TantivyIndex(tmp_path / "tantivy", threads=2)
    queries = questions(100)
    rows_QK, scores_QK = index.rank(queries, 5)
    searcher = index._index.searcher()
    for query, rows, scores in zip(queries, rows_QK, scores_QK, strict=True):
        parsed = index._index.parse_query(query, ["text"])
        expected = searcher.search(parsed, 5).hits
        np.testing.assert_allclose(scores, [score for score, _ in expected], atol=1e-5)
        assert sorted(rows) == sorted(searcher.fast_field_values("row", [address for _, address in expected]))
        assert all((-scores[i], rows[i]) < (-scores[i + 1], rows[i + 1]) for i in range(4))
    index.close()


def test_an_interrupted_tantivy_build_goes_on(make_corpus: Callable[[int], Corpus], tmp_path: Path) -> None:
    corpus = make_corpus(3000)

    def interrupt(done: int, total: int) -> None:
        if done == 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_tantivy(corpus, tmp_path / "tantivy", interrupt, commit_docs=500)
    assert tantivy.Index.open(str(tmp_path / "tantivy")).searcher().num_docs == 2000
    build_tantivy(corpus, tmp_path / "tantivy", no_progress)
    index = TantivyIndex(tmp_path / "tantivy", threads=1)
    titles = [contents.splitlines()[0].strip('"') for contents in corpus.iter_contents()]
    assert index.rank(titles[::100], 1).rows_QK[:, 0].tolist() == list(range(0, 3000, 100))


@pytest.mark.parametrize("backend", ["bm25", "tantivy", "rank_bm25"])
def test_nothing_found_is_an_empty_list(make_corpus: Callable[[int], Corpus], backend: str) -> None:
    corpus = make_corpus(20)
    index = open_backend(RetrievalSection(backend=backend, corpus=str(corpus.path), bm25_kernel="numpy", threads=1))
    found = index.search(["zzzz qqqq", "the of", "!!!", "river"], 50)
    assert found[:3] == [[], [], []]
    assert isinstance(found[3], list)
    assert 0 < len(found[3]) < 20
    assert all("river" in json.loads(hit.document)["contents"] for hit in found[3])
    index.close()


def test_an_index_of_another_corpus_or_other_parameters_is_refused(make_corpus: Callable[[int], Corpus]) -> None:
    corpus = make_corpus(20)
    settings = RetrievalSection(backend="bm25", corpus=str(corpus.path), bm25_kernel="numpy")
    open_backend(settings).close()
    with pytest.raises(DataError, match=r"retrieval\.k1"):
        open_backend(RetrievalSection(backend="bm25", corpus=str(corpus.path), k1=2.0))
    make_corpus(21)
    with pytest.raises(DataError, match="21 documents"):
        open_backend(settings)


def test_a_build_goes_on_with_its_own_parts(make_corpus: Callable[[int], Corpus], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search.bm25_build.CHUNK_DOCS", 10)
    corpus = make_corpus(40)
    settings = RetrievalSection(backend="bm25", corpus=str(corpus.path), bm25_kernel="numpy", threads=1)

    def interrupt(done: int, total: int) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_rows(settings, corpus, "bm25", interrupt)
    part = index_folder(corpus.path) / "bm25" / "parts" / "000000.npz"
    written_ns = part.stat().st_mtime_ns
    again: list[int] = []

    def stop(*_: object) -> None:
        again.append(part.stat().st_mtime_ns)
        raise KeyboardInterrupt

    monkeypatch.setattr("search.bm25_build._totals", stop)
    with pytest.raises(KeyboardInterrupt):
        open_rows(settings, corpus, "bm25", no_progress)
    assert again == [written_ns]


def test_vectors_outlive_another_kind_of_faiss_index(tmp_path: Path) -> None:
    flat = Manifest("dense", 3, "digest", {"retrieval.faiss": "IVF4096,Flat", "dimension": 4}, {"faiss-cpu": "1"})
    begin_build(tmp_path, flat)
    (tmp_path / "vectors.f32").write_bytes(b"vectors")
    begin_build(tmp_path, msgspec.structs.replace(flat, parameters={"retrieval.faiss": "Flat", "dimension": 4}, versions={}))
    assert (tmp_path / "vectors.f32").exists()
    begin_build(tmp_path, msgspec.structs.replace(flat, parameters={"retrieval.faiss": "Flat", "dimension": 8}))
    assert not (tmp_path / "vectors.f32").exists()


@pytest.mark.parametrize("backend", ["bm25", "tantivy"])
def test_a_build_goes_on_only_with_parts_of_its_own(
    make_corpus: Callable[[int], Corpus], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr("search.bm25_build.CHUNK_DOCS", 10)
    corpus = make_corpus(40)
    settings = RetrievalSection(backend=backend, corpus=str(corpus.path), bm25_kernel="numpy", threads=1)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_rows(settings, corpus, backend, interrupt)
    fewer = make_corpus(25)
    index = open_rows(settings, fewer, backend)
    titles = [contents.splitlines()[0].strip('"') for contents in fewer.iter_contents()]
    assert index.rank(titles, 1).rows_QK[:, 0].tolist() == list(range(25))
    index.close()


def test_files_that_no_build_has_left_are_not_touched(make_corpus: Callable[[int], Corpus]) -> None:
    corpus = make_corpus(20)
    foreign = index_folder(corpus.path) / "bm25" / "params.index.json"
    foreign.parent.mkdir()
    foreign.write_text("{}")
    with pytest.raises(DataError, match="got other files"):
        open_backend(RetrievalSection(backend="bm25", corpus=str(corpus.path), bm25_kernel="numpy"))
    assert foreign.read_text() == "{}"


def test_what_is_not_installed_or_not_named_is_one_clear_line(
    make_corpus: Callable[[int], Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(20)
    with pytest.raises(ConfigError, match=r"retrieval\.corpus must name"):
        open_backend(RetrievalSection(backend="bm25"))
    monkeypatch.setattr("search.backends._installed", lambda module: module != "numba")
    with pytest.raises(ConfigError, match="'numba' needs the package numba"):
        open_backend(RetrievalSection(backend="bm25", corpus=str(corpus.path), bm25_kernel="numba"))


def test_rank_bm25_refuses_a_large_corpus(make_corpus: Callable[[int], Corpus], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search.rank_bm25_index.MAX_DOCUMENTS", 10)
    with pytest.raises(ConfigError, match="at most 10"):
        RankBm25Index(make_corpus(11), K1, B)


def test_the_default_depends_on_size_and_kernel() -> None:
    assert lexical_backend(RetrievalSection(bm25_kernel="numba"), 10_000) == "bm25"
    assert lexical_backend(RetrievalSection(bm25_kernel="numpy"), 10_000) == "tantivy"
    assert lexical_backend(RetrievalSection(bm25_kernel="numba"), 20_000_000) == "tantivy"
