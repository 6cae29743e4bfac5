"""Texts to unit vectors by any sentence-transformers or transformers model in a folder.

In: texts with the prefix their role asks for ("query: ", "passage: "). Out: float32 rows of length 1, so that an inner product is
a cosine. Pooling is the model's own for a sentence-transformers folder, else the mean over tokens or the first token's vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from async_search_rl.errors import ConfigError, DataError

Pooling = Literal["auto", "mean", "cls"]


class EncoderSpec(msgspec.Struct, frozen=True):
    """Everything that decides which vector a text gets."""

    path: str
    """Folder of the model."""
    pooling: Pooling = "auto"
    """How token vectors become one."""
    query_prefix: str = ""
    """Text before every query."""
    passage_prefix: str = ""
    """Text before every passage."""
    max_tokens: int = 256
    """Tokens after which a text is cut."""
    batch: int = 64
    """Texts a forward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; half precision on cuda."""

    @property
    def name(self) -> str:
        """The model's name in manifests: its folder's."""
        return Path(self.path).name


class Encoder:
    """A loaded model. One thread at a time.

    Raises:
        ConfigError: no folder is named, or ``cuda`` is asked for without a device.
        DataError: the folder holds no model.
    """

    def __init__(self, spec: EncoderSpec, threads: int = 0) -> None:
        if not spec.path:
            raise ConfigError("retrieval.encoder must name the folder of an encoder, got ''")
        if not (Path(spec.path) / "config.json").is_file():
            raise DataError(f"retrieval.encoder must be a model folder with config.json, got {spec.path!r}")
        import torch

        if threads:
            torch.set_num_threads(threads)
        has_cuda = torch.cuda.is_available()
        if spec.device == "cuda" and not has_cuda:
            raise ConfigError("retrieval.encoder_device must be 'cpu' or 'auto' on a machine without a CUDA device, got 'cuda'")
        self.spec = spec
        self.device = "cuda" if has_cuda and spec.device != "cpu" else "cpu"
        self._model = _load(spec, self.device)
        if self.device == "cuda":
            self._model = self._model.half()
        self.dimension = int(self.queries(["dimension"]).shape[1])

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors [len(texts), dimension] of queries."""
        return self._encode([self.spec.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors [len(texts), dimension] of passages."""
        return self._encode([self.spec.passage_prefix + text for text in texts])

    def _encode(self, texts: list[str]) -> NDArray[np.float32]:
        vectors = self._model.encode(
            texts, batch_size=self.spec.batch, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)


def _load(spec: EncoderSpec, device: str) -> Any:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    if spec.pooling == "auto" and (Path(spec.path) / "modules.json").is_file():
        model = SentenceTransformer(spec.path, device=device, local_files_only=True)
        model.max_seq_length = spec.max_tokens
        return model
    try:
        from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
        from sentence_transformers.sentence_transformer.modules import Transformer
    except ModuleNotFoundError:  # sentence-transformers 5
        from sentence_transformers.models import Pooling as PoolingModule
        from sentence_transformers.models import Transformer

    tokens = Transformer(spec.path, max_seq_length=spec.max_tokens)
    dimension = AutoConfig.from_pretrained(spec.path, local_files_only=True).hidden_size
    pooling = PoolingModule(dimension, pooling_mode="cls" if spec.pooling == "cls" else "mean")
    return SentenceTransformer(modules=[tokens, pooling], device=device)
