"""Retrieval: corpora, indexes, the batching service (`bin/search`) and its asynchronous client."""
