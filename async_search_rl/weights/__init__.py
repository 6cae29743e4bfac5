"""The weight channel: from the learner's staged copy to every engine, while the engines go on generating.

The control plane is HTTP (:mod:`async_search_rl.weights.schema`), the data plane torch.distributed. This is the only contract
that imports torch, and only in the files that move tensors.
"""
